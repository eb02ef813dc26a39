"""The output of ended jobs, kept by the server so that it outlives the hosts.

While a job runs its output lives on its hosts and is read from there by offset. When it ends, each rank's bytes are copied to
`ROOT/CLUSTER_ID/NUMBER/RANK.PHASE`, with the times of its byte ranges in `RANK.PHASE.times`. The copy goes on where an interrupted
one stopped; `complete` is written last.
"""

import asyncio
import struct
from pathlib import Path
from typing import Any

from podway.control.fleet import Fleet, HostSession
from podway.control.records import Cluster, Job
from podway.errors import ProviderError

CHUNK = 1 << 20
AT_ONCE = 8
RECORD = struct.Struct("<QQ")  # end offset, time in ns
PHASES = ("setup", "run")


class Archive:
    """Reads and writes under one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def place(self, job: Job) -> Path:
        """The directory of one job."""
        return self.root / job.cluster_id / str(job.number)

    def complete(self, job: Job) -> bool:
        """True when everything there was is here."""
        return (self.place(job) / "complete").exists()

    async def keep(self, cluster: Cluster, job: Job, fleet: Fleet) -> None:
        """Copy what every rank wrote, a few hosts at a time. A host that is lost leaves what was copied before."""
        place = self.place(job)
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        gate = asyncio.Semaphore(AT_ONCE)

        async def copy(session: HostSession, phase: str) -> None:
            async with gate:
                try:
                    await self._copy(session, job, phase, place / f"{session.host.rank}.{phase}")
                except ProviderError:
                    return

        phases = [phase for phase in PHASES if phase in job.pids]
        await asyncio.gather(*(copy(session, phase) for session in fleet.sessions for phase in phases))
        (place / "complete").touch()

    async def _copy(self, session: HostSession, job: Job, phase: str, path: Path) -> None:
        offset = path.stat().st_size if path.exists() else 0
        while True:
            reply = await session.link.call("follow", job=job.key, phase=phase, offset=offset, limit=CHUNK, wait=0.0)
            if not reply.body:
                return
            await asyncio.to_thread(_append, path, reply.body, reply.fields.get("times", []))
            offset += len(reply.body)

    def read(
        self, job: Job, rank: int, phase: str, offset: int, limit: int = CHUNK
    ) -> tuple[bytes, list[tuple[int, int]]]:
        """Bytes from an offset, and the times [(end offset, ns)] that cover them."""
        path = self.place(job) / f"{rank}.{phase}"
        if not path.exists():
            return b"", []
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(limit)
        if not data:
            return b"", []
        return data, _times(path.with_name(path.name + ".times"), offset, offset + len(data))

    def tail(self, job: Job, rank: int, lines: int = 8) -> str:
        """The last lines a rank wrote, for an error message."""
        for phase in reversed(PHASES):
            path = self.place(job) / f"{rank}.{phase}"
            if path.exists() and path.stat().st_size:
                with path.open("rb") as file:
                    file.seek(max(0, path.stat().st_size - 16384))
                    text = file.read().decode("utf-8", "replace")
                return "\n".join(line.rsplit("\r", 1)[-1] for line in text.replace("\r\n", "\n").splitlines()[-lines:])
        return ""


def _append(path: Path, data: bytes, times: list[Any]) -> None:
    with path.open("ab") as file:
        file.write(data)
    with path.with_name(path.name + ".times").open("ab") as file:
        file.write(b"".join(RECORD.pack(end, moment) for end, moment in times))


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
