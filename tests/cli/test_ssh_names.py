"""The one line in a person's ssh config: asked for once, at a terminal; a no is remembered; otherwise only shown."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import on_terminal
from tests.cli.stub import Stub

LAUNCH = ("launch", "-c", "demo", "--tpus", "v6e-16")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PODWAY_SSH_CONFIG", str(tmp_path / "dot-ssh" / "config"))
    return tmp_path / "dot-ssh" / "config"


def at_terminal(typed: str, *words: str) -> str:
    code, seen = on_terminal(*words, typed=typed)
    assert code == 0, seen
    return seen


@pytest.fixture(autouse=True)
def _only_a_cluster(stub: Stub) -> None:
    stub.launch_job = None


def test_it_is_added_with_consent(home: Path, stub: Stub, config: Path) -> None:
    seen = at_terminal("y\ny\nn\n", *LAUNCH)
    assert f"Add one line to {config}" in seen and "To open a shell on it:  ssh demo" in seen
    assert config.read_text() == f"Include {home}/ssh/config\n" and config.stat().st_mode & 0o777 == 0o600
    stub.clusters.clear()
    assert "Add one line" not in at_terminal("y\nn\n", *LAUNCH)


def test_a_no_is_remembered(home: Path, stub: Stub, config: Path) -> None:
    seen = at_terminal("y\nn\nn\n", *LAUNCH)
    assert "To open a shell on it:  podway ssh demo" in seen and not config.exists()
    stub.clusters.clear()
    seen = at_terminal("y\nn\n", *LAUNCH)
    assert "Add one line" not in seen and "Include" not in seen and not config.exists()


def test_with_yes_the_line_is_only_shown(home: Path, config: Path) -> None:
    seen = at_terminal("n\n", *LAUNCH, "-y")
    assert f"Include {home}/ssh/config" in seen and "Add one line" not in seen and not config.exists()


def test_without_a_terminal_the_line_is_only_shown(home: Path, config: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "podway.cli.main", *LAUNCH],
        env={**os.environ, "PODWAY_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert f"begin {config} with:  Include {home}/ssh/config" in done.stdout, done.stderr
    assert not config.exists()


def test_a_name_that_is_taken_is_said(home: Path, config: Path) -> None:
    config.parent.mkdir()
    config.write_text(f"Include {home}/ssh/config\n\nHost demo\n  HostName 192.0.2.9\n")
    seen = at_terminal("y\nn\n", *LAUNCH)
    assert "has a Host demo already" in seen and "To open a shell on it:  ssh demo-worker0" in seen


def test_a_config_that_cannot_be_changed_is_said(home: Path, config: Path) -> None:
    config.parent.mkdir()
    config.mkdir()
    seen = at_terminal("y\ny\nn\n", *LAUNCH)
    assert "cannot be changed" in seen and "podway ssh demo" in seen
