"""`podway sandbox`, as a person types it."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from podway.sandbox.running import find_sandbox

Podway = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def podway(podway_home: Path) -> Iterator[Podway]:
    def run(*arguments: str, rc: int = 0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "podway.cli.main", "sandbox", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == rc, done.stderr
        return done

    yield run
    run("down")


def test_without_one_there_is_a_hint(podway: Podway) -> None:
    for verb in (("status",), ("env",), ("preempt", "x"), ("stock", "0"), ("faults",)):
        assert podway(*verb, rc=1).stderr == "Error: no sandbox runs\n  start one: podway sandbox up\n"
    assert podway("down").stdout == "No sandbox runs.\n"


def test_a_sandbox_from_up_to_down(podway: Podway, podway_home: Path) -> None:
    podway("up", "--hosts", "none", "--speed", "1000")
    running = find_sandbox(podway_home / "sandbox")
    assert running is not None
    podway("up")
    assert find_sandbox(podway_home / "sandbox") == running
    lines = dict(line.removeprefix("export ").split("=", 1) for line in podway("env").stdout.splitlines())
    unset = podway("env", "--unset").stdout.split()
    assert unset[0] == "unset" and set(lines) | {"PODWAY_GCP_SSH_USER"} == set(unset[1:])
    assert lines["PODWAY_GCP_ENDPOINT"] == running.rest
    assert lines["STORAGE_EMULATOR_HOST"] == running.storage
    assert lines["CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU"].endswith("/")  # gcloud insists on it

    podway("stock", "0", "--generation", "v6e", "--zone", "us-east1-d")
    assert "no generation v9" in podway("stock", "0", "--generation", "v9", rc=1).stderr
    assert "neither a number" in podway("quota", "many", rc=2).stderr
    reserved = "projects/sandbox/locations/us-east5-b/reservations/mine"
    assert podway("reserve", "mine", "16", "--generation", "v6e").stdout == f"{reserved}\n"
    assert "already exists" in podway("reserve", "mine", "16", "--generation", "v6e", rc=1).stderr
    assert "no generation v9" in podway("reserve", "other", "16", "--generation", "v9", rc=1).stderr
    assert podway("fault", "error", "--method", "Delete*", "--times", "1").stdout == "fault-1\n"
    assert "Delete*" in podway("faults").stdout
    assert "Delete*" not in podway("faults", "--clear").stdout

    def ask(method: str, url: str, data: bytes | None = None) -> None:
        headers = {**running.headers(), "Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method)).close()

    nodes = f"{running.rest}/v2/projects/sandbox/locations/us-east5-b/nodes"
    body = {
        "acceleratorType": "v6e-8",
        "runtimeVersion": "v2-alpha-tpuv6e",
        "schedulingConfig": {"spot": True},
    }
    ask("POST", f"{nodes}?nodeId=mine", json.dumps(body).encode())
    shown = podway("status").stdout
    assert "mine" in shown
    assert "us-east5-b" in shown
    assert podway("preempt", "mine").stdout.endswith("/nodes/mine was preempted.\n")
    assert json.loads(podway("status", "-o", "json").stdout)["nodes"].popitem()[1] == "PREEMPTED"
    assert "PREEMPTED" in podway("status").stdout
    assert "not found" in podway("preempt", "yours", rc=1).stderr
    ask("DELETE", f"{nodes}/mine")
    assert "mine" in podway("ledger").stdout
    assert podway("down").stdout == "The sandbox is gone.\n"
    assert find_sandbox(podway_home / "sandbox") is None
