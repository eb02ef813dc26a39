"""How the agent and its callers speak: one JSON line, then as many raw bytes as the line's `size` says.

A request is `{"op": ..., "size": N, ...}` + newline + N bytes; its reply `{"ok": true, "size": N, ...}` or
`{"ok": false, "error": "...", "code": "..."}` + newline + N bytes. Requests on one connection are answered in order;
a caller that wants two things at once opens two connections. A line that is no such request is answered by an error
and the connection is closed, because where the next request begins is then unknown.
"""

from __future__ import annotations

import json

TYPE_CHECKING = False  # as `typing.TYPE_CHECKING`, without the import: start-up time is what the agent saves on
if TYPE_CHECKING:
    from typing import Any, Protocol

    Fields = dict[str, Any]

    class Readable(Protocol):
        def read(self, n: int = -1, /) -> bytes: ...

    class ReadStream(Readable, Protocol):
        def readline(self, n: int = -1, /) -> bytes: ...

    class WriteStream(Protocol):
        def write(self, data: bytes, /) -> object: ...
        def flush(self) -> None: ...


PROTOCOL = 1
MAX_LINE = 16 << 20
MAX_SIZE = 1 << 40
CHUNK = 256 << 10
SOCKET = "agent.sock"
STATE = ".podway"


class WireError(Exception):
    """What came over the connection is not this protocol, or stopped half way."""


def encode(fields: Fields, size: int = 0) -> bytes:
    """One line for `fields`; ASCII, so that bytes smuggled in strings (surrogates) survive."""
    return json.dumps(dict(fields, size=size), separators=(",", ":")).encode("ascii") + b"\n"


def _int(text: str) -> int:
    # A number of a million digits takes Python minutes to read; no field of ours needs more than 64 bits.
    if len(text) > 20:
        raise WireError("a number is too long")
    return int(text)


def _constant(text: str) -> float:
    raise WireError(f"{text} is not JSON")


def decode(line: bytes) -> tuple[Fields, int]:
    """The fields of one line, and the size of the bytes that follow it."""
    try:
        fields = json.loads(line.decode("utf-8"), parse_int=_int, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not a JSON line: {str(error)[:200]}") from None
    if not isinstance(fields, dict):
        raise WireError("not a JSON object")
    size = fields.pop("size", 0)
    if type(size) is not int or not 0 <= size <= MAX_SIZE:
        raise WireError("size is not a number of bytes")
    return fields, size


class MessageBody:
    """The bytes that follow a line, readable once, never beyond their end."""

    def __init__(self, stream: Readable, size: int) -> None:
        self._stream = stream
        self.left = size

    def read(self, n: int = -1) -> bytes:
        """Up to `n` bytes (all that are left, if negative); b"" at the end."""
        want = self.left if n is None or n < 0 else min(n, self.left)
        data = self._stream.read(want) if want else b""
        if len(data) < want:
            raise WireError(f"the connection ended {self.left - len(data)} bytes early")
        self.left -= want
        return data

    def drain(self) -> None:
        """Read past what nobody wanted, so that the next line is a line."""
        while self.left:
            self.read(CHUNK)


def read(stream: ReadStream) -> tuple[Fields, MessageBody] | None:
    """The next message of a connection; None where it ends cleanly."""
    line = stream.readline(MAX_LINE + 1)
    if not line:
        return None
    if not line.endswith(b"\n"):
        raise WireError("the line is too long" if len(line) > MAX_LINE else "the connection ended within a line")
    fields, size = decode(line)
    return fields, MessageBody(stream, size)


def write(stream: WriteStream, fields: Fields, body: bytes | Readable | None = None) -> None:
    """Send one message. A stream as body is sent to its end; `fields` must hold its `size` then."""
    if body is None or isinstance(body, bytes):
        data = body or b""
        stream.write(encode(fields, len(data)))
        stream.write(data)
        stream.flush()
        return
    left = fields["size"]
    stream.write(encode(fields, left))
    while left:
        data = body.read(min(left, CHUNK))
        if not data:
            raise ConnectionError(f"the body ended {left} bytes early")  # only hanging up is honest now
        stream.write(data)
        left -= len(data)
    stream.flush()
