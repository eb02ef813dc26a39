"""A gateway and its replicas in one event loop: real sockets, replicas whose answers a test writes byte by byte."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec

from podway.gateway.handover import listening_socket
from podway.gateway.main import RunningGateway
from podway.gateway.proxy import Gateway
from podway.gateway.table import ApiKey, Backend, RoutedService, RouteTable, digest

Answer = Callable[["Seen", asyncio.StreamWriter], Awaitable[None]]


class Seen(msgspec.Struct):
    """A request as a replica got it."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


class Replica:
    """An HTTP server whose answers are functions of the test's own."""

    def __init__(self, name: str, answer: Answer) -> None:
        self.name = name
        self.answer = answer
        self.seen: list[Seen] = []
        self.connections = 0
        self.cut = 0  # connections that the other side closed in the middle of an answer
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def backend(self) -> Backend:
        return Backend(id=self.name, address=f"127.0.0.1:{self.port}")

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """As a process that is killed: it listens no more, and every connection breaks."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while (seen := await _read(reader)) is not None:
                self.seen.append(seen)
                await self.answer(seen, writer)
                await writer.drain()
                if writer.is_closing():
                    break
        except ConnectionError:
            self.cut += 1
        finally:
            self._writers.discard(writer)
            writer.close()


async def _read(reader: asyncio.StreamReader) -> Seen | None:
    with contextlib.suppress(asyncio.IncompleteReadError):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = b""
        if headers.get("transfer-encoding") == "chunked":
            while size := int(await reader.readline(), 16):
                body += await reader.readexactly(size)
                await reader.readexactly(2)
            await reader.readline()
        elif "content-length" in headers:
            body = await reader.readexactly(int(headers["content-length"]))
        return Seen(method, target, headers, body)
    return None


def says(body: bytes, *, status: int = 200, kind: str = "application/json") -> Answer:
    """A plain answer."""

    async def answer(_: Seen, writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 {status} Fine\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)

    return answer


def streams(events: list[bytes], *, then: str = "end", pause: float = 0.0) -> Answer:
    """A stream of events; `then`: 'end' as HTTP says, 'break' in the middle of a chunk."""

    async def answer(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for event in events:
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
            await asyncio.sleep(pause)
        if then == "break":
            writer.write(b"ff\r\ndata: half an ev")
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.transport.abort()
        else:
            writer.write(b"0\r\n\r\n")

    return answer


async def breaks(_: Seen, writer: asyncio.StreamWriter) -> None:
    """Close without a byte of an answer."""
    writer.transport.abort()


@contextlib.asynccontextmanager
async def live(
    *replicas: Replica, keys: dict[str, ApiKey] | None = None, hedge_s: float | None = None, **more: Any
) -> AsyncIterator["Live"]:
    """A gateway in front of these, as the one service `chat` with the model `m`."""
    for replica in replicas:
        await replica.start()
    running = RunningGateway(Gateway(hedge_s=hedge_s))
    listener = listening_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    running.listen(listener)
    up = Live(running, port, more, keys or {})
    up.route(*replicas)
    try:
        yield up
    finally:
        await running.stop(0.0)
        for replica in replicas:
            await replica.kill()


class Live:
    """What a test does with it."""

    def __init__(self, running: RunningGateway, port: int, more: dict[str, Any], keys: dict[str, ApiKey]) -> None:
        self.running = running
        self.gateway = running.gateway
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.more = {"auth": False, "model": "m", **more}
        self.keys = {digest(token): key for token, key in keys.items()}

    def route(self, *replicas: Replica) -> None:
        service = RoutedService(name="chat", backends=tuple(one.backend for one in replicas), **self.more)
        self.gateway.update(RouteTable(version=1, services=(service,), keys=self.keys))

    async def raw(self, data: bytes, *, until: bytes | None = None) -> bytes:
        """Send bytes on a connection of their own, and read to the end (or until these bytes came)."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            async with asyncio.timeout(30):
                if until is not None:
                    return await reader.readuntil(until)
                return await reader.read()
        finally:
            writer.close()

    async def post(self, path: str = "/v1/chat/completions", body: bytes = b'{"model":"m"}', **headers: str) -> bytes:
        """One POST, and the whole answer."""
        extra = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{extra}content-length: {len(body)}\r\n\r\n"
        return await self.raw(head.encode() + body)

    async def get(self, path: str, **headers: str) -> bytes:
        """One GET, and the whole answer."""
        extra = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        return await self.raw(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{extra}\r\n".encode())
