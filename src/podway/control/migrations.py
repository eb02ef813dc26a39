"""From the schema of any released Podway to the present one, in numbered steps.

A database says its schema in `podway_info`. When a server opens an older one, every step from there on runs in one transaction:
all of them happen or none does. A newer one is refused: this Podway would not understand what it holds.

To change tables or stored records: change `tables.py` and `records.py`, append a step to MIGRATIONS, and keep a dump of the schema
that was (tests/control/fixtures/schema-N.sql); the test opens every dump. A step works on plain SQL and plain JSON, never on
today's record types, since those go on changing.
"""

import json
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from podway.control.tables import READ_ONLY, info, meta
from podway.errors import UserError

Json = dict[str, Any]


def prepare(engine: sa.Engine) -> None:
    """Create the tables or bring them up to date; a database that is ready is only read."""
    with engine.execution_options(**READ_ONLY).connect() as db:
        found = _schema(db) if sa.inspect(db).has_table(info.name) else None
    if found == SCHEMA:
        return
    with engine.begin() as db:
        if engine.dialect.name == "postgresql":
            db.execute(sa.text("SELECT pg_advisory_xact_lock(7236)"))  # two servers starting at once do this once
        found = _schema(db) if sa.inspect(db).has_table(info.name) else None
        if found is not None and found > SCHEMA:
            raise UserError(
                f"the database is of a newer Podway (schema {found}; this one knows {SCHEMA})",
                "update Podway on this machine: pip install -U podway",
            )
        if found is None:
            meta.create_all(db)
            db.execute(sa.insert(info).values(key="schema", value=str(SCHEMA)))
            return
        for step in MIGRATIONS[found - 1 :]:
            step(db)
        meta.create_all(db)  # tables that no step had to fill
        db.execute(sa.update(info).where(info.c.key == "schema").values(value=str(SCHEMA)))


def _schema(db: sa.Connection) -> int | None:
    found = db.execute(sa.select(info.c.value).where(info.c.key == "schema")).scalar()
    return None if found is None else int(found)


def _rewrite(db: sa.Connection, table: str, keys: tuple[str, ...], change: Callable[[Json], Json]) -> None:
    """Pass the JSON body of every row through `change`."""
    rows = sa.table(table, *(sa.column(key) for key in keys), sa.column("body", sa.LargeBinary))
    for row in db.execute(sa.select(rows)).all():
        same = [rows.c[key] == getattr(row, key) for key in keys]
        body = json.dumps(change(json.loads(row.body))).encode()
        db.execute(sa.update(rows).where(*same).values(body=body))


def _take(body: Json, *keys: str) -> Json:
    return {key: body.pop(key) for key in keys if key in body}


def _nest_records(db: sa.Connection) -> None:
    """1 -> 2: a cluster's search and billing, and a job's attempt and outcome, become records of their own; hosts name their cluster."""

    def cluster(body: Json) -> Json:
        search = ("candidates", "left", "untried", "attempts", "rounds", "retry", "clearing", "recovering")
        body["hosts"] = [{"cluster": body["name"], **host} for host in body.get("hosts", ())]
        body["search"] = _take(body, *search, "generation", "not_before")
        body["billing"] = _take(body, "up_since", "billed_s", "spent")
        return body

    def job(body: Json) -> Json:
        attempt = {"number": body.pop("attempt", 1)}
        attempt |= _take(body, "started", "pids", "skew_ms", "error_restarts", "recovering_since", "lost_generation")
        body["attempt"], body["outcome"] = attempt, _take(body, "ended", "exits")
        failed = [end["rank"] for end in body["outcome"].get("exits", ()) if end.get("code") != 0]
        named = [rank for rank in failed if f"(rank {rank}," in body.get("reason", "")]
        if named:
            body["outcome"]["blamed_rank"] = named[0]
        body["sealed_secrets"] = body.pop("secret_box", "")
        body.pop("down_after", None)
        return body

    _rewrite(db, "clusters", ("id",), cluster)
    _rewrite(db, "jobs", ("cluster_id", "number"), job)


def _give_tokens_roles(db: sa.Connection) -> None:
    """2 -> 3: a token has a name, a role in place of `admin`, and may expire. Those there are keep what they could do."""
    for column in ("name VARCHAR NOT NULL DEFAULT ''", "role VARCHAR NOT NULL DEFAULT 'member'", "expires FLOAT"):
        db.execute(sa.text(f"ALTER TABLE tokens ADD COLUMN {column}"))
    old = sa.table("tokens", sa.column("role"), sa.column("admin", sa.Boolean))
    db.execute(sa.update(old).where(old.c.admin).values(role="admin"))
    db.execute(sa.text("ALTER TABLE tokens DROP COLUMN admin"))


def _add_services(db: sa.Connection) -> None:
    """3 -> 4: services, their replicas, gateways and usage get tables of their own, which `prepare` creates empty."""


def _add_gateway_keys(db: sa.Connection) -> None:
    """4 -> 5: keys of the gateway get a table, which `prepare` creates empty."""


def _add_volumes_and_schedules(db: sa.Connection) -> None:
    """5 -> 6: volumes and schedules get tables, which `prepare` creates empty."""


def _add_pools_and_groups(db: sa.Connection) -> None:
    """6 -> 7: pools, their jobs, and job groups get tables, which `prepare` creates empty."""


MIGRATIONS: tuple[Callable[[sa.Connection], None], ...] = (
    _nest_records,
    _give_tokens_roles,
    _add_services,
    _add_gateway_keys,
    _add_volumes_and_schedules,
    _add_pools_and_groups,
)  # the first leads from 1 to 2
SCHEMA = 1 + len(MIGRATIONS)
