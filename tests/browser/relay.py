"""A way to a server that can be cut and mended: what a page sees of a server that is away."""

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self


class Relay:
    """Listens on a port of its own and passes bytes on, until it is cut."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.open = True
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: set[socket.socket] = set()
        self._changing = threading.Lock()  # a connection is either refused or among those that a cut breaks
        self.base = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._accepting = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._accepting.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join(10)

    def cut(self) -> None:
        """Every connection breaks, and new ones end at once."""
        with self._changing:
            self.open = False
            for one in list(self._pairs):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """New connections go through again."""
        self.open = True

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._changing:
                if not self.open:
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self.port))
                self._pairs |= {client, server}
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
            self._pairs.discard(one)
