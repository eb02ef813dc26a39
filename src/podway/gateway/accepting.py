"""Connections of clients, in clear and by TLS on one port.

The first byte of a TLS connection is that of a handshake, which no HTTP request begins with. While there is a certificate the gateway
waits for that byte, without taking it, and then speaks TLS or not; without one every connection is plain, and nothing is waited for.
Each handshake is a task of its own with a time limit: slow ones hold up nobody.
"""

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable

from podway.gateway.connection import DRAIN_IDLE_S, IDLE_S, ClientConnection

HANDSHAKE = 0x16  # the record type that a TLS connection begins with (RFC 8446, 5.1)
HANDSHAKE_S = 10.0
AT_ONCE = 64  # connections accepted before anything else is done
FULL_S = 1.0  # how long nothing is accepted when there are no descriptors or memory left
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

log = logging.getLogger("podway.gateway")


class Acceptor:
    """Accepts on one socket until it is closed."""

    def __init__(
        self,
        listener: socket.socket,
        connection: Callable[[bool], ClientConnection],
        context_at: Callable[[str], ssl.SSLContext | None],
        *,
        always: bool = False,
    ) -> None:
        """`connection`: a new one, by whether it is secure; `context_at`: for an address of this machine. `always`: TLS alone."""
        self._listener = listener
        self._connection = connection
        self._context_at = context_at
        self._always = always
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[socket.socket, asyncio.TimerHandle] = {}  # for their first byte
        self._starting: set[asyncio.Task[None]] = set()
        self._draining = False
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    @property
    def busy(self) -> bool:
        """Whether a connection is here that is not yet a `ClientConnection`."""
        return bool(self._waiting or self._starting)

    def close(self) -> None:
        """Accept nothing more; connections that have not begun have a moment to."""
        if self._draining:
            return
        self._draining = True
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for client, timer in list(self._waiting.items()):
            timer.cancel()
            self._waiting[client] = self._loop.call_later(DRAIN_IDLE_S, self._drop, client)

    def abort(self) -> None:
        """End those too."""
        for client in list(self._waiting):
            self._drop(client)
        for task in self._starting:
            task.cancel()

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                client, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                log.error("no connection can be accepted: %s", error.strerror)
                self._loop.remove_reader(self._listener)
                self._loop.call_later(FULL_S, self._resume)
                return
            client.setblocking(False)
            with contextlib.suppress(OSError):  # a socket of another kind
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._begin(client)

    def _resume(self) -> None:
        if not self._draining:
            self._loop.add_reader(self._listener, self._accept)

    def _begin(self, client: socket.socket) -> None:
        context = self._context_at(_own_address(client))
        if context is None or self._always:
            self._start(client, context)
            return
        self._waiting[client] = self._loop.call_later(IDLE_S, self._drop, client)
        self._loop.add_reader(client, self._first_byte, client)

    def _first_byte(self, client: socket.socket) -> None:
        try:
            first = client.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            first = b""
        if not first:
            self._drop(client)
            return
        self._forget(client)
        secure = first[0] == HANDSHAKE
        self._start(client, self._context_at(_own_address(client)) if secure else None)

    def _forget(self, client: socket.socket) -> None:
        self._waiting.pop(client).cancel()
        self._loop.remove_reader(client)

    def _drop(self, client: socket.socket) -> None:
        self._forget(client)
        client.close()

    def _start(self, client: socket.socket, context: ssl.SSLContext | None) -> None:
        task = self._loop.create_task(self._serve(client, context))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _serve(self, client: socket.socket, context: ssl.SSLContext | None) -> None:
        def made() -> ClientConnection:
            connection = self._connection(context is not None)
            connection.draining = self._draining
            return connection

        limit = HANDSHAKE_S if context is not None else None
        try:
            await self._loop.connect_accepted_socket(made, client, ssl=context, ssl_handshake_timeout=limit)
        except (OSError, TimeoutError):  # ssl.SSLError is an OSError: the client speaks no TLS that we do, or left
            client.close()


def _own_address(client: socket.socket) -> str:
    try:
        name = client.getsockname()
    except OSError:
        return ""
    return str(name[0]) if isinstance(name, tuple) else ""
