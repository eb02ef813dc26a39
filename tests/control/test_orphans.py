"""What carries our mark and belongs to no row is found, told once, and deleted only when asked; with the real local provider."""

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import pytest

from podway.control.orphans import HISTORY, OrphanScanner
from podway.control.records import ClusterState
from podway.control.store import Store, open_store, sqlite_url
from podway.control.volume_store import VolumeRecord
from podway.errors import ProviderError, UserError
from podway.providers import OwnedResource, Provider
from podway.providers.local.provider import LocalProvider
from podway.task.task import Placement
from podway.task.volumes import VolumeSpec
from tests.control.samples import cluster


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(sqlite_url(tmp_path / "p.db"))


def left_behind(tmp_path: Path, name: str) -> Path:
    place = tmp_path / "local" / name
    place.mkdir(parents=True)
    return place


def test_found_told_once_and_purged(tmp_path: Path, store: Store) -> None:
    local = LocalProvider(tmp_path)
    lost, known = left_behind(tmp_path, "lost"), left_behind(tmp_path, "demo")
    store.add_cluster(cluster(state=ClusterState.INIT))

    def provider(name: str) -> Provider:
        if name != "local":
            raise UserError("not set up", "")
        return local

    async def work() -> None:
        orphans = OrphanScanner(store, provider)
        for _ in range(2):
            look = await orphans.scan(("local",))
            assert [(name, found.cluster) for name, found in look.orphans] == [("local", "lost")]
        assert [event.text for event in store.events(HISTORY)] == [
            "local: simulated slice lost in here (deleting) belongs to no cluster: podway down --purge"
        ]
        assert (await orphans.purge())[0].orphans == ()

    asyncio.run(work())
    assert known.exists() and not lost.exists()


def test_a_disk_whose_volume_was_lost_is_an_orphan(tmp_path: Path, store: Store) -> None:
    class WithDisks(LocalProvider):
        disks: ClassVar = {"lost", "data"}

        async def list_resources(self) -> list[OwnedResource]:
            more: dict[str, Any] = {"cluster": "", "owner": self.owner, "kind": "disk", "condition": "ready"}
            return [
                OwnedResource(name=f"disk-{one}", volume=one, hourly_cost=0.5, **more) for one in sorted(self.disks)
            ]

        async def purge(self, resource: OwnedResource) -> None:
            self.disks.discard(resource.volume)

    spec = VolumeSpec(name="data", placement=Placement(provider="local"))
    store.volumes.add(VolumeRecord(name="data", user="ann", spec=spec, created=0.0))
    store.add_cluster(cluster(name="lost", state=ClusterState.INIT))  # a cluster of that name does not account for it
    local = WithDisks(tmp_path)

    def provider(name: str) -> Provider:
        if name != "local":
            raise UserError("not set up", "")
        return local

    async def work() -> None:
        orphans = OrphanScanner(store, provider)
        found = (await orphans.scan(("local",))).orphans
        assert [(one.volume, one.hourly_cost) for _, one in found] == [("lost", 0.5)]
        assert "belongs to no volume" in store.events(HISTORY)[0].text
        await orphans.purge()

    asyncio.run(work())
    assert local.disks == {"data"}


def test_a_cluster_made_while_we_look_is_no_orphan(tmp_path: Path, store: Store) -> None:
    class Slow(LocalProvider):
        async def list_resources(self) -> list[OwnedResource]:
            left_behind(tmp_path, "demo")
            found = await super().list_resources()
            store.add_cluster(cluster())
            return found

    async def look() -> int:
        slow = Slow(tmp_path)
        return len((await OrphanScanner(store, lambda name: slow).scan(("local",))).orphans)

    assert asyncio.run(look()) == 0


def test_who_cannot_be_asked_is_named_only_if_it_matters(tmp_path: Path, store: Store) -> None:
    def provider(name: str) -> Provider:
        if name == "gcp":
            raise UserError("no credentials", "log in")
        raise ProviderError("it does not answer")

    async def unreachable() -> dict[str, str]:
        return (await OrphanScanner(store, provider).scan(("gcp", "ssh"))).unreachable

    assert asyncio.run(unreachable()) == {"ssh": "it does not answer"}
    order = cluster().order
    store.note_try(type(order)(accelerator_type=None, provider="gcp"), True, 1.0)
    assert asyncio.run(unreachable()) == {"gcp": "no credentials", "ssh": "it does not answer"}
