"""The output of a one-shot run, copied to the archive as it comes: nothing of Podway's is in its hosts that would keep it.

Each rank's stream is read to its end by a task of its own. One that broke off, or a server that begins in the middle, goes on with the
second of the last line that is kept, and skips what it has of it: nothing is lost and nothing comes twice.
"""

import asyncio
import time

import msgspec

from podway.control.archive import Archive
from podway.control.records import Job
from podway.errors import ProviderError, UserError
from podway.hosts.agent.mask import Masker, patterns
from podway.providers import OutputLine, RunObservation, RunRank, SupportsOneShot

AGAIN_S = 1.0
REFUSALS = 5  # a container that is about to start has no log yet, and is refused too


class RunOutput:
    """Copies one job's output; `follow` is told of every observation."""

    def __init__(self, provider: SupportsOneShot, cluster: str, archive: Archive, secrets: dict[str, str]) -> None:
        self._provider = provider
        self._cluster = cluster
        self._archive = archive
        self._secrets = patterns(value.encode("utf-8", "surrogatepass") for value in secrets.values())
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._latest: dict[int, asyncio.Task[None]] = {}  # by rank: of its latest source
        self._there: set[str] = set()

    def follow(self, job: Job, seen: RunObservation) -> None:
        """Read from the ranks that are new since the last time; from those of the attempt before too, if they never were."""
        self._there = {one.source for one in (*seen.earlier, *seen.ranks)}
        former = msgspec.structs.replace(job.attempt, number=job.attempt.number - 1)
        for ranks, its in ((seen.earlier, msgspec.structs.replace(job, attempt=former)), (seen.ranks, job)):
            for one in ranks:
                if one.source not in self._tasks:
                    before = self._latest.get(one.rank)
                    self._tasks[one.source] = self._latest[one.rank] = asyncio.create_task(self._copy(its, one, before))

    async def finish(self, limit_s: float) -> None:
        """Until everything is here, at most so long."""
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=limit_s)

    def close(self) -> None:
        """Read no further."""
        for task in self._tasks.values():
            task.cancel()

    async def _copy(self, job: Job, one: RunRank, before: asyncio.Task[None] | None) -> None:
        label = job.label("run")
        if before is not None:
            await asyncio.wait([before])
        refused = 0
        while True:
            second, known = await asyncio.to_thread(self._archive.latest, job, one.rank, label)
            try:
                async for lines in self._provider.run_output(self._cluster, one.source, second):
                    pieces = []
                    for line in lines:
                        if known and line.time_ns // 1_000_000_000 == second:
                            known -= 1
                        elif line.text:
                            pieces.append(self._shown(line))
                    if pieces and not await asyncio.to_thread(self._archive.append, job, one.rank, label, pieces):
                        return
                return
            except UserError as error:
                refused += 1
                if refused == REFUSALS:  # no right to read it: the run goes on, and its log says why it is empty
                    said = f"podway: the output of {one.source} cannot be read: {error.what}\n".encode()
                    await asyncio.to_thread(self._archive.append, job, one.rank, label, [(said, time.time_ns())])
                    return
            except (ProviderError, OSError):
                if one.source not in self._there:
                    return
            await asyncio.sleep(AGAIN_S)

    def _shown(self, line: OutputLine) -> tuple[bytes, int]:
        if not any(value in line.text for value in self._secrets):
            return line.text, line.time_ns
        masker = Masker(self._secrets)
        return masker.feed(line.text) + masker.finish(), line.time_ns
