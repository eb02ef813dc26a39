"""What Podway knows, kept in SQLite (WAL) or PostgreSQL.

Every change of a cluster or job is a guarded write: `UPDATE ... WHERE version = the one that was read`, and for the things
only a cluster's controller may change, `AND owner = me`. So two servers on one database never act twice, and a server that was
asleep too long finds out before it does harm. There are two ways to write:

    update, update_job      apply a transition to the row as it is now, and again when another write came in between
    save_cluster, save_job  write a value that was decided on what was read; `Stale` when the row has changed since

Reads never take SQLite's write lock. Methods are synchronous and short; async callers go through a thread.
"""

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import sqlalchemy as sa

from podway.control import transitions
from podway.control.failover import Place, PlaceRecord, place_of
from podway.control.gateway_keys import GatewayKeys
from podway.control.group_store import GroupRows
from podway.control.leased_rows import LeasedRows, change_event
from podway.control.migrations import prepare
from podway.control.people import People
from podway.control.pool_store import PoolRows
from podway.control.records import Cluster, Event, Job, JobState
from podway.control.schedule_store import ScheduleRows
from podway.control.service_store import ServiceRows
from podway.control.tables import READ_ONLY, clusters, events, jobs, tries
from podway.control.volume_store import VolumeRows
from podway.control.writing import UPDATE_TRIES, Stale, add_events
from podway.decoding import from_json
from podway.errors import UserError
from podway.extras import explain
from podway.order import Order

CONNECTIONS, MORE_CONNECTIONS = 16, 48  # kept open, and opened for a moment when all threads read at once


class AlreadyEnded(Stale):
    """The job has ended, and an ended job never changes."""


_NOT_WRITTEN = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR)


def open_store(url: str) -> "Store":
    """A store at a database URL (`sqlite:///path` or `postgresql://...`), its tables made when they are not there."""
    if url.startswith("postgresql://"):
        url = url.replace("postgresql://", "postgresql+psycopg://", 1)
    try:
        engine = sa.create_engine(
            url, pool_pre_ping=not url.startswith("sqlite"), pool_size=CONNECTIONS, max_overflow=MORE_CONNECTIONS
        )
    except (sa.exc.ArgumentError, ModuleNotFoundError) as error:
        raise explain(error, "a PostgreSQL database") or UserError(
            f"cannot open the database {_safe(url)}: {error}", "give a sqlite:/// or postgresql:// URL"
        ) from None
    if engine.dialect.name == "sqlite":
        sa.event.listen(engine, "connect", _tune_sqlite)
        sa.event.listen(engine, "begin", _begin_sqlite)
    try:
        prepare(engine)
    except sa.exc.OperationalError as error:
        reason = str(error.orig).splitlines()[0]
        raise UserError(
            f"cannot open the database {_safe(url)}: {reason}", "check the URL and that the database runs"
        ) from None
    return Store(engine)


def is_full(error: Exception) -> bool:
    """Whether a write failed because the database's disk is full or read-only."""
    cause = getattr(error, "orig", None)
    return isinstance(cause, sqlite3.OperationalError) and cause.sqlite_errorcode & 0xFF in _NOT_WRITTEN


def _safe(url: str) -> str:
    return sa.engine.make_url(url).render_as_string(hide_password=True) if "://" in url else url


def _tune_sqlite(connection: object, _record: object) -> None:
    # The driver must not open transactions by itself: we send BEGIN IMMEDIATE, so that a writer waits instead of failing.
    connection.isolation_level = None  # type: ignore[attr-defined]
    cursor = connection.cursor()  # type: ignore[attr-defined]
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=15000", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: sa.Connection) -> None:
    # A transaction that will write takes the lock at once: one that read first could not wait for it. Readers need none (WAL).
    reads = READ_ONLY.items() <= connection.get_execution_options().items()
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


class Store(LeasedRows[Cluster]):
    """All reads and guarded writes: clusters as `leased_rows.py` has them, their jobs and events, and the parts."""

    def __init__(self, engine: sa.Engine) -> None:
        super().__init__(engine, Cluster, clusters, clusters.c.next_job, jobs.c.cluster_id)
        self.people = People(engine)
        self.gateway_keys = GatewayKeys(engine)
        self.volumes = VolumeRows(engine)
        self.schedules = ScheduleRows(engine)
        self.pools = PoolRows(engine)
        self.groups = GroupRows(engine)
        self.services = ServiceRows(engine, lambda key: self.written(key))
        self.written: Callable[[str], None] = lambda cluster_id: None  # told of every write, after it is durable

    def _publish(self, key: str) -> None:
        self.written(key)

    # clusters, by the names that say so

    def add_cluster(self, cluster: Cluster) -> None:
        """A new row; the name must not be taken by a live one."""
        self.add(cluster)

    def cluster(self, cluster_id: str) -> Cluster | None:
        """By id, alive or gone."""
        return self.get(cluster_id)

    def live_clusters(self) -> list[Cluster]:
        """Every cluster that is not gone, oldest first."""
        return self.live()

    def past_clusters(self, since: float, limit: int = 1000) -> list[Cluster]:
        """Gone clusters that were created after `since`, latest first."""
        gone = sa.select(clusters).where(clusters.c.live_name.is_(None), clusters.c.created >= since)
        return self._all(gone.order_by(clusters.c.created.desc()).limit(limit))

    def save_cluster(self, cluster: Cluster, *, owner: str | None = None, events: tuple[Event, ...] = ()) -> Cluster:
        """Write the new value over the version it was made from; its events land in the same transaction."""
        return self.save(cluster, owner=owner, events=events)

    # jobs

    def add_job(
        self, job: Job, *, request_id: str | None = None, event: Event | None = None, then: Sequence[Job] = ()
    ) -> Job:
        """Number the job and those that follow it one after the other, and write them in one transaction; a request that was taken
        before answers its job.
        """
        with self.engine.begin() as db:
            if request_id is not None:
                same = sa.select(jobs).where(jobs.c.cluster_id == job.cluster_id, jobs.c.request_id == request_id)
                row = db.execute(same).first()
                if row is not None:
                    return _job(row)
            bump = (
                sa.update(clusters)
                .where(clusters.c.id == job.cluster_id, clusters.c.live_name.is_not(None))
                .values(next_job=clusters.c.next_job + 1 + len(then))
            )
            if db.execute(bump).rowcount != 1:
                raise Stale("the cluster is gone")
            after = db.execute(sa.select(clusters.c.next_job).where(clusters.c.id == job.cluster_id)).scalar_one()
            first = after - 1 - len(then)
            for number, one in enumerate((job, *then), start=first):
                new = msgspec.structs.replace(one, number=number, after=None if number == first else number - 1)
                db.execute(
                    sa.insert(jobs).values(
                        cluster_id=new.cluster_id,
                        number=number,
                        state=new.state,
                        open=True,
                        version=0,
                        request_id=request_id if number == first else None,
                        body=msgspec.json.encode(new),
                    )
                )
                if event is not None:
                    add_events(db, (msgspec.structs.replace(event, job=number),))
        self.written(job.cluster_id)
        return msgspec.structs.replace(job, number=first)

    def job(self, cluster_id: str, number: int) -> Job | None:
        """One job."""
        query = sa.select(jobs).where(jobs.c.cluster_id == cluster_id, jobs.c.number == number)
        with self.reader.connect() as db:
            row = db.execute(query).first()
        return None if row is None else _job(row)

    def has_request(self, cluster_id: str, request_id: str) -> bool:
        """Whether a request has become a job."""
        query = sa.select(jobs.c.number).where(jobs.c.cluster_id == cluster_id, jobs.c.request_id == request_id)
        with self.reader.connect() as db:
            return db.execute(query).first() is not None

    def jobs(self, cluster_id: str, *, open_only: bool = False, limit: int = 1000) -> list[Job]:
        """A cluster's jobs, oldest first; at most the latest `limit`."""
        query = sa.select(jobs).where(jobs.c.cluster_id == cluster_id)
        if open_only:
            query = query.where(jobs.c.open)
        query = query.order_by(jobs.c.number.desc()).limit(limit)
        with self.reader.connect() as db:
            return [_job(row) for row in db.execute(query)][::-1]

    def open_job_counts(self) -> dict[str, int]:
        """How many jobs of each cluster have not ended."""
        query = sa.select(jobs.c.cluster_id, sa.func.count()).where(jobs.c.open).group_by(jobs.c.cluster_id)
        with self.reader.connect() as db:
            return {row[0]: int(row[1]) for row in db.execute(query)}

    def save_job(self, job: Job, *, owner: str | None = None, events: tuple[Event, ...] = ()) -> Job:
        """Guarded like `save_cluster`; the owner is the cluster's."""
        new = msgspec.structs.replace(job, version=job.version + 1)
        guard = [
            jobs.c.cluster_id == job.cluster_id,
            jobs.c.number == job.number,
            jobs.c.version == job.version,
        ]
        if owner is not None:
            mine = sa.select(clusters.c.id).where(clusters.c.id == job.cluster_id, clusters.c.owner == owner)
            guard.append(sa.exists(mine))
        values = {
            "state": new.state,
            "open": not new.done,
            "version": new.version,
            "body": msgspec.json.encode(new),
        }
        with self.engine.begin() as db:
            if db.execute(sa.update(jobs).where(*guard).values(**values)).rowcount != 1:
                raise Stale(f"job {job.number} changed")
            add_events(db, events)
            if new.done and new.state is not JobState.SUCCEEDED:
                _cancel_followers(db, new)
        self.written(job.cluster_id)
        return new

    def update_job(
        self,
        cluster_id: str,
        number: int,
        change: Callable[[Job], Job],
        *,
        owner: str | None = None,
        text: str = "",
        detail: dict[str, str] | None = None,
    ) -> Job:
        """As `update`; `AlreadyEnded` for a job that has ended."""
        seen = -1
        for _ in range(UPDATE_TRIES):
            old = self.job(cluster_id, number)
            if old is None or old.version == seen:
                raise Stale(f"job {number} is gone or is driven by another server")
            if old.done:
                raise AlreadyEnded(f"job {number} has ended")
            new = change(old)
            if new == old:
                return old
            try:
                return self.save_job(new, owner=owner, events=change_event(new, text, detail))
            except Stale:
                seen = old.version
        raise Stale(f"job {number} keeps changing")

    # events

    def add_event(self, event: Event) -> None:
        """Append to the history."""
        with self.engine.begin() as db:
            add_events(db, (event,))
        self.written(event.cluster_id)

    def events(self, cluster_id: str, after: int = 0, limit: int = 500) -> list[Event]:
        """Events with an id above `after`, oldest first."""
        query = (
            sa.select(events)
            .where(events.c.cluster_id == cluster_id, events.c.id > after)
            .order_by(events.c.id)
            .limit(limit)
        )
        with self.reader.connect() as db:
            rows = db.execute(query).all()
        return [msgspec.structs.replace(from_json(row.body, Event), id=row.id) for row in rows]

    def clusters_with_events(self, after: int) -> tuple[int, set[str]]:
        """The latest event id, and which clusters have events between `after` and it; none at the first look (0)."""
        with self.reader.connect() as db:
            last = int(db.execute(sa.select(sa.func.max(events.c.id))).scalar() or 0)
            if after in (0, last):
                return last, set()
            found = db.execute(sa.select(events.c.cluster_id).where(events.c.id > after).distinct())
            return last, {row[0] for row in found}

    # tries to get hosts

    def tries(self) -> dict[Place, PlaceRecord]:
        """How they went, by place."""
        with self.reader.connect() as db:
            return {
                (row.provider, row.accelerator_type or None, row.zone or None, bool(row.spot)): PlaceRecord(
                    good=row.good, bad=row.bad, at=row.at
                )
                for row in db.execute(sa.select(tries))
            }

    def providers_used(self) -> tuple[str, ...]:
        """Every provider that was ever asked for hosts here."""
        with self.reader.connect() as db:
            past = {row[0] for row in db.execute(sa.select(tries.c.provider).distinct())}
        return tuple(sorted(past | {cluster.order.provider for cluster in self.live_clusters()}))

    def note_try(self, order: Order, good: bool, now: float) -> None:
        """One more, in each zone the order asked in."""
        with self.engine.begin() as db:
            for zone in order.zones if order.zones and not good else (order.zone,):
                provider, kind, _, spot = place_of(order)
                key = {"provider": provider, "accelerator_type": kind or "", "zone": zone or "", "spot": spot}
                same = [tries.c[name] == value for name, value in key.items()]
                row = db.execute(sa.select(tries).where(*same)).first()
                old = PlaceRecord(good=row.good, bad=row.bad, at=row.at) if row else PlaceRecord()
                values = msgspec.structs.asdict(old.plus(good, now))
                db.execute(
                    sa.update(tries).where(*same).values(**values) if row else sa.insert(tries).values(**key, **values)
                )


def sqlite_url(path: Path) -> str:
    """The URL of a SQLite file."""
    return f"sqlite:///{path}"


def _cancel_followers(db: sa.Connection, ended: Job) -> None:
    """In the transaction in which a job ends without success: what follows it is cancelled, and in turn what follows that."""
    open_rows = sa.select(jobs).where(jobs.c.cluster_id == ended.cluster_id, jobs.c.open).with_for_update()
    for follower in [job for row in db.execute(open_rows).all() if (job := _job(row)).after == ended.number]:
        new = transitions.cancel_follower(follower, ended)
        new = msgspec.structs.replace(new, version=follower.version + 1)
        same = (jobs.c.cluster_id == new.cluster_id, jobs.c.number == new.number)
        db.execute(sa.update(jobs).where(*same).values(version=new.version, body=msgspec.json.encode(new)))


def _job(row: sa.Row[tuple[object, ...]]) -> Job:
    return msgspec.structs.replace(from_json(row.body, Job), version=row.version)


__all__ = ["AlreadyEnded", "Stale", "Store", "open_store", "sqlite_url"]
