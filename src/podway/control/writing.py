"""What every guarded write of the store needs: how a refused one is told, and how events land in its transaction."""

import msgspec
import sqlalchemy as sa

from podway.control.records import Event
from podway.control.tables import events

UPDATE_TRIES = 50
EVENTS_LOCK = 0x706F6477_65767473  # "podwevts": one of PostgreSQL's locks by number, for the end of a transaction
EVENTS_KEPT = 2000  # for each cluster or service; older ones are dropped as new ones come


class Stale(Exception):
    """The row changed since it was read, or is no longer ours."""


def add_events(db: sa.Connection, new: tuple[Event, ...]) -> None:
    """Append to the history, as the last thing in a transaction.

    Readers ask for what comes after the last id they saw, so ids must become visible in their order. SQLite has one writer at a time;
    PostgreSQL hands out ids before it commits, so whoever appends there waits for whoever did so before.
    """
    if new and db.dialect.name == "postgresql":
        db.execute(sa.select(sa.func.pg_advisory_xact_lock(EVENTS_LOCK)))
    for event in new:
        key = db.execute(
            sa.insert(events).values(cluster_id=event.cluster_id, body=msgspec.json.encode(event))
        ).inserted_primary_key[0]  # type: ignore[index]
        if key % 500 == 0:
            db.execute(
                sa.delete(events).where(events.c.cluster_id == event.cluster_id, events.c.id < key - EVENTS_KEPT)
            )
