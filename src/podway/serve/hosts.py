"""One engine over the devices of several hosts: every host launches the same programs with the same arrays, in one order.

Each host is a process with its own devices, joined by `jax.distributed`. A program over devices of several hosts runs only
when all of them launch it. So one host of a group decides (the leader: it has the loop and the batcher), and the others
follow:

1. `addresses` tells every host where every other one listens, and the words that open its door.
2. The followers connect to their leader (`join`); it waits for all of them (`Crew`).
3. Before the leader launches a step, it sends the step's arrays to each follower (`Crew.tell`, the engine's `before_launch`).
   They are small: a few integers for each row. A follower launches what it hears (`follow`), and reads no result.
4. The leader's end is told to the followers. If a host is lost, a program over its devices never ends, so the others do:
   whoever started them starts them again.

A frame is 4 bytes of length and MessagePack.
"""

import hmac
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import jax
import msgspec
import numpy as np
from jax.experimental import multihost_utils

from podway.errors import UserError
from podway.serve.batcher import Step
from podway.serve.engine import Engine, Prepared

_LENGTH = struct.Struct("!I")
_CARD = 64  # bytes that a host tells the others of itself: 4 of address, 2 of port, 32 of words
_WORDS = 32
_PATIENCE = 600  # seconds that hosts wait for each other: the slowest may still be compiling


class Address(msgspec.Struct, frozen=True):
    """Where a host listens, and what one must say there."""

    ip: str
    port: int
    words: bytes


class Post:
    """A socket that hosts connect to."""

    def __init__(self) -> None:
        self.ip = os.environ.get("PODWAY_HOST_IP") or socket.gethostbyname(socket.gethostname())
        self.words = secrets.token_bytes(_WORDS)
        self._socket = socket.create_server((self.ip, 0), backlog=256)
        self._socket.settimeout(_PATIENCE)

    def card(self) -> Any:
        """Its address in an array, as all hosts can gather it."""
        raw = socket.inet_aton(self.ip) + struct.pack("!H", self._socket.getsockname()[1]) + self.words
        return np.frombuffer(raw.ljust(_CARD, b"\0"), np.uint8)

    def accept(self) -> tuple[socket.socket, int]:
        """The next host that says the words, and its number."""
        while True:
            try:
                peer, _ = self._socket.accept()
            except TimeoutError:
                raise UserError("hosts of this group do not come", "look at the logs of the other ranks") from None
            peer.settimeout(10)
            try:
                said = _exactly(peer, _WORDS + 4)
            except (OSError, EOFError):
                peer.close()
                continue
            if hmac.compare_digest(said[:_WORDS], self.words):
                ready(peer)
                return peer, int.from_bytes(said[_WORDS:], "big")
            peer.close()

    def close(self) -> None:
        self._socket.close()


def addresses(post: Post) -> list[Address]:
    """Of all hosts, in order of their numbers; every host calls it at the same time."""
    found = []
    for card in np.asarray(multihost_utils.process_allgather(post.card())).reshape(-1, _CARD):
        raw = card.astype(np.uint8).tobytes()
        found.append(Address(socket.inet_ntoa(raw[:4]), int.from_bytes(raw[4:6], "big"), raw[6 : 6 + _WORDS]))
    return found


def join(leader: Address, number: int) -> socket.socket:
    """A connection to a host, for the host of this number."""
    made = socket.create_connection((leader.ip, leader.port), timeout=60)
    made.sendall(leader.words + number.to_bytes(4, "big"))
    ready(made)
    return made


def ready(made: socket.socket) -> None:
    """Frames are small and wanted at once; a connection may be silent for as long as nobody asks anything."""
    made.settimeout(None)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def send(to: socket.socket, raw: bytes) -> None:
    to.sendall(_LENGTH.pack(len(raw)) + raw)


def frames(of: socket.socket) -> Iterator[bytes]:
    """What comes, until an empty frame. The other side's death is an EOFError."""
    while True:
        [length] = _LENGTH.unpack(_exactly(of, _LENGTH.size))
        if not length:
            return
        yield _exactly(of, length)


def _exactly(of: socket.socket, count: int) -> bytes:
    got = bytearray()
    while len(got) < count:
        piece = of.recv(min(count - len(got), 1 << 20))
        if not piece:
            raise EOFError
        got += piece
    return bytes(got)


class Crew:
    """The followers of a leader."""

    def __init__(self, members: Sequence[socket.socket], on_loss: Callable[[], None]) -> None:
        self._members = list(members)
        self._ending = False
        for member in self._members:
            threading.Thread(target=self._watch, args=(member, on_loss), name="watch", daemon=True).start()

    def tell(self, prepared: Prepared) -> None:
        """A step that is about to be launched here."""
        raw = pack(prepared)
        for member in self._members:
            send(member, raw)

    def end(self) -> None:
        self._ending = True
        for member in self._members:
            with suppress(OSError):  # it may be gone already
                send(member, b"")
                member.close()

    def _watch(self, member: socket.socket, on_loss: Callable[[], None]) -> None:
        """Followers say nothing: whatever can be read is their end."""
        with suppress(OSError):
            member.recv(1)
        if not self._ending:
            on_loss()


def follow(engine: Engine, leader: socket.socket) -> bool:
    """Launch what the leader tells, until its end. False: it was lost."""
    try:
        for raw in frames(leader):
            engine.launch(unpack(raw))
    except (OSError, EOFError):
        return False
    return True


def pack(prepared: Prepared) -> bytes:
    """A step's arrays and sizes. What only the leader needs of it (who asked) stays."""
    step = prepared.step
    sizes = {name: value for name in step.__struct_fields__ if isinstance(value := getattr(step, name), int)}
    return msgspec.msgpack.encode([sizes, [_plain(value) for value in prepared if value is not step]])


def unpack(raw: bytes) -> Prepared:
    sizes, plain = msgspec.msgpack.decode(raw)
    return Prepared(Step(seats=[], rows=[], pieces=[], **sizes), *map(_made, plain))


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return ["list", *map(_plain, value)]
    if isinstance(value, np.ndarray | np.generic):
        return ["array", value.dtype.str, list(value.shape), value.tobytes()]
    return value


def _made(plain: Any) -> Any:
    if not isinstance(plain, list):
        return plain
    kind, *rest = plain
    if kind == "list":
        return [_made(one) for one in rest]
    dtype, shape, raw = rest
    return np.frombuffer(raw, dtype).reshape(shape)


def groups_of(devices: Sequence[jax.Device], size: int, count: int) -> list[list[jax.Device]]:
    """Runs of `size` devices, host by host, one for each of `count` replicas. No host is left out or cut in two."""
    asked = f"--tp {size}" + (f" --replicas {count}" if count > 1 else "")
    if size * count > len(devices):
        raise UserError(f"{asked} needs {size * count} devices, and there are {len(devices)}", "lower them")
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    groups = [ordered[begin : begin + size] for begin in range(0, size * count, size)]
    each = len(devices) // len({device.process_index for device in devices})
    if each < len(devices) and size * count < len(devices):
        raise UserError(
            f"{asked} leaves {len(devices) - size * count} of {len(devices)} devices on several hosts idle",
            f"use --tp {len(devices)}, or --tp {each} --replicas {len(devices) // each}",
        )
    if size % each and each % size:
        raise UserError(f"--tp {size} cuts a host of {each} devices in two", "choose a multiple or a divisor of that")
    return groups
