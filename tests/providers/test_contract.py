"""What every provider must do, run over all of them: idempotent verbs, the truth after each, silence where nothing is left.

A provider of another package that is installed is one of them (test_third_party.py runs this file with one). What it does not
support is not asked of it.
"""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from podway.catalog.slices import find_slice
from podway.errors import UserError
from podway.hosts.link import AgentLink
from podway.order import Order
from podway.provider_table import provider_rows, row_of
from podway.providers import Observation, OwnedResource, Provider, Request, SupportsListing, SupportsStop, open_provider
from podway.providers.gcp.provider import GcpProvider
from podway.sandbox.hosts import HostSet, make_hosts, pool_text, why_no_hosts
from podway.sandbox.kubernetes.running import (
    NodePool,
    RunningKubernetes,
    kubeconfig_text,
    running_kubernetes,
    why_no_namespaces,
)
from podway.sandbox.running import Running, running_sandbox
from podway.task.task import Accelerator, Resources

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = {
    "one-host": ("v6e-8", 1),
    "four-hosts": ("v6e-16", 1),
    "two-slices": ("v5litepod-16", 2),
    "cpu": (None, 1),
}


def order(provider: str, tpu: str | None, slices: int) -> Order:
    if tpu is None:
        zone = "us-central1-a" if provider == "gcp" else None
        return Order(accelerator_type=None, provider=provider, slices=slices, zone=zone)
    found = find_slice(tpu)
    zone = {"v4": "us-central2-b", "v5e": "us-west4-a", "v6e": "us-east5-b"}[found.generation]
    return Order(
        accelerator_type=found.accelerator_type,
        topology=found.topology_text,
        provider=provider,
        slices=slices,
        zone=zone if provider == "gcp" else None,
        hosts_per_slice=found.hosts,
        chips_per_host=found.chips_per_host,
        runtime_version=found.generation_facts.default_runtime,
    )


# Machines that nobody has (RFC 5737), for an ssh pool's requests.
LISTED = """
  - {address: 192.0.2.1, accelerator: v6e-16, name: north-0}
  - {address: 192.0.2.2, accelerator: v6e-16, name: north-1, port: 2222}
  - {address: 192.0.2.3, accelerator: v6e-16, user: ada}
  - {address: 192.0.2.4, accelerator: v6e-16, jump: gate@192.0.2.250}
  - {address: 192.0.2.5, accelerator: v6e-16}
  - {address: 192.0.2.6, accelerator: v6e-16}
  - {address: 192.0.2.7, accelerator: v6e-16}
  - {address: 192.0.2.8, accelerator: v6e-16}
  - {address: 192.0.2.9}
""" + "".join(f"  - {{address: 192.0.2.{100 + i}, accelerator: v5litepod-16}}\n" for i in range(8))


@pytest.fixture(scope="module")
def machines() -> Iterator[HostSet]:
    """Four real machines for the ssh provider: two for a v4-16, and two of v6e-8."""
    why_not = why_no_hosts()
    if why_not:
        pytest.skip(why_not)
    with make_hosts(4) as made:
        yield made


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A pretend Google Cloud whose hosts are real."""
    why_not = why_no_hosts()
    if why_not:
        pytest.skip(why_not)
    with running_sandbox(tmp_path_factory.mktemp("sandbox"), hosts="auto") as running:
        yield running


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningKubernetes]:
    """A small Kubernetes whose TPU nodes run pods as processes."""
    why_not = why_no_namespaces()
    if why_not:
        pytest.skip(why_not)
    pools = (
        NodePool(name="v4", accelerator_type="v4-16"),
        NodePool(name="v6e-0", accelerator_type="v6e-8"),
        NodePool(name="v6e-1", accelerator_type="v6e-8"),
    )
    with running_kubernetes(tmp_path_factory.mktemp("kubernetes"), pools) as running:
        yield running


@pytest.fixture(params=sorted(provider_rows()))
def provider(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    if request.param == "gcp":
        use_sandbox(request.getfixturevalue("sandbox"), monkeypatch)
    if request.param == "ssh":
        made = request.getfixturevalue("machines")
        (tmp_path / "ssh").mkdir()
        (tmp_path / "ssh" / "lab.yaml").write_text(pool_text(made, "v4-16", "v4-16", "v6e-8", more=LISTED))
    if request.param == "gke":
        monkeypatch.setenv("KUBECONFIG", str(request.getfixturevalue("kubernetes").kubeconfig))
    opened = open_provider(request.param, tmp_path)
    if isinstance(opened, GcpProvider):
        opened.pace_s = 0.1  # the pretend cloud counts no calls
    yield opened
    for name in ("a", "b"):
        asyncio.run(take_down(opened, name))


def use_sandbox(sandbox: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in sandbox.environment(Path("/nonexistent")).items():
        if name.startswith(("PODWAY_", "GOOGLE_")):
            monkeypatch.setenv(name, value)


async def bring_up(provider: Provider, request: Request, seconds: float = 60.0) -> Observation:
    """As the control loop does: look, and ask again, until it is ready."""
    async with asyncio.timeout(seconds):
        while (seen := await provider.observe(request.name)).condition != "ready":
            assert seen.condition in ("absent", "creating"), seen
            await provider.submit(request)
        return seen


async def take_down(provider: Provider, name: str, seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while (await provider.observe(name)).condition != "absent":
            await provider.destroy(name)


async def settle(provider: Provider, name: str, condition: str, seconds: float = 60.0) -> Observation:
    """Look until it is so."""
    async with asyncio.timeout(seconds):
        while (seen := await provider.observe(name)).condition != condition:
            await asyncio.sleep(0.05)
        return seen


async def mine(provider: Provider) -> list[OwnedResource]:
    """What is there with this Podway's mark; nothing where the provider cannot tell."""
    if not isinstance(provider, SupportsListing):
        return []
    return [one for one in await provider.list_resources() if one.owner == provider.owner]


@pytest.fixture(params=sorted(provider_rows()))
def renderer(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Provider:
    """A provider that is asked for requests only: nothing needs to be there."""
    if request.param == "gcp":
        monkeypatch.setenv("PODWAY_GCP_ENDPOINT", "http://127.0.0.1:9")  # nobody is there
        (tmp_path / "gcp.yaml").write_text("project: my-project\nowner: ab12cd34\n")
        (tmp_path / "gcp").mkdir()
        (tmp_path / "gcp" / "id_ed25519.pub").write_text("ssh-ed25519 AAAAexample podway\n")
    if request.param == "ssh":
        (tmp_path / "ssh").mkdir()
        only = "  - {address: 192.0.2.200, accelerator: v6e-8}\n"
        (tmp_path / "ssh" / "lab.yaml").write_text("user: podway\nhosts:" + LISTED + only)
    if request.param == "gke":
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        (tmp_path / "kubeconfig").write_text(kubeconfig_text("east", "http://127.0.0.1:9", "nobody is there"))
        (tmp_path / "gke.yaml").write_text("owner: ab12cd34\nqueue: multislice-queue\npriority_class: medium\n")
    return open_provider(request.param, tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_rendered_requests_are_golden(renderer: Provider, case: str) -> None:
    """Pure, and exactly what was reviewed: run with PODWAY_REWRITE_GOLDEN=1 after a wanted change, and read the difference."""
    provider = renderer
    tpu, slices = CASES[case]
    rendered = provider.render("demo", order(provider.name, tpu, slices))
    assert rendered == provider.render("demo", order(provider.name, tpu, slices))
    text = msgspec.json.format(msgspec.json.encode(rendered), indent=2).decode() + "\n"
    assert msgspec.json.decode(text, type=Request) == rendered
    path = GOLDEN / provider.name / f"{case}.json"
    if row_of(provider.name).opens.partition(".")[0] != "podway":
        return  # another package keeps its own
    if os.environ.get("PODWAY_REWRITE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("tpu", ["v4-16", "v6e-8"])
def test_a_life(provider: Provider, tpu: str) -> None:
    """absent -> ready -> stopped -> ready -> absent, each verb done twice."""

    async def life() -> None:
        wanted = order(provider.name, tpu, 1)
        hosts = find_slice(tpu).hosts
        assert (await provider.observe("a")).condition == "absent"
        assert not await mine(provider)
        request = provider.render("a", wanted)
        for _ in range(2):
            await provider.submit(request)
        seen = await bring_up(provider, request)
        assert [(host.rank, host.slice, host.worker) for host in seen.hosts] == [(i, 0, i) for i in range(hosts)]
        assert len({host.address for host in seen.hosts}) == hosts
        for host in seen.hosts:
            for _ in range(2):
                await provider.ensure_agent(host)
            link = AgentLink(provider.connect(host))
            assert (await link.call("hello")).fields["home"] == host.home
            link.close()
        if isinstance(provider, SupportsListing):
            assert {one.cluster for one in await mine(provider)} == {"a"}
            assert all(one.condition == "ready" for one in await mine(provider))
        if isinstance(provider, SupportsStop) and provider.refuse_stop(wanted) is None:
            for _ in range(2):
                await provider.stop("a")
            await settle(provider, "a", "stopped")
            for _ in range(2):
                await provider.start("a")
            again = await bring_up(provider, request)
            assert [(host.rank, host.home) for host in again.hosts] == [(host.rank, host.home) for host in seen.hosts]
        for _ in range(2):
            await provider.destroy("a")
        await take_down(provider, "a")
        assert not await mine(provider)

    asyncio.run(life())


def test_what_is_listed_can_be_purged(provider: Provider) -> None:
    """Also by a Podway that knows nothing of it but what `list_resources` says."""

    if not isinstance(provider, SupportsListing):
        pytest.skip(f"{provider.name} does not list its resources")

    async def purge() -> None:
        await bring_up(provider, provider.render("a", order(provider.name, "v6e-8", 1)))
        for _ in range(2):
            for one in await mine(provider):
                await provider.purge(one)
        async with asyncio.timeout(30):
            while await mine(provider):
                await asyncio.sleep(0.05)
        await take_down(provider, "a")

    asyncio.run(purge())


def test_destroy_of_nothing_is_silence(provider: Provider) -> None:
    asyncio.run(provider.destroy("never-there"))


def test_two_clusters_do_not_share_addresses(provider: Provider) -> None:
    async def both() -> None:
        hosts = []
        for name in ("a", "b"):
            hosts += (await bring_up(provider, provider.render(name, order(provider.name, "v6e-8", 1)))).hosts
        assert len({host.address for host in hosts}) == 2
        assert len({host.id for host in hosts}) == 2

    asyncio.run(both())


def test_offers_name_real_slices_cheapest_first(renderer: Provider) -> None:
    offers = renderer.offers(Resources(accelerator=Accelerator(type="v6e-16")), 2)
    assert offers
    costs = [offer.hourly_cost for offer in offers if offer.hourly_cost is not None]
    assert costs == sorted(costs)
    for offer in offers:
        assert offer.accelerator_type and find_slice(offer.accelerator_type).chips == 16
        assert offer.slices == 2


def test_an_unknown_provider_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        open_provider("aws", tmp_path)
    assert "local" in caught.value.hint
