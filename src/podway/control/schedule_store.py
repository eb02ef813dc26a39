"""The rows of schedules: a guarded write for each change."""

from typing import Any, Literal

import msgspec
import sqlalchemy as sa

from podway.control.records import Grant
from podway.control.tables import READ_ONLY, schedules
from podway.decoding import from_json
from podway.launch_options import LaunchRequest


class ScheduleRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One schedule."""

    name: str
    user: str
    project: str | None = None
    grants: tuple[Grant, ...] = ()
    request: LaunchRequest
    sealed_secrets: bytes = b""
    created: float
    next_at: float
    due: float | None = None  # claimed: the run of this time is being started
    last_at: float | None = None
    last: Literal["", "started", "skipped", "failed"] = ""
    reason: str = ""
    version: int = 1


class ScheduleRows:
    """The part of the store that is about schedules."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._reader = engine.execution_options(**READ_ONLY)

    def put(self, record: ScheduleRecord) -> None:
        """A new row, in the place of one of the same name; what was read of that one can no longer be saved."""
        same = schedules.c.name == record.name
        with self._engine.begin() as db:
            known = db.execute(sa.select(schedules.c.version).where(same)).scalar() or 0
            db.execute(sa.delete(schedules).where(same))
            db.execute(sa.insert(schedules).values(name=record.name, version=known + 1, **_columns(record)))

    def get(self, name: str) -> ScheduleRecord | None:
        """By name."""
        with self._reader.connect() as db:
            row = db.execute(sa.select(schedules).where(schedules.c.name == name)).first()
        return None if row is None else _record(row)

    def all(self, due_before: float | None = None) -> list[ScheduleRecord]:
        """The one that is due next first."""
        asked = sa.select(schedules).order_by(schedules.c.next_at)
        with self._reader.connect() as db:
            rows = db.execute(asked if due_before is None else asked.where(schedules.c.next_at <= due_before)).all()
        return [_record(row) for row in rows]

    def save(self, record: ScheduleRecord) -> ScheduleRecord | None:
        """Over the version it was made from; None where it changed since."""
        new = msgspec.structs.replace(record, version=record.version + 1)
        same = (schedules.c.name == record.name, schedules.c.version == record.version)
        with self._engine.begin() as db:
            done = db.execute(sa.update(schedules).where(*same).values(version=new.version, **_columns(new)))
        return new if done.rowcount == 1 else None

    def delete(self, name: str) -> None:
        """It starts nothing any more."""
        with self._engine.begin() as db:
            db.execute(sa.delete(schedules).where(schedules.c.name == name))


def _columns(record: ScheduleRecord) -> dict[str, object]:
    return {"next_at": record.next_at, "body": msgspec.json.encode(record)}


def _record(row: sa.Row[Any]) -> ScheduleRecord:
    return msgspec.structs.replace(from_json(row.body, ScheduleRecord), version=row.version)
