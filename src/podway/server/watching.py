"""Following one job for one client: a stream of JSON lines (`api.Frame`).

The cluster's and the job's events come while there is nothing to read yet, then the log lines as the renderer makes them, then the
end. Each frame carries a cursor; a client that comes back with it goes on exactly there, whatever happened to the server in
between. A client that does not read is not read for: a few frames wait for it, and then its log is not followed further.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import msgspec

from podway.control.records import Cluster, Event, Job
from podway.errors import UserError
from podway.hosts.logs.follow import Cursor, Options, Renderer, follow
from podway.server import api
from podway.server.feeds import REFRESH_S, JobRankFeed, LiveJob, width
from podway.server.routing import Services

PING_S = 15.0
TAILS_AT_ONCE = 16
FRAMES_WAITING = 4
encode = msgspec.json.Encoder().encode


class Watcher(LiveJob):
    """One client following one job."""

    def __init__(
        self,
        services: Services,
        cluster: Cluster,
        job: Job,
        options: Options,
        cursor: Cursor | None,
        event: int,
        keep: bool,
    ) -> None:
        super().__init__(services, cluster, job, keep)
        self.options = options
        self.cursor = cursor
        self.event = event
        self.frames: asyncio.Queue[api.Frame] = asyncio.Queue(maxsize=FRAMES_WAITING)
        self.ips = [""] * width(cluster, job)

    async def lines(self) -> AsyncIterator[bytes]:
        """The stream: whatever the task below puts into the queue, and a sign of life now and then."""
        work = asyncio.create_task(self._work())
        try:
            while True:
                try:
                    frame = await asyncio.wait_for(self.frames.get(), PING_S)
                except TimeoutError:
                    frame = api.Frame(kind="ping")
                yield encode(frame) + b"\n"
                if frame.kind == "end":
                    return
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work

    async def _work(self) -> None:
        try:
            publish = asyncio.create_task(self.keep_fresh())
            try:
                await self._log()
                if self.keep:
                    await self._until(lambda: self.job.done)
            finally:
                publish.cancel()
            await self.refresh()
            await self.frames.put(await asyncio.to_thread(self._end))
        except UserError as error:
            await self.frames.put(api.Frame(kind="end", state="", reason=str(error)))

    async def refresh(self) -> None:
        """Read the rows again, and pass events on."""
        await super().refresh()
        self._name_hosts()
        await self._events()

    def _name_hosts(self) -> None:
        """Addresses for the prefixes, changed in place: hosts are others after a recovery."""
        known = [host.address for host in self.cluster.hosts]
        self.ips[: len(known)] = known

    async def _until(self, true: Callable[[], bool]) -> None:
        while not true():
            await self.changed(REFRESH_S)

    async def _events(self) -> None:
        for event in await self.services.rows.events(self.cluster.id, self.event):
            self.event = event.id
            if event.job in (None, self.job.number) and event.time >= self.job.submitted - 0.5:
                await self.frames.put(self._event_frame(event))

    def _event_frame(self, event: Event) -> api.Frame:
        state = event.detail.get("state", "")  # of the job, or of the cluster when the event is not of a job
        return api.Frame(kind="event", text=event.text, event=event.id, time=event.time, state=state)

    def _end(self) -> api.Frame:
        job, blamed = self.job, self.job.outcome.blamed_rank
        tail = self.services.archive.tail(job, blamed) if blamed is not None else ""
        ended = job.outcome.ended or time.time()
        return api.Frame(kind="end", state=job.state.value, reason=job.reason, tail=tail, time=ended)

    async def _tail_start(self, feeds: list[JobRankFeed]) -> Cursor:
        """Where each rank's last lines begin: the rest of a long log is not read at all."""
        start = Cursor(len(feeds))
        chosen = [feed for feed in feeds if self.options.rank in (None, feed.rank)]
        gate = asyncio.Semaphore(TAILS_AT_ONCE)

        async def find(feed: JobRankFeed) -> None:
            async with gate:
                for label, offset in await feed.tail_offsets(self.options.tail):
                    start.phase(label)[feed.rank] = offset

        await asyncio.gather(*(find(feed) for feed in chosen))
        return start

    async def _log(self) -> None:
        """Everything the ranks write, in order, as a person reads it."""
        if self.keep:
            await self._until(lambda: bool(self.job.attempt.pids) or self.job.done)
        if not self.job.attempt.pids:
            return
        self.ips = [""] * width(self.cluster, self.job)  # the cluster may have become another one since
        self._name_hosts()
        skew = {rank: ms * 1_000_000 for rank, ms in enumerate(self.job.attempt.skew_ms) if ms}
        feeds = [JobRankFeed(self, rank) for rank in range(len(self.ips))]
        start = await self._tail_start(feeds) if self.options.tail and self.cursor is None else None
        renderer = Renderer(
            self.options, self.ips, name=self.job.name or "", cursor=self.cursor, tail_from=start, skew=skew
        )

        async def emit(lines: list[str]) -> None:
            frame = api.Frame(kind="log", text="\n".join(lines) + "\n", cursor=renderer.cursor.encode())
            await self.frames.put(frame)

        try:
            await follow(feeds, renderer, emit, stay=self.keep, turn=self.services.turns.take)
        finally:
            for feed in feeds:
                feed.close()
