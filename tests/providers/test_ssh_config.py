"""`ssh NAME-worker3`: the file is what OpenSSH itself makes of it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from podway.hosts.ssh.config import config_text, include, write_config
from podway.hosts.ssh.endpoint import Endpoint

CLUSTERS = {
    "train": [
        Endpoint(address="10.0.0.1", user="ada", identity_file="/keys/lab key"),
        Endpoint(address="10.0.0.2", port=2222, jump=Endpoint(address="bastion", user="gate", port=2200)),
    ]
}


@pytest.fixture
def parsed(tmp_path: Path):  # type: ignore[no-untyped-def]
    if shutil.which("ssh") is None:
        pytest.skip("ssh is not installed (tools/system-packages installs it for root)")
    path = tmp_path / "config"
    write_config(path, config_text(CLUSTERS, tmp_path / "known_hosts"))
    assert path.stat().st_mode & 0o777 == 0o600

    def parse(name: str) -> dict[str, str]:
        out = subprocess.run(["ssh", "-F", path, "-G", name], capture_output=True, text=True, check=True).stdout
        return dict(line.split(" ", 1) for line in out.splitlines() if " " in line)

    return parse


def test_openssh_reads_it(parsed, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for name in ("train", "train-worker0"):
        head = parsed(name)
        assert (head["hostname"], head["user"], head["port"]) == ("10.0.0.1", "ada", "22")
        assert head["identityfile"] == "/keys/lab key"
        assert head["userknownhostsfile"] == str(tmp_path / "known_hosts")
        assert head["stricthostkeychecking"] in ("yes", "true")
    worker = parsed("train-worker1")
    assert (worker["hostname"], worker["port"]) == ("10.0.0.2", "2222")
    assert "gate" in worker["proxycommand"] and worker["proxycommand"].endswith("bastion -W '[%h]:%p'")
    assert parsed("train-worker2")["hostname"] == "train-worker2"  # no such host: nothing is said about it


def test_include_is_added_once_and_first(tmp_path: Path) -> None:
    real = tmp_path / "dotfiles-config"
    real.write_text("Host *\n    ForwardAgent no\n")
    real.chmod(0o640)
    config = tmp_path / "config"
    config.symlink_to(real)
    ours = tmp_path / "podway home" / "config"
    assert include(ours, config) and not include(ours, config)
    lines = real.read_text().splitlines()
    assert lines[0] == f'Include "{ours}"' and lines[2] == "Host *" and len(lines) == 4
    assert config.is_symlink() and real.stat().st_mode & 0o777 == 0o640


def test_include_makes_the_file_where_there_is_none(tmp_path: Path) -> None:
    config = tmp_path / ".ssh" / "config"
    assert include(tmp_path / "c", config)
    assert config.read_text() == f"Include {tmp_path / 'c'}\n"
    assert config.stat().st_mode & 0o777 == 0o600 and config.parent.stat().st_mode & 0o777 == 0o700
