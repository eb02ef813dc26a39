"""One engine over the devices of several hosts: every host launches the same programs with the same arrays, in one order.

Each host is a process with its own devices, joined by `jax.distributed`. A program over devices of several hosts runs only
when all of them launch it. So one host of a group decides (the leader: it has the loop and the batcher), and the others
follow:

1. `addresses` gives every host the address of every other one, and the secret that it asks for.
2. The followers connect to their leader (`join`); it waits for all of them (`Followers`).
3. Before the leader launches a step, it sends the step's arrays to each follower (`Followers.broadcast`, the engine's
   `before_launch`). They are small: a few integers for each row. A follower launches what it receives (`follow`), and
   reads no result.
4. When the leader ends it tells the followers. If a host is lost, a program over its devices never ends, so the other
   processes exit, for the job to be restarted.

A frame is 4 bytes of length and MessagePack.
"""

import hmac
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

import jax
import msgspec
import numpy as np
import numpy.typing as npt
from jax.experimental import multihost_utils

from podway.decoding import from_msgpack
from podway.errors import UserError
from podway.serve.batcher import Step
from podway.serve.engine import Engine, HostArray, HostInputs, Prepared

_LENGTH = struct.Struct("!I")
_ADDRESS_BYTES = 64  # 4 bytes of IP address, 2 of port, 32 of secret, 4 of rank, padded
_SECRET_BYTES = 32
_MISSED_AFTER = 5.0  # seconds between the failure of a program that misses a host and the end of its connection
_JOIN_TIMEOUT = 600  # seconds that hosts wait for each other: the slowest may still be compiling


WireArray = tuple[str, list[int], bytes]  # dtype, shape, contents


class StepMessage(msgspec.Struct, array_like=True, kw_only=True):
    """A step as followers receive it."""

    steps: int
    row_bucket: int
    block_bucket: int
    plain: bool
    slot_fills: list[WireArray]
    inputs: list[WireArray | None]  # in the order of `HostInputs`


class Address(msgspec.Struct, frozen=True):
    """Where a host listens, the secret that it asks for, and its rank in the job, which people know it by."""

    ip: str
    port: int
    secret: bytes
    rank: int = 0


class HostListener:
    """A socket that hosts connect to."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.ip = os.environ.get("PODWAY_HOST_IP") or socket.gethostbyname(socket.gethostname())
        self.secret = secrets.token_bytes(_SECRET_BYTES)
        self._socket = socket.create_server((self.ip, 0), backlog=256)
        self._socket.settimeout(_JOIN_TIMEOUT)

    def encoded_address(self) -> npt.NDArray[np.uint8]:
        """Its address in an array, as all hosts can gather it."""
        raw = socket.inet_aton(self.ip) + struct.pack("!H", self._socket.getsockname()[1]) + self.secret
        raw += self.rank.to_bytes(4, "big")
        return np.frombuffer(raw.ljust(_ADDRESS_BYTES, b"\0"), np.uint8)

    def accept(self) -> tuple[socket.socket, int]:
        """The next host that sends the secret, and its number."""
        while True:
            try:
                peer, _ = self._socket.accept()
            except TimeoutError:
                raise UserError(
                    "other hosts of this replica did not connect", "look at the logs of the other ranks"
                ) from None
            peer.settimeout(10)
            try:
                said = _exactly(peer, _SECRET_BYTES + 4)
            except (OSError, EOFError):
                peer.close()
                continue
            if hmac.compare_digest(said[:_SECRET_BYTES], self.secret):
                ready(peer)
                return peer, int.from_bytes(said[_SECRET_BYTES:], "big")
            peer.close()

    def close(self) -> None:
        self._socket.close()


def addresses(listener: HostListener) -> list[Address]:
    """Of all hosts, in order of their numbers; every host calls it at the same time."""
    found = []
    for one in np.asarray(multihost_utils.process_allgather(listener.encoded_address())).reshape(-1, _ADDRESS_BYTES):
        raw = one.astype(np.uint8).tobytes()
        secret, rest = raw[6 : 6 + _SECRET_BYTES], raw[6 + _SECRET_BYTES :]
        port, rank = int.from_bytes(raw[4:6], "big"), int.from_bytes(rest[:4], "big")
        found.append(Address(socket.inet_ntoa(raw[:4]), port, secret, rank))
    return found


def join(leader: Address, number: int) -> socket.socket:
    """A connection to a host, for the host of this number."""
    made = socket.create_connection((leader.ip, leader.port), timeout=60)
    made.sendall(leader.secret + number.to_bytes(4, "big"))
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


class Followers:
    """The followers of a leader, by their ranks."""

    def __init__(self, members: Mapping[int, socket.socket], on_loss: Callable[[int], None]) -> None:
        self._members = list(members.values())
        self._ending = False
        self._lost = threading.Event()
        for rank, member in members.items():
            watch = (member, lambda rank=rank: on_loss(rank))
            threading.Thread(target=self._watch, args=watch, name="watch", daemon=True).start()

    def broadcast(self, prepared: Prepared) -> None:
        """Send a step that is about to be launched here."""
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
        """Followers send nothing: whatever can be read is their end."""
        with suppress(OSError):
            member.recv(1)
        if not self._ending:
            self._lost.set()
            on_loss()

    def is_one_lost(self) -> bool:
        """Whether a program failed because a follower is gone; its connection may end a moment later."""
        return self._lost.wait(_MISSED_AFTER)


def follow(engine: Engine, leader: socket.socket) -> bool:
    """Launch what the leader sends, until its end. False: it was lost."""
    try:
        for raw in frames(leader):
            engine.launch(unpack(raw))
    except (OSError, EOFError):
        return False
    except Exception:
        if _ends(leader):
            return False
        raise
    return True


def _ends(peer: socket.socket) -> bool:
    """Whether the other side is gone, now or in a moment."""
    peer.settimeout(_MISSED_AFTER)
    try:
        while peer.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def pack(prepared: Prepared) -> bytes:
    """A step's arrays and sizes. What only the leader needs of it (who asked) stays."""
    step = prepared.step
    message = StepMessage(
        steps=step.steps, row_bucket=step.row_bucket, block_bucket=step.block_bucket, plain=prepared.plain,
        slot_fills=[_to_wire(fill) for fill in prepared.slot_fills],
        inputs=[None if array is None else _to_wire(array) for array in prepared.inputs],
    )  # fmt: skip
    return msgspec.msgpack.encode(message)


def unpack(raw: bytes) -> Prepared:
    message = from_msgpack(raw, StepMessage)
    step = Step(
        admitted=[], rows=[], pieces=[], steps=message.steps, row_bucket=message.row_bucket,
        block_bucket=message.block_bucket,
    )  # fmt: skip
    rows, blocks, table, mask, scoring, turns = (None if one is None else _from_wire(one) for one in message.inputs)
    assert rows is not None and table is not None
    inputs = HostInputs(
        rows.astype(np.int32, copy=False), None if blocks is None else blocks.astype(np.int32, copy=False),
        table.astype(np.int32, copy=False), None if mask is None else mask.astype(np.uint32, copy=False),
        None if scoring is None else np.bool_(scoring), None if turns is None else turns.astype(np.int32, copy=False),
    )  # fmt: skip
    return Prepared(
        step, [_from_wire(fill).astype(np.int32, copy=False) for fill in message.slot_fills], inputs, message.plain
    )


def _to_wire(array: HostArray | np.generic) -> WireArray:
    return array.dtype.str, list(array.shape), array.tobytes()


def _from_wire(wire: WireArray) -> HostArray:
    dtype, shape, raw = wire
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
