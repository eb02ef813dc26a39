"""Drives pools: looks at each every second, and does what `decide_pool.py` answers.

1. A server holds a pool while it acts on it, by a guarded write with a time; another takes over when that has passed.
2. Workers are written before they are launched, and launched under a request id of their own: one launch, however often it is repeated.
   One that is given up before it is known whether it was launched is taken down by that id.
3. A job that waits is written as a worker's before it is queued there, likewise. When a worker is lost, or its job fails in a way that
   its task comes back from, the job waits again.
"""

import asyncio
import logging
import time

import msgspec

from podway import crash
from podway.control.access import Caller
from podway.control.decide_pool import SeenWorker, WorkerChanges, decide_pool
from podway.control.pool_store import PoolJob, PoolWorker, WorkerPool
from podway.control.pools import PoolControl
from podway.control.records import ENDED, Cluster, ClusterState, Job, JobState
from podway.control.recovery import Cause, cause_of
from podway.control.schedules import Person
from podway.errors import ProviderError, UserError

LOOK_S = 1.0
HELD_S = 30.0
AGAIN_S = 30.0  # after a worker could not be launched, or was lost
MOST_LOST = 20  # workers that may go from under one job
log = logging.getLogger("podway.pools")
replace = msgspec.structs.replace


class PoolDriver:
    """Acts on pools, under the name of one server."""

    def __init__(self, verbs: PoolControl, owner: str) -> None:
        self._control = verbs.control
        self._store = verbs.control.store
        self._rows = verbs.rows
        self._owner = owner

    async def run(self, person: Person) -> None:
        """For as long as the server runs."""
        while True:
            try:
                await asyncio.to_thread(self.look, time.time(), person)
            except Exception:
                log.exception("pools")
            await asyncio.sleep(LOOK_S)

    def look(self, now: float, person: Person) -> None:
        """Once at every pool."""
        for pool in self._rows.all():
            if pool.held_by not in ("", self._owner) and pool.held_until > now:
                continue
            try:
                self._drive(pool, now, person)
            except (UserError, ProviderError) as error:
                log.warning("pool %s: %s", pool.name, error)
            except Exception:  # the others are looked at all the same
                log.exception("pool %s", pool.name)

    def _drive(self, pool: WorkerPool, now: float, person: Person) -> None:
        jobs = self._rows.jobs(pool, open_only=True)
        seen = [self.see(pool, worker, jobs, now) for worker in pool.workers]
        waiting = sorted((job for job in jobs if job.worker is None), key=_turn)
        plan = decide_pool(pool, seen, len(waiting), now)
        finished = pool.goal == "gone" and not pool.workers
        free = [one.worker for one in seen if one.state == "free" and one.worker.number not in plan.drain]
        to_launch = any(one.state == "new" for one in seen)
        given = [job for job in jobs if job.worker is not None]
        if not (plan or finished or to_launch or given or (waiting and (free or pool.goal == "gone"))):
            return
        held = self._rows.save(replace(pool, held_by=self._owner, held_until=now + HELD_S))
        if held is None:  # it has changed: next time
            return
        if finished:
            self._rows.delete(held)
            return
        if pool.goal == "gone":
            for job in jobs:
                self._end(job, "CANCELLED", "the pool is being taken down")
        else:
            self._drive_jobs(held, given, list(zip(free, waiting, strict=False)), person)
        held = self._change_workers(held, plan, now, {one.worker.number: one.reason for one in seen})
        crash.point("pool.workers-written")
        held = self._launch_new(held, now, person)
        self._rows.save(replace(held, held_by="", held_until=0.0))

    def _drive_jobs(
        self, pool: WorkerPool, given: list[PoolJob], pairs: list[tuple[PoolWorker, PoolJob]], person: Person
    ) -> None:
        """Look at those that have a worker, and give one to those whose turn it is."""
        for job in given:
            self._check_given(pool, job, person)
        for worker, job in pairs:
            self._give(pool, worker, job, person)

    # workers

    def see(self, pool: WorkerPool, worker: PoolWorker, jobs: list[PoolJob], now: float) -> SeenWorker:
        """How a worker is now."""
        if worker.cluster_id is None:
            return SeenWorker(worker=worker, state="new")
        cluster = self._store.cluster(worker.cluster_id)
        if cluster is None or not cluster.live:
            return SeenWorker(worker=worker, state="gone", reason=cluster.reason if cluster else "")
        if cluster.goal != "up":
            return SeenWorker(worker=worker, state="leaving" if cluster.goal == "gone" else "starting")
        if worker.setup_job is not None:
            setup = self._store.job(cluster.id, worker.setup_job)
            if setup is not None and setup.state in ENDED and setup.state is not JobState.SUCCEEDED:
                why = f"the setup of {cluster.name} failed: {setup.reason or setup.state.value}"
                return SeenWorker(worker=worker, state="broken", reason=why)
            if setup is None or setup.state not in ENDED:
                return SeenWorker(worker=worker, state="starting")
        if cluster.state is not ClusterState.UP:
            return SeenWorker(worker=worker, state="starting", reason=cluster.reason)
        has_job = any(job.worker == worker.number for job in jobs)
        if has_job or self._store.jobs(cluster.id, open_only=True):
            return SeenWorker(worker=worker, state="busy")
        since = max(cluster.active_at, cluster.billing.up_since or 0.0)
        return SeenWorker(worker=worker, state="free", idle_s=now - since)

    def _change_workers(self, pool: WorkerPool, plan: WorkerChanges, now: float, reasons: dict[int, str]) -> WorkerPool:
        workers = []
        not_before, reason = pool.not_before, ""
        for worker in pool.workers:
            if worker.number in plan.take_down and worker.cluster_id is not None:
                self._take_down(worker.cluster_id)
            if worker.number in plan.forget:
                self._give_up_launch(pool, worker)
                lost = worker.cluster_id is not None and not worker.drained and pool.goal == "up"
                not_before = max(not_before, now + AGAIN_S) if lost else not_before
                reason = reasons.get(worker.number, "") or reason
                continue
            reason = reasons.get(worker.number, "") or reason
            workers.append(replace(worker, drained=True) if worker.number in plan.drain else worker)
        for number in range(pool.next_worker, pool.next_worker + plan.add):
            workers.append(PoolWorker(number=number, revision=pool.revision))
        new = replace(
            pool,
            workers=tuple(workers),
            next_worker=pool.next_worker + plan.add,
            not_before=not_before,
            reason=reason or (pool.reason if not_before > now else ""),
        )
        return self._save(pool, new)

    def _take_down(self, cluster_id: str) -> None:
        cluster = self._store.cluster(cluster_id)
        if cluster is not None and cluster.live:
            self._control.down(cluster.name)

    def _give_up_launch(self, pool: WorkerPool, worker: PoolWorker) -> None:
        """A worker that was to be launched: a server killed in between may have launched it without writing so."""
        made = self._store.find(pool.cluster_name(worker)) if worker.cluster_id is None else None
        if made is not None and made.request_id == _launch_id(pool, worker):
            self._take_down(made.id)

    def _launch_new(self, pool: WorkerPool, now: float, person: Person) -> WorkerPool:
        for worker in pool.workers if pool.goal == "up" else ():
            if worker.cluster_id is not None:
                continue
            try:
                made = self._launch(pool, worker, person)
            except (UserError, ProviderError) as error:
                why = f"{error.what}; {error.hint}" if isinstance(error, UserError) else str(error)
                for one in pool.workers:
                    self._give_up_launch(pool, one)
                left = tuple(one for one in pool.workers if one.cluster_id is not None)
                pool = self._save(pool, replace(pool, workers=left, not_before=now + AGAIN_S, reason=why))
                break
            crash.point("pool.worker-launched")
            workers = tuple(made if one.number == worker.number else one for one in pool.workers)
            pool = self._save(pool, replace(pool, workers=workers))
        return pool

    def _launch(self, pool: WorkerPool, worker: PoolWorker, person: Person) -> PoolWorker:
        caller = self._person(pool.user, person)
        name = pool.cluster_name(worker)
        taken = self._store.find(name)
        request_id = _launch_id(pool, worker)
        if taken is not None and taken.request_id != request_id:
            raise UserError(f"there is a cluster {name} already", f"podway down {name}, or name the pool otherwise")
        secrets = self._control.vault.open(pool.sealed_secrets)
        request = replace(
            pool.request,
            task=replace(pool.request.task, secrets=secrets),
            options=replace(pool.request.options, cluster=name),
            request_id=request_id,
        )
        made = self._control.launch(request, caller)
        return replace(worker, cluster_id=made.cluster_id, setup_job=made.job)

    # jobs

    def _give(self, pool: WorkerPool, worker: PoolWorker, job: PoolJob, person: Person) -> None:
        name = pool.cluster_name(worker)
        given = replace(job, worker=worker.number, cluster=name, cluster_id=worker.cluster_id, job=None)
        saved = self._rows.save_job(given)
        crash.point("pool.job-given")
        if saved is not None:
            self._queue(pool, saved, person)

    def _queue(self, pool: WorkerPool, job: PoolJob, person: Person) -> None:
        """Queue it on its worker; again, if that was interrupted."""
        assert job.cluster is not None
        cluster = self._store.find(job.cluster)
        if cluster is None or cluster.id != job.cluster_id or cluster.goal == "gone":
            self._wait_again(job)
            return
        task = replace(job.request.task, secrets=self._control.vault.open(job.sealed_secrets))
        request_id = f"pool-{pool.id}-job-{job.number}-{job.lost + job.restarts}"
        try:
            caller = self._person(job.user, person)
            queued = self._control.execute(job.cluster, task, job.request.files, caller, request_id)
        except UserError as error:
            now = self._store.cluster(cluster.id)
            if now is None or now.goal == "gone":  # the worker goes: that is not the job's fault
                self._wait_again(job)
            else:
                self._end(job, "FAILED", f"{error.what}; {error.hint}")
            return
        crash.point("pool.job-queued")
        self._rows.save_job(replace(job, job=queued.job))

    def _check_given(self, pool: WorkerPool, job: PoolJob, person: Person) -> None:
        """What became of a job that has a worker."""
        if job.job is None:
            self._queue(pool, job, person)
            return
        cluster = self._store.cluster(job.cluster_id or "")
        found = self._store.job(cluster.id, job.job) if cluster is not None else None
        if cluster is None or found is None:
            self._wait_again(job)
            return
        if found.state in ENDED:
            cause = None if job.cancel else why_again(cluster, found, job)
            if cause is not None:
                self._wait_again(job, cause, found.reason)
            else:
                self._end(job, found.state.value, found.reason)
        elif job.cancel and not found.cancel:
            self._control.cancel(cluster.name, Caller(user=job.user, role="admin", internal=True), (job.job,))

    def _wait_again(self, job: PoolJob, cause: Cause = "interruption", why: str = "its worker was lost") -> None:
        """For any worker that is free."""
        freed = replace(job, worker=None, cluster=None, cluster_id=None, job=None, reason=f"it begins again: {why}")
        if job.cancel:
            self._end(job, "CANCELLED", "cancelled by the user")
        elif cause == "error":
            self._rows.save_job(replace(freed, restarts=job.restarts + 1))
        elif job.lost >= MOST_LOST:
            self._end(job, "FAILED", f"{MOST_LOST} workers were lost while it ran")
        else:
            self._rows.save_job(replace(freed, lost=job.lost + 1))

    def _end(self, job: PoolJob, state: str, reason: str) -> None:
        self._rows.save_job(replace(job, end=state, reason=reason))

    def _person(self, user: str, person: Person) -> Caller:
        caller = person(user)
        if caller is None:
            raise UserError(
                f"{user} has no valid token that may launch", "an administrator makes one: podway server token"
            )
        return caller

    def _save(self, old: WorkerPool, new: WorkerPool) -> WorkerPool:
        """While it is held only a verb may have changed it: that stays, and the workers are ours."""
        if new == old:
            return old
        saved = self._rows.save(new)
        while saved is None:
            row = self._rows.get(old.name)
            if row is None or row.id != old.id:
                raise UserError(f"pool {old.name} is gone", "make it again")
            ours = {key: getattr(new, key) for key in ("workers", "next_worker", "not_before", "reason")}
            saved = self._rows.save(replace(row, **ours))
        return saved


def _turn(job: PoolJob) -> tuple[int, int]:
    """The oldest of the highest priority first."""
    return -job.request.task.priority, job.number


def _launch_id(pool: WorkerPool, worker: PoolWorker) -> str:
    """Of the launch of a worker: twice is once."""
    return f"pool-{pool.id}-{worker.number}"


def why_again(cluster: Cluster, found: Job, job: PoolJob) -> Cause | None:
    """Why a job that ended is to begin again; None: it has ended.

    Hosts that were taken away, not by a person, end no job of a pool, unless its task says otherwise. From its own failures it comes
    back as its task says.
    """
    recovery = found.task.recovery
    if found.state in (JobState.FAILED_DRIVER, JobState.FAILED_NO_RESOURCE):
        cause: Cause | None = "interruption" if found.outcome.hosts_lost or cluster.goal == "gone" else None
    elif found.state is JobState.FAILED:
        blamed = next((one for one in found.outcome.exits if one.rank == found.outcome.blamed_rank), None)
        cause = cause_of(found, blamed, hosts_lost=False) if blamed is not None else "error"
    else:
        return None
    if recovery is None:
        return cause if cause == "interruption" else None
    tries_left = cause != "error" or job.restarts < recovery.max_restarts_on_errors
    return cause if cause in recovery.events and tries_left else None
