"""Resources in a cloud that carry this Podway's mark and that no cluster's row accounts for.

There should never be any: a row is written before anything is made, and is closed only when the provider says that nothing is
left. So what is found without a row (a lost database, a bug, somebody's own hand) is told, never deleted unasked:

1. when the server starts and once in a while, every provider that was ever used here is asked what is there; a stray seen for the
   first time is logged and written as an event;
2. `podway status --refresh` asks every provider at once, and `podway down --purge` deletes the strays.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from podway.control.records import Event
from podway.control.store import Store
from podway.errors import ProviderError, UserError
from podway.provider_table import provider_rows
from podway.providers import OwnedResource, Provider, SupportsListing

EVERY_S = 900.0
FIRST_S = 5.0  # after the start, when the controllers have taken up their clusters
PURGE_S = 300.0  # a slice takes minutes to delete
ANSWER_S = PURGE_S + 120.0
HISTORY = "strays"  # their events have no cluster

log = logging.getLogger("podway.strays")


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What one look at the providers found: (provider, resource) pairs, and why a provider could not be asked."""

    strays: tuple[tuple[str, OwnedResource], ...] = ()
    unasked: dict[str, str] = {}


class Strays:
    """Looks, tells and deletes. The `_now` methods are for threads; the work is done on the server's loop."""

    def __init__(self, store: Store, provider: Callable[[str], Provider], loop: asyncio.AbstractEventLoop) -> None:
        self.store = store
        self.provider = provider
        self.last = Look()
        self._loop = loop
        self._told: set[tuple[str, str, str | None]] = set()

    def look_now(self) -> Look:
        """Ask every provider there is."""
        return self._wait(self.look(tuple(provider_rows())))

    def purge_now(self) -> Look:
        """Delete every stray; what is left."""
        return self._wait(self.purge())

    def _wait(self, work: Coroutine[Any, Any, Look]) -> Look:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(ANSWER_S)

    async def keep_looking(self) -> None:
        """For as long as the server runs."""
        await asyncio.sleep(FIRST_S)
        while True:
            try:
                await self.look(await asyncio.to_thread(self.store.providers_used))
            except Exception:
                log.exception("looking for strays")
            await asyncio.sleep(EVERY_S)

    async def look(self, names: tuple[str, ...]) -> Look:
        """Ask these providers. A provider that was never used here and is not set up is not worth a word."""
        used = await asyncio.to_thread(self.store.providers_used)
        known = await self._known()
        strays: list[tuple[str, OwnedResource]] = []
        unasked: dict[str, str] = {}
        for name in names:
            try:
                provider = await asyncio.to_thread(self.provider, name)  # it may have to be imported first
                if isinstance(provider, SupportsListing):
                    listed = await provider.list_resources()
                    strays += [(name, found) for found in listed if found.owner == provider.owner]
            except UserError as error:
                if name in used:
                    unasked[name] = error.what
            except (ProviderError, OSError) as error:
                unasked[name] = str(error)
        known |= await self._known()  # a cluster made or gone while we looked is no stray
        rest = tuple((name, found) for name, found in strays if (name, found.cluster) not in known)
        self.last = Look(strays=rest, unasked=unasked)
        await self._tell()
        return self.last

    async def purge(self) -> Look:
        """Delete them, again and again until nothing is left or the time is over."""
        look = await self.look(tuple(provider_rows()))
        until = time.monotonic() + PURGE_S
        errors: dict[str, str] = {}
        while look.strays and time.monotonic() < until:
            errors = {}
            for name, found in look.strays:
                try:
                    provider = self.provider(name)
                    if isinstance(provider, SupportsListing):
                        await provider.purge(found)
                except (ProviderError, UserError, OSError) as error:
                    errors[name] = f"{found.name}: {error}"
            await asyncio.sleep(0.2 if not errors else 2.0)
            look = await self.look(tuple(provider_rows()))
        return msgspec.structs.replace(look, unasked={**look.unasked, **errors})

    async def _known(self) -> set[tuple[str, str]]:
        """(provider, cluster) of every live row, wherever it was tried for."""
        live = await asyncio.to_thread(self.store.live_clusters)
        known = {(cluster.order.provider, cluster.name) for cluster in live}
        return known | {(attempt.provider, cluster.name) for cluster in live for attempt in cluster.search.attempts}

    async def _tell(self) -> None:
        """Once for each: in the log, and as an event."""
        for name, found in self.last.strays:
            key = (name, found.name, found.zone)
            if key in self._told:
                continue
            self._told.add(key)
            where = f" in {found.zone}" if found.zone else ""
            text = f"{name}: {found.kind} {found.name}{where} ({found.condition}) belongs to no cluster: podway down --purge"
            log.warning("%s", text)
            event = Event(time=time.time(), cluster_id=HISTORY, kind="error", text=text)
            await asyncio.to_thread(self.store.add_event, event)
