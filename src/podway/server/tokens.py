"""Who a bearer token belongs to, from memory: a request is authenticated without a thread and without the database.

The table is read when the server starts, after each change made here, and every few seconds for changes made by another server
on the same database. A token that is not known is looked for once more in the table, at most once a second for all of them.
"""

import asyncio
import logging
import time

from podway.control.people import People, TokenRow, token_digest

REFRESH_S = 2.0
MISS_S = 1.0

log = logging.getLogger("podway.tokens")


class TokenCache:
    """The tokens of a server, by digest."""

    def __init__(self, people: People, local_token: str, local_user: str) -> None:
        self._people = people
        digest = token_digest(local_token)
        # Whoever can read server.json is this machine's user, who owns the server.
        self._local = {digest: TokenRow(digest=digest, user=local_user, admin=True, created=time.time())}
        self._known = self._local
        self._read_at = 0.0
        self._reading: asyncio.Lock = asyncio.Lock()

    def reload(self) -> None:
        """Read the table; from any thread."""
        self._known = {row.digest: row for row in self._people.tokens()} | self._local
        self._read_at = time.monotonic()

    async def find(self, token: str) -> TokenRow | None:
        """Whose it is, or None."""
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
