"""One shell for the commands of a page, in a directory with a copy of the examples and a home of its own."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.conftest import SLOWEST, processes_of, wait_until
from tests.manual.pages import ROOT

END = "@@ the command has ended with"


class Printed(NamedTuple):
    """What a command printed, stdout and stderr together, and its exit code."""

    text: str
    code: int


def environment(place: Path) -> dict[str, str]:
    """A stranger's: a home, `podway` and `python3` on the path, nothing of whoever runs the tests but the machine's own settings."""
    kept = {name: os.environ[name] for name in ("LANG", "LC_ALL", "TMPDIR", "XLA_FLAGS") if name in os.environ}
    return {
        **kept,
        "HOME": str(place),
        "USER": "ada",
        "PODWAY_HOME": str(place / ".podway"),
        "PODWAY_SSH_CONFIG": str(place / ".ssh" / "config"),
        "CLOUDSDK_CONFIG": str(place / ".config" / "gcloud"),
        "XDG_CACHE_HOME": str(place / ".cache"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "TERM": "dumb",
    }


def working_directory(place: Path) -> Path:
    """A copy of what a person has after `git clone`, as far as the manual uses it."""
    shutil.copytree(ROOT / "examples", place / "podway" / "examples")
    return place / "podway"


class Shell:
    """bash, to type into."""

    def __init__(self, place: Path) -> None:
        self.home, self.place = place / ".podway", place
        self.process = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=working_directory(place),
            env=environment(place),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )

    def type(self, command: str, seconds: float = 300.0) -> Printed:
        """Run one command to its end."""
        assert self.process.stdin is not None and self.process.stdout is not None
        # The command reads no input of ours: it would take the next command for it.
        self.process.stdin.write(f"{{ {command}\n}} </dev/null; exited=$?; echo; echo '{END}' $exited\n")
        self.process.stdin.flush()
        lines: list[str] = []
        watch = threading.Timer(SLOWEST * seconds, self.process.kill)
        watch.start()
        try:
            for line in self.process.stdout:
                if line.startswith(END):
                    return Printed("".join(lines), int(line.removeprefix(END)))
                lines.append(line)
        finally:
            watch.cancel()
        raise AssertionError(f"`{command}` did not end within {SLOWEST * seconds:.0f} s:\n{''.join(lines)}")

    def close(self) -> None:
        """End the clusters, the server and whatever else was started, and check that nothing is left."""
        if self.process.poll() is None:
            self.type("podway down --all --yes")
            self.type("podway server stop")
            self.type("podway sandbox down 2>/dev/null || true")
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait(SLOWEST * 10)
        left = processes_of(self.home)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not processes_of(self.home), 30)
            left = []
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        assert not left, f"left running: {[process.cmdline() for process in left]}"
