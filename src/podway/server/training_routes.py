"""The functions of the routes about training runs: their metrics as they come, and what the planner says of the same step.

Metrics are what the first rank prints (`hosts/logs/steps.py`), read by offset from its host or from the archive: they are there for
every provider and after the cluster is gone, and for programs that print MaxText's line as well as for `podway train`.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator

import msgspec
from starlette.responses import Response, StreamingResponse

from podway.catalog.slices import find_slice
from podway.control.access import right_on
from podway.control.records import Cluster, phase_label, phase_of
from podway.errors import ProviderError, UserError
from podway.hosts.logs.steps import StepProfile, StepReader, TrainingStep
from podway.server import page_api, views
from podway.server.feeds import READ, JobRankFeed, LiveJob
from podway.server.routing import ApiCall

WAIT_S = 10.0  # for more output; then a line without steps is a sign of life
RETRY_S = 2.0
MOST_CLUSTERS, MOST_JOBS, MOST_RUNS = 200, 200, 500
_CURSOR = re.compile(r"([0-9]{1,6}):([0-9]{1,18})")
encode = msgspec.json.Encoder().encode


async def metrics(call: ApiCall) -> Response:
    """The steps of a training run, from a cursor on; to its end unless `follow` is false."""
    cluster, job = await call.read_job()
    attempt, offset = _position(call.query.get("cursor", ""))
    live = LiveJob(call.services, cluster, job, call.query.get("follow", True))
    return StreamingResponse(_frames(live, attempt, offset), media_type="application/x-ndjson")


def planned(call: ApiCall) -> page_api.PlannedReply:
    """The plan of the step that a job trains."""
    from podway.server.plan_views import planned_reply  # the planner takes a while to import

    cluster, job = call.find_job()
    return planned_reply(cluster, job, call.services.blobs)


def runs(call: ApiCall) -> page_api.RunsReply:
    """The jobs that train, as their commands say, of clusters the caller may see; with `past`, of deleted ones since then too."""
    from podway.plan.task_needs import command_of  # the planner takes a while to import

    store = call.services.store
    clusters = store.live_clusters()
    if "past" in call.query:
        clusters = [*store.past_clusters(call.query["past"], limit=MOST_CLUSTERS), *clusters]
    found = []
    for cluster in clusters:
        if right_on(cluster, call.caller) is None:
            continue
        for job in store.jobs(cluster.id, limit=MOST_JOBS):
            command = command_of(job.task)
            if command is None or command.verb != "train":
                continue
            named = [word.partition("=")[2] for word in command.words if word.startswith("model.name=")]
            view = views.job_view(cluster, job)
            found.append(
                page_api.RunView(
                    cluster=cluster.name,
                    job=job.number,
                    name=job.name or "",
                    user=job.user,
                    state=view.state,
                    model=named[-1] if named else "",
                    resources=view.resources,
                    submitted=view.submitted,
                    started=view.started,
                    ended=view.ended,
                )
            )
    found.sort(key=lambda run: -run.submitted)
    return page_api.RunsReply(runs=found[:MOST_RUNS])


def _position(cursor: str) -> tuple[int, int]:
    """`2:4096`: byte 4096 of the second attempt."""
    if not cursor:
        return 1, 0
    found = _CURSOR.fullmatch(cursor)
    if found is None:
        raise UserError(f"cursor={cursor!r} is not a position in a log", "give the cursor of an earlier line")
    return max(1, int(found[1])), int(found[2])


def _devices(cluster: Cluster) -> int:
    order = cluster.order
    tpu = find_slice(order.accelerator_type, order.topology) if order.accelerator_type else None
    return (tpu.devices if tpu else 1) * order.slices


async def _frames(live: LiveJob, attempt: int, offset: int) -> AsyncIterator[bytes]:
    fresh = asyncio.create_task(live.keep_fresh())
    feed = JobRankFeed(live, 0)
    try:
        yield encode(page_api.MetricsFrame(devices=_devices(live.cluster))) + b"\n"
        for label in feed.phases:
            phase, number = phase_of(label)
            if phase == "run" and number >= attempt:
                async for frame in _phase(live, feed, number, offset if number == attempt else 0):
                    yield encode(frame) + b"\n"
        yield encode(page_api.MetricsFrame(ended=live.job.done)) + b"\n"
    finally:
        feed.close()
        fresh.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await fresh


async def _phase(live: LiveJob, feed: JobRankFeed, attempt: int, offset: int) -> AsyncIterator[page_api.MetricsFrame]:
    """One attempt, until it has ended or, for who does not follow, until what is there is read."""
    reader, label = StepReader(), phase_label("run", attempt)
    while True:
        try:
            chunk = await feed.read(label, offset, WAIT_S if live.keep else 0.0, READ)
        except ProviderError:
            if not live.keep:
                return
            await asyncio.sleep(RETRY_S)
            continue
        if not chunk.data:
            if chunk.ended or not live.keep:
                return
            yield page_api.MetricsFrame()
            continue
        await live.services.turns.take()
        found, offset = reader.feed(chunk.data), chunk.next
        if found:
            yield page_api.MetricsFrame(
                steps=[one for one in found if isinstance(one, TrainingStep)],
                profile=next((one for one in reversed(found) if isinstance(one, StepProfile)), None),
                cursor=f"{attempt}:{offset - reader.waiting}",
                attempt=attempt,
            )
