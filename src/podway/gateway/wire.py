"""Heads of HTTP/1.1 messages: which headers go on to the other side, and how a head is written. Pure.

Bodies pass unchanged. A head is written again, since what concerns one connection (RFC 9110, 7.6.1) must not travel further, and
since two readers of one head that disagree about its end are how requests are smuggled.
"""

from collections.abc import Iterable

Header = tuple[bytes, bytes]  # the name in lower case

# RFC 9110, 7.6.1, and what older proxies send. Transfer-Encoding is put back where a body has no known length.
_OF_THE_CONNECTION = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# Said by the gateway itself, never believed from a client.
_OURS = frozenset({b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host", b"x-podway-user", b"content-length"})

REASONS = {
    200: b"OK",
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    404: b"Not Found",
    405: b"Method Not Allowed",
    408: b"Request Timeout",
    413: b"Content Too Large",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
}


def value_of(headers: Iterable[Header], name: bytes) -> bytes | None:
    """The first value of a header."""
    return next((value for key, value in headers if key == name), None)


def is_upgrade(headers: Iterable[Header]) -> bool:
    """Whether the client asks to leave HTTP (a WebSocket, for instance)."""
    options = b",".join(value for key, value in headers if key == b"connection").lower()
    return any(option.strip() == b"upgrade" for option in options.split(b","))


def _dropped(headers: Iterable[Header]) -> frozenset[bytes]:
    """Names of headers that concern one connection: the usual ones, and those that `Connection` names."""
    named = b",".join(value for key, value in headers if key == b"connection").lower()
    return _OF_THE_CONNECTION | {option.strip() for option in named.split(b",")} if named else _OF_THE_CONNECTION


def request_head(
    method: bytes,
    target: bytes,
    headers: list[Header],
    *,
    client: str,
    scheme: bytes,
    length: int | None,
    authorization: bool,
    upgrade: bool = False,
) -> bytes:
    """The head sent to a replica; `length` None: the body comes in chunks."""
    dropped = _dropped(headers) | _OURS
    if not authorization:
        dropped |= {b"authorization", b"x-api-key"}  # the caller's key opens the gateway: it is not for a job to see
    lines = [method + b" " + target + b" HTTP/1.1"]
    lines += [key + b": " + value for key, value in headers if key not in dropped]
    lines.append(b"x-forwarded-for: " + client.encode())
    lines.append(b"x-forwarded-proto: " + scheme)
    host = value_of(headers, b"host")
    if host is not None:
        lines.append(b"x-forwarded-host: " + host)
    if upgrade:
        lines += [b"connection: upgrade", b"upgrade: " + (value_of(headers, b"upgrade") or b"websocket")]
    if length is None:
        lines.append(b"transfer-encoding: chunked")
    elif length or method not in (b"GET", b"HEAD", b"OPTIONS", b"DELETE"):
        lines.append(b"content-length: %d" % length)
    return b"\r\n".join(lines) + b"\r\n\r\n"


def response_head(status: int, reason: bytes, headers: list[Header], *, chunked: bool, close: bool) -> bytes:
    """The head sent to a client; where not chunked, Content-Length of the replica stands."""
    dropped = _dropped(headers)
    if chunked:
        dropped |= {b"content-length"}
    lines = [b"HTTP/1.1 %d %s" % (status, reason)]
    lines += [key + b": " + value for key, value in headers if key not in dropped]
    if chunked:
        lines.append(b"transfer-encoding: chunked")
    if close:
        lines.append(b"connection: close")
    return b"\r\n".join(lines) + b"\r\n\r\n"


def plain_response(
    status: int, body: bytes, *, kind: bytes = b"application/json", extra: tuple[Header, ...] = (), close: bool = False
) -> bytes:
    """A whole answer of the gateway's own."""
    headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), *extra]
    return response_head(status, REASONS.get(status, b"-"), headers, chunked=False, close=close) + body


def chunk(data: bytes) -> bytes:
    """One chunk of a body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"
