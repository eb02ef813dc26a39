"""The rows of volumes: a guarded write for each change."""

from typing import Any, Literal

import msgspec
import sqlalchemy as sa

from podway.control.records import Grant
from podway.control.tables import READ_ONLY, volumes
from podway.control.writing import Stale
from podway.decoding import from_json
from podway.providers import CreatedVolume
from podway.task.volumes import VolumeSpec


class VolumeRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One volume: what was asked for, and what its provider made of it."""

    name: str
    user: str
    project: str | None = None
    grants: tuple[Grant, ...] = ()
    state: Literal["creating", "ready", "deleting"] = "creating"
    spec: VolumeSpec
    made: CreatedVolume | None = None
    created: float
    version: int = 1

    @property
    def provider(self) -> str:
        """Who has it."""
        return self.spec.placement.provider or ""


class VolumeRows:
    """The part of the store that is about volumes."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._reader = engine.execution_options(**READ_ONLY)

    def add(self, record: VolumeRecord) -> bool:
        """A new row; False where the name is taken."""
        try:
            with self._engine.begin() as db:
                db.execute(
                    sa.insert(volumes).values(name=record.name, created=record.created, version=1, body=_body(record))
                )
        except sa.exc.IntegrityError:
            return False
        return True

    def get(self, name: str) -> VolumeRecord | None:
        """By name."""
        with self._reader.connect() as db:
            row = db.execute(sa.select(volumes).where(volumes.c.name == name)).first()
        return None if row is None else _record(row)

    def all(self) -> list[VolumeRecord]:
        """Oldest first."""
        with self._reader.connect() as db:
            return [_record(row) for row in db.execute(sa.select(volumes).order_by(volumes.c.created))]

    def save(self, record: VolumeRecord) -> VolumeRecord:
        """Over the version it was made from."""
        new = msgspec.structs.replace(record, version=record.version + 1)
        same = (volumes.c.name == record.name, volumes.c.version == record.version)
        with self._engine.begin() as db:
            done = db.execute(sa.update(volumes).where(*same).values(version=new.version, body=_body(new)))
        if done.rowcount != 1:
            raise Stale(record.name)
        return new

    def delete(self, name: str) -> None:
        """The volume is no more."""
        with self._engine.begin() as db:
            db.execute(sa.delete(volumes).where(volumes.c.name == name))


def _body(record: VolumeRecord) -> bytes:
    return msgspec.json.encode(record)


def _record(row: sa.Row[Any]) -> VolumeRecord:
    return msgspec.structs.replace(from_json(row.body, VolumeRecord), version=row.version)
