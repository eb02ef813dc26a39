"""The rows of job groups: a guarded write for each change."""

from typing import Any

import msgspec
import sqlalchemy as sa

from podway.control.records import Grant
from podway.control.tables import READ_ONLY, job_groups
from podway.decoding import from_json
from podway.launch_options import LaunchRequest


class GroupMember(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One task of a group, and the cluster and job that it became."""

    name: str
    request: LaunchRequest
    sealed_secrets: bytes = b""
    primary: bool = True
    delay_s: float = 0.0
    cluster: str
    cluster_id: str | None = None  # None: to be launched
    job: int | None = None


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One job group."""

    name: str
    user: str
    project: str | None = None
    grants: tuple[Grant, ...] = ()
    members: tuple[GroupMember, ...]
    released: bool = False  # all hosts were there, and the jobs may run
    primary_ended: float | None = None  # when the last primary task had ended
    cancel: bool = False
    reason: str = ""  # why it was cancelled
    ended: float | None = None
    created: float
    request_id: str | None = None  # of its launch: sent again because the answer was lost, it is the same group
    version: int = 1


class GroupRows:
    """The part of the store that is about job groups."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._reader = engine.execution_options(**READ_ONLY)

    def put(self, record: GroupRecord) -> bool:
        """A new row, in the place of an ended one of the same name; False where that one is open."""
        same = job_groups.c.name == record.name
        with self._engine.begin() as db:
            found = db.execute(sa.select(job_groups).where(same)).first()
            if found is not None and _record(found).ended is None:
                return False
            db.execute(sa.delete(job_groups).where(same))
            db.execute(sa.insert(job_groups).values(name=record.name, version=1, body=msgspec.json.encode(record)))
        return True

    def get(self, name: str) -> GroupRecord | None:
        """By name."""
        with self._reader.connect() as db:
            row = db.execute(sa.select(job_groups).where(job_groups.c.name == name)).first()
        return None if row is None else _record(row)

    def all(self) -> list[GroupRecord]:
        """By name."""
        with self._reader.connect() as db:
            return [_record(row) for row in db.execute(sa.select(job_groups).order_by(job_groups.c.name)).all()]

    def save(self, record: GroupRecord) -> GroupRecord | None:
        """Over the version it was made from; None where it changed since."""
        new = msgspec.structs.replace(record, version=record.version + 1)
        same = (job_groups.c.name == record.name, job_groups.c.version == record.version)
        with self._engine.begin() as db:
            values = {"version": new.version, "body": msgspec.json.encode(new)}
            done = db.execute(sa.update(job_groups).where(*same).values(**values))
        return new if done.rowcount == 1 else None

    def delete(self, name: str) -> None:
        """Forget an ended one."""
        with self._engine.begin() as db:
            db.execute(sa.delete(job_groups).where(job_groups.c.name == name))


def _record(row: sa.Row[Any]) -> GroupRecord:
    return msgspec.structs.replace(from_json(row.body, GroupRecord), version=row.version)
