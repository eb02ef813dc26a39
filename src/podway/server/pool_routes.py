"""The functions of the routes about pools."""

import time

from podway.control.access import Right
from podway.control.pool_driver import PoolDriver, why_again
from podway.control.pool_store import PoolJob, WorkerPool
from podway.server.pool_api import (
    PoolBody,
    PoolCancelBody,
    PoolJobsBody,
    PoolJobsReply,
    PoolJobView,
    PoolsReply,
    PoolView,
    PoolWorkerView,
)
from podway.server.routing import ApiCall, Route

JOBS_SHOWN = 200


def pools(call: ApiCall) -> PoolsReply:
    """Pools you may see."""
    return PoolsReply(pools=[_view(call, one) for one in call.services.pools.list_for(call.caller)])


def pool(call: ApiCall) -> PoolView:
    """One pool, with its latest jobs."""
    return _view(call, call.services.pools.find_for(call.path["pool"], call.caller, Right.VIEW), jobs=True)


def apply_pool(call: ApiCall) -> PoolView:
    """Make the pool of the path, or change it; the files of its workers have been uploaded."""
    body: PoolBody = call.body
    return _view(call, call.services.pools.apply(call.path["pool"], body.request, body.size, call.caller))


def submit_to_pool(call: ApiCall) -> PoolJobsReply:
    """Queue jobs for free workers; their files have been uploaded."""
    body: PoolJobsBody = call.body
    made = call.services.pools.submit(call.path["pool"], body.request, body.count, call.caller)
    return PoolJobsReply(jobs=list(made))


def cancel_pool_jobs(call: ApiCall) -> PoolJobsReply:
    """Cancel jobs of a pool, those that wait and those that have a worker."""
    body: PoolCancelBody = call.body
    return PoolJobsReply(jobs=list(call.services.pools.cancel(call.path["pool"], body.jobs, call.caller)))


def end_pool(call: ApiCall) -> PoolsReply:
    """Take down a pool's workers, and forget it when they are gone."""
    call.services.pools.down(call.path["pool"], call.caller)
    return pools(call)


def _view(call: ApiCall, record: WorkerPool, *, jobs: bool = False) -> PoolView:
    verbs = call.services.pools
    open_jobs = verbs.rows.jobs(record, open_only=True)
    shown = verbs.rows.jobs(record, limit=JOBS_SHOWN) if jobs else []
    has = {job.worker: job.number for job in open_jobs if job.worker is not None}
    driver, now = PoolDriver(verbs, ""), time.time()
    seen = [driver.see(record, worker, open_jobs, now) for worker in record.workers]
    task = record.request.task
    return PoolView(
        name=record.name,
        user=record.user,
        project=record.project,
        size=record.size,
        accelerators=list(dict.fromkeys(one.accelerator.type for one in task.resources if one.accelerator)),
        slices=task.slices,
        revision=record.revision,
        leaving=record.goal == "gone",
        reason=record.reason or next((one.reason for one in seen if one.reason), ""),
        created=record.created,
        waiting=sum(job.worker is None for job in open_jobs),
        workers=[
            PoolWorkerView(
                number=one.worker.number,
                cluster=record.cluster_name(one.worker),
                state=one.state,
                job=has.get(one.worker.number),
                outdated=one.worker.revision != record.revision or one.worker.drained,
            )
            for one in seen
        ],
        jobs=[_job_view(call, job) for job in shown],
    )


def _job_view(call: ApiCall, job: PoolJob) -> PoolJobView:
    state, reason = job.end or "PENDING", job.reason
    if not job.end and job.cluster_id is not None and job.job is not None:
        store = call.services.store
        found, cluster = store.job(job.cluster_id, job.job), store.cluster(job.cluster_id)
        if found is not None:
            again = cluster is not None and not job.cancel and why_again(cluster, found, job) is not None
            state, reason = "RECOVERING" if again else found.state.value, found.reason
    return PoolJobView(
        number=job.number,
        name=job.request.task.name,
        user=job.user,
        state=state,
        reason=reason,
        submitted=job.submitted,
        cluster=job.cluster,
        job=job.job,
    )


_P = "/v1/pools/{pool}"
POOL_ROUTES: tuple[Route, ...] = (
    Route(method="GET", path="/v1/pools", function=pools, access="anyone", summary="Pools", reply=PoolsReply),
    Route(method="GET", path=_P, function=pool, access="anyone", summary="One pool", reply=PoolView),
    Route(
        method="PUT",
        path=_P,
        function=apply_pool,
        access="create",
        audited=True,
        summary="Make or change a pool",
        body=PoolBody,
        reply=PoolView,
        slow=True,
    ),
    Route(
        method="DELETE",
        path=_P,
        function=end_pool,
        access="create",
        audited=True,
        summary="Take down a pool",
        reply=PoolsReply,
    ),
    Route(
        method="POST",
        path=f"{_P}/jobs",
        function=submit_to_pool,
        access="create",
        audited=True,
        summary="Queue jobs for a pool",
        body=PoolJobsBody,
        reply=PoolJobsReply,
    ),
    Route(
        method="POST",
        path=f"{_P}/cancel",
        function=cancel_pool_jobs,
        access="create",
        audited=True,
        summary="Cancel jobs of a pool",
        body=PoolCancelBody,
        reply=PoolJobsReply,
    ),
)
