"""`podway gateway` as a process: it follows its file of routes and ends gently."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import openai
import psutil
import pytest

from podway.gateway.table import Backend, RoutedService, RouteTable

ANSWER = {
    "id": "1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}],
}


class _Replica(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = msgspec.json.encode(ANSWER)
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def replica() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Replica)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def put(path: Path, *services: RoutedService) -> None:
    spare = path.with_suffix(".new")
    spare.write_bytes(msgspec.json.encode(RouteTable(version=1, services=services)))
    spare.replace(path)


@contextlib.contextmanager
def gateway(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "podway.cli.main", "gateway", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"127\.0\.0\.1:(\d+)", line)
        assert found, line
        yield process, f"http://127.0.0.1:{found[1]}"
    finally:
        process.kill()
        process.wait()
        for successor in psutil.process_iter(["cmdline"]):  # of a gateway that was replaced, with the same command
            if successor.info["cmdline"] == command:
                successor.kill()
        process.communicate()


def test_it_follows_its_routes_and_ends_gently(tmp_path: Path, replica: str) -> None:
    routes = tmp_path / "routes.json"
    put(routes)
    with gateway("--routes", str(routes)) as (process, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.AuthenticationError):  # nothing is open to everybody
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        service = RoutedService(name="chat", model="m", auth=False, backends=(Backend(id="a", address=replica),))
        put(routes, service)
        until = time.monotonic() + 60
        while not client.models.list().data and time.monotonic() < until:
            time.sleep(0.05)
        answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        assert answer.choices[0].message.content == "hello"
        routes.write_text("{broken")
        assert process.stderr is not None
        assert "the last routes stay in use" in process.stderr.readline()
        assert client.models.list().data
        client.close()
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stderr.read() == ""
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(url)


# As systemd starts a service with a socket: it is file 3, and two variables say so to this process.
ACTIVATE = """import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_FDS=sys.argv[2], LISTEN_PID=str(os.getpid()))
os.execv(sys.executable, [sys.executable, "-m", "podway.cli.main", "gateway", *sys.argv[3:]])
"""


def activated(held: socket.socket, count: str, routes: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", ACTIVATE, str(held.fileno()), count, "--routes", str(routes)]
    return subprocess.Popen(
        command, pass_fds=[held.fileno()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_socket_of_systemd_outlives_the_gateway(tmp_path: Path, replica: str) -> None:
    routes = tmp_path / "routes.json"
    put(routes, RoutedService(name="chat", model="m", auth=False, backends=(Backend(id="a", address=replica),)))
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        for _ in range(2):  # the second one answers what came while none ran
            with socket.create_connection(("127.0.0.1", port)) as early:
                body = b'{"model": "m"}'
                early.sendall(
                    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
                )
                process = activated(held, "1", routes)
                try:
                    assert process.stdout is not None
                    assert f"listening on 127.0.0.1:{port}" in process.stdout.readline()
                    early.settimeout(60)
                    assert early.recv(12) == b"HTTP/1.1 200"
                    with urllib.request.urlopen(urllib.request.Request(url, data=body), timeout=60) as reply:
                        assert reply.status == 200
                finally:
                    process.terminate()
                    process.communicate(timeout=60)
                assert process.returncode == 0


def test_what_is_not_one_listening_socket_is_refused_in_a_line(tmp_path: Path) -> None:
    put(tmp_path / "routes.json")
    with socket.socket() as idle:
        for count, says in (("1", "not a listening TCP socket"), ("2", "passed 2 sockets")):
            _, err = activated(idle, count, tmp_path / "routes.json").communicate(timeout=60)
            assert says in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "says"),
    [(None, "cannot be read"), ("{", "not a table of routes"), ('{"services": [{"nme": 1}]}', "not a table of routes")],
)
def test_bad_routes_are_one_line(tmp_path: Path, text: str | None, says: str) -> None:
    routes = tmp_path / "routes.json"
    if text is not None:
        routes.write_text(text)
    command = [sys.executable, "-m", "podway.cli.main", "gateway", "--routes", str(routes), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and says in done.stderr and "Traceback" not in done.stderr


def test_a_port_that_is_taken_is_one_line(tmp_path: Path, replica: str) -> None:
    routes = tmp_path / "routes.json"
    put(routes)
    command = [
        sys.executable,
        "-m",
        "podway.cli.main",
        "gateway",
        "--routes",
        str(routes),
        "--port",
        replica.split(":")[1],
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "cannot listen" in done.stderr and "Traceback" not in done.stderr
