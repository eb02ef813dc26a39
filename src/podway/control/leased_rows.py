"""One table of named records that servers lease, clusters or services: its reads, its guarded writes, and who drives which row.

A row is written over the version that was read, and for what only its driver may change, under the driver's lease. A name is taken
for as long as its record lives (`live_name`, unique). Each record has numbered children in a table of their own (jobs, replicas); the
row counts them.
"""

import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
import sqlalchemy as sa

from podway.control.records import Cluster, Event, Job
from podway.control.service_records import Replica, Service
from podway.control.tables import READ_ONLY
from podway.control.writing import UPDATE_TRIES, Stale, add_events
from podway.decoding import from_json

R = TypeVar("R", Cluster, Service)


class LeasedRows(Generic[R]):
    """Reads and guarded writes of one such table."""

    def __init__(
        self, engine: sa.Engine, kind: type[R], table: sa.Table, count: sa.Column[Any], parent: sa.Column[Any]
    ) -> None:
        """`count`: the column with the number of the next child; `parent`: the column of the children that names the row."""
        self.engine = engine
        self.reader = engine.execution_options(**READ_ONLY)
        self._kind: type[R] = kind
        self._table, self._count, self._parent = table, count, parent
        self._what = kind.__name__.lower()
        self._is_live = table.c.live_name.is_not(None)

    def _publish(self, key: str) -> None:
        """Tell whoever waits that a row was written."""
        raise NotImplementedError

    # reading

    def get(self, key: str) -> R | None:
        """By id, alive or gone."""
        return self._first(sa.select(self._table).where(self._table.c.id == key))

    def find(self, name: str, *, gone: bool = False) -> R | None:
        """The live one of that name, or with `gone` the latest that ever had it."""
        columns = self._table.c
        if not gone:
            return self._first(sa.select(self._table).where(columns.live_name == name))
        ever = sa.select(self._table).where(columns.name == name)
        return self._first(ever.order_by(columns.created.desc()).limit(1))

    def live(self) -> list[R]:
        """Every one that is not gone, oldest first."""
        return self._all(sa.select(self._table).where(self._is_live).order_by(self._table.c.created))

    def _first(self, query: sa.Select[Any]) -> R | None:
        with self.reader.connect() as db:
            row = db.execute(query).first()
        return None if row is None else self._record(row)

    def _all(self, query: sa.Select[Any]) -> list[R]:
        with self.reader.connect() as db:
            return [self._record(row) for row in db.execute(query)]

    def _record(self, row: sa.Row[Any]) -> R:
        found: R = msgspec.structs.replace(from_json(row.body, self._kind), version=row.version)
        return found

    # writing

    def add(self, record: R, text: str = "") -> None:
        """A new row; the name must not be taken by a live one. Nobody can wait for it yet."""
        first = {"id": record.id, "name": record.name, "created": record.created, "lease_until": 0.0}
        try:
            with self.engine.begin() as db:
                values = {**first, **_columns(record), "version": 0, self._count.name: 1}
                db.execute(sa.insert(self._table).values(**values))
                add_events(db, change_event(record, text))
        except sa.exc.IntegrityError:
            raise Stale(f"{self._what} {record.name} exists") from None

    def save(self, record: R, *, owner: str | None = None, text: str = "", events: tuple[Event, ...] = ()) -> R:
        """Write the new value over the version it was made from; its events land in the same transaction."""
        new: R = msgspec.structs.replace(record, version=record.version + 1)
        guard = [self._table.c.id == record.id, self._table.c.version == record.version]
        if owner is not None:
            guard.append(self._table.c.owner == owner)
        with self.engine.begin() as db:
            if db.execute(sa.update(self._table).where(*guard).values(**_columns(new))).rowcount != 1:
                raise Stale(f"{self._what} {record.name} changed")
            add_events(db, (*events, *change_event(new, text)))
        self._publish(record.id)
        return new

    def update(self, key: str, change: Callable[[R], R], *, owner: str | None = None, text: str = "") -> R:
        """Apply a transition to the row as it is now, with `text` as its event; `Stale` when it is gone or not `owner`'s."""
        seen = -1
        for _ in range(UPDATE_TRIES):
            old = self.get(key)
            # The same version refused twice: the owner is another.
            if old is None or not old.live or old.version == seen:
                raise Stale(f"{self._what} {key} is gone or is driven by another server")
            new = change(old)
            if new == old:
                return old
            try:
                return self.save(new, owner=owner, text=text)
            except Stale:
                seen = old.version
        raise Stale(f"{self._what} {key} keeps changing")

    # leases

    def claim(self, key: str, owner: str, until: float, dead: tuple[str, ...] = ()) -> bool:
        """Take or keep the lease on a row; also from owners known to be dead, without waiting them out."""
        columns = self._table.c
        expired = columns.lease_until < time.time()
        free = sa.or_(columns.owner.is_(None), columns.owner == owner, expired, columns.owner.in_(dead))
        query = sa.update(self._table).where(columns.id == key, free).values(owner=owner, lease_until=until)
        with self.engine.begin() as db:
            return bool(db.execute(query).rowcount == 1)

    def leases(self) -> list[tuple[str, str | None, float]]:
        """(id, owner, until) of every live row."""
        columns = self._table.c
        query = sa.select(columns.id, columns.owner, columns.lease_until).where(self._is_live)
        with self.reader.connect() as db:
            return [(row[0], row[1], row[2]) for row in db.execute(query)]

    def pulse(self) -> dict[str, tuple[int, int, int]]:
        """A mark for each live row that changes whenever it or one of its open children was written."""
        versions = sa.select(self._table.c.id, self._table.c.version, self._count).where(self._is_live)
        children = self._parent.table.c
        work = sa.select(self._parent, sa.func.sum(children.version)).where(children.open).group_by(self._parent)
        with self.reader.connect() as db:
            moved = {row[0]: int(row[1] or 0) for row in db.execute(work)}
            return {row[0]: (row[1], row[2], moved.get(row[0], -1)) for row in db.execute(versions)}


def _columns(record: Cluster | Service) -> dict[str, object]:
    """What changes with a record."""
    return {
        "state": record.state,
        "version": record.version,
        "live_name": record.name if record.live else None,
        "body": msgspec.json.encode(record),
    }


def change_event(
    new: Cluster | Service | Job | Replica, text: str, detail: dict[str, str] | None = None
) -> tuple[Event, ...]:
    """The event of a change, if it has a text; of a child under the id of its row."""
    if not text:
        return ()
    key, number = (new.id, None) if isinstance(new, Cluster | Service) else _place_of(new)
    label = {"state": new.state.value, **(detail or {})}
    return (Event(time=time.time(), cluster_id=key, job=number, text=text, detail=label),)


def _place_of(child: Job | Replica) -> tuple[str, int]:
    return child.cluster_id if isinstance(child, Job) else child.service_id, child.number
