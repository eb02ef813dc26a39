"""This machine's server has a gateway while it has services: started, found again, and ended with the last of them."""

import subprocess
import time
from pathlib import Path

import pytest

from podway.gateway.state_dir import read_info, running_gateway
from podway.server import embedded_gateway
from podway.server.embedded_gateway import EmbeddedGateway
from tests.conftest import free_port


def until(look: EmbeddedGateway, place: Path, running: bool) -> None:
    deadline = time.monotonic() + 120
    while (running_gateway(place / "gateway") is not None) != running:
        assert time.monotonic() < deadline
        look.look(time.monotonic())
        time.sleep(0.05)


def test_it_is_there_while_there_are_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_gateway, "UNUSED_S", 0.2)
    monkeypatch.setattr(embedded_gateway, "USUAL_PORT", free_port())  # which no other test wants meanwhile
    services: list[str] = []
    server = EmbeddedGateway(tmp_path, lambda: bool(services))
    server.look(0.0)
    assert running_gateway(tmp_path / "gateway") is None
    services.append("chat")
    until(server, tmp_path, True)
    first = running_gateway(tmp_path / "gateway")
    assert first is not None
    try:
        after_a_crash = EmbeddedGateway(tmp_path, lambda: bool(services))
        for _ in range(3):
            after_a_crash.look(time.monotonic())
        assert running_gateway(tmp_path / "gateway") == first
        assert after_a_crash._child is None
        services.clear()
        until(after_a_crash, tmp_path, False)
        assert read_info(tmp_path / "gateway") == first
        services.append("chat")  # at the same place as before
        until(server, tmp_path, True)
        again = running_gateway(tmp_path / "gateway")
        assert again is not None and (again.port, again.pid != first.pid) == (first.port, True)
    finally:
        services.clear()
        until(server, tmp_path, False)
        assert isinstance(server._child, subprocess.Popen)
        server._child.wait(60)


def test_a_start_that_fails_is_tried_less_and_less_often(tmp_path: Path) -> None:
    """The server's home was deleted under it: it need not say so each second."""
    server = EmbeddedGateway(tmp_path / "deleted", lambda: True)
    failed = []
    for second in range(200):
        try:
            server.look(float(second))
        except FileNotFoundError:
            failed.append(second)
    assert failed == [0, 1, 3, 7, 15, 31, 63, 123, 183]
