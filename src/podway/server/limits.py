"""What one caller may take of the server: time to send a request, requests at once, and bytes a day.

`TimedConnection` closes a connection whose headers do not arrive in time. `Limits` is put around the application: it refuses a
request that gives its length twice, gives each address and each token a number of requests at once, ends a body that trickles, and
counts what is uploaded. Streams that a caller follows count as requests for as long as they last.
"""

import asyncio
import hashlib
import ipaddress
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from podway.errors import UserError
from podway.quantities import format_bytes
from podway.server import api

HEADERS_S = 20.0  # for a request's headers, from its first byte or from the connection on
BODY_S = 30.0  # for any one piece of a body
BODY_START_S, BODY_RATE = 60.0, 4096  # a body may take this long, and a second more for so many bytes
AT_ONCE_PER_ADDRESS, AT_ONCE_PER_USER = 1024, 4096
UPLOADS_A_DAY = 1 << 40
KEPT_FREE = 1 << 30  # of the disk that uploads go to
SMALL_BODY = 64 << 10  # a request and not an upload: who is out of room must be able to cancel jobs
DAY_S = 24 * 3600.0
_LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class TimedConnection(HttpToolsProtocol):
    """uvicorn's own, with a time limit for headers; what comes after them has its limits in `Limits`."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """asyncio's."""
        super().connection_made(transport)
        self._expect_headers()

    def on_message_begin(self) -> None:
        """httptools': the first byte of a request."""
        super().on_message_begin()
        self._expect_headers()

    def on_headers_complete(self) -> None:
        """httptools'."""
        self._stop_waiting()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        self._stop_waiting()
        self._late = self.loop.call_later(HEADERS_S, self._refuse)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(_LATE)
            self.transport.close()


class Limits:
    """ASGI, around another application. `uploads` is where bodies end up."""

    def __init__(self, app: ASGIApp, uploads: Path, *, uploads_a_day: int = UPLOADS_A_DAY) -> None:
        self._app, self._uploads, self._uploads_a_day = app, uploads, uploads_a_day
        self._running: Counter[str] = Counter()  # requests at once, by address and by user
        self._uploaded: Counter[str] = Counter()  # bytes since `_day`, by user
        self._day = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            user, keys = self._enter(scope)
        except UserError as error:
            await _refuse(send, error)
            return
        body = _TimedBody(receive, lambda size, received: self._count(user, size, received))

        async def closing(message: Message) -> None:
            """What is left of a body that was refused is not read: the connection ends with the answer."""
            if body.refused and message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        try:
            await self._app(scope, body.receive, closing)
        finally:
            for key in keys:
                self._running[key] -= 1
                if not self._running[key]:
                    del self._running[key]

    def _enter(self, scope: Scope) -> tuple[str, list[str]]:
        """Count a request in, or refuse it; its user, and what it counts for."""
        headers = [(name, value) for name, value in scope["headers"]]
        names = [name for name, _ in headers]
        if names.count(b"content-length") + names.count(b"transfer-encoding") > 1:
            hint = "send Content-Length or Transfer-Encoding, once"
            raise UserError("the request gives its length twice", hint, status=400)
        shown = next((value for name, value in headers if name == b"authorization"), b"")
        address = (scope.get("client") or ("",))[0]
        user = "user " + hashlib.sha256(shown).hexdigest() if shown else f"address {address}"
        limits = {user: AT_ONCE_PER_USER}
        if not is_loopback(address):  # where a proxy may stand for everybody
            limits[f"address {address}"] = AT_ONCE_PER_ADDRESS
        for key, most in limits.items():
            if self._running[key] >= most:
                what = f"{most} requests of yours are under way"
                raise UserError(what, "wait until some of them have ended", status=429)
        keys = list(limits)
        self._running.update(keys)
        return user, keys

    def _count(self, user: str, size: int, received: int) -> None:
        """`size` bytes more of a body of which so many have come."""
        now = time.monotonic()
        if now - self._day > DAY_S:
            self._day = now
            self._uploaded.clear()
        self._uploaded[user] += size
        if size and self._uploaded[user] > self._uploads_a_day:
            what = f"more than {format_bytes(self._uploads_a_day)} were uploaded in a day"
            raise UserError(what, "wait a day, or put data into a bucket", status=413)
        if received > SMALL_BODY and shutil.disk_usage(self._uploads).free < KEPT_FREE:
            raise UserError("the server's disk is full", "ask its administrator to make room", status=507)


class _TimedBody:
    """A request's body on its way in: it may neither stop nor trickle, and its bytes are counted."""

    def __init__(self, receive: Receive, count: Callable[[int, int], None]) -> None:
        self._receive, self._count = receive, count
        self._begun, self._received, self._ended = time.monotonic(), 0, False
        self.refused = False

    async def receive(self) -> Message:
        """ASGI's; raises where a limit is passed."""
        if self._ended:  # what is left to come is the end of the connection, whenever that is
            return await self._receive()
        try:
            return await self._next()
        except UserError:
            self.refused = True
            raise

    async def _next(self) -> Message:
        try:
            async with asyncio.timeout(BODY_S):
                message = await self._receive()
        except TimeoutError:
            raise UserError(f"nothing of the request came for {BODY_S:.0f} s", "send it again", status=408) from None
        size = len(message.get("body", b""))
        self._received += size
        self._ended = message["type"] != "http.request" or not message.get("more_body", False)
        if not self._ended and time.monotonic() - self._begun > BODY_START_S + self._received / BODY_RATE:
            raise UserError("the request comes too slowly", "send it over a faster connection", status=408)
        self._count(size, self._received)
        return message


def is_loopback(address: str) -> bool:
    """Whether an address is reached by this machine alone."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


async def _refuse(send: Send, error: UserError) -> None:
    """An answer before anything of the request is read; the connection ends with it."""
    body = msgspec.json.encode(api.ErrorReply(error=api.ErrorView(what=error.what, hint=error.hint or "")))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(b"connection", b"close"), *([(b"retry-after", b"1")] if error.status == 429 else [])]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
