"""Tells waiting streams that something about a cluster was written, so that they need not ask again and again."""

import asyncio
import collections
import contextlib


class Notifier:
    """One event for each cluster, renewed at every write."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: dict[str, asyncio.Event] = collections.defaultdict(asyncio.Event)

    def tell(self, cluster_id: str) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closing
            self._loop.call_soon_threadsafe(self._fire, cluster_id)

    def _fire(self, cluster_id: str) -> None:
        event = self._events.pop(cluster_id, None)
        if event is not None:
            event.set()

    async def wait(self, cluster_id: str, timeout: float) -> None:
        """Until the next write, or the time is over (another server's writes are seen that way)."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._events[cluster_id].wait(), timeout)
