"""The output of ended jobs, kept by the server so that it outlives the hosts.

While a job runs its output lives on its hosts and is read from there by offset. When it ends, each rank's bytes are copied to
`ROOT/CLUSTER_ID/NUMBER/RANK.PHASE`, with the times of its byte ranges in `RANK.PHASE.times`; the phases of a second attempt are
called `setup-2` and `run-2`, and so on. The copy goes on where an interrupted one stopped; `complete` is written last. From hosts
that may vanish it is copied all along, so that what a lost host printed is lost for the last seconds at most.

What hosts send is not trusted: a phase of a rank has at most `MOST_KEPT` bytes here, and ends with a sentence where it had more.
"""

import asyncio
import contextlib
import os
import struct
import threading
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated

import msgspec

from podway.control.fleet import Fleet, HostSession
from podway.control.records import Job
from podway.decoding import from_plain
from podway.errors import ProviderError
from podway.hosts.link import AgentReply
from podway.quantities import format_bytes
from podway.terminal import safe_line

CHUNK = 1 << 20
MOST_KEPT = 1 << 30  # of one phase of one rank: output without end must not fill the server's disk
CUT = "\npodway: this output is longer than {limit}: the rest of it was not kept.\n"
AT_ONCE = 8
RECORD = struct.Struct("<QQ")  # end offset, time in ns
LATEST = 1 << 20  # more pieces than a second has
PHASES = ("setup", "run")
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Archive:
    """Reads and writes under one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._writing = threading.Lock()

    def place(self, job: Job) -> Path:
        """The directory of one job."""
        return self.root / job.cluster_id / str(job.number)

    def complete(self, job: Job) -> bool:
        """True when everything there was is here."""
        return (self.place(job) / "complete").exists()

    async def keep(self, job: Job, fleet: Fleet) -> None:
        """Copy what every rank of this attempt wrote, and mark the job's output as whole."""
        await self.copy(job, fleet)
        await asyncio.to_thread(self.close, job)

    def close(self, job: Job) -> None:
        """Nothing more comes: what is here is all there is."""
        self.place(job).mkdir(parents=True, exist_ok=True, mode=0o700)
        (self.place(job) / "complete").touch()

    async def copy(self, job: Job, fleet: Fleet) -> None:
        """What every rank of this attempt wrote so far, a few hosts at a time; a host that is lost leaves what it left."""
        place = self.place(job)
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(session: HostSession, phase: str) -> None:
            async with gate:
                with contextlib.suppress(ProviderError):
                    await self._copy(session, job, phase, place / f"{session.host.rank}.{job.label(phase)}")

        phases = [phase for phase in PHASES if job.label(phase) in job.attempt.pids]
        await asyncio.gather(*(one(session, phase) for session in fleet.answering() for phase in phases))

    async def _copy(self, session: HostSession, job: Job, phase: str, path: Path) -> None:
        while True:
            offset = path.stat().st_size if path.exists() else 0
            if offset >= MOST_KEPT:
                return
            reply = await session.link.call(
                "follow", job=job.agent_job_id, phase=phase, offset=offset, limit=CHUNK, wait=0.0
            )
            if not reply.body:
                return
            await asyncio.to_thread(self._append, path, offset, reply.body, _checked_times(reply, offset))

    def append(self, job: Job, rank: int, label: str, pieces: Sequence[tuple[bytes, int]]) -> bool:
        """More of a phase, each piece with its time (ns); False when no more is kept of it."""
        path = self.place(job) / f"{rank}.{label}"
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        offset = path.stat().st_size if path.exists() else 0
        if offset >= MOST_KEPT:
            return False
        ends = accumulate((len(data) for data, _ in pieces), initial=offset)
        next(ends)
        times = [(end, moment) for end, (_, moment) in zip(ends, pieces, strict=True)]
        self._append(path, offset, b"".join(data for data, _ in pieces), times)
        return True

    def latest(self, job: Job, rank: int, label: str) -> tuple[int, int]:
        """(the second of the latest piece of a phase, how many pieces are of that second); (0, 0): none. Only before `append`."""
        path = self.place(job) / f"{rank}.{label}"
        times = path.with_name(path.name + ".times")
        if not path.exists() or not times.exists():
            path.unlink(missing_ok=True)
            return 0, 0
        records = times.stat().st_size // RECORD.size
        with times.open("rb") as file:
            file.seek(max(0, records - LATEST) * RECORD.size)
            found = list(RECORD.iter_unpack(file.read(min(records, LATEST) * RECORD.size)))
        # A server that was killed between its two writes has left bytes without times: they come again.
        os.truncate(times, records * RECORD.size)
        os.truncate(path, min(path.stat().st_size, found[-1][0] if found else 0))
        second = max((moment for _, moment in found), default=0) // 1_000_000_000
        return second, sum(moment // 1_000_000_000 == second for _, moment in found)

    def _append(self, path: Path, offset: int, data: bytes, times: list[tuple[int, int]]) -> None:
        if offset + len(data) >= MOST_KEPT:
            data = data[: MOST_KEPT - offset] + CUT.format(limit=format_bytes(MOST_KEPT)).encode()
            times = [pair for pair in times if pair[0] < MOST_KEPT] + [(offset + len(data), times[-1][1])]
        # A copy that was cancelled may still be writing in its thread: whoever finds the file grown leaves it to the other.
        with self._writing:
            if (path.stat().st_size if path.exists() else 0) != offset:
                return
            with path.open("ab") as file:
                file.write(data)
            with path.with_name(path.name + ".times").open("ab") as file:
                file.write(b"".join(RECORD.pack(end, moment) for end, moment in times))

    def size(self, job: Job, rank: int, label: str) -> int:
        """How much there is of a phase."""
        path = self.place(job) / f"{rank}.{label}"
        return path.stat().st_size if path.exists() else 0

    def read(
        self, job: Job, rank: int, phase: str, offset: int, limit: int = CHUNK
    ) -> tuple[bytes, list[tuple[int, int]]]:
        """Bytes from an offset, and the times [(end offset, ns)] that cover them."""
        path = self.place(job) / f"{rank}.{phase}"
        if not path.exists():
            return b"", []
        with self._writing, path.open("rb") as file:  # bytes and times are written one after the other
            file.seek(offset)
            data = file.read(limit)
            times = _times(path.with_name(path.name + ".times"), offset, offset + len(data)) if data else []
        return data, times

    def tail(self, job: Job, rank: int, lines: int = 8) -> str:
        """The last lines a rank wrote, for an error message."""
        for phase in reversed(PHASES):
            path = self.place(job) / f"{rank}.{job.label(phase)}"
            if path.exists() and path.stat().st_size:
                with path.open("rb") as file:
                    file.seek(max(0, path.stat().st_size - 16384))
                    text = file.read().decode("utf-8", "replace")
                shown = text.replace("\r\n", "\n").rstrip("\n").split("\n")[-lines:]
                return "\n".join(safe_line(line.rsplit("\r", 1)[-1]) for line in shown)
        return ""


def _checked_times(reply: AgentReply, offset: int) -> list[tuple[int, int]]:
    """The times of a reply's bytes, one pair for each part of them and the last at their end."""
    try:
        times = from_plain(reply.fields.get("times"), list[tuple[_Count, _Count]])
    except msgspec.ValidationError as error:
        raise ProviderError(f"follow: the host agent answered nonsense ({error})") from None
    ends = [offset, *(end for end, _ in times)]
    if not times or ends[-1] != offset + len(reply.body) or any(a >= b for a, b in pairwise(ends)):
        raise ProviderError("follow: the host agent answered nonsense (times that are not of these bytes)")
    return times


def _times(path: Path, start: int, end: int) -> list[tuple[int, int]]:
    """The records that cover [start, end): found by bisection, since a long log has many."""
    if not path.exists():
        return []
    size = path.stat().st_size // RECORD.size
    with path.open("rb") as file:

        def record(index: int) -> tuple[int, int]:
            file.seek(index * RECORD.size)
            first, second = RECORD.unpack(file.read(RECORD.size))
            return first, second

        low, high = 0, size
        while low < high:
            middle = (low + high) // 2
            if record(middle)[0] <= start:
                low = middle + 1
            else:
                high = middle
        found = []
        for index in range(low, size):
            found.append(record(index))
            if found[-1][0] >= end:
                break
    return found
