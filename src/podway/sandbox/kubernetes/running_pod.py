"""The process of one pod of a pretended node: where its files are, whether its own command runs, and how it is ended."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from podway.sandbox.kubernetes.pod_log import PodLog


class RunningPod:
    """One pod's process."""

    def __init__(self, place: Path, process: "subprocess.Popen[bytes]", env: dict[str, str], grace_s: float) -> None:
        self.place, self.process, self.env, self.grace_s = place, process, env, grace_s
        assert process.stdout is not None
        self.log = PodLog(place / "log", process.stdout)
        self.kill_at: float | None = None
        self.reported = False
        self.ready = False

    def inner(self) -> int | None:
        """The container's first process, as this machine numbers it."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
            return int(path.read_text().split()[0])
        return None

    def booted(self) -> bool:
        """Whether its own command runs: no signal but SIGKILL reaches a first process that has no handler."""
        inner = self.inner()
        try:
            return inner is not None and b"pod_boot" not in Path(f"/proc/{inner}/cmdline").read_bytes()
        except OSError:
            return False

    def end(self) -> None:
        """SIGTERM as soon as it runs, SIGKILL after the grace period."""
        if self.kill_at is None and not self.booted() and self.process.poll() is None:
            return
        if self.kill_at is None:
            self.kill_at = time.monotonic() + self.grace_s
            self._signal(signal.SIGTERM)
        elif time.monotonic() > self.kill_at:
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        inner = self.inner()
        with contextlib.suppress(ProcessLookupError):
            os.kill(inner or self.process.pid, number if inner else signal.SIGKILL)
