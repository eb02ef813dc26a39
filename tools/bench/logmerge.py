"""How fast the logs of many ranks become the lines a person reads, and in how much memory.

64 ranks print 10,000 lines each, a line every 10 ms on average with some jitter, every line a write of its own. Three logs:
all ranks print the same, each prints its own, and half and half in turn. Each log is written to files first and then read by a
fresh process that merges, collapses and renders it, chunk by chunk as from hosts. Counted are input lines per second of CPU
time of the pipeline itself (one thread; not of reading the files), so that what else the machine does matters little, and the
peak memory of that process.

Run it: `python -m tools.bench.logmerge`.
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from podway.cli.tables import table
from podway.decoding import from_json
from podway.hosts.logs.render import Chunk, Options, Renderer

RANKS = 64
LINES = 10_000
CASES = ("alike", "different", "mixed")
WIDTH = 96  # bytes of a line, newline included: with all lines as long, the end of each is known without reading it
GOAL_LINES_PER_S = 200_000
GOAL_MB = 150.0
_CHUNK = 1024 * WIDTH
_EVERY_NS = 10_000_000
_JITTER_NS = 40_000_000
_START_NS = 1_700_000_000_000_000_000


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One log's result; `shown` is how many lines came out."""

    name: str
    lines: int
    shown: int
    lines_per_s: float
    peak_mb: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The result of this benchmark."""

    name: str
    cases: tuple[Case, ...]

    @property
    def lines_per_s(self) -> float:
        """Of the slowest log."""
        return min(case.lines_per_s for case in self.cases)

    @property
    def peak_mb(self) -> float:
        """Of the hungriest log."""
        return max(case.peak_mb for case in self.cases)

    @property
    def met(self) -> bool:
        """True if both goals are met by every log."""
        return self.lines_per_s >= GOAL_LINES_PER_S and self.peak_mb < GOAL_MB


def run(ranks: int = RANKS, lines: int = LINES) -> Row:
    """Measure the three logs, each in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="podway-logmerge-") as folder:
        cases = []
        for name in CASES:
            place = Path(folder) / name
            place.mkdir()
            for rank in range(ranks):
                (place / str(rank)).write_bytes(b"".join(_line(name, rank, number) for number in range(lines)))
            command = [sys.executable, "-m", "tools.bench.logmerge", str(place), name]
            done = subprocess.run(command, check=True, capture_output=True, timeout=300)
            cases.append(from_json(done.stdout, Case))
    return Row(name="log merge", cases=tuple(cases))


def _line(case: str, rank: int, number: int) -> bytes:
    own = case == "different" or (case == "mixed" and number % 2 == 1)
    who = f"part-{rank:03d}" if own else "training"
    text = f"{who} step {number:6d} loss {4 / (1 + number):.6f} tokens/s {123456.7 + number:.1f} mfu {0.41:.2f}"
    return text.encode().ljust(WIDTH - 1, b".") + b"\n"


class _Output:
    """One rank's file, read chunk by chunk; its lines were written in step with the others', give or take the jitter."""

    def __init__(self, path: Path, rank: int) -> None:
        self._file = path.open("rb", buffering=0)
        self._chance = random.Random(rank)
        self._last = 0
        self._rank = rank
        self.lines = 0

    def read(self) -> Chunk:
        data = self._file.read(_CHUNK)
        times = []
        for _ in range(len(data) // WIDTH):
            moment = _START_NS + self.lines * _EVERY_NS + self._chance.randrange(_JITTER_NS)
            self._last = max(self._last + 1, moment)
            self.lines += 1
            times.append((self.lines * WIDTH, self._last))
        return Chunk(data=data, times=times, next=self.lines * WIDTH, ended=not data, pid=1000 + self._rank)


def measure(place: Path, name: str) -> Case:
    """Read the files of one log, a chunk of each rank in turn, and render them. Reading is not timed."""
    outputs = {int(path.name): _Output(path, int(path.name)) for path in place.iterdir()}
    renderer = Renderer(Options(), [f"10.0.0.{rank}" for rank in range(len(outputs))])
    reading = set(outputs)
    shown = 0
    spent = now = 0.0
    with open(os.devnull, "w", encoding="utf-8") as sink:
        while reading:
            chunks = {rank: outputs[rank].read() for rank in sorted(reading - renderer.full)}
            reading -= {rank for rank, chunk in chunks.items() if chunk.ended}
            begun = time.process_time()
            now += 0.01
            for rank, chunk in chunks.items():
                renderer.push(rank, "run", chunk, now)
                if chunk.ended:
                    renderer.end(rank)
            while lines := renderer.take(now) if reading else renderer.finish():
                sink.write("\n".join(lines))
                shown += len(lines)
            spent += time.process_time() - begun
    count = sum(output.lines for output in outputs.values())
    peak_mb = _peak_kib() / 1024
    return Case(name=name, lines=count, shown=shown, lines_per_s=count / spent, peak_mb=peak_mb)


def _peak_kib() -> int:
    """The most memory this program had. Not ru_maxrss, which also counts what the parent had when it forked."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    return 0


def report(row: Row) -> str:
    """The result as a table."""
    rows = [
        (case.name, f"{case.lines:,}", f"{case.shown:,}", f"{case.lines_per_s:,.0f}", f"{case.peak_mb:.0f}")
        for case in row.cases
    ]
    return table(("LOG", "LINES", "SHOWN", "LINES/CPU S", "PEAK MB"), rows, right=(1, 2, 3, 4))


def main(arguments: list[str]) -> None:
    """Without arguments the whole benchmark; with a folder and a name one log of it, as JSON."""
    if arguments:
        print(msgspec.json.encode(measure(Path(arguments[0]), arguments[1])).decode())
    else:
        print(report(run()))


if __name__ == "__main__":
    main(sys.argv[1:])
