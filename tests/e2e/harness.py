"""A real server in a home of its own, and the questions tests ask of it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil

from podway.providers.local import networks
from podway.server.client import Client
from podway.task.task import Accelerator, Resources, Task
from tests.conftest import SLOWEST, processes_of, wait_until

TWO_HOSTS = "v4-16"
FOUR_HOSTS = "v6e-16"


def task(run: str, *, tpu: str = TWO_HOSTS, setup: str = "", **more: object) -> Task:
    return Task(run=run, setup=setup, resources=(Resources(accelerator=Accelerator(type=tpu)),), **more)  # type: ignore[arg-type]


class Podway:
    """One Podway home with its server, which tests kill and start again."""

    def __init__(self, home: Path) -> None:
        self.home = home
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.client = Client()
        self.python = sys.executable  # which runs the server

    def start(self, crash_at: str = "", **env: str) -> int:
        """Start the server, perhaps with a place to die at; its pid."""
        before = (self.home / "server.json").stat().st_mtime_ns if (self.home / "server.json").exists() else 0
        environment = {**os.environ, "PODWAY_HOME": str(self.home), "PODWAY_CRASH_AT": crash_at, **env}
        with open(self.home / "server.out", "ab") as out:
            child = subprocess.Popen(
                [self.python, "-m", "podway.server.main"],
                env=environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.child = child
        place = self.home / "server.json"
        # A client that is watching may have started one a moment before: then ours leaves, and theirs is the server.
        wait_until(
            lambda: place.exists() and (place.stat().st_mtime_ns != before or child.poll() == 1), what="the server"
        )
        self.client = Client()
        return child.pid

    def kill_server(self) -> None:
        self.child.kill()
        self.child.wait(10)

    def log_text(self, cluster: str, job: int, **options: object) -> str:
        return "".join(
            frame.text for frame in self.client.watch(cluster, job, raw=True, **options) if frame.kind == "log"
        )

    def finished(self, cluster: str, job: int, seconds: float = 40) -> str:
        """The job's final state."""
        deadline = time.monotonic() + SLOWEST * seconds
        while time.monotonic() < deadline:
            found = self.client.job(cluster, job, wait=5)
            if found.ended:
                return found.state
        raise AssertionError(f"job {job} did not end: {found}")

    def down(self, cluster: str) -> None:
        """Take it down, and check that nothing of it lives."""
        self.client.down(cluster)
        wait_until(lambda: self.client.cluster(cluster).state == "GONE", 40, "the end of the cluster")
        assert not (self.home / "local" / cluster).exists()
        assert self.host_processes() == []

    def host_processes(self) -> list[psutil.Process]:
        """Processes of simulated hosts of this home; each one's `info` holds its command as it was seen."""
        place, found = str(self.home / "local"), []
        for process in psutil.process_iter(["cmdline", "environ", "status"]):
            if process.info["status"] == psutil.STATUS_ZOMBIE:
                continue
            process.info["cmdline"] = process.info["cmdline"] or []  # none: it has just ended
            process.info["environ"] = process.info["environ"] or {}
            if place in " ".join(process.info["cmdline"]) or process.info["environ"].get("HOME", "").startswith(place):
                found.append(process)
        return found

    def kill_all_in(self, home: Path, only: str = "") -> int:
        """kill -9 every process of the hosts whose homes are in this directory, or those with this word in their command; how many."""
        killed = 0
        for process in self.host_processes():
            command = process.info["cmdline"]
            inside = str(home) in " ".join(command) or process.info["environ"].get("HOME", "").startswith(str(home))
            if inside and (not only or only in command):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
                    killed += 1
        return killed

    def close(self) -> None:
        """End everything, the server first so that it starts nothing again."""
        for find in (lambda: processes_of(self.home), self.host_processes):
            found = find()
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            psutil.wait_procs(found, timeout=10)
        for claimed in self.home.glob("local/*/subnet"):  # a test that failed half way leaves networks too
            networks.remove(int(claimed.read_text()))
        # A client starts a lost server again without a word: one that died of itself is told here.
        said = self.home / "server.out"
        assert not said.exists() or "Fatal Python error" not in said.read_text(errors="replace"), said.read_text()


def files_with(place: Path, text: str) -> list[Path]:
    """The files below a directory that hold a text; some may come and go meanwhile."""
    found = []
    for path in place.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and not path.is_symlink() and text.encode() in path.read_bytes():
                found.append(path)
    return found


def numbered_lines(ranks: int, phase_lines: dict[str, int]) -> Counter[str]:
    """What `counting` prints over all ranks, without prefixes."""
    return Counter(
        f"{phase} {rank} line {n}"
        for phase, lines in phase_lines.items()
        for rank in range(ranks)
        for n in range(lines)
    )


def counting(phase: str, lines: int, pause: float = 0.002) -> str:
    """Bash that prints numbered lines of its own rank."""
    rank = "$SKYPILOT_SETUP_NODE_RANK" if phase == "setup" else "$SKYPILOT_NODE_RANK"
    return f'for i in $(seq 0 {lines - 1}); do echo "{phase} {rank} line $i"; sleep {pause}; done'


def without_prefix(text: str) -> Counter[str]:
    return Counter(line.split(") ", 1)[1] for line in text.splitlines() if line.startswith("("))
