"""`probe`: one HTTP request to a program on this host, or a bare connection, and how it was answered.

Only the status is looked at, unless the caller wants to `keep` so many bytes of the answer. The deadline is for the whole of it: a
program that answers a byte at a time is as late as one that does not answer.
"""

from __future__ import annotations

import socket
import time

from .phase import RequestRefused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .wire import Fields

LONGEST_S = 120.0
MOST_REPLY = 64 << 10  # of an answer is read, so that small ones end as their program means them to
MOST_KEPT = 1 << 20


def probe(request: Fields) -> tuple[Fields, None]:
    """{status} as answered (0 for a bare connection), with `keep` also its {body} as text; or {error, refused}."""
    address, port = str(request.get("address") or "127.0.0.1"), int(request.get("port") or 0)
    timeout = min(float(request.get("limit_s") or 10.0), LONGEST_S)
    if not 0 < port < 65536:
        raise RequestRefused(f"{port} is not a port")
    keep = min(int(request.get("keep") or 0), MOST_KEPT)
    head, body = _message(request, address, port, "1.0" if keep else "1.1")
    deadline = time.monotonic() + timeout
    try:
        with socket.create_connection((address, port), timeout) as connection:
            if head is None:
                return {"status": 0}, None
            _limit(connection, deadline)
            connection.sendall(head + body)
            return _answer(connection, deadline, keep), None
    except ConnectionRefusedError:
        return {"error": f"nothing listens on {address}:{port}", "refused": True}, None
    except (socket.timeout, TimeoutError):  # noqa: UP041 - two things before Python 3.10
        return {"error": f"no answer within {timeout:g} s", "refused": False}, None
    except OSError as error:
        return {"error": f"the connection broke off: {error.strerror or error}", "refused": False}, None


def _message(request: Fields, address: str, port: int, version: str) -> tuple[bytes | None, bytes]:
    """`version` 1.0: the answer comes in one piece."""
    path = request.get("path")
    if path is None:
        return None, b""
    body = str(request.get("content") or "").encode()
    headers = {"Host": f"{address}:{port}", "User-Agent": "podway-probe", "Accept": "*/*", "Connection": "close"}
    given = request.get("headers") or {}
    headers.update({str(name): str(value) for name, value in given.items()})
    if body:
        headers["Content-Length"] = str(len(body))
    lines = [f"{request.get('method') or 'GET'} {path} HTTP/{version}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if any("\r" in line or "\n" in line for line in lines):
        raise RequestRefused("a probe's path or header has a line break")
    return ("\r\n".join(lines) + "\r\n\r\n").encode(), body


def _limit(connection: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)


def _answer(connection: socket.socket, deadline: float, keep: int) -> Fields:
    received = b""
    status = None
    while len(received) < max(keep, MOST_REPLY):
        try:
            _limit(connection, deadline)
            data = connection.recv(8192)
        except OSError:
            if status is None:
                raise
            break  # the answer is known; its rest does not matter
        if not data:
            break
        received += data
        if status is None and b"\n" in received:
            status = _read_status(received.split(b"\n", 1)[0])
            if status is None:
                return {"error": "the answer is not HTTP", "refused": False}
    if status is None:
        return {"error": "the connection was closed without an answer", "refused": False}
    if not keep:
        return {"status": status}
    body = received.partition(b"\r\n\r\n")[2]
    return {"status": status, "body": body[:keep].decode("utf-8", "replace")}


def _read_status(line: bytes) -> int | None:
    parts = line.split()
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/") or not parts[1].isdigit():
        return None
    return int(parts[1])
