"""The side towards clients: requests out of bytes, one after the other on each connection, and answers back in that order.

A connection has one task, which takes its requests in turn and calls the gateway for each. Bytes are read no faster than they are
used, heads and idle connections have time limits, and a client that leaves ends whatever was done for it.
"""

import asyncio
import ipaddress
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import httptools

from podway.gateway import wire
from podway.gateway.openai import error_body
from podway.gateway.socket_protocol import SocketProtocol
from podway.gateway.wire import Header

log = logging.getLogger("podway.gateway")
LONGEST_HEAD = 64 * 1024
MOST_HEADERS = 128
BUFFERED = 256 * 1024  # of a body, before reading stops until somebody takes it
HEAD_S = 30.0  # from the first byte of a head to its last
BODY_S = 60.0  # between two parts of a body
IDLE_S = 120.0  # between two requests
DRAIN_IDLE_S = 5.0  # the same while the gateway ends
MOST_PIPELINED = 16


class TooLarge(Exception):
    """A body is larger than what may be kept."""


class ClientLeft(Exception):
    """The client closed the connection, or sent nothing for too long."""


class Incoming:
    """One request: its head, and its body as it comes."""

    def __init__(self, connection: "ClientConnection") -> None:
        self.connection = connection
        self.begun = time.monotonic()
        self.method = b""
        self.target = b""
        self.headers: list[Header] = []
        self.keep_alive = True
        self.upgrade = False
        self.whole = False
        self.rest_of_tunnel = b""
        self._parts: deque[bytes] = deque()
        self._size = 0
        self._news = asyncio.Event()

    @property
    def path(self) -> bytes:
        """The target without its query."""
        return self.target.partition(b"?")[0]

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header."""
        return wire.value_of(self.headers, name)

    @property
    def length(self) -> int | None:
        """What the head says of the body: 0 for none, None when it comes in chunks."""
        if any(name == b"transfer-encoding" for name, _ in self.headers):
            return None
        text = self.header(b"content-length")
        return int(text) if text and text.isdigit() else 0

    def feed(self, data: bytes) -> None:
        """The next part of the body."""
        self._parts.append(data)
        self._size += len(data)
        if self._size > BUFFERED:
            self.connection.pause_reading()
        self._news.set()

    def end(self) -> None:
        """The body is complete, or never will be (`ClientConnection.left`)."""
        self._news.set()

    async def part(self) -> bytes:
        """The next part of the body; empty at its end."""
        while not self._parts:
            if self.whole:
                return b""
            if self.connection.left.is_set():
                raise ClientLeft
            self._news.clear()
            try:
                async with asyncio.timeout(BODY_S):
                    await self._news.wait()
            except TimeoutError:
                raise ClientLeft from None
        data = self._parts.popleft()
        self._size -= len(data)
        if self._size <= BUFFERED:
            self.connection.resume_reading()
        return data

    async def body(self, limit: int) -> bytes:
        """The whole body."""
        if (self.length or 0) > limit:
            raise TooLarge
        parts, size = [], 0
        while data := await self.part():
            size += len(data)
            if size > limit:
                raise TooLarge
            parts.append(data)
        return b"".join(parts)


Handler = Callable[[Incoming], Awaitable[None]]


class ClientConnection(SocketProtocol):
    """One connection of a client."""

    def __init__(self, handle: Handler, connections: set["ClientConnection"], *, secure: bool) -> None:
        self._handle = handle
        self._connections = connections
        self.scheme = b"https" if secure else b"http"
        self.address = ""
        self.is_local = False  # on this machine
        self.left = asyncio.Event()
        self.on_writable: Callable[[bool], None] | None = (
            None  # told when the client takes too little, and again enough
        )
        self.on_tunnel: Callable[[bytes], None] | None = None
        self.on_left: Callable[[], None] | None = None
        self.draining = False  # answer what is here, then close
        self._parser: Any = httptools.HttpRequestParser(self)
        self._requests: deque[Incoming] = deque()
        self._reading: Incoming | None = None
        self._head_size = 0
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    # towards the client

    def answer(self, status: int, body: bytes, request: Incoming, **more: Any) -> None:
        """A whole answer of the gateway's own."""
        close = not request.keep_alive or not request.whole or self.draining
        data = wire.plain_response(status, body, close=close, **more)
        if request.method == b"HEAD":
            data = data[: len(data) - len(body)]
        self.write(data)
        request.keep_alive = not close

    def drain(self) -> None:
        """Take one more request at most: a client may be about to send one on a connection that it believes to be open."""
        self.draining = True
        if not self._requests and self._reading is None:
            self._limit(DRAIN_IDLE_S)

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        self.address = peer[0] if isinstance(peer, tuple) else "local"
        self.is_local = not isinstance(peer, tuple) or _is_loopback(peer[0])
        self._connections.add(self)
        self._task = asyncio.get_running_loop().create_task(self._serve())
        self._limit(IDLE_S)

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self._connections.discard(self)
        self.left.set()
        self._limit(None)
        for request in (*self._requests, *([self._reading] if self._reading else [])):
            request.end()
        if self.on_left is not None:
            self.on_left()
        if self.on_writable is not None:
            self.on_writable(True)
        self._arrived.set()

    def pause_writing(self) -> None:
        if self.on_writable is not None:
            self.on_writable(False)

    def resume_writing(self) -> None:
        if self.on_writable is not None:
            self.on_writable(True)

    def data_received(self, data: bytes) -> None:
        if self.on_tunnel is not None:
            self.on_tunnel(data)
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._requests:
                self._requests[-1].rest_of_tunnel = data[upgrade.args[0] :]
            self.pause_reading()
        except httptools.HttpParserError as error:
            self._refuse(400, f"not a valid HTTP request: {error}")

    def _refuse(self, status: int, why: str) -> None:
        """Answer what cannot be read, and close: where it ends is not known."""
        if self._requests:
            self.abort()  # an answer to it may be under way
            return
        self.write(wire.plain_response(status, error_body(why, "invalid_request_error"), close=True))
        self.close()

    # httptools

    def on_message_begin(self) -> None:
        self._reading = Incoming(self)
        self._head_size = 0
        self._limit(HEAD_S)

    def on_url(self, url: bytes) -> None:
        if self._reading is not None:
            self._reading.target += url
            self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading is not None:
            self._reading.headers.append((name.lower(), value))
            self._count(len(name) + len(value))

    def _count(self, size: int) -> None:
        self._head_size += size
        too_many = self._reading is not None and len(self._reading.headers) > MOST_HEADERS
        if self._head_size > LONGEST_HEAD or too_many:
            self._reading = None
            self._refuse(431, "the head of the request is too large")

    def on_headers_complete(self) -> None:
        request = self._reading
        if request is None:
            return
        request.method = self._parser.get_method()
        request.keep_alive = self._parser.should_keep_alive()
        request.upgrade = self._parser.should_upgrade()
        self._limit(None)
        self._requests.append(request)
        if len(self._requests) > MOST_PIPELINED:
            self.pause_reading()
        if (request.header(b"expect") or b"").lower() == b"100-continue" and len(self._requests) == 1:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._arrived.set()

    def on_body(self, data: bytes) -> None:
        if self._reading is not None:
            self._reading.feed(data)

    def on_message_complete(self) -> None:
        if self._reading is not None:
            self._reading.whole = True
            self._reading.end()
            self._reading = None

    # the connection's task

    async def _serve(self) -> None:
        while self.transport is not None:
            if not self._requests:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            request = self._requests[0]
            try:
                await self._handle(request)
            except ClientLeft:
                pass
            except Exception:
                log.exception("%s %s", request.method.decode("latin-1"), request.path.decode("latin-1")[:200])
                self.abort()  # how much of an answer was sent is not known
            self._requests.popleft()
            if self.on_tunnel is not None:
                return
            if not request.keep_alive or not request.whole:
                break
            self.resume_reading()
            if not self._requests and self._reading is None:
                # An answer that began before the drain promised to take another request.
                self._limit(DRAIN_IDLE_S if self.draining else IDLE_S)
        self.close()

    def _limit(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.close)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
