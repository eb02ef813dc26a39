"""What every provider must do, run over all of them: idempotent verbs, the truth after each, silence where nothing is left."""

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
from podway.providers import PROVIDERS, Provider, Request, open_provider
from podway.task.task import Accelerator, Resources
from podway.testing.hosts import HostSet, make_hosts, pool_text, why_no_hosts

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = {
    "one-host": ("v6e-8", 1),
    "four-hosts": ("v6e-16", 1),
    "two-slices": ("v5litepod-16", 2),
    "cpu": (None, 1),
}


def order(provider: str, tpu: str | None, slices: int) -> Order:
    if tpu is None:
        return Order(accelerator_type=None, provider=provider, slices=slices)
    found = find_slice(tpu)
    return Order(
        accelerator_type=found.accelerator_type,
        topology=found.topology_text,
        provider=provider,
        slices=slices,
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


@pytest.fixture(params=sorted(PROVIDERS))
def provider(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Provider]:
    if request.param == "ssh":
        made = request.getfixturevalue("machines")
        (tmp_path / "ssh").mkdir()
        (tmp_path / "ssh" / "lab.yaml").write_text(pool_text(made, "v4-16", "v4-16", "v6e-8", more=LISTED))
    opened = open_provider(request.param, tmp_path)
    yield opened
    for name in ("a", "b"):
        asyncio.run(opened.destroy(name))


@pytest.fixture(params=sorted(PROVIDERS))
def renderer(request: pytest.FixtureRequest, tmp_path: Path) -> Provider:
    """A provider that is asked for requests only: nothing needs to be there."""
    if request.param == "ssh":
        (tmp_path / "ssh").mkdir()
        only = "  - {address: 192.0.2.200, accelerator: v6e-8}\n"
        (tmp_path / "ssh" / "lab.yaml").write_text("user: podway\nhosts:" + LISTED + only)
    return open_provider(request.param, tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_rendered_requests_are_golden(renderer: Provider, case: str) -> None:
    """Pure, and exactly what was reviewed: run with PODWAY_REWRITE_GOLDEN=1 after a wanted change, and read the difference."""
    provider = renderer
    tpu, slices = CASES[case]
    rendered = provider.render("demo", order(provider.name, tpu, slices))
    assert rendered == provider.render("demo", order(provider.name, tpu, slices))
    text = msgspec.json.format(msgspec.json.encode(rendered), indent=2).decode() + "\n"
    path = GOLDEN / provider.name / f"{case}.json"
    if os.environ.get("PODWAY_REWRITE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()
    assert msgspec.json.decode(text, type=Request) == rendered


def test_a_life(provider: Provider) -> None:
    """absent -> ready -> stopped -> ready -> absent, each verb done twice."""

    async def life() -> None:
        wanted = order(provider.name, "v4-16", 1)
        assert (await provider.observe("a")).condition == "absent"
        request = provider.render("a", wanted)
        for _ in range(2):
            await provider.submit(request)
        seen = await provider.observe("a")
        assert seen.condition == "ready"
        assert [(host.rank, host.slice, host.worker) for host in seen.hosts] == [(0, 0, 0), (1, 0, 1)]
        assert len({host.address for host in seen.hosts}) == 2
        for host in seen.hosts:
            for _ in range(2):
                await provider.reach(host)
            link = AgentLink(provider.opener(host))
            assert (await link.call("hello")).fields["home"] == host.home
            link.close()
        if provider.refuse_stop(wanted) is None:
            for _ in range(2):
                await provider.stop("a")
            assert (await provider.observe("a")).condition == "stopped"
            for _ in range(2):
                await provider.start("a")
            assert (await provider.observe("a")).hosts == seen.hosts
        for _ in range(2):
            await provider.destroy("a")
        assert (await provider.observe("a")).condition == "absent"

    asyncio.run(life())


def test_destroy_of_nothing_is_silence(provider: Provider) -> None:
    asyncio.run(provider.destroy("never-there"))


def test_two_clusters_do_not_share_addresses(provider: Provider) -> None:
    async def both() -> None:
        hosts = []
        for name in ("a", "b"):
            await provider.submit(provider.render(name, order(provider.name, "v6e-8", 1)))
            hosts += (await provider.observe(name)).hosts
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
