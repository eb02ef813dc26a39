"""Notice that another process of the run has died, at once, and say which (no jax).

Left alone, the others wait in a collective until jax's coordination service has missed enough heartbeats, and end with a
C++ stack trace that names nobody. Here every process holds a TCP connection to rank 0 for as long as it lives. The
operating system closes it when a process dies; a host that vanishes is noticed by keep-alives. Rank 0 then tells the
others, and each prints one sentence and exits.
"""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

LOST = 1  # exit code of a process whose run has lost another
_BYE = b"bye\n"
_GRACE_S = 3.0  # where all processes find the same mistake, each says it itself
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))  # seconds, seconds, probes

Publish = Callable[[str, str], None]
Await = Callable[[str], str]


class Peers:
    """The connections of one process to the rest of its run. `rank` 0 listens at `host`, which the others can reach."""

    def __init__(self, rank: int, size: int, host: str, publish: Publish, wait_for: Await) -> None:
        self.rank, self.size = rank, size
        self.lost: int | None = None
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._links: dict[int, socket.socket] = {}
        secret = os.urandom(8).hex()
        if rank == 0:
            self._server = socket.create_server((host, 0), backlog=size)
            publish("podway/peers", f"{host} {self._server.getsockname()[1]} {secret}")
            threading.Thread(target=self._accept, args=(secret,), daemon=True).start()
        else:
            address, port, secret = wait_for("podway/peers").split()
            link = _alive(socket.create_connection((address, int(port)), timeout=60))
            link.sendall(f"{secret} {rank}\n".encode())
            link.settimeout(None)
            self._links[0] = link
            threading.Thread(target=self._listen, args=(0, link), daemon=True).start()

    def explain(self, within_s: float) -> None:
        """After a collective has failed: if that is because a process was lost, say so and exit."""
        until = time.monotonic() + within_s
        while time.monotonic() < until and self.lost is None:
            time.sleep(0.1)
        if self.lost is not None:
            time.sleep(within_s)  # the thread that noticed ends the process

    def close(self, *, failed: bool = False) -> None:
        """The run is over for this process. The others need not be alarmed, unless it has `failed`."""
        self._closing.set()
        if failed:
            return  # the connections close when the process ends
        with self._lock:
            links = list(self._links.values())
        for link in links:
            with contextlib.suppress(OSError):
                link.sendall(_BYE)
                link.close()
        if self.rank == 0:
            self._server.close()

    def _accept(self, secret: str) -> None:
        while len(self._links) < self.size - 1:
            try:
                link, _ = self._server.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._greet, args=(_alive(link), secret), daemon=True).start()

    def _greet(self, link: socket.socket, secret: str) -> None:
        link.settimeout(60)
        try:
            given, _, rank = link.makefile("rb").readline(100).decode(errors="replace").strip().partition(" ")
            link.settimeout(None)
        except OSError:
            return
        if given != secret or not rank.isdigit():
            link.close()  # somebody else
            return
        with self._lock:
            self._links[int(rank)] = link
        self._listen(int(rank), link)

    def _listen(self, rank: int, link: socket.socket) -> None:
        """Until the other side says good-bye, tells of a loss, or is gone."""
        try:
            line = link.makefile("rb").readline(100)
        except OSError:
            line = b""
        words = line.decode(errors="replace").split()
        if len(words) == 2 and words[0] == "lost" and words[1].isdigit():
            self._end(int(words[1]))  # rank 0 has waited already
        elif line != _BYE and not self._closing.wait(_GRACE_S):
            self._end(rank)

    def _end(self, rank: int) -> None:
        with self._lock:
            if self.lost is not None:
                return
            self.lost = rank
            others = [link for number, link in self._links.items() if number != rank] if self.rank == 0 else []
        for link in others:
            with contextlib.suppress(OSError):
                link.sendall(f"lost {rank}\n".encode())
        sys.stdout.flush()
        message = f"Error: rank {rank} of {self.size} was lost: its process or host has died\n"
        hint = "  see its log; the same command goes on from the last checkpoint\n"
        os.write(2, (message + hint).encode())
        if self.rank == 0:
            time.sleep(_GRACE_S)  # jax's coordination service lives here, and aborts those who outlive it
        os._exit(LOST)


def _alive(link: socket.socket) -> socket.socket:
    """A connection that notices a host that has vanished, in half a minute."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        link.setsockopt(socket.IPPROTO_TCP, option, value)
    return link
