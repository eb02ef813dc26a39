"""Keys for the gateway that are not tokens: they open services and nothing else, and may have limits.

A key belongs to a person and opens, of what they may use, the services it names (or all). It is counted by itself: its requests
stand in the usage as `OWNER/NAME`. Only a digest of it is kept.
"""

import secrets
import time
from typing import Any

import msgspec
import sqlalchemy as sa

from podway.control.people import ID_DIGITS, token_digest
from podway.control.tables import READ_ONLY, gateway_keys


class GatewayKey(msgspec.Struct, frozen=True, kw_only=True):
    """One key, by its digest."""

    digest: str
    user: str
    name: str
    created: float
    expires: float | None = None
    services: tuple[str, ...] | None = None  # None: all that its owner may use
    requests_per_minute: float | None = None
    tokens_per_day: int | None = None

    @property
    def id(self) -> str:
        """What it is called in lists."""
        return self.digest[:ID_DIGITS]

    @property
    def label(self) -> str:
        """Who its requests are counted for."""
        return f"{self.user}/{self.name}"


class GatewayKeys:
    """The part of the store that is about keys."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._reader = engine.execution_options(**READ_ONLY)

    def add(self, user: str, name: str, lifetime_s: float | None = None, **limits: Any) -> str | None:
        """A new key, shown once; None where its owner has one of that name."""
        key, now = "pk_" + secrets.token_urlsafe(32), time.time()
        expires = None if lifetime_s is None else now + lifetime_s
        row = GatewayKey(digest=token_digest(key), user=user, name=name, created=now, expires=expires, **limits)
        values = msgspec.structs.asdict(row)
        values["services"] = None if row.services is None else msgspec.json.encode(row.services).decode()
        try:
            with self._engine.begin() as db:
                db.execute(sa.insert(gateway_keys).values(**values))
        except sa.exc.IntegrityError:
            return None
        return key

    def all(self) -> list[GatewayKey]:
        """Oldest first."""
        with self._reader.connect() as db:
            rows = [dict(row._mapping) for row in db.execute(sa.select(gateway_keys).order_by(gateway_keys.c.created))]
        for row in rows:
            row["services"] = None if row["services"] is None else tuple(msgspec.json.decode(row["services"]))
        return [GatewayKey(**row) for row in rows]

    def delete(self, digest: str) -> None:
        """It opens nothing any more."""
        with self._engine.begin() as db:
            db.execute(sa.delete(gateway_keys).where(gateway_keys.c.digest == digest))
