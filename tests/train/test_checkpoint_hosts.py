"""Checkpoints and processes: other numbers of hosts, kill -9 in the middle of a save, a full disk."""

import contextlib
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import free_port

SCRIPT = str(Path(__file__).with_name("checkpoint_process.py"))


@contextlib.contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, SCRIPT, str(folder), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run_hosts(folder: Path, hosts: int, devices: int, *actions: str) -> None:
    """Every host does the actions; all must succeed."""
    port = free_port()
    shared = ["--hosts", str(hosts), "--port", str(port), "--devices", str(devices), *actions]
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(started(folder, "--host", str(host), *shared)) for host in range(hosts)]
        for process in running:
            said, wrong = process.communicate(timeout=90)
            assert process.returncode == 0, wrong[-3000:]
            lines = [line for line in said.splitlines() if not line.startswith("[Gloo]")]
            assert lines == [action.replace(":", "d ") for action in actions]


def test_a_step_moves_between_numbers_of_hosts_and_devices(tmp_path: Path) -> None:
    run_hosts(tmp_path / "steps", 2, 2, "save:1")
    run_hosts(tmp_path / "steps", 1, 1, "restore:1", "save:2")
    run_hosts(tmp_path / "steps", 2, 2, "restore:2")


def kill_while_saving(folder: Path, seed: int, kills: int) -> None:
    """Kill at random moments, again and again: each start finds the last step but one that had begun, or a later one."""
    randomly = random.Random(seed)
    begun = 0
    for _ in range(kills):
        with started(folder, "--size", "100000", "keep-saving") as process:
            assert process.stdout is not None
            resumed = int(next_word(process, "resumed"))
            assert resumed >= begun - 1, "at most one interval is lost"
            after = resumed + randomly.randint(2, 6)
            while (begun := int(next_word(process, "began"))) < after:
                pass
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(randomly.random() * 0.2)
            process.send_signal(signal.SIGKILL)
            rest = process.communicate()[0].split()
            begun = int(rest[-1]) if rest else begun
    with started(folder, "--size", "100000", "keep-saving") as process:
        assert int(next_word(process, "resumed")) >= begun - 1
    assert len([place for place in folder.iterdir() if place.name.isdigit()]) <= 4


def next_word(process: subprocess.Popen[str], verb: str) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise AssertionError(process.communicate()[1][-3000:])
    assert line.startswith(verb), line
    return line.split()[1]


def test_kill_in_the_middle_of_a_save_loses_one_interval_at_most(tmp_path: Path) -> None:
    kill_while_saving(tmp_path / "steps", seed=1, kills=2)


@pytest.mark.soak
def test_many_kills(tmp_path: Path) -> None:
    kill_while_saving(tmp_path / "steps", seed=2, kills=25)


def test_a_full_disk_is_told_cleanly(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here")
    small = tmp_path / "small"
    small.mkdir()
    mounted = f'mount -t tmpfs -o size=2m tmpfs {small} && exec {sys.executable} "$@"'
    script = [SCRIPT, str(small), "--size", "200000", "save:1"]
    command = ["unshare", "-rm", "sh", "-c", mounted, "sh", *script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert f"no space is left for checkpoints in {small}" in done.stdout, done.stdout + done.stderr[-3000:]
    assert done.returncode == 1
    assert "Traceback" not in done.stdout
