"""Node pools that launches make: what is sent, and their life in the sandbox's Kubernetes Engine beside a small Kubernetes."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from google.cloud import container_v1

from podway import crash
from podway.cli.manifests import as_yaml
from podway.errors import ProviderError, UserError
from podway.order import Order
from podway.providers import Observation
from podway.providers.gke.api import Fields
from podway.providers.gke.manifests import JobSetContext
from podway.providers.gke.pool_render import plan_pools, pool_name
from podway.providers.gke.provider import GkeProvider
from podway.providers.gke.settings import GkeSettings, NodePoolSettings, parse_settings
from podway.sandbox.kubernetes.running import RunningKubernetes, running_kubernetes
from podway.sandbox.running import Running, running_sandbox
from podway.task.task import Accelerator, Resources, Task
from tests.conftest import wait_until
from tests.sandbox.clients import session_of

GOLDEN = Path(__file__).parent.parent / "golden" / "gke" / "launch-pools.json"
UPDATE = bool(os.environ.get("PODWAY_UPDATE_GOLDEN"))
CLUSTER = "projects/sandbox/locations/us-east5/clusters/main"
SETTINGS = f"owner: team-a\nnode_pools:\n  clusters: {{pretend: {CLUSTER}}}\n"
ORDER = Order(accelerator_type="v6e-16", topology="4x4", provider="gke", hosts_per_slice=4, chips_per_host=4, spot=True)
TWO = msgspec.structs.replace(ORDER, slices=2)
WANTED = Resources(accelerator=Accelerator(type="v6e-16"), spot="yes")
POOL_POINTS = [p for p in crash.POINTS if p.startswith("node-pool.")]
CRASHING = """\
import asyncio, sys
from pathlib import Path
import msgspec
from podway.order import Order
from podway.providers.gke.provider import GkeProvider
provider, order = GkeProvider(Path(sys.argv[1])), msgspec.json.decode(sys.argv[3], type=Order)
asyncio.run(provider.submit(provider.render("exp", order)) if sys.argv[2] == "submit" else provider.destroy("exp"))
"""


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_sandbox(tmp_path_factory.mktemp("sandbox"), hosts="none", speed=6000.0) as running:
        url = f"{running.rest}/v1/{CLUSTER.rpartition('/')[0]}"
        assert session_of(running).post(url, json={"cluster": {"name": "main"}}).status_code == 200
        yield running


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "gke.yaml").write_text(SETTINGS)
    return tmp_path / "home"


@pytest.fixture
def kubernetes(
    sandbox: Running, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunningKubernetes]:
    """Without nodes; nothing is left in it, nor in Kubernetes Engine."""
    for name, value in sandbox.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    with running_kubernetes(tmp_path, kueue="v1beta2") as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        yield running
        command(sandbox, "DELETE", "faults")
        gone(open_provider(home))
        assert running.left() == {} and living(sandbox) == [] and records(home) == []


def open_provider(home: Path) -> GkeProvider:
    provider = GkeProvider(home)
    provider.pools.settle_s = 0.0
    return provider


def command(sandbox: Running, method: str, what: str, body: Any = None) -> Any:
    return session_of(sandbox).request(method, f"{sandbox.rest}/sandbox/{what}", json=body).json()


def fault(sandbox: Running, **rule: Any) -> None:
    command(sandbox, "POST", "faults", {"service": "container", "method": "CreateNodePool", **rule})


def living(sandbox: Running) -> list[str]:
    return [one["name"].rpartition("/")[2] for one in command(sandbox, "GET", "ledger")["living"]]


def records(home: Path) -> list[str]:
    return sorted(path.stem for path in (home / "gke" / "node-pools").rglob("*.json"))


def submit(provider: GkeProvider, order: Order = ORDER) -> None:
    asyncio.run(provider.submit(provider.render("exp", order)))


def observe(provider: GkeProvider) -> Observation:
    return asyncio.run(provider.observe("exp"))


def gone(provider: GkeProvider) -> None:
    def ended() -> bool:
        asyncio.run(provider.destroy("exp"))
        return observe(provider).condition == "absent"

    wait_until(ended, 120, "the end of the cluster")


def names(provider: GkeProvider, order: Order = ORDER) -> list[str]:
    return [step.body["name"] for step in provider.render("exp", order).steps if step.verb == "create-node-pool"]


def seen(provider: GkeProvider, holds: Callable[[Observation], bool]) -> Observation:
    last = observe(provider)

    def look() -> bool:
        nonlocal last
        last = observe(provider)
        return holds(last)

    wait_until(look, 120, "what is observed")
    return last


def test_what_is_sent_is_golden_and_read_by_google_s_own_messages() -> None:
    def context(settings: NodePoolSettings) -> JobSetContext:
        return JobSetContext(
            owner="team-a",
            context="gke_my-project_us-east5_main",
            namespace="default",
            settings=GkeSettings(node_pools=settings),
        )

    flex = NodePoolSettings(zone="us-east5-b", service_account="a@b.c", flex_start=True)
    plain = msgspec.structs.replace(ORDER, spot=False)
    cases = {
        "spot": (NodePoolSettings(), TWO),
        "reservation": (flex, msgspec.structs.replace(plain, reservation="mine", queued=True)),
        "flex start": (flex, plain),
        "queued": (flex, msgspec.structs.replace(plain, queued=True)),
        "placement policy": (
            NodePoolSettings(placement_policy="ring"),
            Order(accelerator_type="tpu7x-32", provider="gke", hosts_per_slice=4, chips_per_host=4),
        ),
    }
    rendered = {name: plan_pools(context(allowed), "Exp.1", order).bodies for name, (allowed, order) in cases.items()}
    for bodies in rendered.values():
        for body in bodies:
            container_v1.NodePool.from_json(json.dumps(body))
    text = json.dumps(rendered, indent=2) + "\n"
    if UPDATE:
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_names_are_short_enough_for_any_cluster_and_slice() -> None:
    longest = pool_name("c" * 33 + "-12345678", 999)
    assert longest == "c" * 26 + "-12345678-999" and len(longest) <= 40
    assert pool_name("exp-12345678", 0) == "exp-12345678-0"


def test_without_the_setting_launches_make_none_and_the_offer_says_how(
    kubernetes: RunningKubernetes, home: Path, sandbox: Running
) -> None:
    (home / "gke.yaml").write_text("owner: team-a\n")
    provider = open_provider(home)
    (offer,) = provider.offers(WANTED, 1)
    assert offer.note == (
        "no such node is there now: a node pool must grow (`node_pools` in gke.yaml lets launches make node pools)"
    )
    submit(provider)
    assert names(provider) == [] and living(sandbox) == []
    (home / "gke.yaml").write_text("owner: team-a\nnode_pools: true\n")
    (offer,) = provider.offers(WANTED, 1)
    assert "context pretend does not say which GKE cluster it is" in offer.note and names(provider) == []


def test_a_launch_s_pools_live_and_go_with_it(kubernetes: RunningKubernetes, home: Path, sandbox: Running) -> None:
    provider = open_provider(home)
    (offer,) = provider.offers(WANTED, 2)
    assert offer.note == "makes 2 node pools (ct6e-standard-4t, spot), deleted with the cluster"
    assert offer.hourly_cost is not None and offer.blocked is None
    submit(provider, TWO)
    submit(provider, TWO)  # as often as the server likes
    assert sorted(living(sandbox)) == names(provider, TWO) == records(home)
    assert len(records(home)) == 2
    first = observe(provider)
    assert first.condition == "creating"
    assert first.billed_since is not None or f"node pool {names(provider)[0]} is being made" in first.reason
    assert seen(provider, lambda one: one.billed_since is not None).condition == "creating"
    owned = asyncio.run(provider.list_resources())
    pools = [one for one in owned if one.kind == "node pool"]
    assert [(one.cluster, one.owner, one.accelerator_type) for one in pools] == [("exp", "team-a", "v6e-16")] * 2
    assert all(one.hourly_cost == offer.hourly_cost / 2 for one in pools)
    spec = kubernetes.objects.find("jobsets")[0]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert spec["tolerations"][-1]["key"] == "podway.dev/cluster"
    gone(provider)
    assert living(sandbox) == [] and records(home) == []


@pytest.mark.long
def test_pools_that_others_made_are_used_and_left(kubernetes: RunningKubernetes, home: Path, sandbox: Running) -> None:
    provider = open_provider(home)
    body = next(dict(step.body) for step in provider.render("exp", ORDER).steps if step.verb == "create-node-pool")
    body |= {"name": "theirs", "config": {"machineType": "ct6e-standard-4t", "spot": True}}
    session, url = session_of(sandbox), f"{sandbox.rest}/v1/{CLUSTER}/nodePools"
    assert session.post(url, json={"nodePool": body}).status_code == 200
    submit(provider)
    assert living(sandbox) == ["theirs"] and records(home) == []
    gone(provider)
    submit(provider, msgspec.structs.replace(ORDER, spot=False))  # another way to get capacity: theirs does not fit
    assert sorted(living(sandbox)) == sorted(["theirs", *names(provider)])
    gone(provider)
    assert living(sandbox) == ["theirs"]
    wait_until(lambda: session.delete(f"{url}/theirs").status_code in (200, 404), 60, "the deletion to begin")
    wait_until(lambda: living(sandbox) == [], 60, "the pool to be gone")


def test_no_pool_is_made_while_kueue_lets_the_launch_wait(
    kubernetes: RunningKubernetes, home: Path, sandbox: Running
) -> None:
    (home / "gke.yaml").write_text(f"{SETTINGS}queue: multislice-queue\n")
    kubernetes.set_quota(0)
    provider = open_provider(home)
    submit(provider)
    waits = seen(provider, lambda one: "insufficient" in one.reason or "quota" in one.reason)
    submit(provider)
    assert waits.condition == "creating" and living(sandbox) == [] and records(home) == []

    def enlarged(queue: Fields) -> Fields:
        queue["spec"]["resourceGroups"][0]["flavors"][0]["resources"][0]["nominalQuota"] = "16"
        return queue

    kubernetes.objects.change("clusterqueues", "", "cluster-queue", enlarged)

    def made() -> bool:
        submit(provider)
        return living(sandbox) == names(provider)

    wait_until(made, 120, "the pool once there is quota")


@pytest.mark.long
@pytest.mark.parametrize("point", POOL_POINTS)
def test_killed_at_each_point_nothing_is_forgotten(
    kubernetes: RunningKubernetes, home: Path, sandbox: Running, point: str
) -> None:
    """kill -9 around each call: another process goes on with it, makes no second pool, and leaves none."""

    def run(verb: str, crash_at: str) -> int:
        order = msgspec.json.encode(ORDER).decode()
        env = {**os.environ, "PODWAY_CRASH_AT": crash_at}
        return subprocess.run([sys.executable, "-c", CRASHING, str(home), verb, order], env=env, timeout=120).returncode

    provider = open_provider(home)
    if "create" in point:
        assert run("submit", point) == -signal.SIGKILL
        assert records(home) == names(provider)
        assert living(sandbox) == (names(provider) if "after" in point else [])
        submit(provider)
        assert living(sandbox) == names(provider)
    else:
        submit(provider)

        def killed() -> bool:  # the JobSet's pods go first
            return run("destroy", point) == -signal.SIGKILL

        wait_until(killed, 120, "the kill")
        assert records(home) == names(provider) and ("after" in point or living(sandbox) == names(provider))
        assert observe(provider).condition == "deleting"


@pytest.mark.long
def test_a_lost_home_leaves_orphans_that_are_found(kubernetes: RunningKubernetes, home: Path, sandbox: Running) -> None:
    submit(open_provider(home))
    shutil.rmtree(home / "gke")
    provider = open_provider(home)
    owned = {one.kind: one for one in asyncio.run(provider.list_resources())}
    assert owned["node pool"].cluster == owned["JobSet"].cluster == "exp" and owned["node pool"].owner == "team-a"
    assert observe(provider).condition == "creating"  # found by the JobSet, which says where its pools are
    for resource in owned.values():
        asyncio.run(provider.purge(resource))

    def purged() -> bool:
        for one in asyncio.run(provider.list_resources()):
            asyncio.run(provider.purge(one))
        return living(sandbox) == []

    wait_until(purged, 120, "no orphan")


@pytest.mark.long
def test_what_cannot_be_made_is_told_and_deleted(kubernetes: RunningKubernetes, home: Path, sandbox: Running) -> None:
    provider = open_provider(home)
    message = "There is no more capacity in the zone"
    fault(sandbox, kind="lro", status="RESOURCE_EXHAUSTED", message=message)
    submit(provider)
    failed = seen(provider, lambda one: one.condition == "failed")
    assert failed.elsewhere and failed.reason.startswith("a node pool could not be made: no capacity")
    submit(provider)
    assert len(living(sandbox)) == 1  # no second try of the same
    gone(provider)
    command(sandbox, "DELETE", "faults")
    fault(sandbox, kind="error", status="RESOURCE_EXHAUSTED", message=message)
    submit(provider)
    assert observe(provider).condition == "failed" and living(sandbox) == []
    gone(provider)
    command(sandbox, "DELETE", "faults")
    denied = f"Permission 'container.nodePools.create' denied on {CLUSTER.rpartition('/')[2]}"
    fault(sandbox, kind="error", status="PERMISSION_DENIED", message=denied)
    with pytest.raises(UserError, match=r"permission container\.nodePools\.create is missing"):
        submit(provider)
    assert records(home) == [] and living(sandbox) == []


@pytest.mark.long
def test_lost_answers_and_a_busy_cluster(kubernetes: RunningKubernetes, home: Path, sandbox: Running) -> None:
    provider = open_provider(home)
    fault(sandbox, kind="error", status="FAILED_PRECONDITION", times=1)
    with pytest.raises(ProviderError, match="waits for another change of the cluster"):
        submit(provider)
    assert records(home) == []
    fault(sandbox, kind="lost", times=1)
    with pytest.raises(ProviderError, match="cannot be reached"):
        submit(provider)
    assert records(home) == living(sandbox) == names(provider)
    submit(provider)
    assert living(sandbox) == names(provider)


def test_no_more_than_the_settings_allow(kubernetes: RunningKubernetes, home: Path, sandbox: Running) -> None:
    (home / "gke.yaml").write_text(f"{SETTINGS}  most: 1\n")
    provider = open_provider(home)
    with pytest.raises(ProviderError, match=r"node_pools\.most of gke\.yaml is 1"):
        submit(provider, TWO)
    assert living(sandbox) == []


@pytest.mark.long
def test_stop_deletes_them_and_start_makes_them_again(
    kubernetes: RunningKubernetes, home: Path, sandbox: Running
) -> None:
    provider = open_provider(home)
    submit(provider)

    def stopped() -> bool:
        asyncio.run(provider.stop("exp"))
        return observe(provider).condition == "stopped"

    wait_until(stopped, 120, "the end of its pools")
    assert living(sandbox) == [] and records(home) == []
    asyncio.run(provider.start("exp"))
    submit(provider)
    assert living(sandbox) == names(provider)


@pytest.mark.long
def test_a_login_that_is_refused_blocks_the_offer(kubernetes: RunningKubernetes, home: Path, sandbox: Running) -> None:
    fault(sandbox, method="ListNodePools", kind="error", status="UNAUTHENTICATED")
    (offer,) = open_provider(home).offers(WANTED, 1)
    assert offer.blocked is not None and "did not accept the credentials" in offer.blocked.reason
    command(sandbox, "DELETE", "faults")


def test_a_dry_run_names_the_pools_beside_what_kubectl_takes(kubernetes: RunningKubernetes, home: Path) -> None:
    request = msgspec.to_builtins(open_provider(home).render("exp", ORDER))
    text = as_yaml(request, Task(run="true"))
    first, second = text.splitlines()[:2]
    assert first == "# Node pools that a launch makes where the cluster has none for these slices:"
    assert second.startswith(f"#   {CLUSTER}/nodePools/exp-") and "kind: JobSet" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("node_pools: {zones: x}", "gke.yaml:1:21: node_pools.zones: unknown key"),
        ("node_pools: maybe", "expected a mapping, found `maybe`"),
        ("node_pools: {most: 0}", "must be at least 1"),
        ("node_pools: {clusters: {a: b}}", "`b` is not a GKE cluster"),
    ],
)
def test_settings_that_are_wrong(text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_settings(text.encode(), "gke.yaml")
    assert said in caught.value.what


def test_settings() -> None:
    assert parse_settings(b"node_pools: false", "f").node_pools is None
    assert parse_settings(b"node_pools: yes", "f").node_pools == NodePoolSettings()
    assert parse_settings(SETTINGS.encode(), "f").node_pools == NodePoolSettings(clusters={"pretend": CLUSTER})
