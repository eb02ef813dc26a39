"""What one caller may take of the server: slow headers and bodies, lengths given twice, requests at once, bytes a day, TLS."""

import asyncio
import contextlib
import datetime
import http.client
import ipaddress
import json
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from podway.errors import UserError
from podway.server import limits
from podway.server.limits import Limits, TimedConnection
from tests.conftest import wait_until

ANN, BOB = ({"Authorization": f"Bearer {name}"} for name in ("ann", "bob"))


class App:
    """Reads the body, waits at /wait until it may go on, and answers errors as the server does."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            size = len(await request.body())
            if scope["path"] == "/wait":
                while not self.go_on.is_set():
                    await asyncio.sleep(0.01)
            response = Response(f"{size} bytes")
        except UserError as error:
            response = Response(json.dumps({"error": {"what": error.what}}), error.status)
        await response(scope, receive, send)


class Served:
    """A server on a port of its own."""

    def __init__(self, port: int, app: App) -> None:
        self.port, self.app = port, app

    def ask(self, path: str = "/", body: bytes | None = None, headers: dict[str, str] | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET" if body is None else "POST", path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def send(self, *pieces: bytes) -> socket.socket:
        """A connection on which these bytes were sent."""
        connection = socket.create_connection(("127.0.0.1", self.port), 30)
        connection.sendall(b"".join(pieces))  # at once: a server that has answered early resets on what comes after
        return connection


Serve = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    ends: list[Callable[[], None]] = []

    def start(**options: int) -> Served:
        app = App()
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(
            Limits(app, tmp_path, **options),
            http=TimedConnection,
            lifespan="off",
            log_config=None,
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()

        def end() -> None:
            app.go_on.set()
            server.should_exit = True
            thread.join(20)

        ends.append(end)
        wait_until(lambda: server.started, 20, "the server")
        return Served(listener.getsockname()[1], app)

    yield start
    for end in ends:
        end()


def answered(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    with connection, contextlib.suppress(ConnectionResetError):
        return b"".join(iter(lambda: connection.recv(65536), b""))
    return b""


HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "pieces",
    [(), (b"G",), (HEAD,), (HEAD, b"X-Long: "), (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"GET / HTTP/1.1\r\nHo")],
    ids=["nothing", "one byte", "half the headers", "half a header", "half a second request"],
)
def test_headers_that_do_not_arrive_end_the_connection(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, pieces: tuple[bytes, ...]
) -> None:
    monkeypatch.setattr(limits, "HEADERS_S", 0.5)
    shown = answered(serve().send(*pieces))
    assert shown.endswith(b"content-length: 0\r\n\r\n") and b"408 Request Timeout" in shown


def test_a_body_that_stops_is_refused(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_S", 0.5)
    shown = answered(serve().send(HEAD, b"Content-Length: 100\r\n\r\n", b"only this"))
    assert shown.startswith(b"HTTP/1.1 408") and b"nothing of the request came" in shown
    assert b"connection: close" in shown


def test_a_body_that_trickles_is_refused(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_START_S", 0.5)
    connection = serve().send(HEAD, b"Content-Length: 100000\r\n\r\n")

    def trickle() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(b"x")
                if ended.wait(0.1):
                    return

    ended = threading.Event()
    thread = threading.Thread(target=trickle)
    thread.start()
    shown = answered(connection)
    ended.set()
    thread.join(20)
    assert shown.startswith(b"HTTP/1.1 408") and b"too slowly" in shown


@pytest.mark.parametrize(
    "lengths",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n",
        b"Content-Length: 4\r\nContent-Length: 5\r\n",
    ],
)
def test_a_length_that_is_given_twice_is_refused(serve: Serve, lengths: bytes) -> None:
    shown = answered(serve().send(HEAD, lengths, b"\r\n0\r\n\r\n"))
    assert shown.startswith(b"HTTP/1.1 400")
    assert shown.count(b"HTTP/1.1 ") == 1  # nothing of the body is taken for another request


def test_each_user_has_so_many_requests_at_once(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "AT_ONCE_PER_USER", 2)
    served = serve()
    waiting = [served.send(b"GET /wait HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ann\r\n\r\n") for _ in range(2)]
    wait_until(lambda: served.ask("/", headers=ANN)[0] == 429, 20, "the two requests under way")
    status, body = served.ask("/", headers=ANN)
    assert status == 429 and "2 requests of yours are under way" in body
    assert served.ask("/", headers=BOB)[0] == 200
    served.app.go_on.set()
    for connection in waiting:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        connection.close()
    wait_until(lambda: served.ask("/", headers=ANN)[0] == 200, 20, "room for another request")


def test_what_a_user_uploads_in_a_day_is_bounded(serve: Serve) -> None:
    served = serve(uploads_a_day=1000)
    assert served.ask("/", b"x" * 900, ANN) == (200, "900 bytes")
    status, body = served.ask("/", b"x" * 900, ANN)
    assert status == 413 and "in a day" in body
    assert served.ask("/", headers=ANN)[0] == 200  # what brings nothing is answered
    assert served.ask("/", b"x" * 900, BOB) == (200, "900 bytes")


def test_a_full_disk_refuses_uploads_and_answers_the_rest(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KEPT_FREE", 1 << 62)
    served = serve()
    status, body = served.ask("/", b"x" * (limits.SMALL_BODY + 1), ANN)
    assert status == 507 and "disk is full" in body
    assert served.ask("/", b"{}", ANN)[0] == 200  # a cancel, say
    assert served.ask("/", headers=ANN)[0] == 200


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """For 127.0.0.1, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "podway test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .sign(key, hashes.SHA256())
    )
    cert, private = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    encoding = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    private.write_bytes(key.private_bytes(*encoding))
    return cert, private


@contextlib.contextmanager
def running(home: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """A server of the home, and what it wrote of itself."""
    command = [sys.executable, "-m", "podway.server.main", "--foreground", *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: (home / "server.json").exists() or process.poll() is not None, 60, "the server")
            yield process, json.loads((home / "server.json").read_text())
        finally:
            process.terminate()
            process.communicate(timeout=30)


def test_over_tls_others_need_the_certificate_and_this_machine_does_not(
    podway_home: Path, certificate: tuple[Path, Path]
) -> None:
    cert, key = certificate
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ("--port", str(port), "--tls-cert", str(cert), "--tls-key", str(key))
    with running(podway_home, *words) as (_, about):
        trusting = ssl.create_default_context(cafile=str(cert))
        connection = http.client.HTTPSConnection("127.0.0.1", port, context=trusting, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", "/healthz")
            assert connection.getresponse().status == 200
        with pytest.raises(ssl.SSLError), contextlib.closing(http.client.HTTPSConnection("127.0.0.1", port)) as other:
            other.request("GET", "/healthz")
        assert about["url"].startswith("http://127.0.0.1:") and not about["url"].endswith(f":{port}")
        own = http.client.HTTPConnection(about["url"].removeprefix("http://"), timeout=30)
        with contextlib.closing(own):
            own.request("GET", "/healthz")
            assert own.getresponse().status == 200


def test_bad_certificates_are_one_line(podway_home: Path, certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = certificate
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("nothing of the kind")
    for words, said in (
        (("--tls-cert", str(cert)), "a certificate and its key go together"),
        (("--tls-cert", str(wrong), "--tls-key", str(key)), "are not a certificate and its key"),
        (("--tls-cert", str(tmp_path / "nowhere"), "--tls-key", str(key)), "No such file"),
    ):
        command = [sys.executable, "-m", "podway.server.main", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and said in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
        assert not (podway_home / "server.json").exists()


def test_listening_on_all_addresses_without_tls_warns(podway_home: Path) -> None:
    command = [sys.executable, "-m", "podway.server.main", "--host", "0.0.0.0"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert "listening on 0.0.0.0 without TLS" in process.stderr.readline()
        finally:
            process.terminate()
            process.communicate(timeout=30)
