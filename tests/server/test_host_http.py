"""The server's own requests to programs on hosts, which may answer anything."""

import asyncio

import pytest

from podway.errors import UserError
from podway.hosts.link import connect_tcp
from podway.server import host_http
from podway.server.host_http import exchange


async def answered(reply: bytes, *, whole: bool = True) -> tuple[int, bytes, bytes]:
    """What comes of a server that answers so: (status, body, what it was asked)."""
    asked = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.extend(await reader.readuntil(b"\r\n\r\n"))
        writer.write(reply)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        found = await exchange(connect_tcp(("127.0.0.1",), port), "GET", "/v1/models")
        return found.status, await found.whole(), bytes(asked)
    finally:
        server.close()


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "reply",
    [
        OK + b"content-length: 5\r\n\r\nhello",
        OK + b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
        OK + b"connection: close\r\n\r\nhello",
        b"HTTP/1.1 404 Not Found\r\ncontent-length: 5\r\n\r\nhello",
    ],
)
def test_answers_of_every_kind(reply: bytes) -> None:
    status, body, asked = asyncio.run(answered(reply))
    assert (status, body) == (404 if b"404" in reply else 200, b"hello")
    assert asked.startswith(b"GET /v1/models HTTP/1.1\r\n")


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x00" * 100,
        OK + b"x: " + b"y" * (host_http.LONGEST_HEAD + 10_000),
        OK + b"content-length: 100\r\n\r\nshort",
        OK + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        OK + b"content-length: 5000000\r\n\r\n" + b"x" * 5_000_000,
    ],
)
def test_what_is_no_answer_is_one_line(reply: bytes) -> None:
    with pytest.raises(UserError) as raised:
        asyncio.run(answered(reply))
    assert raised.value.status == 502


def test_nothing_listens() -> None:
    with pytest.raises(UserError) as raised:
        asyncio.run(exchange(connect_tcp(("127.0.0.1",), 1), "GET", "/"))
    assert raised.value.status == 503
