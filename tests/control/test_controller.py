"""What a controller does with what it saw, when a row has changed since it was read."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from podway.control.archive import Archive
from podway.control.controller import Controller, Parts
from podway.control.records import ClusterState, JobState
from podway.control.store import open_store, sqlite_url
from podway.control.vault import SecretVault
from podway.errors import ProviderError
from podway.hosts.blobs import BlobStore
from podway.providers import Observation
from podway.providers.local.provider import LocalProvider
from podway.task.task import Recovery, Task
from tests.control.samples import cluster, hosts, job

UP = cluster(state=ClusterState.UP, hosts=hosts(), up_since=1000.0)


@pytest.mark.parametrize(
    ("recovery", "expected", "cluster_state"),
    [
        (Recovery(), JobState.RECOVERING, ClusterState.INIT),
        (None, JobState.FAILED_DRIVER, ClusterState.TERMINATING),
    ],
)
def test_hosts_lost_while_a_job_begins(
    tmp_path: Path, recovery: Recovery | None, expected: JobState, cluster_state: ClusterState
) -> None:
    """It was waiting when the controller read its row, and runs when the cloud has answered that its hosts are preempted."""
    store = open_store(sqlite_url(tmp_path / "p.db"))
    store.add_cluster(UP)
    assert store.claim(UP.id, "me", 1e12, ())
    store.add_job(job(task=Task(run="true", recovery=recovery)))

    class Preempted(LocalProvider):
        async def observe(self, name: str) -> Observation:
            waiting = store.job(UP.id, 1)
            assert waiting is not None
            store.save_job(msgspec.structs.replace(waiting, state=JobState.RUNNING), owner="me")
            return Observation(condition="preempted")

    parts = Parts(
        store=store,
        blobs=BlobStore(tmp_path / "blobs"),
        vault=SecretVault(tmp_path / "key"),
        archive=Archive(tmp_path / "logs"),
        provider=lambda name: Preempted(tmp_path),
        cache_dir="",
        home=tmp_path,
        owner="me",
    )
    assert asyncio.run(Controller(parts, UP.id)._step())
    after, here = store.job(UP.id, 1), store.cluster(UP.id)
    assert after is not None and here is not None
    assert (after.state, here.state) == (expected, cluster_state)


def test_an_error_is_told_once_for_each_goal(tmp_path: Path) -> None:
    """Who takes down what could not be launched must see that the same is in the way."""
    store = open_store(sqlite_url(tmp_path / "p.db"))
    launching = cluster(state=ClusterState.INIT)
    store.add_cluster(launching)
    parts = Parts(
        store=store,
        blobs=BlobStore(tmp_path / "blobs"),
        vault=SecretVault(tmp_path / "key"),
        archive=Archive(tmp_path / "logs"),
        provider=lambda name: LocalProvider(tmp_path),
        cache_dir="",
        home=tmp_path,
        owner="me",
    )
    controller = Controller(parts, launching.id)

    async def fail_twice(goal: str) -> None:
        controller.cluster = msgspec.structs.replace(launching, goal=goal)
        for _ in range(2):
            await controller._tell_error(ProviderError("no answer"))

    asyncio.run(fail_twice("up"))
    asyncio.run(fail_twice("gone"))
    assert [event.text for event in store.events(launching.id, 0)] == ["no answer"] * 2
