"""The server's side of SPDY/3.1, as far as a kubelet needs it for `exec`: API servers before Kubernetes 1.36 speak it to their nodes.

The caller opens one stream for each of the process' (`streamtype` in its headers); frames of all of them share the connection. There
is no flow control: Kubernetes' own implementation has none either. The draft of 2013 (SPDY Protocol, draft 3.1) is the source of the
frames and of the dictionary that headers are compressed with.
"""

import struct
import threading
import zlib
from collections.abc import Mapping
from io import BufferedIOBase

_SYN_STREAM, _SYN_REPLY, _PING, _GO_AWAY = 1, 2, 6, 7
_FIN = 1
_CONTROL = 0x80000000 | 3 << 16  # version 3
_NAMES = """\
options head post put delete trace accept accept-charset accept-encoding accept-language accept-ranges age allow authorization
cache-control connection content-base content-encoding content-language content-length content-location content-md5 content-range
content-type date etag expect expires from host if-match if-modified-since if-none-match if-range if-unmodified-since last-modified
location max-forwards pragma proxy-authenticate proxy-authorization range referer retry-after server te trailer transfer-encoding
upgrade user-agent vary via warning www-authenticate method get status 200_OK version HTTP/1.1 url public set-cookie keep-alive origin
"""
_TEXT = (
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505"
    "203 Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized403 Forbidden"
    "404 Not Found500 Internal Server Error501 Not Implemented503 Service Unavailable"
    "Jan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMT"
    "chunked,text/html,image/png,image/jpg,image/gif,application/xml,application/xhtml+xml,text/plain,text/javascript,"
    "publicprivatemax-age=gzip,deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,enq=0."
)
_WORDS = [word.replace("_", " ").encode() for word in _NAMES.split()]
_DICTIONARY = b"".join(struct.pack("!I", len(word)) + word for word in _WORDS) + _TEXT.encode()


class SpdyStreams:
    """The streams of one connection, by the channel that each is for. One thread reads; several may write."""

    def __init__(self, incoming: BufferedIOBase, outgoing: BufferedIOBase, channels: Mapping[str, int]) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self._by_type = channels  # what a caller may open: its `streamtype`, and the channel that this is here
        self._channels: dict[int, int] = {}  # stream -> channel
        self._sending = threading.Lock()
        self._read_headers = zlib.decompressobj(zdict=_DICTIONARY)
        self._write_headers = zlib.compressobj(zdict=_DICTIONARY)

    def accept(self, count: int) -> None:
        """Until the caller has opened so many streams."""
        while len(self._channels) < count:
            if self.read() is None:
                raise ConnectionResetError("the caller has gone")

    def read(self) -> tuple[int, bytes, bool] | None:
        """The next bytes of a channel, and whether no more come on it; None when the caller has gone."""
        while True:
            head = self._incoming.read(8)
            if len(head) < 8:
                return None
            first, second = struct.unpack("!II", head)
            size, last = second & 0xFFFFFF, bool(second >> 24 & _FIN)
            data = self._incoming.read(size)
            if not first & 0x80000000:
                if first in self._channels:
                    return self._channels[first], data, last
                continue
            kind = first & 0xFFFF
            if kind == _SYN_STREAM:
                self._opened(data)
                return -1, b"", False
            if kind == _PING:
                self._send(_CONTROL | _PING, 0, data)
            elif kind == _GO_AWAY:
                return None

    def write(self, channel: int, data: bytes, *, last: bool = False) -> None:
        """Bytes for a channel; nothing where the caller has not opened it."""
        for stream, its in self._channels.items():
            if its == channel:
                self._send(stream, _FIN if last else 0, data)

    def _opened(self, data: bytes) -> None:
        stream = struct.unpack("!I", data[:4])[0] & 0x7FFFFFFF
        kind = _headers(self._read_headers.decompress(data[10:])).get("streamtype", "")
        if kind not in self._by_type:
            raise ConnectionResetError(f"a stream of type {kind!r}")
        self._channels[stream] = self._by_type[kind]
        none = self._write_headers.compress(struct.pack("!I", 0)) + self._write_headers.flush(zlib.Z_SYNC_FLUSH)
        self._send(_CONTROL | _SYN_REPLY, 0, struct.pack("!I", stream) + none)

    def _send(self, first: int, flags: int, data: bytes) -> None:
        with self._sending:
            self._outgoing.write(struct.pack("!II", first, flags << 24 | len(data)) + data)
            self._outgoing.flush()


def _headers(block: bytes) -> dict[str, str]:
    count, at, found = struct.unpack("!I", block[:4])[0], 4, []
    for _ in range(2 * count):
        size = struct.unpack("!I", block[at : at + 4])[0]
        found.append(block[at + 4 : at + 4 + size].decode())
        at += 4 + size
    return dict(zip(found[::2], found[1::2], strict=True))
