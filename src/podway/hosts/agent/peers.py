"""Blobs from host to host, so that the server sends a tree once however many hosts want it.

The host that has blobs listens (`listen`); another connects (`pull`). On the wire, as in wire.py:

    listener   {"nonce": N}
    puller     {"op": "files.blobs", "digests": [...], "mac": HMAC-SHA256(token, N + "\\n" + digests joined by ",")}
    listener   {"ok": true, "absent": [...], "size": S} and a pack of S bytes, or {"ok": false, "error": ...}

One request per connection, and only this one. The token never travels here: the server gives it to both ends over its own
links, and it dies after an hour. The puller need not trust the listener, because a blob proves itself by its digest.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import threading
import time

from . import wire
from .packs import CHUNK, FilesError, PackStream, is_digest
from .receive import Receiver
from .records import Contents, SyncState

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

CONNECT_S = 5.0
STALL_S = 30.0
TOKEN_S = 3600.0
MAX_CONNECTIONS = 16


class PeerUnreachable(Exception):
    """The peer could not be reached, broke off, or did not answer as a peer does."""


def _mac(token: str, nonce: str, digests: list[str]) -> str:
    return hmac.new(token.encode(), ("%s\n%s" % (nonce, ",".join(digests))).encode(), "sha256").hexdigest()


class Listener:
    """Serves one host's blobs to whoever proves to know a token; ends by itself when no token is valid any more."""

    def __init__(self, state_dir: str, address: str, port: int) -> None:
        self.state_dir = state_dir
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.socket = socket.create_server((address, port), family=family)
        self.port: int = self.socket.getsockname()[1]
        self.tokens: dict[str, float] = {}
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)

    def valid(self) -> list[str]:
        """The tokens that are still good."""
        now = time.monotonic()
        return [token for token, until in list(self.tokens.items()) if until > now]

    def run(self) -> None:
        """Accept until no token is left or the socket is closed."""
        self.socket.settimeout(STALL_S)
        while True:
            with _lock:  # so that `listen` does not add a token to a listener that is about to end
                if not self.valid():
                    self.socket.close()
                    return
            try:
                connection, _ = self.socket.accept()
            except OSError:  # nobody came for a while, or `close` was called; the loop's head knows which
                continue
            self._free.acquire()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError, wire.WireError, FilesError):
                connection.settimeout(STALL_S)
                with connection.makefile("rwb") as stream:
                    self._answer(stream)  # type: ignore[arg-type]  # a socket's stream does all that is used
        finally:
            self._free.release()

    def _answer(self, stream: BinaryIO) -> None:
        nonce = os.urandom(16).hex()
        wire.write(stream, {"nonce": nonce})
        message = wire.read(stream)
        if message is None:
            return
        fields = message[0]
        digests, mac = fields.get("digests"), fields.get("mac")
        if fields.get("op") != "files.blobs" or not isinstance(digests, list) or not all(map(is_digest, digests)):
            wire.write(stream, {"ok": False, "error": "only files.blobs is answered here"})
            return
        proofs = [_mac(token, nonce, digests) for token in self.valid()]
        if not isinstance(mac, str) or not any(hmac.compare_digest(mac.encode(), p.encode()) for p in proofs):
            wire.write(stream, {"ok": False, "error": "the token is not valid here"})
            return
        contents = Contents(SyncState(self.state_dir))
        sizes = {digest: contents.size(digest) for digest in digests}
        pack = PackStream([(digest, size) for digest, size in sizes.items() if size is not None], contents.open)
        absent = [digest for digest, size in sizes.items() if size is None]
        reply = {"ok": True, "absent": absent, "size": pack.size}
        wire.write(stream, reply, pack)  # type: ignore[arg-type]  # `read` is all that is used


_listeners: dict[tuple[str, str], Listener] = {}
_lock = threading.Lock()


def listen(state_dir: str, address: str, port: int, token: str) -> int:
    """Serve this host's blobs on `address` to holders of `token`; the port. Once is enough: a second call adds its token."""
    key = (os.path.abspath(state_dir), address)
    with _lock:
        listener = _listeners.get(key)
        if listener is None or listener.socket.fileno() < 0:
            listener = _listeners[key] = Listener(state_dir, address, port)
            listener.tokens[token] = time.monotonic() + TOKEN_S
            threading.Thread(target=listener.run, daemon=True).start()
        listener.tokens[token] = time.monotonic() + TOKEN_S
        return listener.port


def close(state_dir: str) -> None:
    """Stop serving this host's blobs."""
    with _lock:
        for key in [key for key in _listeners if key[0] == os.path.abspath(state_dir)]:
            listener = _listeners.pop(key)
            listener.tokens.clear()
            with contextlib.suppress(OSError):
                listener.socket.shutdown(socket.SHUT_RDWR)  # wakes `accept`
            listener.socket.close()


def pull(peer: str, token: str, digests: list[str], folder: str) -> tuple[int, list[str]]:
    """Fetch blobs from a peer ("address:port") into `folder`; the bytes that came, and the digests the peer has not."""
    host, _, port = peer.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_S) as connection:
            connection.settimeout(STALL_S)
            with connection.makefile("rwb") as stream:
                return _ask(stream, token, digests, folder)  # type: ignore[arg-type]  # as above
    except (OSError, ValueError, OverflowError, wire.WireError) as error:
        raise PeerUnreachable("peer %s: %s" % (peer, error)) from None


def _ask(stream: BinaryIO, token: str, digests: list[str], folder: str) -> tuple[int, list[str]]:
    hello = wire.read(stream)
    nonce = hello[0].get("nonce") if hello else None
    wire.write(stream, {"op": "files.blobs", "digests": digests, "mac": _mac(token, str(nonce), digests)})
    reply = wire.read(stream)
    if reply is None or reply[0].get("ok") is not True:
        raise wire.WireError(str(reply[0].get("error")) if reply else "no answer")
    fields, body = reply
    absent = [digest for digest in digests if digest in set(fields.get("absent") or ())]
    size = body.left
    with Receiver(folder) as receiver:
        while body.left:
            receiver.feed(body.read(min(CHUNK, body.left)))
        receiver.close()
    return size, absent
