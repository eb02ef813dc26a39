"""The routes that stream: following a job, raw output, and the upload of contents.

A watch is one stream of JSON lines (`api.Frame`): the cluster's and the job's events while there is nothing to read yet,
then the log lines as the renderer makes them, then the end. Each frame carries a cursor; a client that comes back with it
goes on exactly there, whatever happened to the server in between.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from podway.control.fleet import Fleet, HostSession
from podway.control.records import Cluster, Event, Job, phase_label
from podway.errors import UserError
from podway.hosts.agent.packs import FilesError
from podway.hosts.logs.follow import Cursor, Options, Renderer, follow
from podway.server import api
from podway.server.feeds import Feed, RankFeed, width
from podway.server.notify import Notifier
from podway.server.routes import Caller, Services

PING_S = 15.0
TAILS_AT_ONCE = 16
encode = msgspec.json.Encoder().encode

Handler = Callable[[Request, Caller], Awaitable[Response]]


class Streams:
    """The handlers, over the same services as the other routes."""

    def __init__(self, services: Services, notifier: Notifier) -> None:
        self.services = services
        self.notifier = notifier

    def table(self) -> list[tuple[str, str, Handler]]:
        """(method, path, handler) of each."""
        job = "/v1/clusters/{cluster}/jobs/{job}"
        return [
            ("GET", f"{job}/watch", self.watch),
            ("GET", f"{job}/output", self.output),
            ("GET", f"{job}/usage", self.usage),
            ("POST", "/v1/files", self.upload),
        ]

    async def upload(self, request: Request, caller: Caller) -> Response:
        """Contents into the store, as they come."""
        try:
            with self.services.blobs.receiver() as receiver:
                async for chunk in request.stream():
                    await asyncio.to_thread(receiver.feed, chunk)
                receiver.close()
        except FilesError as error:
            raise UserError(f"the upload is not right: {error}", "run the command again") from None
        return Response(encode(api.DigestsReply(missing=[])), media_type="application/json")

    async def watch(self, request: Request, caller: Caller) -> Response:
        """Follow a job to its end."""
        cluster, job = await self._job(request)
        query = request.query_params
        options = Options(
            raw=_flag(query.get("raw")),
            rank=_whole(query.get("rank"), "rank"),
            tail=_whole(query.get("tail"), "tail") or 0,
            colour=_flag(query.get("colour")),
            timestamps=_flag(query.get("timestamps")),
        )
        hosts = width(cluster, job)
        cursor = Cursor.decode(query["cursor"], hosts) if query.get("cursor") else None
        if options.rank is not None and not 0 <= options.rank < hosts:
            raise UserError(f"there is no rank {options.rank}", f"ranks are 0 to {hosts - 1}")
        event = _whole(query.get("event"), "event") or 0
        keep = query.get("follow", "true") not in ("false", "0")
        watcher = Watcher(self, cluster, job, options, cursor, event, keep)
        return StreamingResponse(watcher.lines(), media_type="application/x-ndjson")

    async def output(self, request: Request, caller: Caller) -> Response:
        """The bytes of one rank's phase, as they are."""
        cluster, job = await self._job(request)
        rank, phase = _whole(request.query_params.get("rank"), "rank") or 0, request.query_params.get("phase", "run")
        labels = {
            phase_label(name, attempt) for name in ("setup", "run") for attempt in range(1, job.attempt.number + 1)
        }
        if not 0 <= rank < width(cluster, job) or phase not in labels:
            raise UserError(
                f"there is no output of rank {rank}, phase {phase!r}", "give a rank, and setup or run", status=404
            )
        feed = Feed(self.services, cluster, job, rank)

        async def chunks() -> AsyncIterator[bytes]:
            offset = 0
            while True:
                chunk = await feed.now(phase, offset)
                if not chunk.data:
                    break
                yield chunk.data
                offset = chunk.next
            feed.close()

        return StreamingResponse(chunks(), media_type="application/octet-stream")

    async def usage(self, request: Request, caller: Caller) -> Response:
        """CPU and memory of every rank, now."""
        cluster, job = await self._job(request)
        fleet = Fleet(self.services.provider(cluster.order.provider), cluster)

        async def ask(session: HostSession) -> api.UsageView:
            found = await session.call("usage", job=job.agent_job_id, patience=2.0)
            return api.UsageView(
                rank=session.host.rank,
                cpu_s=float(found.get("cpu_s") or 0),
                rss=int(found.get("rss") or 0),
                processes=int(found.get("processes") or 0),
            )

        try:
            ranks = await asyncio.gather(*(ask(session) for session in fleet.sessions))
        finally:
            fleet.close()
        return Response(encode(api.UsageReply(ranks=list(ranks))), media_type="application/json")

    async def _job(self, request: Request) -> tuple[Cluster, Job]:
        name, text = request.path_params["cluster"], request.path_params["job"]
        store = self.services.store
        cluster = await asyncio.to_thread(store.find, name) or await asyncio.to_thread(
            lambda: store.find(name, gone=True)
        )
        if cluster is None:
            raise UserError(f"there is no cluster {name!r}", "see: podway status", status=404)
        job = await asyncio.to_thread(store.job, cluster.id, int(text)) if text.isdigit() and len(text) < 10 else None
        if job is None:
            raise UserError(f"cluster {name} has no job {text}", f"see: podway queue {name}", status=404)
        return cluster, job


class Watcher:
    """One client following one job."""

    def __init__(
        self,
        streams: Streams,
        cluster: Cluster,
        job: Job,
        options: Options,
        cursor: Cursor | None,
        event: int,
        keep: bool,
    ) -> None:
        self.services = streams.services
        self.notifier = streams.notifier
        self.cluster = cluster
        self.job = job
        self.options = options
        self.cursor = cursor
        self.event = event
        self.keep = keep
        self.frames: asyncio.Queue[api.Frame] = asyncio.Queue(maxsize=256)
        self.moved = asyncio.Event()
        self.ips = [""] * width(cluster, job)

    async def lines(self) -> AsyncIterator[bytes]:
        """The stream: whatever the two tasks below put into the queue, and a sign of life now and then."""
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
            tell = asyncio.create_task(self._tell())
            try:
                await self._log()
                if self.keep:
                    await self._until(lambda: self.job.done)
            finally:
                tell.cancel()
            await self._events()
            await self.frames.put(self._end())
        except UserError as error:
            await self.frames.put(api.Frame(kind="end", state="", reason=str(error)))

    async def _tell(self) -> None:
        """Keep the rows fresh and pass events on."""
        while True:
            await self._events()
            await self.notifier.wait(self.cluster.id, 1.0)
            await self._refresh()
            self.moved.set()

    async def _refresh(self) -> None:
        store = self.services.store
        cluster = await asyncio.to_thread(store.cluster, self.cluster.id)
        job = await asyncio.to_thread(store.job, self.cluster.id, self.job.number)
        self.cluster, self.job = cluster or self.cluster, job or self.job
        self._name_hosts()

    def _name_hosts(self) -> None:
        """Addresses for the prefixes, changed in place: hosts are others after a recovery."""
        known = [host.address for host in self.cluster.hosts]
        self.ips[: len(known)] = known

    async def _until(self, true: Callable[[], bool]) -> None:
        while not true():
            self.moved.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.moved.wait(), 1.0)

    async def _events(self) -> None:
        for event in await asyncio.to_thread(self.services.store.events, self.cluster.id, self.event):
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

    async def _tail_start(self, feeds: list[RankFeed]) -> Cursor:
        """Where each rank's last lines begin: the rest of a long log is not read at all."""
        start = Cursor(len(feeds))
        chosen = [feed for feed in feeds if self.options.rank in (None, feed.rank)]
        gate = asyncio.Semaphore(TAILS_AT_ONCE)

        async def find(feed: RankFeed) -> None:
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
        feeds = [RankFeed(self, rank) for rank in range(len(self.ips))]
        start = await self._tail_start(feeds) if self.options.tail and self.cursor is None else None
        renderer = Renderer(
            self.options, self.ips, name=self.job.name or "", cursor=self.cursor, tail_from=start, skew=skew
        )

        async def emit(lines: list[str]) -> None:
            frame = api.Frame(kind="log", text="\n".join(lines) + "\n", cursor=renderer.cursor.encode())
            await self.frames.put(frame)

        try:
            await follow(feeds, renderer, emit, stay=self.keep)
        finally:
            for feed in feeds:
                feed.close()


def _flag(text: str | None) -> bool:
    return text in ("true", "1", "yes")


def _whole(text: str | None, name: str) -> int | None:
    if text is None or text == "":
        return None
    if not text.isdigit() or len(text) > 12:
        raise UserError(f"{name}={text!r} is not a whole number", f"give {name} as digits")
    return int(text)
