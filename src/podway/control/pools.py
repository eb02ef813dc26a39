"""Pools: workers that are kept, and jobs that each take a free one.

A worker is a cluster of its own, launched with the pool's setup; a job is queued on a worker as `podway exec` queues one, so setup runs
once. `PoolControl` has the verbs, which only write what is wanted; `pool_driver.py` does it. Workers belong to who made the pool; a
job runs with the rights of who submitted it.
"""

import secrets
import time
from collections.abc import Callable

import msgspec

from podway import crash
from podway.catalog.slices import find_slice
from podway.control.access import Caller, Right, check_inventory, check_project, require, right_on
from podway.control.pool_store import PoolJob, Submission, WorkerPool
from podway.control.verbs import NAME, Control
from podway.errors import UserError
from podway.launch_options import LaunchOptions, LaunchRequest
from podway.task.pools import MOST_WORKERS, PoolSize
from podway.task.task import Task, without_secrets

MOST_JOBS = 10_000  # submitted at once
SUBMISSIONS_KEPT = 100
_TRIES = 50


class PoolControl:
    """The verbs of pools."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.rows = control.store.pools

    def apply(self, name: str, request: LaunchRequest | None, size: PoolSize, caller: Caller) -> WorkerPool:
        """Make the pool, or change the one of its name. Without a request only its size is changed."""
        _check_size(size)
        known = self.rows.get(name)
        if known is not None:
            self._require(known, caller)
        if request is None:
            if known is None:
                raise self._no_pool(name, caller)
            return self._update(name, lambda row: msgspec.structs.replace(row, size=size))
        if not NAME.match(f"{name}-{MOST_WORKERS}"):
            raise UserError(
                f"{name!r} cannot be the name of a pool",
                "use letters, digits, '.', '_' and '-', starting with a letter, at most 57 characters",
            )
        check_project(caller, request.options.project)
        check_inventory(caller, request.task)
        worker = _worker(request)
        self.control.check_launch(worker, f"{name}-1", caller)
        sealed = self.control.vault.seal(request.task.secrets)
        kept = msgspec.structs.replace(worker, task=without_secrets(worker.task))
        if known is None:
            record = WorkerPool(
                id=secrets.token_hex(6),
                name=name,
                user=caller.user,
                project=request.options.project,
                request=kept,
                sealed_secrets=sealed,
                size=size,
                created=time.time(),
            )
            if not self.rows.add(record):
                raise UserError(f"a pool {name} was made at the same moment", "run the command again", status=409)
            return record

        def changed(row: WorkerPool) -> WorkerPool:
            same = row.request == kept and self.control.vault.open(row.sealed_secrets) == request.task.secrets
            revision = row.revision if same else row.revision + 1
            return msgspec.structs.replace(
                row, request=kept, sealed_secrets=sealed, size=size, revision=revision, goal="up", not_before=0.0
            )

        return self._update(name, changed)

    def submit(self, name: str, request: LaunchRequest, count: int, caller: Caller) -> tuple[int, ...]:
        """Queue jobs for free workers; their numbers. The same request twice is one."""
        pool = self.find_for(name, caller, Right.USE)
        if not 1 <= count <= MOST_JOBS:
            raise UserError(f"{count} jobs at once are not possible", f"submit at least 1 and at most {MOST_JOBS:,}")
        if pool.goal == "gone":
            raise UserError(f"pool {name} is being taken down", "make another, or wait until it is gone", status=409)
        if request.then or request.task.kind != "task":
            raise UserError("a job of a pool is one task", "launch a service or pipeline by itself")
        _check_fit(pool, request.task)
        now, sealed = time.time(), self.control.vault.seal(request.task.secrets)
        for _ in range(_TRIES):
            if (sent := _sent_before(pool, request, caller)) is not None:
                return tuple(range(sent.first, sent.first + sent.count))
            numbers = range(pool.next_job, pool.next_job + count)
            new = [
                PoolJob(
                    pool_id=pool.id,
                    number=number,
                    user=caller.user,
                    request=_job(request, rank, count),
                    sealed_secrets=sealed,
                    submitted=now,
                )
                for rank, number in enumerate(numbers)
            ]
            if self.rows.add_jobs(_with_submission(pool, request, caller, count), new):
                return tuple(numbers)
            pool = self.find_for(name, caller, Right.USE)
        raise _keeps_changing(name)

    def cancel(self, name: str, numbers: tuple[int, ...], caller: Caller) -> tuple[int, ...]:
        """Cancel these jobs, or all that are open. Whoever may only use a pool cancels their own."""
        pool = self.find_for(name, caller, Right.USE)
        jobs = self.rows.jobs(pool, open_only=True)
        others = [number for number in numbers if not 0 < number < pool.next_job]
        if others:
            raise UserError(f"pool {name} has no job {others[0]}", f"see: podway pool status {name}", status=404)
        chosen = [job for job in jobs if job.number in numbers or not numbers]
        for job in chosen:
            if job.user != caller.user:
                require(pool, caller, Right.MANAGE)
        for job in chosen:
            self._cancel(pool, job)
        return tuple(job.number for job in chosen)

    def _cancel(self, pool: WorkerPool, job: PoolJob) -> None:
        """A job that waits has ended; of one that has a worker, the driver passes it on."""
        for _ in range(_TRIES):
            waits = job.worker is None
            end, reason = ("CANCELLED", "cancelled by the user") if waits else ("", job.reason)
            if self.rows.save_job(msgspec.structs.replace(job, cancel=True, end=end, reason=reason)) is not None:
                return
            left = {one.number: one for one in self.rows.jobs(pool, open_only=True)}
            if job.number not in left:
                return
            job = left[job.number]
        raise _keeps_changing(pool.name)

    def down(self, name: str, caller: Caller) -> None:
        """Take down the workers, whatever runs there, and forget the pool when they are gone."""
        self.find_for(name, caller, Right.MANAGE)
        self._update(name, lambda row: msgspec.structs.replace(row, goal="gone"))
        crash.point("pool.down-marked")

    def list_for(self, caller: Caller) -> list[WorkerPool]:
        """Those the caller may know of."""
        return [one for one in self.rows.all() if right_on(one, caller) is not None]

    def find_for(self, name: str, caller: Caller, needed: Right) -> WorkerPool:
        """The pool of that name; for whoever may not know of it there is none."""
        found = self.rows.get(name)
        if found is None or right_on(found, caller) is None:
            raise self._no_pool(name, caller)
        require(found, caller, needed)
        return found

    def _no_pool(self, name: str, caller: Caller) -> UserError:
        names = ", ".join(one.name for one in self.list_for(caller))[:200]
        hint = f"existing pools: {names}" if names else "make one: podway pool apply -p NAME FILE"
        return UserError(f"there is no pool {name!r}", hint, status=404)

    def _require(self, known: WorkerPool, caller: Caller) -> None:
        if right_on(known, caller) is None:
            raise UserError(f"the name {known.name!r} is taken", "use another name", status=409)
        require(known, caller, Right.MANAGE)

    def _update(self, name: str, change: Callable[[WorkerPool], WorkerPool]) -> WorkerPool:
        for _ in range(_TRIES):
            row = self.rows.get(name)
            if row is None:
                raise UserError(f"pool {name} is gone", "make it again", status=409)
            saved = self.rows.save(change(row))
            if saved is not None:
                return saved
        raise _keeps_changing(name)


def _check_size(size: PoolSize) -> None:
    if not 0 <= size.workers <= size.max_workers <= MOST_WORKERS or size.max_workers == 0:
        raise UserError(
            f"a pool cannot have from {size.workers} to {size.max_workers} workers",
            f"must be at least 1 and at most {MOST_WORKERS:,}",
        )


def _worker(request: LaunchRequest) -> LaunchRequest:
    """The launch of one worker, whatever options the request came with."""
    if request.then or request.task.kind != "task" or request.task.run.strip():
        raise UserError("a pool's workers run nothing by themselves", "leave `run` out; the jobs of the pool have one")
    task = msgspec.structs.replace(request.task, autostop=None, schedule=(), pools=())
    options = LaunchOptions(project=request.options.project, provider=request.options.provider, retry_until_up=True)
    return LaunchRequest(task=task, options=options, files=request.files)


def _job(request: LaunchRequest, rank: int, count: int) -> LaunchRequest:
    """One job of several; its secrets are kept apart."""
    env = {**request.task.env, "SKYPILOT_JOB_RANK": str(rank), "SKYPILOT_NUM_JOBS": str(count)}
    task = msgspec.structs.replace(request.task, env=env, pools=(), autostop=None, schedule=())
    return LaunchRequest(task=without_secrets(task), files=request.files)


def _sent_before(pool: WorkerPool, request: LaunchRequest, caller: Caller) -> Submission | None:
    same = (caller.user, request.request_id)
    return next((one for one in pool.submissions if (one.user, one.request_id) == same), None)


def _with_submission(pool: WorkerPool, request: LaunchRequest, caller: Caller, count: int) -> WorkerPool:
    if request.request_id is None:
        return pool
    new = Submission(user=caller.user, request_id=request.request_id, first=pool.next_job, count=count)
    return msgspec.structs.replace(pool, submissions=(*pool.submissions, new)[-SUBMISSIONS_KEPT:])


def _check_fit(pool: WorkerPool, task: Task) -> None:
    """A task that names other slices than the workers have waits for ever: it is refused."""
    asked, have = _types(task), _types(pool.request.task)
    if None in asked or (asked & have and task.slices in (1, pool.request.task.slices)):
        return
    many = f"{task.slices} x " if task.slices > 1 else ""
    workers = " or ".join(sorted(one or "CPUs" for one in have))
    raise UserError(
        f"the workers of pool {pool.name} are {workers}, and the task asks for {many}{' or '.join(sorted(map(str, asked)))}",
        f"give it the resources of the pool, or none; or launch it by itself. See: podway pool status {pool.name}",
        status=409,
    )


def _types(task: Task) -> set[str | None]:
    found = (one.accelerator for one in task.resources)
    return {find_slice(one.type, one.topology).accelerator_type if one else None for one in found}


def _keeps_changing(name: str) -> UserError:
    return UserError(f"pool {name} keeps changing", "run the command again", status=409)
