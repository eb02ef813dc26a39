"""A launch is done with the settings of the shell it comes from, also where a server runs since before they were made."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from podway.sandbox.running import Running, running_sandbox
from podway.server.client import Client
from tests.conftest import wait_until


def podway(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "podway.cli.main", *words]
    shell = {name: value for name, value in os.environ.items() if not name.startswith("CLOUDSDK_")}
    return subprocess.run(command, env={**shell, **env}, capture_output=True, text=True, timeout=240)


def server_pid(home: Path) -> int:
    return int(json.loads((home / "server.json").read_text())["pid"])


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Running]:
    with running_sandbox(tmp_path / "sandbox", hosts="none") as running:
        yield running


def settings_of(sandbox: Running, tmp_path: Path) -> dict[str, str]:
    """What `eval "$(podway sandbox env)"` sets."""
    return sandbox.environment(tmp_path / "sandbox")


@pytest.mark.e2e
def test_a_server_that_runs_already_takes_up_new_settings_and_loses_no_job(
    podway_home: Path, tmp_path: Path, sandbox: Running
) -> None:
    first = podway(
        "launch",
        "-y",
        "-d",
        "-c",
        "before",
        "--infra",
        "local",
        "while [ ! -e done ]; do sleep 0.1; done; echo ended well",
    )
    assert first.returncode == 0, first.stderr
    before = server_pid(podway_home)
    wait_until(lambda: Client().job("before", 1).state == "RUNNING", what="the job")

    dry = podway("launch", "--dryrun", "--infra", "gcp", "--tpus", "v6e-8", "true", **settings_of(sandbox, tmp_path))
    assert dry.returncode == 0, dry.stderr
    assert json.loads(dry.stdout)["provider"] == "gcp"
    after = server_pid(podway_home)
    assert after != before

    again = podway("launch", "--dryrun", "--infra", "gcp", "--tpus", "v6e-8", "true", **settings_of(sandbox, tmp_path))
    assert again.returncode == 0 and server_pid(podway_home) == after  # nothing differs now
    assert podway("status").returncode == 0 and server_pid(podway_home) == after  # it only looks

    home = Client().cluster("before").hosts[0].home
    (Path(home) / "sky_workdir" / "done").touch()
    wait_until(lambda: Client().job("before", 1).state == "SUCCEEDED", what="the end of the job")
    assert "ended well" in podway("logs", "before", "--no-follow").stdout
    assert podway("down", "-y", "before").returncode == 0


@pytest.mark.e2e
def test_two_shells_do_not_take_each_others_clusters_away(podway_home: Path, tmp_path: Path, sandbox: Running) -> None:
    mine = settings_of(sandbox, tmp_path)
    made = podway("launch", "-y", "-d", "-c", "pod", "--infra", "gcp", "--tpus", "v6e-8", "true", **mine)
    assert made.returncode == 0, made.stderr
    pid = server_pid(podway_home)

    others = {**mine, "PODWAY_GCP_PROJECT": "another-project"}
    refused = podway("launch", "-y", "-d", "-c", "other", "--infra", "gcp", "--tpus", "v6e-8", "true", **others)
    assert refused.returncode == 1
    assert "clusters of gcp are up with other settings than this shell's (PODWAY_GCP_PROJECT)" in refused.stderr
    assert "Traceback" not in refused.stderr

    plain = podway("launch", "--dryrun", "--infra", "gcp", "--tpus", "v6e-8", "true")  # a shell that sets none of it
    assert plain.returncode == 0, plain.stderr
    assert server_pid(podway_home) == pid
    assert podway("down", "-y", "pod", **mine).returncode == 0


def test_a_server_that_somebody_runs_keeps_its_settings(podway_home: Path) -> None:
    running = subprocess.Popen([sys.executable, "-m", "podway.cli.main", "server", "run"], stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: (podway_home / "server.json").exists(), what="the server")
        command = ("launch", "--dryrun", "--infra", "local", "--tpus", "v6e-8", "true")
        done = podway(*command, PODWAY_GCP_PROJECT="lab-project")
        assert done.returncode == 0, done.stderr
        assert server_pid(podway_home) == running.pid and running.poll() is None
    finally:
        running.terminate()
        running.wait(30)
