"""Waiting for a change, and reading it once: what makes thousands of open requests cost nothing while nothing happens.

`Notifier` counts the writes to each cluster (its *tick*). Whoever waits remembers the tick it has read up to and sleeps until the
count has moved, so a write between the read and the sleep is never missed and nobody polls. `LiveRows` reads rows for all who
wait: however many ask after a write, the database is read once.

A server that is alone on its database (the usual one) hears of every write before the writer is answered, so what `LiveRows` keeps
is what the database holds. Beside another server it hears of the other's writes a moment late: then a caller who asks for the first
time is answered from the database.
"""

import asyncio
import collections
import contextlib
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Executor
from typing import Any, TypeVar

from podway.control.records import Cluster, Event, Job
from podway.control.store import Store

T = TypeVar("T")
ROWS_KEPT = 10_000


class Subscription:
    """The clusters that were written since the last look, of whatever cluster."""

    def __init__(self) -> None:
        self._changed: set[str] = set()
        self._event = asyncio.Event()

    def add(self, cluster_id: str) -> None:
        """One was written."""
        self._changed.add(cluster_id)
        self._event.set()

    async def take(self, timeout: float) -> set[str]:
        """Those that were written, as soon as there is one; none when the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._event.wait()
        self._event.clear()
        found, self._changed = self._changed, set()
        return found


class Notifier:
    """A count for each cluster, and who waits for its next write."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ticks: dict[str, int] = collections.defaultdict(int)
        self._waiting: dict[str, set[asyncio.Future[None]]] = collections.defaultdict(set)
        self._subscriptions: set[Subscription] = set()

    def publish(self, cluster_id: str) -> None:
        """Something about this cluster was written; from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closing
            self._loop.call_soon_threadsafe(self._fire, cluster_id)

    def _fire(self, cluster_id: str) -> None:
        self._ticks[cluster_id] += 1
        for waiter in self._waiting.pop(cluster_id, ()):
            _release(waiter)
        for subscription in self._subscriptions:
            subscription.add(cluster_id)

    @contextlib.contextmanager
    def subscription(self) -> Iterator[Subscription]:
        """Hear of every write for a while."""
        found = Subscription()
        self._subscriptions.add(found)
        try:
            yield found
        finally:
            self._subscriptions.discard(found)

    def tick(self, cluster_id: str) -> int:
        """How many writes there were."""
        return self._ticks[cluster_id]

    async def wait(self, cluster_id: str, seen: int, timeout: float) -> None:
        """Until there is a write after the tick `seen`, or the time is over."""
        if self._ticks[cluster_id] != seen or timeout <= 0:
            return
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiting[cluster_id].add(waiter)
        timer = self._loop.call_later(timeout, _release, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            if cluster_id in self._waiting:
                self._waiting[cluster_id].discard(waiter)
                if not self._waiting[cluster_id]:
                    del self._waiting[cluster_id]


def _release(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():  # a write and the end of its time may come together
        waiter.set_result(None)


class LiveRows:
    """Rows as they are after the last write. `alone`: no other server writes to the database."""

    def __init__(self, store: Store, notifier: Notifier, executor: Executor, *, alone: bool) -> None:
        self.alone = alone
        self._store = store
        self._ids: dict[str, str] = {}  # of live clusters, by name
        self._notifier = notifier
        self._executor = executor
        self._read: collections.OrderedDict[Hashable, tuple[int, asyncio.Future[Any]]] = collections.OrderedDict()

    async def cluster(self, cluster_id: str) -> Cluster | None:
        """By id."""
        return await self._once(cluster_id, ("cluster", cluster_id), lambda: self._store.cluster(cluster_id))

    async def live_cluster(self, name: str) -> Cluster | None:
        """By name; None for one that is not live, or not known yet."""
        cluster = await self.cluster(self._ids[name]) if name in self._ids else None
        if cluster is None or not cluster.live:
            self._ids.pop(name, None)
            return None
        return cluster

    def learn(self, cluster: Cluster) -> None:
        """That a live cluster has its name."""
        if cluster.live and len(self._ids) < ROWS_KEPT:
            self._ids[cluster.name] = cluster.id

    async def job(self, cluster_id: str, number: int) -> Job | None:
        """By number."""
        return await self._once(cluster_id, ("job", cluster_id, number), lambda: self._store.job(cluster_id, number))

    async def events(self, cluster_id: str, after: int) -> list[Event]:
        """Those after an event id."""
        key = ("events", cluster_id, after)
        return await self._once(cluster_id, key, lambda: self._store.events(cluster_id, after))

    async def _once(self, cluster_id: str, key: Hashable, read: Callable[[], T]) -> T:
        # The tick is taken before the read: what is kept under it is never older than it says.
        tick = self._notifier.tick(cluster_id)
        known = self._read.get(key)
        if known is None or known[0] != tick or (known[1].done() and (known[1].cancelled() or known[1].exception())):
            known = (tick, asyncio.get_running_loop().run_in_executor(self._executor, read))
            self._read[key] = known
            self._read.move_to_end(key)
            if len(self._read) > ROWS_KEPT:
                self._read.popitem(last=False)
        if known[1].done():
            kept: T = known[1].result()
            return kept
        found: T = await asyncio.shield(known[1])
        return found
