"""The side towards replicas: connections that are kept and used again, one request at a time on each.

A `ReplicaConnection` parses what a replica answers and hands it to the `ResponseReceiver` of the request that is on it. A connection is
used again when the answer ended as HTTP says it should; in every other case it is closed, which also tells the replica that
nobody waits any more.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import httptools

from podway.gateway.socket_protocol import SocketProtocol
from podway.gateway.table import Backend
from podway.gateway.wire import Header

CONNECT_S = 5.0
TUNNEL_CONNECT_S = 30.0  # with a login, where the host has no connection yet
MOST_IDLE = 256  # for each replica
# A replica whose host or zone vanished says nothing more: its connections break after 25 s, not after the longest answer.
_LOSS_OPTIONS = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}


# Opens a connection to a port of a host through its sshd or another way in, for a protocol; OSError when that cannot be.
TunnelDial = Callable[[str, int, asyncio.Protocol], Awaitable[None]]


class ResponseReceiver(Protocol):
    """What takes an answer. Each is called from the event loop, and none may block."""

    def on_head(self, status: int, reason: bytes, headers: list[Header], connection: "ReplicaConnection") -> None:
        """The head is there."""

    def on_body(self, data: bytes) -> None:
        """The next part of the body."""

    def on_end(self) -> None:
        """The answer is complete."""

    def on_lost(self, why: str) -> None:
        """The connection broke before the answer was complete."""

    def on_tunnel(self, data: bytes) -> None:
        """Bytes of another protocol, after an upgrade."""

    def on_writable(self, writable: bool) -> None:
        """The replica takes too little, or again enough."""


class ReplicaConnection(SocketProtocol):
    """One connection to a replica."""

    def __init__(self, pool: "ReplicaPool", place: str) -> None:
        self.pool = pool
        self.place = place
        self.answered = False  # something came for the request that is on it
        self.is_tunnel = False
        self.writable = asyncio.Event()
        self.writable.set()
        self._receiver: ResponseReceiver | None = None
        self._parser: Any = None
        self._reason = b""
        self._headers: list[Header] = []
        self._bodiless = False
        self._to_the_end = False  # the answer ends with the connection

    # towards the replica

    def send(self, receiver: ResponseReceiver, head: bytes, *, bodiless: bool) -> None:
        """Begin a request; `bodiless`: the answer has no body whatever it says (HEAD)."""
        assert self.transport is not None
        self._receiver, self._bodiless = receiver, bodiless
        self._parser = httptools.HttpResponseParser(self)
        self.answered = False
        self.transport.write(head)

    async def send_part(self, data: bytes) -> None:
        """More of the request, no faster than the replica takes it."""
        self.write(data)
        await self.writable.wait()

    @property
    def idle(self) -> bool:
        """No request is on it."""
        return self._receiver is None

    def abandon(self) -> None:
        """Nobody waits for the answer any more."""
        self._receiver = None
        self.abort()

    # asyncio

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self.writable.set()
        self.pool.forget(self)
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return
        if self._to_the_end and error is None:
            receiver.on_end()
        else:
            receiver.on_lost(str(error) if error else "the replica closed the connection")

    def pause_writing(self) -> None:
        self.writable.clear()
        if self._receiver is not None:
            self._receiver.on_writable(False)

    def resume_writing(self) -> None:
        self.writable.set()
        if self._receiver is not None:
            self._receiver.on_writable(True)

    def data_received(self, data: bytes) -> None:
        receiver = self._receiver
        if receiver is None:
            self.abandon()  # an answer that nobody asked for: the replica does not speak HTTP as we do
            return
        self.answered = True
        if self.is_tunnel:
            receiver.on_tunnel(data)
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self.is_tunnel = True
            if rest := data[upgrade.args[0] :]:
                receiver.on_tunnel(rest)
        except httptools.HttpParserError as error:
            if self._receiver is receiver:
                self.abandon()
                receiver.on_lost(f"the replica's answer is not HTTP: {error}")

    # httptools

    def on_message_begin(self) -> None:
        self._reason, self._headers = b"", []

    def on_status(self, status: bytes) -> None:
        self._reason += status

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._receiver is None or (100 <= status < 200 and status != 101):
            return  # "continue" and its like concern this connection alone
        names = {name for name, _ in self._headers}
        bodiless = self._bodiless or status in (204, 304)
        self._to_the_end = not bodiless and not names & {b"content-length", b"transfer-encoding"} and status != 101
        self._receiver.on_head(status, self._reason, self._headers, self)
        if self._bodiless:
            self._finish(keep=False)

    def on_body(self, data: bytes) -> None:
        if self._receiver is not None:
            self._receiver.on_body(data)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            return
        self._finish(keep=self._parser.should_keep_alive() and not self._to_the_end)

    def _finish(self, *, keep: bool) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return
        if keep:
            self.resume_reading()
            self.pool.give_back(self)
        else:
            self.close()
        receiver.on_end()


class ReplicaPool:
    """Connections that wait for their next request, by replica."""

    def __init__(self, dial: TunnelDial | None = None) -> None:
        self._idle: dict[str, list[ReplicaConnection]] = {}
        self._dial = dial

    async def connect(self, backend: Backend, *, fresh: bool = False) -> tuple[ReplicaConnection, bool]:
        """(a connection to a replica, whether it was used before)."""
        idle = self._idle.get(backend.place)
        if idle and not fresh:
            return idle.pop(), True
        loop = asyncio.get_running_loop()
        address, connection = backend.address, ReplicaConnection(self, backend.place)
        if backend.tunnel and self._dial is not None:
            async with asyncio.timeout(TUNNEL_CONNECT_S):
                await self._dial(backend.tunnel, backend.port, connection)
            return connection, False
        async with asyncio.timeout(CONNECT_S):
            if address.startswith("unix:"):
                await loop.create_unix_connection(lambda: connection, address.removeprefix("unix:"))
            else:
                host, _, port = address.rpartition(":")
                transport, _ = await loop.create_connection(lambda: connection, host.strip("[]"), int(port))
                _notice_loss(transport.get_extra_info("socket"))
        return connection, False

    def give_back(self, connection: ReplicaConnection) -> None:
        """The connection may be used again."""
        idle = self._idle.setdefault(connection.place, [])
        if len(idle) < MOST_IDLE and connection.transport is not None and not connection.transport.is_closing():
            idle.append(connection)
        else:
            connection.close()

    def forget(self, connection: ReplicaConnection) -> None:
        """The connection is gone."""
        idle = self._idle.get(connection.place)
        if idle and connection in idle:
            idle.remove(connection)

    def keep(self, places: set[str]) -> None:
        """Close what leads to replicas that are no more."""
        for place in set(self._idle) - places:
            for connection in self._idle.pop(place):
                connection.close()

    def close(self) -> None:
        """Close everything that waits."""
        self.keep(set())


def _notice_loss(link: socket.socket) -> None:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _LOSS_OPTIONS.items():
        if hasattr(socket, name):  # not every system has each of them
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
