"""Who may use a server, and what they did: tokens (of which only digests are kept), members of projects, and the audit log."""

import hashlib
import secrets
import time
from typing import Any

import msgspec
import sqlalchemy as sa

from podway.control.access import Role
from podway.control.tables import READ_ONLY, audit, members, tokens

AUDIT_KEPT = 100_000
ID_DIGITS = 12


class TokenRow(msgspec.Struct, frozen=True, kw_only=True):
    """One token of one person; of the token itself only a digest is kept."""

    digest: str
    user: str
    name: str
    role: Role
    created: float
    expires: float | None = None

    @property
    def id(self) -> str:
        """What it is called in lists."""
        return self.digest[:ID_DIGITS]


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A person in a project."""

    project: str
    user: str
    role: Role


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that somebody did or tried: the request, and how it was answered."""

    id: int = 0
    time: float
    user: str
    token: str
    address: str
    action: str
    target: str
    status: int


def token_digest(token: str) -> str:
    """What is kept of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


class People:
    """The part of the store that is about people."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._reader = engine.execution_options(**READ_ONLY)

    def _rows(self, query: sa.Select[Any]) -> list[dict[str, Any]]:
        with self._reader.connect() as db:
            return [dict(row._mapping) for row in db.execute(query)]

    # tokens

    def add_token(self, user: str, role: Role = "member", name: str = "", lifetime_s: float | None = None) -> str:
        """A new token for a person; it is shown once."""
        token, now = "pw_" + secrets.token_urlsafe(32), time.time()
        row = TokenRow(
            digest=token_digest(token),
            user=user,
            name=name,
            role=role,
            created=now,
            expires=None if lifetime_s is None else now + lifetime_s,
        )
        with self._engine.begin() as db:
            db.execute(sa.insert(tokens).values(**msgspec.structs.asdict(row)))
        return token

    def tokens(self) -> list[TokenRow]:
        """Every token, oldest first."""
        return [TokenRow(**row) for row in self._rows(sa.select(tokens).order_by(tokens.c.created))]

    def revoke(self, user: str, token_id: str | None = None) -> int:
        """Forget every token of a person, or the one with this id."""
        query = sa.delete(tokens).where(tokens.c.user == user)
        if token_id is not None:
            query = query.where(sa.func.substr(tokens.c.digest, 1, ID_DIGITS) == token_id)
        with self._engine.begin() as db:
            return int(db.execute(query).rowcount)

    # projects

    def members(self) -> list[Member]:
        """Everybody in every project."""
        return [Member(**row) for row in self._rows(sa.select(members).order_by(members.c.project, members.c.user))]

    def set_member(self, project: str, user: str, role: Role | None) -> None:
        """Put a person into a project with this role, or (None) take them out."""
        same = (members.c.project == project, members.c.user == user)
        with self._engine.begin() as db:
            db.execute(sa.delete(members).where(*same))
            if role is not None:
                db.execute(sa.insert(members).values(project=project, user=user, role=role))

    # the audit log

    def record(self, entry: AuditEntry) -> None:
        """Append; the oldest entries go when there are very many."""
        values = msgspec.structs.asdict(entry)
        del values["id"]
        with self._engine.begin() as db:
            key = db.execute(sa.insert(audit).values(**values)).inserted_primary_key
            if key is not None and key[0] % 1000 == 0:
                db.execute(sa.delete(audit).where(audit.c.id <= key[0] - AUDIT_KEPT))

    def audit(self, limit: int, user: str | None = None) -> list[AuditEntry]:
        """The latest entries, latest first."""
        query = sa.select(audit).order_by(audit.c.id.desc()).limit(limit)
        if user is not None:
            query = query.where(audit.c.user == user)
        return [AuditEntry(**row) for row in self._rows(query)]
