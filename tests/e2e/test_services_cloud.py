"""Services on the emulated Google Cloud, under load: a zone is lost, spot capacity goes and comes back.

What the cloud bills is what is looked at: its list of living resources is empty at the end.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from podway.launch_options import LaunchRequest
from podway.sandbox.hosts import why_no_hosts, why_no_namespaces
from podway.sandbox.running import Running, running_sandbox
from podway.server.service_api import ReplicaView
from podway.task.task import Resources
from tests.conftest import wait_until
from tests.e2e.harness import Podway
from tests.e2e.test_gateway import gateway_url
from tests.e2e.test_gateway_hosts import on
from tests.e2e.test_recovery_cloud import REGION, ZONES, living, reset, start
from tests.gateway.load_run import LoadRun, load


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    if why_not := why_no_hosts() or why_no_namespaces():
        pytest.skip(why_not)
    with running_sandbox(tmp_path_factory.mktemp("sandbox")) as running:
        yield running


@pytest.fixture
def cloud(sandbox: Running) -> Iterator[Running]:
    """The sandbox with every stock full."""
    yield sandbox
    reset(sandbox)


def service(replicas: int, spot: str = "no", **changes: object) -> LaunchRequest:
    plain = on("gcp", "v6e-1", low=replicas, region=REGION)
    resources: tuple[Resources, ...] = tuple(msgspec.structs.replace(one, spot=spot) for one in plain.task.resources)
    assert plain.task.service is not None
    spec = msgspec.structs.replace(plain.task.service, **changes)
    return msgspec.structs.replace(plain, task=msgspec.structs.replace(plain.task, resources=resources, service=spec))


def set_stock(cloud: Running, chips: int | None, *zones: str, tier: str | None = None) -> None:
    for zone in zones:
        only = {"tier": tier} if tier else {}
        cloud.command("POST", "stock", {"zone": zone, "generation": "v6e", "chips": chips, **only})


def nodes(cloud: Running, *, zone: str | None = None, tier: str | None = None) -> list[dict[str, Any]]:
    """The nodes that live, by zone and tariff."""
    return [
        one
        for one in living(cloud)
        if one["kind"] == "node" and zone in (None, one["name"].split("/")[3]) and tier in (None, one["tier"])
    ]


def ready(pod: Podway) -> list[ReplicaView]:
    return [one for one in pod.client.service("web").replicas if one.state == "READY"]


def under_load(pod: Podway, during: Callable[[LoadRun, Callable[..., Any]], Any]) -> LoadRun:
    """Clients of the service's model while something is done; what became of their requests."""
    key, url = pod.client.make_gateway_key("load"), gateway_url(pod)
    headers = {"authorization": f"Bearer {key}"}
    wait_until(lambda: httpx.get(f"{url}/v1/models", headers=headers).json().get("data"), 60, "the key at the gateway")

    async def until(condition: Callable[[], object], what: str) -> None:
        await asyncio.to_thread(wait_until, condition, 200, what)

    async def run() -> LoadRun:
        async with load(url, key=key, clients=4) as done:
            await done.more()
            await during(done, until)
            await done.more()
        return done

    return asyncio.run(run())


def end(pod: Podway, cloud: Running) -> None:
    pod.client.end_service("web")
    wait_until(lambda: pod.client.service("web").state == "GONE", 90, "the end of the service")
    wait_until(lambda: pod.client.clusters() == [], 60, "the end of its clusters")
    assert living(cloud) == []


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_a_zone_is_lost(pod: Podway, cloud: Running, tmp_path: Path) -> None:
    """Its network is gone, without a word of the cloud: packets vanish, and nothing new can be had there."""
    start(pod, cloud, tmp_path)
    pod.client.apply_service(service(2))
    wait_until(lambda: len(ready(pod)) == 2, 150, "two replicas")
    zones = {one.cluster: str(one.zone) for one in ready(pod)}
    assert len(set(zones.values())) == 2

    async def during(run: LoadRun, until: Callable[..., Any]) -> None:
        lost = zones[run.names.most_common(1)[0][0]]  # the one that has the load
        set_stock(cloud, 0, lost)
        for node in nodes(cloud, zone=lost):
            cloud.command("POST", "partition", {"node": node["name"]})
        await run.more()
        assert run.outcomes["cut"] <= 4  # one for each client at most
        await until(lambda: sorted(str(one.zone) for one in ready(pod) if one.zone != lost)[1:], "a replica elsewhere")
        await until(lambda: nodes(cloud, zone=lost) == [], "the end of the lost nodes")

    run = under_load(pod, during)
    print(dict(run.outcomes), [(one.number, one.zone) for one in ready(pod)])
    assert run.failures == [] and run.outcomes["cut"] <= 4
    assert Counter(one.zone for one in ready(pod)).most_common(1)[0][1] == 1  # spread again
    end(pod, cloud)


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_spot_replicas_are_replaced_on_demand_and_come_back(pod: Podway, cloud: Running, tmp_path: Path) -> None:
    start(pod, cloud, tmp_path)
    pod.client.apply_service(service(3, "yes", spot_fallback=1, dynamic_fallback=True))
    settled = lambda: sorted(one["tier"] for one in nodes(cloud)) == ["on-demand", "spot", "spot"]  # noqa: E731
    wait_until(lambda: len(ready(pod)) == 3 and settled(), 200, "one replica on demand, two spot")
    spot_zones = {node["name"].split("/")[3] for node in nodes(cloud, tier="spot")}
    assert len(spot_zones) == 2  # spread

    async def during(run: LoadRun, until: Callable[..., Any]) -> None:
        set_stock(cloud, 0, *ZONES, tier="spot")  # nowhere
        for node in nodes(cloud, tier="spot"):
            cloud.command("POST", "preempt", {"node": node["name"]})
        await until(lambda: len(nodes(cloud, tier="on-demand")) == 3 and len(ready(pod)) == 3, "stand-ins on demand")
        set_stock(cloud, None, *ZONES, tier="spot")
        await until(lambda: settled() and len(ready(pod)) == 3, "the spot replicas")

    run = under_load(pod, during)
    print(dict(run.outcomes))
    assert run.failures == []
    assert pod.client.service("web").state == "READY"
    end(pod, cloud)
