"""What the API server asks a node for: `exec` in a pod, and its log. One listener for each node's address, over TLS.

Only who shows the set's token (the API of this process) or a certificate of the given authority (a real API server's) is answered:
whoever may exec in a pod runs as this process' user.
"""

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import pty
import signal
import ssl
import struct
import subprocess
import termios
import threading
from collections.abc import Callable
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any
from urllib.parse import parse_qs, urlsplit

from podway.providers.gke.streams import CLOSE_STREAM, CLOSING, PROTOCOL, STDERR, STDIN, STDOUT, frame
from podway.sandbox.kubernetes.pod_log import PodLog

_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3
CHUNK = 32 << 10
_BINARY, _CLOSE = 2, 8
RESIZE = 4

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
            query = parse_qs(url.query)
            self._exec(namespace, pod, query.get("command", []), terminal=query.get("tty") == ["true"])
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

    def _exec(self, namespace: str, pod: str, command: list[str], *, terminal: bool) -> None:
        master, slave = pty.openpty() if terminal else (None, None)
        process = self.server.enter(namespace, pod, command, slave)
        if slave is not None:
            os.close(slave)
        if process is None:
            if master is not None:
                os.close(master)
            self._answer(404, b"no such pod")
            return
        key = self.headers.get("Sec-WebSocket-Key", "")
        accept = base64.b64encode(hashlib.sha1((key + _GUID).encode()).digest()).decode()
        self.send_response(101)
        for name, value in (("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Accept", accept)):
            self.send_header(name, value)
        asked = self.headers.get("Sec-WebSocket-Protocol", "")
        self.send_header("Sec-WebSocket-Protocol", CLOSING if CLOSING in asked else PROTOCOL)
        self.end_headers()
        self.wfile.flush()
        _join(_Streams(process, master), self.rfile, self.wfile)


class _Streams:
    """A process' own streams, or its terminal."""

    def __init__(self, process: "subprocess.Popen[bytes]", terminal: int | None) -> None:
        self.process, self.terminal = process, terminal
        self.out: list[tuple[IO[bytes], int]] = []
        if terminal is not None:
            self.input: IO[bytes] = os.fdopen(os.dup(terminal), "wb", buffering=0)
            self.out = [(os.fdopen(terminal, "rb"), STDOUT)]
        else:
            assert process.stdin is not None and process.stdout is not None and process.stderr is not None
            self.input = process.stdin
            self.out = [(process.stdout, STDOUT), (process.stderr, STDERR)]

    def take(self, channel: int, data: bytes) -> None:
        """What the caller sent on a channel."""
        if channel == STDIN:
            self.input.write(data)
            self.input.flush()
        elif channel == RESIZE and self.terminal is not None:
            size = json.loads(data)
            fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size["Height"], size["Width"], 0, 0))
        elif channel == CLOSE_STREAM and self.terminal is None and data == bytes([STDIN]):
            self.input.close()

    def hang_up(self) -> None:
        """End it; of a terminal, the leader of its session, whose end the system tells everything there."""
        with contextlib.suppress(OSError, ValueError):
            pid = self.process.pid
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            for child in children if self.terminal is not None else ():
                os.kill(int(child), signal.SIGKILL)
        self.process.kill()


def _join(streams: _Streams, incoming: Any, outgoing: Any) -> None:
    """Both ways until either ends; then how it ended."""
    process, sending = streams.process, threading.Lock()

    def send(opcode: int, data: bytes) -> None:
        with sending:
            outgoing.write(frame(opcode, data, masked=False))
            outgoing.flush()

    def out(stream: IO[bytes], channel: int) -> None:
        try:
            while data := stream.read1(CHUNK):  # type: ignore[attr-defined]
                send(_BINARY, bytes([channel]) + data)
        except (OSError, ValueError):
            if streams.terminal is None:  # a terminal ends so
                process.kill()

    def feed() -> None:
        try:
            while (data := _read(incoming)) is not None:
                if data:
                    streams.take(data[0], data[1:])
        except (OSError, ValueError):
            pass
        finally:  # the caller has gone
            streams.hang_up()

    threading.Thread(target=feed, daemon=True).start()
    copies = [threading.Thread(target=out, args=pair, daemon=True) for pair in streams.out]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.join()
    code = process.wait()
    status: dict[str, object] = {"metadata": {}, "status": "Success"}
    if code:
        cause = {"reason": "ExitCode", "message": str(code)}
        message = f"command terminated with exit code {code}"
        status = {"status": "Failure", "reason": "NonZeroExitCode", "message": message, "details": {"causes": [cause]}}
    try:
        send(_BINARY, b"\x03" + json.dumps(status).encode())
        send(_CLOSE, struct.pack("!H", 1000))
    except (OSError, ValueError):
        pass


def _read(incoming: Any) -> bytes | None:
    """The next message of the caller; None when it has gone."""
    whole = b""
    while True:
        head = incoming.read(2)
        if len(head) < 2 or head[0] & 0x0F == _CLOSE:
            return None
        size = head[1] & 0x7F
        if size > 125:
            size = int.from_bytes(incoming.read(2 if size == 126 else 8), "big")
        mask = incoming.read(4) if head[1] & 0x80 else b""
        data: bytes = incoming.read(size)
        if mask:
            pattern = (mask * (size // 4 + 1))[:size]
            data = (int.from_bytes(data, "big") ^ int.from_bytes(pattern, "big")).to_bytes(size, "big")
        whole += data
        if head[0] & 0x80:
            return whole
