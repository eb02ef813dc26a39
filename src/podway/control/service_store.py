"""The part of the store that is about services: their rows and replicas, what gateways report, and usage.

Writes are guarded as those of clusters are (`leased_rows.py`). Every write is told to `written` under the service's id and under
ROUTES, for whoever waits for routes.
"""

from collections.abc import Callable

import msgspec
import sqlalchemy as sa

from podway.control.leased_rows import LeasedRows, change_event
from podway.control.service_records import (
    GatewayInfo,
    LoadSample,
    Replica,
    Service,
)
from podway.control.tables import gateways, loads, replicas, services, usage
from podway.control.writing import Stale, add_events
from podway.decoding import from_json
from podway.gateway.report import ModelUsage, ServiceLoad

ROUTES = "routes"  # what to wait for, to hear of every change of a service
LOADS_KEPT_S = 900.0
REPLICAS_KEPT = 200  # of those that ended, for each service


class ServiceRows(LeasedRows[Service]):
    """All reads and guarded writes of services: their rows as `leased_rows.py` has them, and what belongs to them."""

    def __init__(self, engine: sa.Engine, written: Callable[[str], None]) -> None:
        super().__init__(engine, Service, services, services.c.next_replica, replicas.c.service_id)
        self._written = written

    def _publish(self, key: str) -> None:
        self._written(key)
        self._written(ROUTES)

    def add(self, record: Service, text: str = "") -> None:
        """A new row; whoever waits for routes is told."""
        super().add(record, text)
        self._publish(record.id)

    def named(self, name: str) -> list[Service]:
        """Every service that ever had a name, oldest first."""
        return self._all(sa.select(services).where(services.c.name == name).order_by(services.c.created))

    # replicas

    def add_replica(self, replica: Replica, *, name: Callable[[int], str], owner: str | None = None) -> Replica:
        """Give the replica its number, and by it its cluster's name, and write it."""
        with self.engine.begin() as db:
            guard = [services.c.id == replica.service_id, services.c.live_name.is_not(None)]
            if owner is not None:
                guard.append(services.c.owner == owner)
            bump = sa.update(services).where(*guard).values(next_replica=services.c.next_replica + 1)
            if db.execute(bump).rowcount != 1:
                raise Stale("the service is gone or is driven by another server")
            query = sa.select(services.c.next_replica).where(services.c.id == replica.service_id)
            number = db.execute(query).scalar_one() - 1
            replica = msgspec.structs.replace(replica, number=number, cluster=name(number))
            db.execute(
                sa.insert(replicas).values(
                    service_id=replica.service_id,
                    number=number,
                    state=replica.state,
                    open=True,
                    version=0,
                    body=msgspec.json.encode(replica),
                )
            )
            old = (replicas.c.service_id == replica.service_id, ~replicas.c.open)
            db.execute(sa.delete(replicas).where(*old, replicas.c.number < number - REPLICAS_KEPT))
        self._publish(replica.service_id)
        return replica

    def replicas(self, service_id: str, *, open_only: bool = True) -> list[Replica]:
        """A service's replicas, oldest first."""
        query = sa.select(replicas).where(replicas.c.service_id == service_id).order_by(replicas.c.number)
        with self.reader.connect() as db:
            return [_replica(row) for row in db.execute(query.where(replicas.c.open) if open_only else query)]

    def open_replicas(self) -> list[Replica]:
        """Those of all services that have not ended."""
        query = sa.select(replicas).where(replicas.c.open).order_by(replicas.c.service_id, replicas.c.number)
        with self.reader.connect() as db:
            return [_replica(row) for row in db.execute(query)]

    def save_replica(self, replica: Replica, *, owner: str | None = None, text: str = "") -> Replica:
        """Guarded like `save`; the owner is the service's."""
        new = msgspec.structs.replace(replica, version=replica.version + 1)
        guard = [
            replicas.c.service_id == replica.service_id,
            replicas.c.number == replica.number,
            replicas.c.version == replica.version,
        ]
        if owner is not None:
            mine = sa.select(services.c.id).where(services.c.id == replica.service_id, services.c.owner == owner)
            guard.append(sa.exists(mine))
        values = {
            "state": new.state,
            "open": not new.done,
            "version": new.version,
            "body": msgspec.json.encode(new),
        }
        with self.engine.begin() as db:
            if db.execute(sa.update(replicas).where(*guard).values(**values)).rowcount != 1:
                raise Stale(f"replica {replica.number} changed")
            add_events(db, change_event(new, text))
        self._publish(replica.service_id)
        return new

    # what gateways report

    def add_report(
        self, gateway: GatewayInfo, found: tuple[ServiceLoad, ...], used: tuple[ModelUsage, ...]
    ) -> tuple[bool, set[str]]:
        """Keep a report; (False, …) for one that came before. Also the names of the services it is about."""
        with self.engine.begin() as db:
            row = db.execute(sa.select(gateways.c.sequence).where(gateways.c.id == gateway.id)).first()
            if row is not None and row[0] >= gateway.sequence:
                return False, set()
            values = {"url": gateway.url, "seen": gateway.seen, "sequence": gateway.sequence}
            if row is None:
                db.execute(sa.insert(gateways).values(id=gateway.id, **values))
            else:
                db.execute(sa.update(gateways).where(gateways.c.id == gateway.id).values(**values))
            for load in found:
                body = msgspec.json.encode(load)
                place = {"service": load.service, "gateway": gateway.id, "at": gateway.seen}
                db.execute(sa.insert(loads).values(**place, body=body))
            db.execute(sa.delete(loads).where(loads.c.at < gateway.seen - LOADS_KEPT_S))
            for one in used:
                _add_usage(db, one)
        return True, {load.service for load in found}

    def loads(self, service: str, since: float) -> list[LoadSample]:
        """What gateways saw of a service, oldest first."""
        query = sa.select(loads).where(loads.c.service == service, loads.c.at >= since).order_by(loads.c.at)
        with self.reader.connect() as db:
            return [
                LoadSample(gateway=row.gateway, at=row.at, load=from_json(row.body, ServiceLoad))
                for row in db.execute(query)
            ]

    def gateways(self) -> list[GatewayInfo]:
        """Those that ever reported, the latest first."""
        with self.reader.connect() as db:
            found = db.execute(sa.select(gateways).order_by(gateways.c.seen.desc()))
            return [GatewayInfo(id=row.id, url=row.url, seen=row.seen, sequence=row.sequence) for row in found]

    def usage(self, since_day: str) -> list[ModelUsage]:
        """What was used from a day on, oldest first."""
        query = sa.select(usage).where(usage.c.day >= since_day).order_by(usage.c.day, usage.c.user, usage.c.service)
        with self.reader.connect() as db:
            return [ModelUsage(**row._mapping) for row in db.execute(query)]


def _add_usage(db: sa.Connection, one: ModelUsage) -> None:
    same = [usage.c[name] == getattr(one, name) for name in ("day", "user", "service", "model")]
    counts = ("requests", "prompt_tokens", "completion_tokens")
    more = {name: usage.c[name] + getattr(one, name) for name in counts}
    if db.execute(sa.update(usage).where(*same).values(**more)).rowcount == 0:
        db.execute(sa.insert(usage).values(**{name: getattr(one, name) for name in ModelUsage.__struct_fields__}))


def _replica(row: sa.Row[tuple[object, ...]]) -> Replica:
    return msgspec.structs.replace(from_json(row.body, Replica), version=row.version)
