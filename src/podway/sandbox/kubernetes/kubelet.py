"""What the API server asks a node for: `exec` in a pod, and its log. One listener for each node's address, over TLS.

`exec` is answered over a WebSocket or over SPDY, as it is asked for (exec_session.py).

Only who shows the set's token (the API of this process) or a certificate of the given authority (a real API server's) is answered:
whoever may exec in a pod runs as this process' user.
"""

import base64
import hashlib
import os
import pty
import ssl
import subprocess
import threading
from collections.abc import Callable
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from podway.providers.gke.streams import CLOSING, PROTOCOL
from podway.sandbox.kubernetes.exec_session import (
    SPDY_CHANNELS,
    Caller,
    ProcessStreams,
    SpdyCaller,
    WebSocketCaller,
    join,
)
from podway.sandbox.kubernetes.pod_log import PodLog
from podway.sandbox.kubernetes.spdy import SpdyStreams

_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3
SPDY = "SPDY/3.1"

Enter = Callable[
    [str, str, list[str], int | None], "subprocess.Popen[bytes] | None"
]  # namespace, pod, command, terminal
LogOf = Callable[[str, str], PodLog | None]


class Kubelet(ThreadingHTTPServer):
    """The listener of one node."""

    daemon_threads = True

    def __init__(self, address: str, secured: ssl.SSLContext, token: str, enter: Enter, log_of: LogOf) -> None:
        self.token, self.enter, self.log_of = token, enter, log_of
        self.secured = secured
        self.protocols: list[str] = []  # of each exec, in the order in which they came
        super().__init__((address, 0), _Handler)
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True)
        self._thread.start()

    def get_request(self) -> tuple[Any, Any]:
        connection, address = super().get_request()
        return self.secured.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that goes away is not an error."""

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Kubelet

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        kind, namespace, pod, *_ = [*url.path.strip("/").split("/"), "", "", ""]
        self.close_connection = True
        if not self._allowed():
            self._answer(401, b"Unauthorized")
        elif kind == "exec":
            self._exec(namespace, pod, parse_qs(url.query))
        elif kind == "containerLogs":
            self._log(namespace, pod, parse_qs(url.query))
        else:
            self._answer(404, b"not found")

    do_POST = do_GET

    def _allowed(self) -> bool:
        certificate = self.connection.getpeercert() if isinstance(self.connection, ssl.SSLSocket) else None
        return bool(certificate) or self.headers.get("X-Node-Token") == self.server.token

    def _answer(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def _log(self, namespace: str, pod: str, query: dict[str, list[str]]) -> None:
        log = self.server.log_of(namespace, pod)
        if log is None:
            self._answer(404, b"no such pod")
            return
        since = query.get("sinceTime", [""])[0]
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()
        lines = log.lines(
            since=datetime.fromisoformat(since.replace("Z", "+00:00")).timestamp() if since else 0.0,
            times=query.get("timestamps") == ["true"],
            follow=query.get("follow") == ["true"],
        )
        for line in lines:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.write(b"0\r\n\r\n")

    def _exec(self, namespace: str, pod: str, query: dict[str, list[str]]) -> None:
        master, slave = pty.openpty() if "tty" in query else (None, None)
        process = self.server.enter(namespace, pod, query.get("command", []), slave)
        if slave is not None:
            os.close(slave)
        if process is None:
            if master is not None:
                os.close(master)
            self._answer(404, b"no such pod")
            return
        streams = ProcessStreams(process, master)
        try:
            join(streams, self._caller(query))
        finally:
            streams.hang_up()

    def _caller(self, query: dict[str, list[str]]) -> Caller:
        """The connection becomes what the caller asked for."""
        if self.headers.get("Upgrade", "").lower() == SPDY.lower():
            self._upgrade({"Upgrade": SPDY, "X-Stream-Protocol-Version": PROTOCOL})
            streams = SpdyStreams(self.rfile, self.wfile, SPDY_CHANNELS)
            wanted = [name for name in ("input", "output", "error", "tty") if name in query]
            streams.accept(1 + len(wanted))  # one is for errors; a terminal's is for its size
            self.server.protocols.append(SPDY)
            return SpdyCaller(streams)
        key = self.headers.get("Sec-WebSocket-Key", "")
        accept = base64.b64encode(hashlib.sha1((key + _GUID).encode()).digest()).decode()
        asked = self.headers.get("Sec-WebSocket-Protocol", "")
        chosen = CLOSING if CLOSING in asked else PROTOCOL
        self._upgrade({"Upgrade": "websocket", "Sec-WebSocket-Accept": accept, "Sec-WebSocket-Protocol": chosen})
        self.server.protocols.append(chosen)
        return WebSocketCaller(self.rfile, self.wfile)

    def _upgrade(self, headers: dict[str, str]) -> None:
        self.send_response(101)
        for name, value in {"Connection": "Upgrade", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.flush()
