"""Where the output of a job's ranks comes from: their hosts while an attempt runs, the archive afterwards.

A job has attempts, an attempt has phases, and each has a label (`run`, `run-2`); a `JobRankFeed` goes through them in order for the log
driver, and finds where the last lines begin without reading what is before them.
"""

import asyncio
import contextlib
import re
import time
from collections import deque
from collections.abc import Iterator

from podway.control.fleet import HostSession
from podway.control.records import Cluster, Job, JobState, phase_label, phase_of
from podway.errors import ProviderError
from podway.hosts.logs.follow import Chunk
from podway.launch import has_setup
from podway.server.routing import Services

READ = 1 << 18
REFRESH_S = 60.0  # a write is heard of at once; this is for one that was not
ARCHIVE_S = 0.25  # between looks at an archive that grows
TAIL_WINDOW = 1 << 16  # how far from the end the last lines are looked for at first


class LiveJob:
    """A job that is followed: its rows are kept fresh by `keep_fresh`, which the follower runs meanwhile."""

    def __init__(self, services: Services, cluster: Cluster, job: Job, keep: bool) -> None:
        self.services = services
        self.cluster = cluster
        self.job = job
        self.keep = keep  # follow it to its end
        self._moved = asyncio.Event()  # set, and replaced, whenever the rows changed

    async def keep_fresh(self) -> None:
        """Read the rows again whenever they were written."""
        notifier = self.services.notifier
        while True:
            seen = notifier.tick(self.cluster.id)
            await self.refresh()
            await notifier.wait(self.cluster.id, seen, REFRESH_S)

    async def refresh(self) -> None:
        """Read the rows again."""
        rows = self.services.rows
        cluster, job = await rows.cluster(self.cluster.id), await rows.job(self.cluster.id, self.job.number)
        self.cluster, self.job = cluster or self.cluster, job or self.job
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def changed(self, timeout: float) -> None:
        """Until the rows are others, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._moved.wait()


def width(cluster: Cluster, job: Job) -> int:
    """How many ranks a log position counts: those the job has, or the most it can get in any of its attempts."""
    have = max((len(pids) for pids in job.attempt.pids.values()), default=0)
    if have and job.task.recovery is None:
        return have
    candidates = [order.hosts for group in cluster.search.candidates for order in group]
    return max([1, have, len(cluster.hosts), cluster.order.hosts, *candidates])


class Feed:
    """What one rank wrote: from the archive when the attempt is over and kept there, else from its host."""

    def __init__(self, services: Services, cluster: Cluster, job: Job, rank: int) -> None:
        self.services = services
        self.cluster = cluster
        self.job = job
        self.rank = rank
        self._session: HostSession | None = None

    async def now(self, label: str, offset: int, wait: float = 0.0, limit: int = READ) -> Chunk:
        """What is there of a phase from an offset; `ended` when nothing more can come."""
        job, (phase, attempt) = self.job, phase_of(label)
        over = self._is_over(attempt)
        if over or self.cluster.one_shot:
            data, times = await self._archived(label, offset, 0.0 if over else wait, limit)
            ended = over and not data
            return Chunk(data=data, times=times, next=offset + len(data), ended=ended, pid=self._pid(label))
        if label not in job.attempt.pids or self.rank >= min(len(self.cluster.hosts), len(job.attempt.pids[label])):
            return Chunk(data=b"", times=[], next=offset, ended=job.done or label in job.attempt.pids)
        link = self._host().link
        reply = await link.call("follow", job=job.agent_job_id, phase=phase, offset=offset, limit=limit, wait=wait)
        found = reply.fields
        ended = bool(found.get("end")) or (job.done and not reply.body)
        return Chunk(
            data=reply.body, times=found.get("times", []), next=found["next"], ended=ended, pid=self._pid(label)
        )

    def _is_over(self, attempt: int) -> bool:
        """Whether everything of that attempt is in the archive."""
        job = self.job
        return (
            attempt < job.attempt.number
            or job.state is JobState.RECOVERING
            or (job.done and self.services.archive.complete(job))
        )

    async def _archived(self, label: str, offset: int, wait: float, limit: int) -> tuple[bytes, list[tuple[int, int]]]:
        """From the archive, which that of a one-shot run is copied to as it comes: more is looked for as long as `wait`."""
        until = time.monotonic() + wait
        while True:
            found = await asyncio.to_thread(self.services.archive.read, self.job, self.rank, label, offset, limit)
            if found[0] or time.monotonic() >= until:
                return found
            await asyncio.sleep(min(ARCHIVE_S, wait))

    async def size(self, label: str) -> int:
        """How much there is of a phase now."""
        job, (phase, attempt) = self.job, phase_of(label)
        if self.cluster.one_shot or self._is_over(attempt):
            return await asyncio.to_thread(self.services.archive.size, job, self.rank, label)
        if self.rank >= len(self.cluster.hosts):
            return 0
        reply = await self._host().link.call("follow", job=job.agent_job_id, phase=phase, offset=0, limit=1, wait=0.0)
        return int(reply.fields.get("output_size") or 0)

    def _host(self) -> HostSession:
        """The session of the rank's host, which is another one after a recovery."""
        host = self.cluster.hosts[self.rank]
        if self._session is None or self._session.host != host:
            self.close()
            self._session = HostSession(self.services.provider(self.cluster.order.provider), host)
        return self._session

    def _pid(self, label: str) -> int | None:
        pids = self.job.attempt.pids.get(label)
        return pids[self.rank] if pids and self.rank < len(pids) else None

    def close(self) -> None:
        """Drop the connection."""
        if self._session is not None:
            self._session.link.close()


class JobRankFeed:
    """A rank's phases in order, attempt after attempt, for the log driver."""

    def __init__(self, watcher: LiveJob, rank: int) -> None:
        self.watcher = watcher
        self.rank = rank
        self._feed = Feed(watcher.services, watcher.cluster, watcher.job, rank)

    @property
    def phases(self) -> Iterator[str]:
        """Setup (where there is one) and run, and again for as long as the job may begin again."""
        attempt = 0
        while True:
            attempt += 1
            job = self.watcher.job
            label = phase_label("setup", attempt)
            if (job.run_setup and has_setup(job.task, self.watcher.cluster.order)) or label in job.attempt.pids:
                yield label
            yield phase_label("run", attempt)
            job = self.watcher.job
            last = job.done or not self.watcher.keep or job.task.recovery is None
            if last and attempt >= job.attempt.number:
                return

    async def tail_offsets(self, lines: int) -> list[tuple[str, int]]:
        """For each phase that has output, where its part of this rank's last so many lines begins."""
        found, left = [], lines
        begun = [label for label, pids in self.watcher.job.attempt.pids.items() if self.rank < len(pids)]
        with contextlib.suppress(ProviderError):  # then the log is read from its beginning, and says what is wrong
            for label in reversed(begun):
                size = await self._feed.size(label)
                offset, counted = size, 0
                window = TAIL_WINDOW
                while left > 0 and offset > 0 and counted <= left:
                    offset = max(0, size - window)
                    offset, counted = await self._count(label, offset, size, left)
                    window *= 8
                found.append((label, offset))
                left = max(0, left - counted)
        return found

    async def _count(self, label: str, start: int, end: int, lines: int) -> tuple[int, int]:
        """(the offset behind the newline before the last `lines` lines in start..end, or `start`; how many there are)."""
        ends: deque[int] = deque(maxlen=lines + 1)
        counted, offset = 0, start
        while offset < end:
            chunk = await self._feed.now(label, offset, 0.0, min(READ, end - offset))
            if not chunk.data:
                break
            for found in re.finditer(b"\n", chunk.data):
                ends.append(offset + found.end())
                counted += 1
            offset = chunk.next
        return (ends[0] if counted > lines else start), counted

    async def read(self, phase: str, offset: int, wait: float, limit: int) -> Chunk:
        """The next output of a phase; waits for a phase that has not begun, until the job has ended or gone past it."""
        watcher = self.watcher
        job = watcher.job
        self._feed.cluster, self._feed.job = watcher.cluster, job
        if phase in job.attempt.pids or job.done:
            return await self._feed.now(phase, offset, wait, limit)
        name, attempt = phase_of(phase)
        if attempt < job.attempt.number or (name == "setup" and phase_label("run", attempt) in job.attempt.pids):
            return Chunk(data=b"", times=[], next=offset, ended=True)
        if wait:
            await watcher.changed(wait)
        return Chunk(data=b"", times=[], next=offset)

    def close(self) -> None:
        """Drop the connection."""
        self._feed.close()
