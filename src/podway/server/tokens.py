"""Who a bearer token belongs to, from memory: a request is authenticated without a thread and without the database.

The tables are read when the server starts, after each change made here, and every few seconds for changes made by another server
on the same database. A token that is not known is looked for once more in the table, at most once a second for all of them.
"""

import asyncio
import logging
import threading
import time

from podway.control.access import Caller, Role
from podway.control.people import People, TokenRow, token_digest
from podway.errors import UserError

REFRESH_S = 2.0
MISS_S = 1.0

log = logging.getLogger("podway.tokens")


class TokenCache:
    """The tokens of a server, by digest."""

    def __init__(self, people: People, local_token: str, local_user: str) -> None:
        self._people = people
        digest = token_digest(local_token)
        # Whoever can read server.json is this machine's user, who owns the server.
        row = TokenRow(digest=digest, user=local_user, name="local", role="admin", created=time.time())
        self._local = {digest: row}
        self._known = self._local
        self._projects: dict[str, dict[str, Role]] = {}
        self._read_at = 0.0
        self._reading: asyncio.Lock = asyncio.Lock()
        self._loading = threading.Lock()

    def reload(self) -> None:
        """Read the tables; from any thread, one after the other: what was read earlier never replaces what was read later."""
        with self._loading:
            projects: dict[str, dict[str, Role]] = {}
            for member in self._people.members():
                projects.setdefault(member.user, {})[member.project] = member.role
            self._projects = projects
            self._known = {row.digest: row for row in self._people.tokens()} | self._local
            self._read_at = time.monotonic()

    async def caller(self, token: str) -> Caller:
        """Whose it is."""
        return self._caller(await self._find(token))

    def holder(self, digest: str) -> Caller:
        """Who holds a token now, by its digest."""
        return self._caller(self._known.get(digest))

    def holders(self) -> list[tuple[str, Caller]]:
        """The digest of every token that is valid now, and who holds it."""
        now = time.time()
        valid = [row for row in self._known.values() if row.expires is None or row.expires > now]
        return [(row.digest, self._caller(row)) for row in valid]

    def owner(self, user: str) -> Caller:
        """A person as the owner of keys, which never open more than a member may use."""
        return Caller(user=user, role="member", projects=self._projects.get(user, {}))

    def person(self, user: str) -> Caller | None:
        """Somebody with all that any of their valid tokens allows; None where none of them allows to launch."""
        roles = {caller.role: caller for _, caller in self.holders() if caller.user == user}
        return roles.get("admin") or roles.get("member")

    def _caller(self, found: TokenRow | None) -> Caller:
        if found is None:
            raise UserError("this token is not known here", "ask for a new one, then: podway login URL", status=401)
        if found.expires is not None and found.expires <= time.time():
            raise UserError("this token has expired", "ask for a new one, then: podway login URL", status=401)
        projects = self._projects.get(found.user, {})
        return Caller(user=found.user, role=found.role, token=found.name or found.id, projects=projects)

    async def _find(self, token: str) -> TokenRow | None:
        digest = token_digest(token)
        found = self._known.get(digest)
        if found is not None:
            return found
        async with self._reading:
            if digest not in self._known and time.monotonic() - self._read_at > MISS_S:
                await asyncio.to_thread(self.reload)
        return self._known.get(digest)

    async def keep_fresh(self) -> None:
        """For as long as the server runs."""
        while True:
            try:
                await asyncio.to_thread(self.reload)
            except Exception:
                log.exception("reading the tokens")
            await asyncio.sleep(REFRESH_S)
