"""The gcp provider against a pretend Google Cloud with real hosts: each way to have a slice, and each thing that goes wrong.

Whatever goes wrong ends in one of two ways: the cluster is there and known, or nothing of it is left. The sandbox's ledger, which
knows nothing of Podway, is what is asked.
"""

import asyncio
import contextlib
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import asyncssh
import msgspec
import pytest

from podway.errors import ProviderError, UserError
from podway.hosts.link import AgentLink
from podway.order import Order
from podway.providers import Observation, OwnedResource, Request
from podway.providers.gcp import api
from podway.providers.gcp.diagnose import diagnose
from podway.providers.gcp.hosts import NO_SUDO, mount_command
from podway.providers.gcp.provider import GcpProvider
from podway.providers.gcp.resources import Listing
from podway.providers.ssh.machine import Unable
from podway.sandbox.hosts import why_no_hosts
from podway.sandbox.hosts.netns import why_no_namespaces
from podway.sandbox.running import Running, running_sandbox
from podway.task.task import Accelerator, Placement, Resources
from podway.task.volumes import VolumeSpec

from .test_contract import use_sandbox
from .test_gcp_render import order
from .test_gcp_settings import STOCK

EAST, FAR = "us-east5-b", "us-east1-d"
ONE = order("v6e-1")
SPOT = order("v6e-1", spot=True)


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    why_not = why_no_hosts() or why_no_namespaces()
    if why_not:
        pytest.skip(why_not)
    with running_sandbox(tmp_path_factory.mktemp("sandbox"), speed=1200) as running:
        yield running


@pytest.fixture
def gcp(cloud: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GcpProvider]:
    use_sandbox(cloud, monkeypatch)
    provider = _opened(tmp_path)
    yield provider
    cloud.command("DELETE", "faults")
    for body in ({"chips": None}, {"chips": None, "zone": EAST}, {"chips": None, "zone": FAR}):
        cloud.command("POST", "stock", body)
    asyncio.run(gone(provider, "c"))
    assert living(cloud) == []
    assert provider.records.all() == []
    pins = provider.hosts.connections.pins.path
    assert not pins.exists() or pins.read_text() == ""


def _opened(home: Path) -> GcpProvider:
    provider = GcpProvider(home)
    provider.pace_s, provider.settle_s = 0.05, 0.5
    return provider


def living(cloud: Running) -> list[str]:
    """What the cloud has and would bill or keep, whoever knows of it."""
    return [one["name"].partition("/locations/")[2] or one["name"] for one in cloud.command("GET", "ledger")["living"]]


async def patiently(work: Callable[[], Awaitable[Any]]) -> None:
    """As the control loop does: what may pass is tried again."""
    with contextlib.suppress(ProviderError):
        await work()


async def until(provider: GcpProvider, request: Request, *conditions: str, seconds: float = 40.0) -> Observation:
    """Submit and look until it is one of these."""
    async with asyncio.timeout(seconds):
        while True:
            with contextlib.suppress(ProviderError):
                seen = await provider.observe(request.name)
                if seen.condition in conditions:
                    return seen
                await provider.submit(request)


async def gone(provider: GcpProvider, name: str, seconds: float = 40.0) -> None:
    async with asyncio.timeout(seconds):
        while True:
            with contextlib.suppress(ProviderError):
                if (await provider.observe(name)).condition == "absent":
                    return
                await provider.destroy(name)


async def greet(provider: GcpProvider, seen: Observation) -> list[str]:
    """The agents' own words for where they are."""
    homes = []
    for host in seen.hosts:
        link = AgentLink(provider.connect(host))
        homes.append((await link.call("hello")).fields["home"])
        link.close()
    return homes


# ways to have a slice


def test_several_slices_are_one_queued_resource_and_hosts_go_slice_by_slice(gcp: GcpProvider, cloud: Running) -> None:
    async def life() -> None:
        wanted = order("v5litepod-16", 2, zone="us-west4-a")
        seen = await until(gcp, gcp.render("c", wanted), "ready")
        assert [(host.rank, host.slice, host.worker) for host in seen.hosts] == [(i, i // 4, i % 4) for i in range(8)]
        assert len({host.address for host in seen.hosts}) == 8
        assert len({host.tpu_name for host in seen.hosts}) == 2
        assert len(await greet(gcp, seen)) == 8
        found = await gcp.list_resources()
        assert sorted(one.kind for one in found) == ["node", "node", "queued resource"]
        shown = [said for one in found if one.kind == "node" for said in gcp.cloud.guest_attributes(one.name)]
        pinned = gcp.hosts.connections.pins.path.read_text()
        assert len(shown) == 8
        assert all(f"ssh-ed25519 {said['hostkeys/ssh-ed25519']}" in pinned for said in shown)
        assert all(one.hourly_cost for one in found if one.kind == "node")

    asyncio.run(life())


def test_the_first_zone_with_capacity_is_kept_and_the_others_given_back(gcp: GcpProvider, cloud: Running) -> None:
    async def life() -> None:
        cloud.command("POST", "stock", {"zone": EAST, "chips": 0})
        request = gcp.render("c", order("v6e-1", spot=True, zones=(EAST, FAR)))
        seen = await until(gcp, request, "ready")
        assert seen.zone == FAR
        async with asyncio.timeout(20):
            while any(EAST in name for name in living(cloud)):
                await asyncio.sleep(0.05)
        assert {name.partition("/")[0] for name in living(cloud)} == {FAR}

    asyncio.run(life())


def test_a_server_that_is_killed_between_two_zones_gives_the_others_back_later(
    gcp: GcpProvider, cloud: Running, tmp_path: Path
) -> None:
    """Both zones come; the one who asked is gone; another, who knows nothing but the name, keeps one of them."""

    async def life() -> None:
        request = gcp.render("c", order("v6e-1", spot=True, zones=(EAST, FAR)))
        await gcp.submit(request)
        async with asyncio.timeout(20):
            while len([name for name in living(cloud) if "/nodes/" in name]) < 2:
                await asyncio.sleep(0.05)
        gcp.records.drop("c")
        other = _opened(tmp_path)
        seen = await until(other, other.render("c", order("v6e-1", spot=True, zones=(EAST, FAR))), "ready")
        assert seen.zone in (EAST, FAR)
        async with asyncio.timeout(20):
            while {name.partition("/")[0] for name in living(cloud)} != {seen.zone}:
                await asyncio.sleep(0.05)

    asyncio.run(life())


def test_a_legacy_tpu_node_has_a_host_vm_that_knows_its_name(gcp: GcpProvider, cloud: Running) -> None:
    async def life() -> None:
        wanted = order("v2-8", zone="us-central1-b", tpu_vm=False, runtime_version="2.12.0")
        request = gcp.render("c", wanted)
        seen = await until(gcp, request, "ready")
        assert len(seen.hosts) == 1
        node = next(one for one in await gcp.list_resources() if one.kind == "tpu node")
        assert seen.hosts[0].tpu_name == node.name.rpartition("/")[2]
        assert len(await greet(gcp, seen)) == 1
        assert gcp.refuse_stop(wanted) is None
        await gcp.stop("c")
        async with asyncio.timeout(20):
            while (await gcp.observe("c")).condition != "stopped":
                await patiently(lambda: gcp.stop("c"))
        await gcp.start("c")
        await until(gcp, request, "ready")

    asyncio.run(life())


def test_cpu_hosts_are_virtual_machines(gcp: GcpProvider) -> None:
    async def life() -> None:
        seen = await until(gcp, gcp.render("c", order(None, 2, zone="us-central1-a")), "ready")
        assert [(host.rank, host.slice) for host in seen.hosts] == [(0, 0), (1, 1)]
        assert len(await greet(gcp, seen)) == 2

    asyncio.run(life())


def test_ports_are_a_rule_that_goes_with_the_cluster(gcp: GcpProvider, cloud: Running) -> None:
    async def life() -> None:
        await until(gcp, gcp.render("c", order("v6e-1", ports=("8080",))), "ready")
        assert any("firewalls" in name for name in living(cloud))

    asyncio.run(life())


def test_a_disk_larger_than_the_boot_disk_is_where_jobs_live(gcp: GcpProvider, cloud: Running, tmp_path: Path) -> None:
    """A loop device stands for the disk; the sandbox attaches none."""
    image = tmp_path / "disk.img"
    with image.open("wb") as file:
        file.truncate(120 << 30)
    made = subprocess.run(["losetup", "-f", "--show", str(image)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no loop device can be made here: {made.stderr.strip()}")

    async def life() -> None:
        request = gcp.render("c", order("v6e-1", disk_gb=120))
        seen = await until(gcp, request, "ready")
        assert [host.home for host in seen.hosts] == await greet(gcp, seen) == ["/mnt/podway"]
        assert any("/disks/" in name for name in living(cloud))
        endpoint = gcp.hosts.endpoint(seen.hosts[0])
        shown = await gcp.hosts.connections.run(endpoint, "df --output=size -B1G /mnt/podway | tail -1")
        assert int(shown.out) > 110
        halt = "kill -9 $(cat /mnt/podway/.podway/agent.pid) && umount -l /mnt/podway"  # as a restart leaves it
        assert (await gcp.hosts.connections.run(endpoint, halt)).code == 0
        await gcp.ensure_agent(seen.hosts[0])
        shown = await gcp.hosts.connections.run(endpoint, "mountpoint /mnt/podway")
        assert shown.code == 0
        await gone(gcp, "c")

    try:
        (tmp_path / "gcp.yaml").write_text("ssh_user: root\n")  # the sandbox's hosts have no sudo
        asyncio.run(life())
    finally:
        subprocess.run(["losetup", "-d", made.stdout.strip()], check=True)


def test_best_effort_is_asked_of_v2alpha1(gcp: GcpProvider, cloud: Running) -> None:
    async def life() -> None:
        await until(gcp, gcp.render("c", order("v6e-1", best_effort=True)), "ready")
        nodes = [one for one in cloud.command("GET", "ledger")["living"] if one["kind"] == "node"]
        assert [one["tier"] for one in nodes] == ["best-effort"]

    asyncio.run(life())


def test_a_reservation_is_used(gcp: GcpProvider, cloud: Running) -> None:
    async def life() -> None:
        cloud.command("POST", "reservations", {"zone": EAST, "name": "team", "generation": "v6e", "chips": 8})
        await until(gcp, gcp.render("c", order("v6e-8", reservation="team")), "ready")
        nodes = [one for one in cloud.command("GET", "ledger")["living"] if one["kind"] == "node"]
        assert [one["tier"] for one in nodes] == ["reserved"]

    asyncio.run(life())


def test_hosts_of_a_person_who_is_not_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sandbox's sshds on loopback: another port, one user, the same path."""
    why_not = why_no_hosts()
    if why_not:
        pytest.skip(why_not)

    async def life(provider: GcpProvider) -> None:
        seen = await until(provider, provider.render("c", order("v4-16", zone="us-central2-b")), "ready")
        assert len(set(await greet(provider, seen))) == 2
        await gone(provider, "c")

    with running_sandbox(tmp_path / "sandbox", hosts="loopback") as sandbox:
        use_sandbox(sandbox, monkeypatch)
        asyncio.run(life(_opened(tmp_path)))
        assert living(sandbox) == []


# what goes wrong


@pytest.mark.parametrize("wanted", [ONE, SPOT], ids=["at once", "queued"])
def test_no_quota_is_said_and_leaves_nothing(gcp: GcpProvider, cloud: Running, wanted: Order) -> None:
    async def life() -> None:
        cloud.command("POST", "quota", {"zone": EAST, "limit": 0})
        try:
            seen = await until(gcp, gcp.render("c", wanted), "failed")
        finally:
            cloud.command("POST", "quota", {"zone": EAST, "limit": None})
        assert seen.elsewhere
        assert seen.reason.startswith("quota ")
        assert f"is 0 in {EAST}" in seen.reason
        await gone(gcp, "c")
        assert living(cloud) == []

    asyncio.run(life())


def test_no_capacity_now_is_said_and_leaves_nothing(gcp: GcpProvider, cloud: Running) -> None:
    async def life() -> None:
        cloud.command("POST", "stock", {"zone": EAST, "chips": 0})
        seen = await until(gcp, gcp.render("c", ONE), "failed")
        assert (seen.elsewhere, seen.reason) == (True, f"no capacity for v6e-1 in {EAST}")
        await gone(gcp, "c")
        assert living(cloud) == []

    asyncio.run(life())


def test_of_several_slices_all_come_or_none(gcp: GcpProvider, cloud: Running) -> None:
    """The second of two nodes is refused after the first was made."""

    async def life() -> None:
        fault = {"kind": "lro", "method": "CreateNode", "status": "RESOURCE_EXHAUSTED", "message": STOCK, "nth": 2}
        cloud.command("POST", "faults", fault)
        seen = await until(gcp, gcp.render("c", order("v3-8", 2, zone="us-central1-a")), "failed", "ready")
        assert (seen.condition, seen.elsewhere) == ("failed", True)
        assert seen.reason == "no capacity for v3-8 in us-central1-a"
        assert len(living(cloud)) == 1
        await gone(gcp, "c")
        assert living(cloud) == []

    asyncio.run(life())


def test_a_zone_that_does_not_answer_is_not_an_empty_one(gcp: GcpProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    """The API names zones it could not ask; the sandbox has no such day, so the look is told."""

    async def life() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(gcp.cloud, "look", lambda kinds, zones: Listing(unreachable=(EAST,)))
            with pytest.raises(ProviderError, match=f"does not answer for {EAST}"):
                await gcp.observe("c")
            with pytest.raises(ProviderError, match=f"does not answer for {EAST}"):
                await gcp.destroy("c")

    asyncio.run(life())


def test_a_queue_waits_and_says_so_and_expires(gcp: GcpProvider, cloud: Running) -> None:
    async def life() -> None:
        cloud.command("POST", "stock", {"zone": EAST, "chips": 0})
        request = gcp.render("c", msgspec.structs.replace(SPOT, valid_until_s=3000.0))
        said = set()
        async with asyncio.timeout(30):
            while (seen := await gcp.observe("c")).condition in ("absent", "creating"):
                said.add(seen.reason)
                await gcp.submit(request)
        assert f"v6e-1 in {EAST}: waiting for capacity" in said
        assert (seen.condition, seen.elsewhere) == ("failed", True)
        assert f"no capacity for v6e-1 in {EAST} came in time" in seen.reason

    asyncio.run(life())


def test_a_queue_that_takes_long_is_looked_at_less_often(gcp: GcpProvider, cloud: Running) -> None:
    async def life() -> None:
        cloud.command("POST", "stock", {"zone": EAST, "chips": 0})
        request = gcp.render("c", SPOT)
        async with asyncio.timeout(20):
            while "waiting for capacity" not in (await gcp.observe("c")).reason:
                await gcp.submit(request)
        cloud.command("POST", "faults", {"kind": "delay", "method": "List*", "probability": 0.0})  # only counts
        looks = []
        for waited in (0.0, 3600.0):
            record = gcp.records.read("c")
            assert record is not None
            gcp.records.change(record, began=time.time() - waited)
            before = cloud.command("GET", "faults")["faults"][0]["seen"]
            for _ in range(5):
                assert "waiting for capacity" in (await gcp.observe("c")).reason
                await gcp.submit(request)
            looks.append(cloud.command("GET", "faults")["faults"][0]["seen"] - before)
        assert looks[0] >= 8  # two lists for each look, but for the first, which may be fresh
        assert looks[1] <= 2
        await gone(gcp, "c")

    asyncio.run(life())


def test_what_is_not_allowed_in_one_zone_may_be_in_another(gcp: GcpProvider, cloud: Running) -> None:
    async def life() -> None:
        why = f"Permission 'tpu.nodes.create' denied on 'projects/{cloud.project}/locations/{EAST}'"
        fault = {"kind": "error", "method": "CreateNode", "status": "PERMISSION_DENIED", "message": why}
        cloud.command("POST", "faults", fault)
        seen = await until(gcp, gcp.render("c", ONE), "failed")
        told = f"permission tpu.nodes.create is missing in {EAST} of project {cloud.project}"
        assert (seen.elsewhere, seen.reason) == (True, told)

    asyncio.run(life())


def test_what_is_not_allowed_at_all_is_an_error_of_the_person(gcp: GcpProvider, cloud: Running) -> None:
    async def life() -> None:
        why = f"Permission 'tpu.nodes.create' denied on 'projects/{cloud.project}'"
        fault = {"kind": "error", "method": "CreateNode", "status": "PERMISSION_DENIED", "message": why, "times": 1}
        cloud.command("POST", "faults", fault)
        with pytest.raises(UserError) as caught:
            await until(gcp, gcp.render("c", ONE), "ready", "failed")
        assert "roles/tpu.admin" in caught.value.hint

    asyncio.run(life())


def test_preemption_is_seen_with_its_reason(gcp: GcpProvider, cloud: Running) -> None:
    async def life() -> None:
        request = gcp.render("c", SPOT)
        seen = await until(gcp, request, "ready")
        cloud.command("POST", "preempt", {"node": seen.hosts[0].tpu_name, "zone": EAST})
        async with asyncio.timeout(20):
            while (seen := await gcp.observe("c")).condition == "ready":
                await asyncio.sleep(0.05)
        assert seen.condition == "preempted"
        assert "preempt" in seen.reason
        assert EAST in seen.reason

    asyncio.run(life())


def test_hosts_that_never_let_us_in_send_the_cluster_elsewhere(gcp: GcpProvider, cloud: Running) -> None:
    async def life() -> None:
        gcp.boot_s = 0.5
        request = gcp.render("c", ONE)
        async with asyncio.timeout(20):
            while not [name for name in living(cloud) if "/nodes/" in name]:
                await gcp.submit(request)
        # The node is there; its guest agent is told of another key.
        gcp.account.identity_file.write_bytes(asyncssh.generate_private_key("ssh-ed25519").export_private_key())
        seen = await until(gcp, request, "failed")
        assert seen.elsewhere
        assert f"the hosts in {EAST} are up since" in seen.reason
        assert "refused the login" in seen.reason

    asyncio.run(life())


def test_a_start_without_capacity_says_why_and_is_tried_again(gcp: GcpProvider, cloud: Running) -> None:
    async def life() -> None:
        request = gcp.render("c", ONE)
        await until(gcp, request, "ready")
        async with asyncio.timeout(20):
            while (await gcp.observe("c")).condition != "stopped":
                await gcp.stop("c")
        fault = {"kind": "lro", "method": "StartNode", "status": "RESOURCE_EXHAUSTED", "message": STOCK, "times": 1}
        cloud.command("POST", "faults", fault)
        said = []
        async with asyncio.timeout(20):
            while (await gcp.observe("c")).condition != "ready":
                try:
                    await gcp.start("c")
                except ProviderError as error:
                    said.append(str(error))
                await gcp.submit(request)
        assert said == [f"no capacity for v6e-1 in {EAST}"]

    asyncio.run(life())


def test_a_node_that_somebody_deleted_is_noticed_and_its_rule_goes_too(gcp: GcpProvider, cloud: Running) -> None:
    async def life() -> None:
        await until(gcp, gcp.render("c", order("v6e-1", ports=("80",))), "ready")
        node = next(one for one in await gcp.list_resources() if one.kind == "node")
        await gcp.purge(node)
        async with asyncio.timeout(20):
            while (seen := await gcp.observe("c")).condition in ("ready", "deleting"):
                await asyncio.sleep(0.05)
        assert seen.condition == "preempted"
        await gone(gcp, "c")
        assert living(cloud) == []

    asyncio.run(life())


RULED = order("v6e-1", ports=("80",))
# Every call that a life makes.
CALLS = [
    *((ONE, call) for call in ("CreateNode", "ListNodes", "GetOperation", "GetGuestAttributes", "DeleteNode")),
    *((SPOT, call) for call in ("CreateQueuedResource", "ListQueuedResources", "DeleteQueuedResource")),
    *((RULED, call) for call in ("firewalls.insert", "firewalls.list", "firewalls.delete")),
]


@pytest.mark.parametrize(("wanted", "call"), CALLS, ids=[call for _, call in CALLS])
def test_each_call_may_fail_in_every_way(gcp: GcpProvider, cloud: Running, wanted: Order, call: str) -> None:
    """Refused, cut off before it was done, and cut off after: the cluster comes all the same, and goes all the same."""

    async def life() -> None:
        service = "compute" if "." in call else "tpu"
        for kind in ("error", "drop", "lost"):
            fault = {"kind": kind, "service": service, "method": call, "status": "UNAVAILABLE", "times": 1}
            cloud.command("POST", "faults", fault)
        await until(gcp, gcp.render("c", wanted), "ready")
        await gone(gcp, "c")
        struck = sum(one["struck"] for one in cloud.command("GET", "faults")["faults"])
        assert struck == 3 or (call, struck) in {("GetOperation", 1), ("GetGuestAttributes", 1)}
        assert living(cloud) == []

    asyncio.run(life())


@pytest.mark.parametrize(
    "wanted", [ONE, SPOT, order("v5litepod-4", 2, zone="us-west4-a")], ids=["at once", "queued", "2"]
)
@pytest.mark.parametrize("after", range(4))
def test_down_at_any_moment_leaves_nothing(
    gcp: GcpProvider, cloud: Running, wanted: Order, after: int, tmp_path: Path
) -> None:
    """Taken down after so many steps, by a server that was just started."""

    async def life() -> None:
        request = gcp.render("c", wanted)
        for _ in range(after):
            await gcp.observe("c")
            await gcp.submit(request)
        await gone(_opened(tmp_path), "c")
        assert living(cloud) == []

    asyncio.run(life())


def test_a_create_whose_answer_is_lost_is_deleted_though_nobody_saw_it(gcp: GcpProvider, cloud: Running) -> None:
    async def life() -> None:
        cloud.command("POST", "faults", {"kind": "lost", "method": "CreateQueuedResource", "times": 1})
        with pytest.raises(ProviderError):
            await gcp.submit(gcp.render("c", SPOT))
        assert (await gcp.observe("c")).condition == "creating"
        await gone(gcp, "c")
        assert living(cloud) == []

    asyncio.run(life())


@pytest.mark.parametrize("kind", ["delay", "slow"])
@pytest.mark.parametrize(
    ("wanted", "call"), [(ONE, "CreateNode"), (SPOT, "CreateQueuedResource")], ids=["at once", "queued"]
)
def test_what_is_made_after_we_stopped_waiting_is_deleted_too(
    gcp: GcpProvider, cloud: Running, wanted: Order, call: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call takes longer than we wait for it, and `down` comes before it is done."""

    async def life() -> None:
        monkeypatch.setitem(api._ONCE, "timeout", 0.5)
        gcp.settle_s = 4.0
        cloud.command("POST", "faults", {"kind": kind, "method": call, "seconds": 2.0, "times": 1})
        with pytest.raises(ProviderError, match="cannot be reached"):
            await gcp.submit(gcp.render("c", wanted))
        assert (living(cloud) == []) == (kind == "delay")
        await gone(gcp, "c")
        assert [
            one["name"]
            for one in cloud.command("GET", "ledger")["gone"]
            if gcp.render("c", wanted).steps[0].target in one["name"]
        ]
        assert living(cloud) == []

    asyncio.run(life())


# before trying


def test_a_host_that_can_never_be_used_is_told_at_once(
    gcp: GcpProvider, cloud: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took the 300 s that a machine is given to boot. What may pass is shown while it is waited for."""

    async def not_yet(*_: object) -> None:
        raise ProviderError("192.0.2.1: Connection refused")

    async def never(*_: object) -> None:
        raise Unable("the login podway may not use sudo there", "let it")

    async def life() -> None:
        request = gcp.render("c", ONE)
        with monkeypatch.context() as patch:
            patch.setattr(gcp.hosts, "place", not_yet)
            async with asyncio.timeout(120):
                while "waiting for its hosts: 192.0.2.1: Connection refused" not in (await gcp.observe("c")).reason:
                    await gcp.submit(request)
            patch.setattr(gcp.hosts, "place", never)
            with pytest.raises(UserError, match="may not use sudo"):
                async with asyncio.timeout(60):
                    while True:
                        await gcp.submit(request)
        assert (await until(gcp, request, "ready", seconds=120)).reason == ""
        await gone(gcp, "c")

    asyncio.run(life())


def test_a_login_without_sudo_cannot_mount() -> None:
    """A bash whose `id` says an ordinary user, and whose `sudo` refuses."""
    prelude = "id() { echo 1000; }; sudo() { return 1; }; export -f id sudo; "
    done = subprocess.run(["bash", "-c", prelude + mount_command(200)], capture_output=True)
    assert done.returncode == NO_SUDO


def test_zones_that_do_not_offer_the_slice_are_named_and_blocked(gcp: GcpProvider, cloud: Running) -> None:
    offers = gcp.offers(Resources(accelerator=Accelerator(type="v6e-8"), placement=Placement(zone="us-west4-z")), 1)
    assert [(offer.zone, offer.blocked.code) for offer in offers if offer.blocked] == [("us-west4-z", "not_offered")]
    told = [offer.blocked.reason for offer in offers if offer.blocked]
    assert all("zones known to have v6e: us-" in reason for reason in told), "the nearest names"
    good = gcp.offers(Resources(accelerator=Accelerator(type="v6e-8"), spot="auto"), 1)
    assert {(offer.zone, offer.spot) for offer in good} >= {(EAST, True), (EAST, False)}
    assert not [offer for offer in good if offer.zone == EAST and offer.blocked]
    costs = [offer.hourly_cost for offer in good if offer.hourly_cost is not None]
    assert costs == sorted(costs)


def test_quota_is_read_before_a_zone_is_tried(gcp: GcpProvider, cloud: Running) -> None:
    spot_only = "TPUV6EPreemptiblePerProjectPerZoneForTPUAPI"

    def blocked(**wanted: Any) -> dict[tuple[str | None, bool], str]:
        place = Placement(region="us-east5")
        resources = Resources(accelerator=Accelerator(type="v6e-16", **wanted), spot="auto", placement=place)
        return {(o.zone, o.spot): o.blocked.reason if o.blocked else "" for o in gcp.offers(resources, 2)}

    cloud.command("POST", "quota", {"zone": EAST, "limit": 16})
    try:
        first = blocked()
        assert first[EAST, False] == "quota tpu-v6e is 16, and 2 x v6e-16 takes 32"
        assert first[EAST, True] == "quota tpu-v6e-preemptible is 16, and 2 x v6e-16 takes 32"
        assert not any(why for (zone, _), why in first.items() if zone != EAST)
        assert not any(blocked(reservation="r").values())  # counted apart
        cloud.command("POST", "quota", {"limit": 0})
        assert blocked() == first  # what was read is believed for a while, as long as there is a zone to try
        cloud.command("POST", "quota", {"limit": None})
        cloud.command("POST", "quota", {"zone": EAST, "limit": None})
        cloud.command("POST", "quota", {"limit": 0, "quota": spot_only})
        fresh = _opened(gcp.account.root)
        wanted = Resources(accelerator=Accelerator(type="v6e-16"), spot="yes", placement=Placement(zone=EAST))
        refused = fresh.offers(wanted, 1)[0].blocked
        assert refused and refused.code == "quota" and "is 0" in refused.reason
        cloud.command("POST", "quota", {"limit": None, "quota": spot_only})
        assert fresh.offers(wanted, 1)[0].blocked is None  # granted since: read again before everything is refused
    finally:
        for body in ({}, {"zone": EAST}, {"quota": spot_only}):
            cloud.command("POST", "quota", {**body, "limit": None})


def test_who_may_not_read_quotas_may_try(gcp: GcpProvider, cloud: Running) -> None:
    cloud.command("POST", "quota", {"zone": EAST, "limit": 0})
    cloud.command("POST", "faults", {"kind": "error", "service": "serviceusage", "status": "PERMISSION_DENIED"})
    try:
        offers = gcp.offers(Resources(accelerator=Accelerator(type="v6e-1"), placement=Placement(zone=EAST)), 1)
        assert [offer.blocked for offer in offers] == [None]
    finally:
        cloud.command("POST", "quota", {"zone": EAST, "limit": None})


def test_a_zone_whose_quota_is_nothing_is_not_tried_twice(gcp: GcpProvider, cloud: Running) -> None:
    async def life() -> None:
        cloud.command("POST", "quota", {"zone": EAST, "limit": 0})
        try:
            await until(gcp, gcp.render("c", ONE), "failed")
        finally:
            cloud.command("POST", "quota", {"zone": EAST, "limit": None})
        offers = gcp.offers(Resources(accelerator=Accelerator(type="v6e-1"), placement=Placement(zone=EAST)), 1)
        assert offers[0].blocked and offers[0].blocked.code == "quota"

    asyncio.run(life())


def test_the_doctor_finds_what_is_wrong(cloud: Running, gcp: GcpProvider, tmp_path: Path) -> None:
    found = list(diagnose(tmp_path))
    assert [one.what for one in found if one.ok] == [
        *("zones", "credentials", "project", "Cloud TPU API", "Compute Engine API", "quota", "ssh key of the hosts")
    ]
    assert "v6e" in found[5].note and not gcp.account.identity_file.exists()  # nothing is made
    (tmp_path / "gcp.yaml").write_text("zones: [us-east5-z]\n")
    cloud.command("POST", "faults", {"kind": "error", "service": "compute", "status": "PERMISSION_DENIED"})
    wrong = {one.what: one for one in diagnose(tmp_path) if not one.ok}
    assert set(wrong) == {"Compute Engine API", "zones"} and all(one.fix for one in wrong.values())
    assert "us-east5-" in wrong["zones"].fix


def test_the_disk_of_a_lost_volume_is_found_priced_and_purged(gcp: GcpProvider) -> None:
    """No row is asked here: the provider lists the disk as a volume's, and no cluster's end takes it along."""
    spec = VolumeSpec(name="data", placement=Placement(provider="gcp", zone=EAST), size_gb=73)

    async def owned() -> list[OwnedResource]:
        return [one for one in await gcp.list_resources() if one.volume]

    async def test() -> None:
        made = await gcp.create_volume(spec)
        await gone(gcp, "c")
        (found,) = await owned()
        assert (found.volume, found.cluster, found.owner, found.zone) == ("data", "", gcp.owner, EAST)
        assert found.name == made.disk and found.hourly_cost == pytest.approx(0.01)  # 73 GB at $0.10 a month
        while await owned():
            await gcp.purge(found)
            await asyncio.sleep(0.05)

    asyncio.run(test())
