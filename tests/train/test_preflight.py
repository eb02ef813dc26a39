"""The commands for a host's network: rendered here, never run."""

from pathlib import Path

import pytest

from podway.errors import UserError
from podway.train import preflight

ROUTE = "default via 10.128.0.1 dev ens8 proto dhcp src 10.128.0.40 metric 100"


def test_the_commands_of_a_route() -> None:
    told = [str(command) for command in preflight.commands(ROUTE)]
    assert told[0].startswith(f"ip route change {ROUTE} rto_min 5ms")
    assert told[1].startswith("ethtool -K ens8 tx-nocache-copy on")
    assert any("tcp_slow_start_after_idle=0" in line for line in told)


def test_it_is_done_once() -> None:
    again = [command.words[0] for command in preflight.commands(ROUTE + " rto_min lock 5ms")]
    assert "ip" not in again


def test_small_packets_are_told(tmp_path: Path) -> None:
    (tmp_path / "ens8").mkdir()
    (tmp_path / "ens8" / "mtu").write_text("1460\n")
    assert "1460" in str(preflight.check_mtu("ens8", tmp_path))
    (tmp_path / "ens8" / "mtu").write_text("8896\n")
    assert preflight.check_mtu("ens8", tmp_path) is None
    assert "cannot be read" in str(preflight.check_mtu("none", tmp_path))


@pytest.mark.parametrize("environment", [{}, {"PODWAY_SIMULATED": "1"}])
def test_only_a_real_host_is_changed(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError):
        preflight.refuse_elsewhere(environment)
    monkeypatch.setenv("PODWAY_SIMULATED", "1")
    monkeypatch.setattr(preflight.subprocess, "run", lambda *_, **__: pytest.fail("a command was run"))
    assert preflight.main(["--apply"]) == 1
