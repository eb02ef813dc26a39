"""Several runs one after the other, each in a process of its own, and what each of them measured (no jax).

`podway tune` launches `podway train --candidates FILE` on every host of a slice. FILE is a list of lists of settings. All
hosts go through it in the same order; one that fails (out of memory, a mesh that does not fit) costs nothing but its time.

1. A candidate trains for some steps in `python -m podway.train`. Each has a coordinator port of its own, so that a host
   that is already at the next one waits for the others in place of meeting the last of the one before.
2. What the steps after the first few took becomes one line, `tune: {…}`, from rank 0. A failure is such a line from the
   rank that has it, since only that rank knows why.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec

from podway.decoding import from_json
from podway.errors import UserError

PREFIX = "tune: "
SKIPPED_STEPS = 2  # at the start: they compile and fill queues
_STEP = re.compile(r"completed step: (\d+), seconds: ([0-9.]+),.* loss: ([0-9.a-z]+)")
_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|[Oo]ut of memory|OOM|bad_alloc|Killed")
_LOST = "was lost: its process or host has died"
_FIXED = ("checkpoint.save=false", "checkpoint.export=false", "logging.tensorboard=false", "logging.every=1")


class Measurement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came of one candidate."""

    candidate: int  # its place in the list, from 0
    seconds: float | None = None  # of a step: the median after the first few
    loss: float | None = None  # of the last step
    failed: str | None = None

    def line(self) -> str:
        """As it stands in a log."""
        return PREFIX + msgspec.json.encode(self).decode()


def read_line(line: str) -> Measurement | None:
    """The measurement in a line of a log, if there is one."""
    _, found, text = line.partition(PREFIX + "{")
    try:
        return from_json("{" + text.strip(), Measurement) if found else None
    except msgspec.DecodeError:
        return None


def read_candidates(file: str) -> list[list[str]]:
    """A JSON list of lists of settings."""
    try:
        return from_json(Path(file).read_bytes(), list[list[str]])
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(
            f"cannot read candidates from {file}: {error}", "give a JSON list of lists of settings"
        ) from None


def run_candidates(candidates: Sequence[Sequence[str]], limit_s: float) -> int:
    """Run all of them and print what they measured; 0 if any of them ran."""
    ran = False
    for number, settings in enumerate(candidates):
        measured = _run(number, settings, limit_s)
        if measured.failed is not None or _rank() == 0:
            print(measured.line(), flush=True)
        ran = ran or measured.failed is None
    return 0 if ran else 1


def _run(number: int, settings: Sequence[str], limit_s: float) -> Measurement:
    last: deque[str] = deque(maxlen=200)
    steps: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory(prefix="podway-tune-") as folder:
        command = [sys.executable, "-m", "podway.train", *settings, *_FIXED, f"output={folder}/out"]
        process = subprocess.Popen(
            ["timeout", "--kill-after=10", str(limit_s), *command], env=_environment(os.environ, number),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            last.append(line)
            step = _STEP.search(line)
            if step:
                steps.append((float(step[2]), float(step[3])))
        code = process.wait()
    if code:
        return Measurement(candidate=number, failed=_reason(code, "".join(last)))
    seconds = [taken for taken, _ in steps[SKIPPED_STEPS:] or steps]
    return Measurement(
        candidate=number, seconds=median(seconds) if seconds else None, loss=steps[-1][1] if steps else None
    )


def _reason(code: int, text: str) -> str:
    """In a few words; the last line of its output, where it is none of the usual."""
    if code in (124, 137) and not _MEMORY.search(text):
        return "took too long"
    if _MEMORY.search(text):
        return "out of memory"
    if _LOST in text:
        return "another rank failed"
    errors = [line for line in text.splitlines() if line.startswith("Error: ")]
    lines = errors or [line for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("Error: ").strip()[:200] if lines else f"exit code {code}"


def _environment(given: Mapping[str, str], number: int) -> dict[str, str]:
    """That of this host, with a port of its own for the processes to find each other."""
    address = given.get("JAX_COORDINATOR_ADDRESS", "")
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        return dict(given)
    return {**given, "JAX_COORDINATOR_ADDRESS": f"{host}:{int(port) + 1 + number}"}


def _rank() -> int:
    return int(os.environ.get("PODWAY_RANK", "0") or 0)
