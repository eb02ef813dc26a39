"""The rows of pools and of the jobs given to them: a guarded write for each change."""

from typing import Any, Literal

import msgspec
import sqlalchemy as sa

from podway.control.records import Grant
from podway.control.tables import READ_ONLY, pool_jobs, pools
from podway.decoding import from_json
from podway.launch_options import LaunchRequest
from podway.task.pools import PoolSize


class PoolWorker(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker: a cluster of its own."""

    number: int
    revision: int  # of the pool when it was made
    cluster_id: str | None = None  # None: to be launched
    setup_job: int | None = None  # of the cluster; None: nothing to set up
    drained: bool = False  # takes no more jobs, and goes when it has none


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs that were submitted by one request: sent again because its answer was lost, it gets the same answer."""

    user: str
    request_id: str
    first: int  # the number of the first job
    count: int


class WorkerPool(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One pool."""

    id: str
    name: str
    user: str
    project: str | None = None
    grants: tuple[Grant, ...] = ()
    request: LaunchRequest  # of one worker
    sealed_secrets: bytes = b""
    size: PoolSize
    goal: Literal["up", "gone"] = "up"
    revision: int = 1  # counts the changes of what a worker is
    workers: tuple[PoolWorker, ...] = ()
    next_worker: int = 1
    next_job: int = 1
    submissions: tuple[Submission, ...] = ()  # the latest
    not_before: float = 0.0  # no new worker earlier than this
    reason: str = ""  # why workers are missing, for people
    created: float
    held_by: str = ""  # the server that acts on it now
    held_until: float = 0.0
    version: int = 1

    def cluster_name(self, worker: PoolWorker) -> str:
        """The name of a worker's cluster."""
        return f"{self.name}-{worker.number}"


class PoolJob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job for a free worker. It is written that it has one before it is queued there, so that no crash gives it two."""

    pool_id: str
    number: int
    user: str
    request: LaunchRequest
    sealed_secrets: bytes = b""
    submitted: float
    worker: int | None = None  # None: it waits
    cluster: str | None = None  # of the worker, by name
    cluster_id: str | None = None
    job: int | None = None  # its number there, once it is queued
    lost: int = 0  # times a worker went from under it
    restarts: int = 0  # times it failed by itself and began again, as its task allows
    cancel: bool = False
    end: str = ""  # the state it ended in; '': it is open
    reason: str = ""
    version: int = 1


class PoolRows:
    """The part of the store that is about pools."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._reader = engine.execution_options(**READ_ONLY)

    def add(self, record: WorkerPool) -> bool:
        """A new row; False where the name is taken."""
        values = {"id": record.id, "name": record.name, "version": record.version, "body": msgspec.json.encode(record)}
        try:
            with self._engine.begin() as db:
                db.execute(sa.insert(pools).values(**values))
        except sa.exc.IntegrityError:
            return False
        return True

    def get(self, name: str) -> WorkerPool | None:
        """By name."""
        found = self._pools(sa.select(pools).where(pools.c.name == name))
        return found[0] if found else None

    def all(self) -> list[WorkerPool]:
        """By name."""
        return self._pools(sa.select(pools).order_by(pools.c.name))

    def save(self, record: WorkerPool) -> WorkerPool | None:
        """Over the version it was made from; None where it changed since."""
        new = msgspec.structs.replace(record, version=record.version + 1)
        same = (pools.c.id == record.id, pools.c.version == record.version)
        with self._engine.begin() as db:
            values = {"version": new.version, "body": msgspec.json.encode(new)}
            done = db.execute(sa.update(pools).where(*same).values(**values))
        return new if done.rowcount == 1 else None

    def delete(self, record: WorkerPool) -> None:
        """The pool and its jobs; what they left on clusters stays there."""
        with self._engine.begin() as db:
            db.execute(sa.delete(pool_jobs).where(pool_jobs.c.pool_id == record.id))
            db.execute(sa.delete(pools).where(pools.c.id == record.id))

    def add_jobs(self, record: WorkerPool, new: list[PoolJob]) -> bool:
        """The jobs, in one transaction with the pool's new row; False where the pool changed since it was read."""
        after = msgspec.structs.replace(record, next_job=record.next_job + len(new), version=record.version + 1)
        same = (pools.c.id == record.id, pools.c.version == record.version)
        with self._engine.begin() as db:
            values = {"version": after.version, "body": msgspec.json.encode(after)}
            if db.execute(sa.update(pools).where(*same).values(**values)).rowcount != 1:
                return False
            db.execute(sa.insert(pool_jobs), [_job_columns(one) for one in new])
        return True

    def jobs(self, record: WorkerPool, *, open_only: bool = False, limit: int | None = None) -> list[PoolJob]:
        """In their order; with a limit, the latest."""
        asked = sa.select(pool_jobs).where(pool_jobs.c.pool_id == record.id)
        if open_only:
            asked = asked.where(pool_jobs.c.open)
        with self._reader.connect() as db:
            rows = db.execute(asked.order_by(pool_jobs.c.number.desc()).limit(limit)).all()
        return [msgspec.structs.replace(from_json(row.body, PoolJob), version=row.version) for row in reversed(rows)]

    def save_job(self, job: PoolJob) -> PoolJob | None:
        """Over the version it was made from; None where it changed since."""
        new = msgspec.structs.replace(job, version=job.version + 1)
        columns = pool_jobs.c
        same = (columns.pool_id == job.pool_id, columns.number == job.number, columns.version == job.version)
        with self._engine.begin() as db:
            done = db.execute(sa.update(pool_jobs).where(*same).values(**_job_columns(new)))
        return new if done.rowcount == 1 else None

    def _pools(self, asked: sa.Select[Any]) -> list[WorkerPool]:
        with self._reader.connect() as db:
            rows = db.execute(asked).all()
        return [msgspec.structs.replace(from_json(row.body, WorkerPool), version=row.version) for row in rows]


def _job_columns(job: PoolJob) -> dict[str, object]:
    return {
        "pool_id": job.pool_id,
        "number": job.number,
        "open": not job.end,
        "version": job.version,
        "body": msgspec.json.encode(job),
    }
