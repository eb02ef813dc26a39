"""Waiting for writes, and rows that are read once after each of them."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from podway.control import transitions
from podway.control.records import Cluster, ClusterState
from podway.control.store import Store, open_store, sqlite_url
from podway.server.notify import LiveRows, Notifier
from tests.control.samples import cluster


def run(tmp_path: Path, scenario: Callable[[Store, Notifier, LiveRows], Awaitable[None]]) -> None:
    async def main() -> None:
        store = open_store(sqlite_url(tmp_path / "p.db"))
        notifier = Notifier(asyncio.get_running_loop())
        store.written = notifier.publish
        with ThreadPoolExecutor(2) as threads:
            await asyncio.wait_for(scenario(store, notifier, LiveRows(store, notifier, threads, alone=True)), 60)
        store.engine.dispose()

    asyncio.run(main())


def counted(store: Store) -> list[str]:
    """The reads of clusters from now on."""
    reads: list[str] = []
    read = store.cluster

    def counting(cluster_id: str) -> Cluster | None:
        reads.append(cluster_id)
        return read(cluster_id)

    store.cluster = counting  # type: ignore[method-assign]
    return reads


def test_a_cluster_is_read_once_after_each_write(tmp_path: Path) -> None:
    async def scenario(store: Store, notifier: Notifier, rows: LiveRows) -> None:
        made = cluster(name="a")
        store.add_cluster(made)
        assert await rows.live_cluster("a") is None  # nobody has asked the database for it
        rows.learn(made)
        reads = counted(store)
        for _ in range(3):
            found = await rows.live_cluster("a")
            assert found is not None and found.grants == ()
        assert reads == [made.id]
        await asyncio.to_thread(store.update, made.id, lambda row: transitions.set_grant(row, "bob", "view"))
        reads.clear()
        found = await rows.live_cluster("a")
        assert found is not None and [grant.user for grant in found.grants] == ["bob"]
        assert reads == [made.id]

    run(tmp_path, scenario)


def test_a_name_that_is_used_again_is_the_new_cluster(tmp_path: Path) -> None:
    async def scenario(store: Store, notifier: Notifier, rows: LiveRows) -> None:
        first, second = cluster(name="a", id="1"), cluster(name="a", id="2")
        store.add_cluster(first)
        rows.learn(first)
        assert await rows.live_cluster("a") is not None
        await asyncio.to_thread(
            store.update, first.id, lambda row: msgspec.structs.replace(row, state=ClusterState.GONE)
        )
        store.add_cluster(second)
        assert await rows.live_cluster("a") is None
        rows.learn(second)
        found = await rows.live_cluster("a")
        assert found is not None and found.id == second.id

    run(tmp_path, scenario)


def test_waiters_are_released_by_a_write_and_by_the_end_of_their_time(tmp_path: Path) -> None:
    async def scenario(store: Store, notifier: Notifier, rows: LiveRows) -> None:
        waiting: list[asyncio.Task[Any]] = [asyncio.create_task(notifier.wait("a", 0, 600)) for _ in range(50)]
        left = asyncio.create_task(notifier.wait("a", 0, 600))
        await notifier.wait("a", 0, 0.01)  # nothing is written
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert not any(task.done() for task in waiting)
        notifier.publish("b")
        notifier.publish("a")
        await asyncio.gather(*waiting)
        await notifier.wait("a", 0, 600)  # the write that was missed counts
        assert notifier._waiting == {}

    run(tmp_path, scenario)
