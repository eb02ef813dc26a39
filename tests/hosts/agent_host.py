"""A real agent in a temporary home, for the tests of the agent: the bundle, run as on any host."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from podway.hosts.agent import processes, wire
from podway.hosts.agent.relay import connect
from podway.hosts.bundle import bundle

DEADLINE_S = 15.0


def _oldest_python() -> list[str]:
    """The oldest Python the agent must run on, where there is one that works."""
    path = shutil.which("python3.8")
    works = path and subprocess.run([path, "-c", ""], capture_output=True, timeout=120).returncode == 0
    return [path] if path and works else []


PYTHONS = [sys.executable, *_oldest_python()]


class Refusal(Exception):
    """The agent said no."""

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__(fields["error"])
        self.code = fields["code"]


def until(what: Callable[[], Any], seconds: float = DEADLINE_S) -> Any:
    """Wait for `what` to be true; its value."""
    deadline = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(0.01)
    return value


class Host:
    """One host: `call` its agent, `restart` it, read what a job printed. Leaves no process behind."""

    def __init__(self, folder: Path, python: str = sys.executable, prefix: tuple[str, ...] = ()) -> None:
        self.home = folder / "home"
        self.state = self.home / wire.STATE
        self.host_id = f"test-{uuid.uuid4().hex}"
        self.bundle = folder / "agent.pyz"
        bundle().write(self.bundle)
        self.command = [*prefix, python, "-S", "-E", str(self.bundle), "serve", "--home", str(self.home), "--daemon"]
        self.pid = self.start_agent()

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        assert processes.kill_hosts([self.host_id], 10.0) == []
        log = self.state / "agent.log"
        assert not log.exists() or "Traceback" not in log.read_text(), log.read_text()

    def start_agent(self, **more: str) -> int:
        env = {**os.environ, processes.HOST_ID_VARIABLE: self.host_id, **more}
        done = subprocess.run(self.command, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        self.pid = int(done.stdout)
        return self.pid

    def kill_agent(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        until(lambda: not alive(self.pid))

    def restart(self, **env: str) -> None:
        self.kill_agent()
        self.start_agent(**env)

    def exchange(self, op: object, body: bytes = b"", **fields: Any) -> tuple[dict[str, Any], bytes]:
        with connect(str(self.home)) as connection, connection.makefile("rwb") as stream:
            wire.write(stream, {"op": op, **fields}, body)
            message = wire.read(stream)
            assert message is not None
            return message[0], message[1].read()

    def call(self, op: str, **fields: Any) -> dict[str, Any]:
        reply, _ = self.exchange(op, **fields)
        if not reply["ok"]:
            raise Refusal(reply)
        return reply

    def start(self, script: str, job: str = "job", phase: str = "run", **fields: Any) -> dict[str, Any]:
        return self.call("start", job=job, phase=phase, script=script, **fields)

    def follow(
        self, job: str = "job", phase: str = "run", offset: int = 0, **fields: Any
    ) -> tuple[dict[str, Any], bytes]:
        reply, body = self.exchange("follow", job=job, phase=phase, offset=offset, **fields)
        if not reply["ok"]:
            raise Refusal(reply)
        return reply, body

    def output(self, job: str = "job", phase: str = "run") -> tuple[dict[str, Any], bytes]:
        """All that a phase prints, to its end, and the last reply."""
        printed = b""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            reply, body = self.follow(job, phase, len(printed), wait=5)
            printed += body
            assert reply["next"] == len(printed)
            if reply["end"]:
                return reply, printed
        raise AssertionError(f"{job}/{phase} did not end; so far: {printed[-500:]!r}")

    def run(self, script: str, job: str = "job", **fields: Any) -> tuple[dict[str, Any], bytes]:
        self.start(script, job, **fields)
        return self.output(job)

    def printed(self, text: bytes, job: str = "job", phase: str = "run") -> bytes:
        """What was printed by the time `text` was."""
        return until(lambda: (out := self.follow(job, phase)[1]) and text in out and out)

    def runner(self, job: str = "job", phase: str = "run") -> int:
        begun = wire.json.loads((self.state / "jobs" / job / phase / "runner.json").read_bytes())
        return int(begun["pid"])

    def processes(self) -> set[int]:
        """All processes of this host."""
        return processes.with_variable(processes.snapshot(), processes.HOST_ID_VARIABLE, self.host_id)


def alive(pid: int) -> bool:
    process = processes.read(pid)
    return process is not None and process.alive


def pids_in(folder: Path) -> list[int]:
    """The pids a test's processes wrote into `folder`, each as an empty file of that name."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(int(path.name) for path in folder.iterdir())
    return []
