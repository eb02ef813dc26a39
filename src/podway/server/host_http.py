"""One HTTP request from the server to a program on a host, over whatever streams its provider opens.

The answer's head is waited for; its body comes as it arrives. The connection is closed after it, and also when nobody reads on.
"""

import asyncio
from collections.abc import AsyncIterator

import httptools
import msgspec

from podway.errors import ProviderError, UserError
from podway.hosts.link import Connect, Reader, Writer

CONNECT_S, HEAD_S, SILENCE_S = 15.0, 300.0, 120.0
READ = 64 << 10
LONGEST_HEAD = 64 << 10
MOST_WHOLE = 4 << 20


class HostResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The head of an answer, and its body as it comes."""

    status: int
    body: AsyncIterator[bytes]

    async def whole(self) -> bytes:
        """All of a body that is small."""
        found = bytearray()
        async for part in self.body:
            found += part
            if len(found) > MOST_WHOLE:
                raise _bad("it answers too much")
        return bytes(found)


class _ResponseParts:
    """What httptools has parsed so far."""

    def __init__(self) -> None:
        self.body: list[bytes] = []
        self.headed = self.ended = False

    def on_headers_complete(self) -> None:
        self.headed = True

    def on_body(self, data: bytes) -> None:
        self.body.append(data)

    def on_message_complete(self) -> None:
        self.ended = True


async def exchange(
    connect: Connect, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> HostResponse:
    """Send a request; the answer once its head is there. UserError: nothing listens there, or it speaks no HTTP."""
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await connect()
    except (OSError, TimeoutError, ProviderError) as error:
        reason = str(error) or "no answer"
        raise UserError(
            f"nothing answers there yet: {reason}", "wait until the job says it is ready", status=503
        ) from None
    more = "".join(f"{name}: {value}\r\n" for name, value in {"host": "podway", **(headers or {})}.items())
    head = (
        f"{method} {path} HTTP/1.1\r\n{more}connection: close\r\naccept-encoding: identity\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    parts = _ResponseParts()
    parser = httptools.HttpResponseParser(parts)
    try:
        writer.write(head.encode() + body)
        await writer.drain()
        seen = 0
        while not parts.headed:
            seen += await _feed(reader, parser, HEAD_S)
            if seen > LONGEST_HEAD and not parts.headed:
                raise _bad("its answer has no end of head")
    except BaseException:
        writer.close()
        raise
    return HostResponse(status=parser.get_status_code(), body=_body(reader, writer, parser, parts))


async def _body(
    reader: Reader, writer: Writer, parser: httptools.HttpResponseParser, parts: _ResponseParts
) -> AsyncIterator[bytes]:
    try:
        while True:
            if parts.body:
                data, parts.body = b"".join(parts.body), []
                yield data
            if parts.ended:
                return
            try:
                await _feed(reader, parser, SILENCE_S)
            except UserError:
                if parser.should_keep_alive():  # a length or chunks were announced, and are not all there
                    raise
                return
    finally:
        writer.close()


async def _feed(reader: Reader, parser: httptools.HttpResponseParser, timeout: float) -> int:
    try:
        async with asyncio.timeout(timeout):
            data = await reader.read(READ)
        if not data:
            raise _bad("the connection ended")
        parser.feed_data(data)
    except (OSError, TimeoutError) as error:
        raise _bad(str(error) or "no answer in time") from None
    except httptools.HttpParserError as error:
        raise _bad(f"it does not speak HTTP: {error}") from None
    return len(data)


def _bad(why: str) -> UserError:
    return UserError(f"the program on the host did not answer: {why}", "see the job's log", status=502)
