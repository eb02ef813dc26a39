"""Resources in a cloud that carry this Podway's label and that no cluster's or volume's row accounts for.

There should never be any: a row is written before anything is created, and is closed only when the provider says that nothing is
left. So what is found without a row (a lost database, a bug, a person's own doing) is reported, never deleted unasked:

1. when the server starts and once in a while, every provider that was ever used here is asked what is there; an orphan seen for the
   first time is logged and written as an event;
2. `podway status --refresh` asks every provider at once, and `podway down --purge` deletes the orphans.
"""

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from podway.control.records import Event
from podway.control.store import Store
from podway.errors import ProviderError, UserError
from podway.provider_table import provider_rows
from podway.providers import OwnedResource, Provider, SupportsListing

EVERY_S = 900.0
FIRST_S = 5.0  # after the start, when the controllers have taken up their clusters
PURGE_S = 300.0  # a slice takes minutes to delete
PROVIDER_S = 60.0  # a provider that has not answered by then counts as unreachable
HISTORY = "orphans"  # the history their events are in, in the place of a cluster's id

log = logging.getLogger("podway.orphans")


class OrphanReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one scan of the providers found: (provider, resource) pairs, and why a provider could not be asked."""

    orphans: tuple[tuple[str, OwnedResource], ...] = ()
    unreachable: dict[str, str] = {}


class OrphanScanner:
    """Scans, reports and deletes. However many ask at once, the providers are asked once."""

    def __init__(self, store: Store, provider: Callable[[str], Provider]) -> None:
        self.store = store
        self.provider = provider
        self.last = OrphanReport()
        self._reported: set[tuple[str, str, str | None]] = set()
        self._scanning: asyncio.Task[OrphanReport] | None = None
        self._purging: asyncio.Task[OrphanReport] | None = None

    async def scan_all(self) -> OrphanReport:
        """Ask every provider there is."""
        if self._scanning is None or self._scanning.done():
            self._scanning = asyncio.create_task(self.scan(tuple(provider_rows())))
        return await asyncio.shield(self._scanning)

    async def purge(self, patience_s: float = PURGE_S) -> tuple[OrphanReport, bool]:
        """Delete every orphan: what is left, and whether that goes on (`patience_s` is how long the caller waits)."""
        if self._purging is None or self._purging.done():
            self._purging = asyncio.create_task(self._purge())
        await asyncio.wait([self._purging], timeout=patience_s)
        return (self._purging.result(), False) if self._purging.done() else (self.last, True)

    async def keep_scanning(self) -> None:
        """For as long as the server runs."""
        await asyncio.sleep(FIRST_S)
        while True:
            try:
                await self.scan(await asyncio.to_thread(self.store.providers_used))
            except Exception:
                log.exception("scanning for orphans")
            await asyncio.sleep(EVERY_S)

    async def scan(self, names: tuple[str, ...]) -> OrphanReport:
        """Ask these providers, all at once. One that was never used here and is not set up is not worth a word."""
        used = await asyncio.to_thread(self.store.providers_used)
        known = await self._known()
        unreachable: dict[str, str] = {}

        async def ask(name: str) -> list[tuple[str, OwnedResource]]:
            try:
                async with asyncio.timeout(PROVIDER_S):
                    provider = await asyncio.to_thread(self.provider, name)  # it may have to be imported first
                    if isinstance(provider, SupportsListing):
                        listed = await provider.list_resources()
                        return [(name, found) for found in listed if found.owner == provider.owner]
            except UserError as error:
                if name in used:
                    unreachable[name] = error.what
            except TimeoutError:
                unreachable[name] = f"no answer within {PROVIDER_S:g} s"
            except (ProviderError, OSError) as error:
                unreachable[name] = str(error)
            return []

        found = [pair for pairs in await asyncio.gather(*map(ask, names)) for pair in pairs]
        known |= await self._known()  # a cluster created or gone while we looked is not an orphan
        orphans = tuple((name, resource) for name, resource in found if _accountable(name, resource) not in known)
        self.last = OrphanReport(orphans=orphans, unreachable=unreachable)
        await self._report()
        return self.last

    async def _purge(self) -> OrphanReport:
        """Delete them, again and again until nothing is left or the time is over."""
        report = await self.scan(tuple(provider_rows()))
        until = time.monotonic() + PURGE_S
        errors: dict[str, str] = {}
        while report.orphans and time.monotonic() < until:
            errors = {}
            for name, found in report.orphans:
                try:
                    provider = self.provider(name)
                    if isinstance(provider, SupportsListing):
                        await provider.purge(found)
                except (ProviderError, UserError, OSError) as error:
                    errors[name] = f"{found.name}: {error}"
            await asyncio.sleep(0.2 if not errors else 2.0)
            report = await self.scan(tuple(provider_rows()))
        return msgspec.structs.replace(report, unreachable={**report.unreachable, **errors})

    async def _known(self) -> set[tuple[str, str, str]]:
        """What the rows account for: clusters that are live, wherever they were tried for, and volumes."""
        live = await asyncio.to_thread(self.store.live_clusters)
        volumes = await asyncio.to_thread(self.store.volumes.all)
        known = {(cluster.order.provider, "cluster", cluster.name) for cluster in live}
        known |= {(attempt.provider, "cluster", one.name) for one in live for attempt in one.search.attempts}
        return known | {(volume.provider, "volume", volume.name) for volume in volumes}

    async def _report(self) -> None:
        """Once for each: in the log, and as an event."""
        for name, found in self.last.orphans:
            key = (name, found.name, found.zone)
            if key in self._reported:
                continue
            self._reported.add(key)
            where, what = f" in {found.zone}" if found.zone else "", "volume" if found.volume else "cluster"
            text = f"{name}: {found.kind} {found.name}{where} ({found.condition}) belongs to no {what}: podway down --purge"
            log.warning("%s", text)
            event = Event(time=time.time(), cluster_id=HISTORY, kind="error", text=text)
            await asyncio.to_thread(self.store.add_event, event)


def _accountable(provider: str, resource: OwnedResource) -> tuple[str, str, str]:
    """The row that should know it."""
    return (provider, "volume", resource.volume) if resource.volume else (provider, "cluster", resource.cluster)
