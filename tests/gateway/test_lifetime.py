"""The gateway of this machine's own server ends by itself when nobody can need it any more, and not before."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from podway.gateway.lifetime import Lifetime
from podway.gateway.state_dir import lock_is_ours, take_lock
from podway.gateway.table import Backend, RoutedService, RouteTable

# A gateway whose server is away, as the real command runs it, but one that looks more often.
PROGRAM = """
import sys
from pathlib import Path
from podway.gateway.main import GatewaySettings, serve
from podway.server.gateway_source import GatewaySource
state = Path(sys.argv[1])
serve(GatewaySettings(state=state, single=True, port=0, look_s=0.05, unused_s=float(sys.argv[2])), GatewaySource(state.parent))
"""
SERVICE = RoutedService(name="chat", backends=(Backend(id="chat-1", address="127.0.0.1:1"),))


@contextlib.contextmanager
def gateway(state: Path, unused_s: float) -> Iterator[tuple[subprocess.Popen[str], int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(state), str(unused_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    with process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"127\.0\.0\.1:(\d+)", line)
            assert found, line
            yield process, int(found[1])
        finally:
            process.kill()


def healthy(port: int) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60) as answer:
        return bool(answer.status == 200)


def test_it_ends_when_its_directory_is_deleted_and_finishes_what_it_has(tmp_path: Path) -> None:
    state = tmp_path / "home" / "gateway"
    state.mkdir(parents=True)
    (state / "routes.json").write_bytes(msgspec.json.encode(RouteTable(version=1, services=(SERVICE,))))
    # Away for longer than it would stay without a service: it has one, and goes on.
    with gateway(state, 0.0) as (process, port):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n")  # a request under way
            assert healthy(port) and process.poll() is None
            shutil.rmtree(tmp_path / "home", ignore_errors=True)
            assert process.stderr is not None
            said = next(line for line in process.stderr if "ending" in line)
            assert said.startswith("podway gateway: ") and "was deleted" in said
            client.sendall(b"{}")
            assert client.recv(100).startswith(b"HTTP/1.1 ")
        assert process.wait(60) == 0
        assert "Traceback" not in process.stderr.read()
    assert not (tmp_path / "home" / "gateway" / "gateway.json").exists()


def test_it_ends_without_a_service_and_without_a_server(tmp_path: Path) -> None:
    with gateway(tmp_path / "gateway", 0.1) as (process, _):
        assert process.wait(60) == 0
        assert process.stderr is not None and "no service, and the server is away" in process.stderr.read()


@pytest.mark.parametrize(
    ("services", "away_since", "ends"),
    [(0, None, False), (0, 500.0, False), (0, 400.0, True), (1, 400.0, False), (1, None, False)],
)
def test_it_goes_on_while_it_may_be_needed(tmp_path: Path, services: int, away_since: float | None, ends: bool) -> None:
    lock = take_lock(tmp_path)
    found = Lifetime(
        folder=tmp_path, lock=lock, services=lambda: services, away_since=lambda: away_since, unused_s=600.0
    ).end_reason(1000.0)
    assert (found is not None) is ends
    os.close(lock)


def test_whose_lock_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "gateway"
    folder.mkdir()
    lock = take_lock(folder)
    assert lock_is_ours(folder, lock)
    folder.rename(tmp_path / "moved")
    assert not lock_is_ours(folder, lock)
    folder.mkdir()
    other = take_lock(folder)  # a new gateway of a new directory
    assert lock_is_ours(folder, other) and not lock_is_ours(folder, lock)
    shutil.rmtree(folder)
    folder.write_text("a file")
    assert not lock_is_ours(folder, other)
    os.close(lock)
    os.close(other)
