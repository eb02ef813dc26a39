"""Who may use a server: tokens, of which only digests are kept."""

import hashlib
import secrets
import time

import msgspec
import sqlalchemy as sa

from podway.control.tables import READ_ONLY, tokens


class TokenRow(msgspec.Struct, frozen=True, kw_only=True):
    """One token of one person; of the token itself only a digest is kept."""

    digest: str
    user: str
    admin: bool
    created: float


def token_digest(token: str) -> str:
    """What is kept of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


class People:
    """The part of the store that is about people."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._reader = engine.execution_options(**READ_ONLY)

    def add_token(self, user: str, *, admin: bool = False) -> str:
        """A new token for a person; it is shown once."""
        token = "pw_" + secrets.token_urlsafe(32)
        row = {"digest": token_digest(token), "user": user, "created": time.time(), "admin": admin}
        with self._engine.begin() as db:
            db.execute(sa.insert(tokens).values(**row))
        return token

    def tokens(self) -> list[TokenRow]:
        """Every token, oldest first."""
        with self._reader.connect() as db:
            rows = db.execute(sa.select(tokens).order_by(tokens.c.created)).all()
        return [TokenRow(digest=row.digest, user=row.user, admin=bool(row.admin), created=row.created) for row in rows]

    def revoke(self, user: str) -> int:
        """Forget every token of a person."""
        with self._engine.begin() as db:
            return int(db.execute(sa.delete(tokens).where(tokens.c.user == user)).rowcount)
