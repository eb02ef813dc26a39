"""A small HTTP/1.1 client for load: one POST, its answer as it comes. Only the standard library, so that the client costs little."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from podway.errors import UserError


class Target(NamedTuple):
    """Where a server is."""

    host: str
    port: int
    secure: bool
    path: str  # before /v1/…
    headers: dict[str, str]


def target_of(url: str, key: str | None = None) -> Target:
    """'http://host:8000' or '…/v1', and the headers that every request has."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"{url!r} is not a server URL", "write it as http://host:port")
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        raise UserError(f"{url!r} has no valid port", "write it as http://host:port") from None
    path = parts.path.rstrip("/").removesuffix("/v1")
    headers = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json", "Connection": "close"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    return Target(parts.hostname, port, parts.scheme == "https", path, headers)


async def request(target: Target, method: str, path: str, body: Any = None) -> tuple[int, AsyncIterator[bytes]]:
    """Status, and the lines of the body as they come; the connection closes when they are read or given up."""
    tls = ssl.create_default_context() if target.secure else None
    reader, writer = await asyncio.open_connection(target.host, target.port, ssl=tls, limit=1 << 24)
    content = json.dumps(body).encode() if body is not None else b""
    head = [f"{method} {target.path}{path} HTTP/1.1", *(f"{k}: {v}" for k, v in target.headers.items())]
    writer.write("\r\n".join([*head, f"Content-Length: {len(content)}", "", ""]).encode() + content)
    await writer.drain()
    status_line = (await reader.readline()).split()
    if len(status_line) < 2:
        writer.close()
        raise ConnectionError("the server closed the connection")
    chunked = False
    while (line := await reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode("latin-1").partition(":")
        chunked |= name.lower() == "transfer-encoding" and "chunked" in value.lower()

    async def lines() -> AsyncIterator[bytes]:
        try:
            held = b""
            while piece := await _piece(reader, chunked):
                *whole, held = (held + piece).split(b"\n")
                for one in whole:
                    yield one
            if held:
                yield held
        finally:
            writer.close()

    return int(status_line[1]), lines()


async def _piece(reader: asyncio.StreamReader, chunked: bool) -> bytes:
    if not chunked:
        return await reader.read(1 << 16)
    size = int((await reader.readline()).strip() or b"0", 16)
    if not size:
        return b""
    piece = await reader.readexactly(size)
    await reader.readexactly(2)
    return piece


async def ask(target: Target, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Status and the whole JSON of an answer (None where it is none)."""
    status, lines = await request(target, method, path, body)
    text = b"\n".join([line async for line in lines])
    try:
        return status, json.loads(text)
    except ValueError:
        return status, None
