"""What a pod's process writes, line by line with the time of each, in a file as a container runtime keeps it."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from threading import Condition, Thread
from typing import IO

LONGEST = 16 << 10  # a longer line is kept in parts, as container runtimes do


class PodLog:
    """Reads a process' output to its end, in a thread of its own; answers what there is of it."""

    def __init__(self, path: Path, output: IO[bytes]) -> None:
        self.path = path
        self._output = output
        self._lines: list[tuple[int, bytes]] = []
        self._changed = Condition()
        self._ended = False
        self._thread = Thread(target=self._read, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Until everything is here: the process has ended."""
        self._thread.join()

    def lines(self, *, since: float, times: bool, follow: bool) -> Iterator[bytes]:
        """The lines since then; those that are still to come too, if `follow`."""
        at = 0
        while True:
            with self._changed:
                while follow and at == len(self._lines) and not self._ended:
                    self._changed.wait()
                new, ended = self._lines[at:], self._ended
            at += len(new)
            for moment, line in new:
                if moment >= since * 1_000_000_000:
                    yield (_stamp(moment) if times else b"") + line
            if not follow or (ended and not new):
                return

    def _read(self) -> None:
        with self._output, self.path.open("ab", buffering=0) as file:
            while line := self._output.readline(LONGEST):
                file.write(line)
                with self._changed:
                    self._lines.append((time.time_ns(), line))
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def _stamp(moment: int) -> bytes:
    seconds, rest = divmod(moment, 1_000_000_000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:09d}Z ".encode()
