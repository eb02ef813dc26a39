"""The functions of the routes about jobs: queue, look, wait, cancel, follow."""

import asyncio
import time
from collections.abc import AsyncIterator

from starlette.responses import Response, StreamingResponse

from podway.control.fleet import Fleet, HostSession
from podway.control.records import phase_label
from podway.errors import UserError
from podway.hosts.logs.follow import Cursor, Options
from podway.server import api, views
from podway.server.feeds import Feed, width
from podway.server.routing import ApiCall
from podway.server.watching import Watcher

LONGEST_WAIT_S = 60.0


def execute(call: ApiCall) -> api.LaunchReply:
    """Queue a task on a cluster, without setup."""
    body: api.ExecBody = call.body
    done = call.services.control.execute(call.path["cluster"], body.task, body.files, call.caller, body.request_id)
    return views.launched_view(done)


def run(call: ApiCall) -> api.LaunchReply:
    """Run a command on every host now."""
    body: api.RunBody = call.body
    done = call.services.control.run_everywhere(call.path["cluster"], body.command, call.caller.user, body.request_id)
    return views.launched_view(done)


def jobs(call: ApiCall) -> api.JobsReply:
    """A cluster's jobs."""
    found = call.find_cluster()
    every = call.services.store.jobs(found.id, limit=call.query.get("limit", 1000))
    return api.JobsReply(jobs=[views.job_view(found, job) for job in every])


async def job(call: ApiCall) -> api.JobView:
    """One job; with `wait=SECONDS`, answers when it has ended or the time is over."""
    cluster, found = await call.read_job()
    rows, notifier = call.services.rows, call.services.notifier
    deadline = time.monotonic() + min(LONGEST_WAIT_S, call.query.get("wait", 0.0))
    while not found.done and (left := deadline - time.monotonic()) > 0:
        seen = notifier.tick(cluster.id)
        found = await rows.job(cluster.id, found.number) or found
        if not found.done:
            await notifier.wait(cluster.id, seen, left)
    return views.job_view(cluster, found)


def cancel(call: ApiCall) -> api.CancelReply:
    """Ask jobs to end; follow with `job?wait=` to know that nothing of them is left."""
    body: api.CancelBody = call.body
    return api.CancelReply(
        jobs=call.services.control.cancel(call.path["cluster"], call.caller, body.jobs, every=body.all)
    )


async def watch(call: ApiCall) -> Response:
    """Follow a job: its progress, its log lines, its end."""
    cluster, found = await call.read_job()
    query = call.query
    options = Options(
        raw=query.get("raw", False),
        rank=query.get("rank"),
        tail=query.get("tail", 0),
        colour=query.get("colour", False),
        timestamps=query.get("timestamps", False),
        spread=query.get("spread", False),
    )
    hosts = width(cluster, found)
    cursor = Cursor.decode(query["cursor"], hosts) if "cursor" in query else None
    if options.rank is not None and options.rank >= hosts:
        raise UserError(f"there is no rank {options.rank}", f"ranks are 0 to {hosts - 1}")
    keep = query.get("follow", True)
    watcher = Watcher(call.services, cluster, found, options, cursor, query.get("event", 0), keep)
    return StreamingResponse(watcher.lines(), media_type="application/x-ndjson")


async def output(call: ApiCall) -> Response:
    """The raw bytes one rank wrote in one phase."""
    cluster, found = await call.read_job()
    rank, phase = call.query.get("rank", 0), call.query.get("phase", "run")
    attempts = range(1, found.attempt.number + 1)
    labels = {phase_label(name, attempt) for name in ("setup", "run") for attempt in attempts}
    if rank >= width(cluster, found) or phase not in labels:
        raise UserError(
            f"there is no output of rank {rank}, phase {phase!r}", "give a rank, and setup or run", status=404
        )
    feed = Feed(call.services, cluster, found, rank)

    async def chunks() -> AsyncIterator[bytes]:
        offset = 0
        try:
            while (chunk := await feed.now(phase, offset)).data:
                yield chunk.data
                offset = chunk.next
        finally:
            feed.close()

    return StreamingResponse(chunks(), media_type="application/octet-stream")


async def usage(call: ApiCall) -> api.UsageReply:
    """CPU and memory of every rank, now."""
    cluster, found = await call.read_job()
    fleet = Fleet(call.services.provider(cluster.order.provider), cluster)

    async def ask(session: HostSession) -> api.UsageView:
        used = await session.call("usage", job=found.agent_job_id, patience=2.0)
        return api.UsageView(
            rank=session.host.rank,
            cpu_s=float(used.get("cpu_s") or 0),
            rss=int(used.get("rss") or 0),
            processes=int(used.get("processes") or 0),
        )

    try:
        return api.UsageReply(ranks=list(await asyncio.gather(*(ask(session) for session in fleet.sessions))))
    finally:
        fleet.close()
