"""HTTP/1.1 as far as a Podway client speaks it, over a plain socket.

One request on one connection, the body sent whole or in chunks, the answer read by length, in chunks, or to the end. The standard
library's client does the same and much more, and importing it (with ssl and email) costs more than everything else `podway status`
does; so it is used for https only.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from http.client import HTTPSConnection

TIMEOUT_S = 90.0
LONGEST_HEAD = 64 * 1024


class Response(Protocol):
    """What callers use of an answer."""

    status: int

    def read(self, amount: int | None = None, /) -> bytes: ...
    def readline(self) -> bytes: ...
    def __enter__(self) -> Response: ...
    def __exit__(self, *_: object) -> None: ...


class BadAnswer(ConnectionError):
    """The other side does not speak HTTP, or stopped in the middle."""


class OpenSockets:
    """The sockets of requests under way, so that another thread can end them all."""

    def __init__(self) -> None:
        self._sockets: set[socket.socket] = set()
        self.add, self.discard = self._sockets.add, self._sockets.discard

    def shut(self) -> None:
        """A read that waits on one of them ends at once, as if the other side had gone."""
        for connection in list(self._sockets):
            with contextlib.suppress(OSError):  # it is closed already
                connection.shutdown(socket.SHUT_RDWR)


def request(
    scheme: str,
    host: str,
    method: str,
    path: str,
    headers: dict[str, str],
    body: bytes | Iterable[bytes] | None,
    sockets: OpenSockets,
) -> Response:
    """Send one request; the answer once its head is there."""
    if scheme == "https":
        return _secure(host, method, path, headers, body, sockets)
    name, _, port = host.rpartition(":")
    if not name:
        name, port = host, "80"
    connection = _connect(name.strip("[]"), int(port))
    sockets.add(connection)
    try:
        _send(connection, host, method, path, headers, body)
        return _Answer(connection, sockets)
    except BaseException:
        sockets.discard(connection)
        connection.close()
        raise


def _connect(name: str, port: int) -> socket.socket:
    if not name.replace(".", "").isdigit():
        return socket.create_connection((name, port), timeout=TIMEOUT_S)
    # A plain IPv4 address needs no look-up, and the look-up's first step imports the whole of IDNA.
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.settimeout(TIMEOUT_S)
        connection.connect((name, port))
    except BaseException:
        connection.close()
        raise
    return connection


def _send(
    connection: socket.socket,
    host: str,
    method: str,
    path: str,
    headers: dict[str, str],
    body: bytes | Iterable[bytes] | None,
) -> None:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close"]
    lines += [f"{key}: {value}" for key, value in headers.items()]
    if isinstance(body, bytes) or body is None:
        lines.append(f"Content-Length: {len(body or b'')}")
    else:
        lines.append("Transfer-Encoding: chunked")
    head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")
    if isinstance(body, bytes) or body is None:
        connection.sendall(head + (body or b""))
        return
    connection.sendall(head)
    for chunk in body:
        if chunk:
            connection.sendall(b"%x\r\n%b\r\n" % (len(chunk), chunk))
    connection.sendall(b"0\r\n\r\n")


class _Answer:
    """An answer being read."""

    def __init__(self, connection: socket.socket, sockets: OpenSockets) -> None:
        self._connection = connection
        self._sockets = sockets
        self._file = connection.makefile("rb")
        first = self._file.readline(LONGEST_HEAD).split(None, 2)
        if len(first) < 2 or not first[0].startswith(b"HTTP/1.") or not first[1].isdigit():
            raise BadAnswer("not an HTTP answer")
        self.status = int(first[1])
        fields = {}
        while (line := self._file.readline(LONGEST_HEAD)) not in (b"\r\n", b"\n", b""):
            key, _, value = line.partition(b":")
            fields[key.strip().lower()] = value.strip()
        self._chunked = fields.get(b"transfer-encoding", b"").lower() == b"chunked"
        length = fields.get(b"content-length", b"")
        self._left = int(length) if length.isdigit() else None  # None: to the end of the connection
        self._chunk = 0
        self._buffer = b""

    def read(self, amount: int | None = None, /) -> bytes:
        """At most `amount` bytes of the body, or all of it; empty at its end."""
        if amount is None:
            parts = [self._buffer]
            self._buffer = b""
            while piece := self._piece(1 << 16):
                parts.append(piece)
            return b"".join(parts)
        if not self._buffer:
            return self._piece(amount)
        found, self._buffer = self._buffer[:amount], self._buffer[amount:]
        return found

    def readline(self) -> bytes:
        """The next line, as soon as it is whole; empty at the end of the body."""
        while b"\n" not in self._buffer:
            piece = self._piece(1 << 16)
            if not piece:
                line, self._buffer = self._buffer, b""
                return line
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line + b"\n"

    def _piece(self, amount: int) -> bytes:
        """Some bytes of the body that have come, at most `amount`."""
        if self._chunked:
            return self._chunked_piece(amount)
        if self._left is None:
            return self._file.read1(amount)
        if self._left == 0:
            return b""
        data = self._file.read1(min(amount, self._left))
        if not data:
            raise BadAnswer("the connection ended in the middle of an answer")
        self._left -= len(data)
        return data

    def _chunked_piece(self, amount: int) -> bytes:
        if self._chunk == 0:
            line = self._file.readline(LONGEST_HEAD)
            try:
                self._chunk = int(line.split(b";")[0], 16)
            except ValueError:
                raise BadAnswer("the connection ended in the middle of an answer") from None
            if self._chunk == 0:
                self._file.readline(LONGEST_HEAD)
                self._chunked, self._left = False, 0
                return b""
        data = self._file.read1(min(amount, self._chunk))
        if not data:
            raise BadAnswer("the connection ended in the middle of an answer")
        self._chunk -= len(data)
        if self._chunk == 0:
            self._file.readline(LONGEST_HEAD)
        return data

    def __enter__(self) -> _Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self._sockets.discard(self._connection)
        self._file.close()
        self._connection.close()


class _SecureAnswer:
    """An answer over https, read by the standard library."""

    def __init__(self, connection: HTTPSConnection, sockets: OpenSockets) -> None:
        self._socket, self._sockets = connection.sock, sockets  # the connection forgets its socket as the answer begins
        self._response = connection.getresponse()
        self.status = self._response.status

    def read(self, amount: int | None = None, /) -> bytes:
        """At most `amount` bytes of the body, or all of it; empty at its end."""
        return self._response.read(amount)

    def readline(self) -> bytes:
        """The next line, as soon as it is whole; empty at the end of the body."""
        return self._response.readline()

    def __enter__(self) -> _SecureAnswer:
        return self

    def __exit__(self, *_: object) -> None:
        self._sockets.discard(self._socket)
        self._response.close()


def _secure(
    host: str,
    method: str,
    path: str,
    headers: dict[str, str],
    body: bytes | Iterable[bytes] | None,
    sockets: OpenSockets,
) -> Response:
    from http.client import HTTPSConnection  # see the module docstring

    connection = HTTPSConnection(host, timeout=TIMEOUT_S)
    connection.connect()
    sockets.add(connection.sock)
    chunked = body is not None and not isinstance(body, bytes)
    try:
        connection.request(method, path, body=body, headers=headers, encode_chunked=chunked)
        return _SecureAnswer(connection, sockets)
    except BaseException:
        sockets.discard(connection.sock)
        connection.close()
        raise
