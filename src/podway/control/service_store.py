"""The part of the store that is about services: their rows and replicas, what gateways report, and usage.

Writes are guarded as those of clusters are (`store.py`): by the version that was read and, for what only a service's controller
may change, by the lease. Every write is told to `written` under the service's id and under ROUTES, for whoever waits for routes.
"""

import time
from collections.abc import Callable

import msgspec
import sqlalchemy as sa

from podway.control.records import Event
from podway.control.service_records import (
    GatewayInfo,
    LoadSample,
    Replica,
    ReplicaState,
    Service,
    ServiceState,
)
from podway.control.tables import READ_ONLY, gateways, loads, replicas, services, usage
from podway.control.writing import UPDATE_TRIES, Stale, add_events
from podway.decoding import from_json
from podway.gateway.report import ModelUsage, ServiceLoad

ROUTES = "routes"  # what to wait for, to hear of every change of a service
LOADS_KEPT_S = 900.0
REPLICAS_KEPT = 200  # of those that ended, for each service


class ServiceRows:
    """All reads and guarded writes of services."""

    def __init__(self, engine: sa.Engine, written: Callable[[str], None]) -> None:
        self.engine = engine
        self.reader = engine.execution_options(**READ_ONLY)
        self._written = written

    def _publish(self, service_id: str) -> None:
        self._written(service_id)
        self._written(ROUTES)

    # services

    def add(self, service: Service, text: str = "") -> None:
        """A new row; the name must not be taken by a live one."""
        try:
            with self.engine.begin() as db:
                db.execute(
                    sa.insert(services).values(
                        id=service.id,
                        name=service.name,
                        live_name=service.name,
                        state=service.state,
                        created=service.created,
                        version=0,
                        lease_until=0.0,
                        next_replica=1,
                        body=msgspec.json.encode(service),
                    )
                )
                add_events(db, _events(service, None, text))
        except sa.exc.IntegrityError:
            raise Stale(f"service {service.name} exists") from None
        self._publish(service.id)

    def get(self, service_id: str) -> Service | None:
        """By id, alive or gone."""
        with self.reader.connect() as db:
            row = db.execute(sa.select(services).where(services.c.id == service_id)).first()
        return None if row is None else _service(row)

    def find(self, name: str, *, gone: bool = False) -> Service | None:
        """The live service of that name, or with `gone` the latest that ever had it."""
        query = sa.select(services).where(services.c.live_name == name)
        if gone:
            query = sa.select(services).where(services.c.name == name).order_by(services.c.created.desc()).limit(1)
        with self.reader.connect() as db:
            row = db.execute(query).first()
        return None if row is None else _service(row)

    def live(self) -> list[Service]:
        """Every service that is not gone, oldest first."""
        query = sa.select(services).where(services.c.live_name.is_not(None)).order_by(services.c.created)
        with self.reader.connect() as db:
            return [_service(row) for row in db.execute(query)]

    def save(self, service: Service, *, owner: str | None = None, text: str = "") -> Service:
        """Write the new value over the version it was made from, with `text` as its event."""
        new = msgspec.structs.replace(service, version=service.version + 1)
        guard = [services.c.id == service.id, services.c.version == service.version]
        if owner is not None:
            guard.append(services.c.owner == owner)
        values = {
            "state": new.state,
            "version": new.version,
            "live_name": new.name if new.state is not ServiceState.GONE else None,
            "body": msgspec.json.encode(new),
        }
        with self.engine.begin() as db:
            if db.execute(sa.update(services).where(*guard).values(**values)).rowcount != 1:
                raise Stale(f"service {service.name} changed")
            add_events(db, _events(new, None, text))
        self._publish(service.id)
        return new

    def update(
        self, service_id: str, change: Callable[[Service], Service], *, owner: str | None = None, text: str = ""
    ) -> Service:
        """Apply a transition to the row as it is now; `Stale` when the service is gone or not `owner`'s."""
        seen = -1
        for _ in range(UPDATE_TRIES):
            old = self.get(service_id)
            if old is None or not old.live or old.version == seen:
                raise Stale(f"service {service_id} is gone or is driven by another server")
            new = change(old)
            if new == old:
                return old
            try:
                return self.save(new, owner=owner, text=text)
            except Stale:
                seen = old.version
        raise Stale(f"service {service_id} keeps changing")

    def claim(self, service_id: str, owner: str, until: float, dead: tuple[str, ...] = ()) -> bool:
        """Take or keep the lease on a service; also from owners known to be dead, without waiting them out."""
        free = sa.or_(
            services.c.owner.is_(None),
            services.c.owner == owner,
            services.c.lease_until < time.time(),
            services.c.owner.in_(dead),
        )
        query = sa.update(services).where(services.c.id == service_id, free).values(owner=owner, lease_until=until)
        with self.engine.begin() as db:
            return bool(db.execute(query).rowcount == 1)

    def leases(self) -> list[tuple[str, str | None, float]]:
        """(service id, owner, until) of every live service."""
        query = sa.select(services.c.id, services.c.owner, services.c.lease_until)
        with self.reader.connect() as db:
            found = db.execute(query.where(services.c.live_name.is_not(None)))
            return [(row[0], row[1], row[2]) for row in found]

    def pulse(self) -> dict[str, tuple[int, int, int]]:
        """A mark for each live service that changes whenever it or one of its open replicas was written."""
        versions = sa.select(services.c.id, services.c.version, services.c.next_replica).where(
            services.c.live_name.is_not(None)
        )
        work = (
            sa.select(replicas.c.service_id, sa.func.sum(replicas.c.version))
            .where(replicas.c.open)
            .group_by(replicas.c.service_id)
        )
        with self.reader.connect() as db:
            moved = {row[0]: int(row[1] or 0) for row in db.execute(work)}
            return {row[0]: (row[1], row[2], moved.get(row[0], -1)) for row in db.execute(versions)}

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
            add_events(db, _events(None, new, text))
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

    def named(self, name: str) -> list[Service]:
        """Every service that ever had a name, oldest first."""
        query = sa.select(services).where(services.c.name == name).order_by(services.c.created)
        with self.reader.connect() as db:
            return [_service(row) for row in db.execute(query)]


def _add_usage(db: sa.Connection, one: ModelUsage) -> None:
    same = [usage.c[name] == getattr(one, name) for name in ("day", "user", "service", "model")]
    counts = ("requests", "prompt_tokens", "completion_tokens")
    more = {name: usage.c[name] + getattr(one, name) for name in counts}
    if db.execute(sa.update(usage).where(*same).values(**more)).rowcount == 0:
        db.execute(sa.insert(usage).values(**{name: getattr(one, name) for name in ModelUsage.__struct_fields__}))


def _service(row: sa.Row[tuple[object, ...]]) -> Service:
    return msgspec.structs.replace(from_json(row.body, Service), version=row.version)


def _replica(row: sa.Row[tuple[object, ...]]) -> Replica:
    return msgspec.structs.replace(from_json(row.body, Replica), version=row.version)


def _events(service: Service | None, replica: Replica | None, text: str) -> tuple[Event, ...]:
    """The event of a change, if it has a text; of a replica under its service's id."""
    if not text:
        return ()
    state: ServiceState | ReplicaState
    if replica is not None:
        key, number, state = replica.service_id, replica.number, replica.state
    else:
        assert service is not None
        key, number, state = service.id, None, service.state
    return (Event(time=time.time(), cluster_id=key, job=number, text=text, detail={"state": state.value}),)
