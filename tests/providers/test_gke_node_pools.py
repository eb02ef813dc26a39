"""Node pools of GKE: what is sent, and the commands against the sandbox's Kubernetes Engine by the official client."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.cloud import container_v1

from podway.errors import UserError
from podway.providers.gke import container_api
from podway.providers.gke.node_pools import NodePoolOrder, cluster_of, free_names, node_pool
from podway.sandbox.running import Running, running_sandbox
from tests.cli.conftest import Run, home, run
from tests.conftest import wait_until
from tests.sandbox.clients import session_of

__all__ = ["home", "run"]  # fixtures
GOLDEN = Path(__file__).parent.parent / "golden" / "gke" / "node-pools.json"
UPDATE = bool(os.environ.get("PODWAY_UPDATE_GOLDEN"))
CLUSTER = "projects/sandbox/locations/us-east5/clusters/main"
ORDERS = {
    "one host": NodePoolOrder(accelerator_type="v6e-8"),
    "four hosts": NodePoolOrder(accelerator_type="v6e-16"),
    "spot in a zone": NodePoolOrder(accelerator_type="v5litepod-16", spot=True, zone="us-east5-b"),
    "reservation": NodePoolOrder(accelerator_type="v5p-32", reservation="mine", service_account="a@b.c"),
    "flex start": NodePoolOrder(accelerator_type="v6e-16", flex_start=True),
    "queued": NodePoolOrder(accelerator_type="v6e-16", queued=True),
    "placement policy": NodePoolOrder(accelerator_type="tpu7x-32", placement_policy="ring"),
}


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_sandbox(tmp_path_factory.mktemp("sandbox"), hosts="none", speed=6000.0) as running:
        url = f"{running.rest}/v1/{CLUSTER.rpartition('/')[0]}"
        assert session_of(running).post(url, json={"cluster": {"name": "main"}}).status_code == 200
        yield running


@pytest.fixture
def cloud(sandbox: Running, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """The commands use the sandbox, and the current context is its cluster; nothing is left afterwards."""
    for name, value in sandbox.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    context = "gke_sandbox_us-east5_main"
    document = {
        "current-context": context,
        "clusters": [{"name": "k", "cluster": {"server": "http://127.0.0.1:9"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": context, "context": {"cluster": "k", "user": "u"}}],
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(document))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setattr(container_api, "POLL_S", 0.02)
    yield sandbox
    command(sandbox, "DELETE", "faults")
    if left := [one["name"] for one in listed(run)]:
        assert run("gke", "node-pool", "delete", *left, "--yes").code == 0
    assert living(sandbox) == []


def command(sandbox: Running, method: str, what: str, body: Any = None) -> Any:
    return session_of(sandbox).request(method, f"{sandbox.rest}/sandbox/{what}", json=body).json()


def living(sandbox: Running) -> list[str]:
    return [one["name"] for one in command(sandbox, "GET", "ledger")["living"]]


def listed(run: Run) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run("gke", "node-pool", "list", "-o", "json").out)
    return found


def test_requests_are_golden_and_read_by_google_s_own_messages() -> None:
    rendered = {name: node_pool("podway-pool-0", "team-a", order) for name, order in ORDERS.items()}
    for body in rendered.values():
        container_v1.NodePool.from_json(json.dumps(body))  # a field that it does not know is an error
    text = json.dumps(rendered, indent=2) + "\n"
    if UPDATE:
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_a_pool_s_life(run: Run, cloud: Running, podway_home: Path) -> None:
    assert "No node pools" in run("gke", "node-pool", "list").out
    refused = run("gke", "node-pool", "create", "v6e-16")
    assert refused.code == 1 and "--yes" in refused.err and living(cloud) == []
    made = run("gke", "node-pool", "create", "v6e-16", "--count", "2", "--spot", "--yes")
    assert made.code == 0, made.err
    assert "podway-v6e-16-0 is there" in made.out and "podway-v6e-16-1 is there" in made.out
    pools = listed(run)
    assert [(one["name"], one["status"], one["tier"], one["nodes"], one["topology"]) for one in pools] == [
        ("podway-v6e-16-0", "RUNNING", "spot", 4, "4x4"),
        ("podway-v6e-16-1", "RUNNING", "spot", 4, "4x4"),
    ]
    assert all(one["cluster"] == CLUSTER for one in pools)
    assert "podway-v6e-16-0" in run("gke", "node-pool", "list").out
    assert run("gke", "node-pool", "create", "v6e-16", "--yes").code == 0  # the next free name
    assert [one["name"] for one in listed(run)][-1] == "podway-v6e-16-2"
    records = podway_home / "gke" / "node-pools"
    assert len(list(records.rglob("*.json"))) == 3
    gone = run("gke", "node-pool", "delete", "podway-v6e-16-1", "podway-v6e-16-1", "--yes")
    assert gone.code == 0 and "podway-v6e-16-1 is deleted" in gone.out
    assert [one["name"] for one in listed(run)] == ["podway-v6e-16-0", "podway-v6e-16-2"]
    assert len(list(records.rglob("*.json"))) == 2


def test_pools_are_found_whatever_the_current_context_is(
    run: Run, cloud: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("gke", "node-pool", "create", "v6e-8", "--name", "single", "--yes", "--cluster", CLUSTER).code == 0
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert [one["name"] for one in listed(run)] == ["single-0"]
    assert run("gke", "node-pool", "delete", "single-0", "--yes").code == 0
    result = run("gke", "node-pool", "list")
    assert result.code == 1 and "KUBECONFIG" in result.err
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))


def test_a_pool_that_cannot_be_made_is_deleted(run: Run, cloud: Running, podway_home: Path) -> None:
    rule = {
        "kind": "lro",
        "service": "container",
        "method": "CreateNodePool",
        "status": "RESOURCE_EXHAUSTED",
        "message": "There is no more capacity in the zone",
    }
    command(cloud, "POST", "faults", rule)
    result = run("gke", "node-pool", "create", "v6e-16", "--yes")
    assert result.code == 1 and "podway-v6e-16-0 could not be made: no capacity" in result.err
    assert listed(run) == [] and living(cloud) == []
    assert list((podway_home / "gke" / "node-pools").rglob("*.json")) == []


def test_a_cluster_that_is_busy_and_answers_that_are_lost(run: Run, cloud: Running) -> None:
    for rule in (
        {"kind": "error", "method": "CreateNodePool", "status": "FAILED_PRECONDITION", "times": 2},
        {"kind": "error", "method": "GetOperation", "status": "UNAVAILABLE", "times": 3},
    ):
        command(cloud, "POST", "faults", {"service": "container", **rule})
    assert run("gke", "node-pool", "create", "v6e-16", "--yes").code == 0
    assert [one["status"] for one in listed(run)] == ["RUNNING"]


def test_a_lost_answer_of_a_creation_forgets_nothing(run: Run, cloud: Running, podway_home: Path) -> None:
    command(cloud, "POST", "faults", {"service": "container", "kind": "lost", "method": "CreateNodePool", "times": 1})
    result = run("gke", "node-pool", "create", "v6e-16", "--yes")
    assert result.code == 1 and "Google Cloud cannot be reached" in result.err and "try again" in result.err
    assert len(list((podway_home / "gke" / "node-pools").rglob("*.json"))) == 1
    assert [one["name"] for one in listed(run)] == ["podway-v6e-16-0"]


def test_what_others_made_is_not_deleted(run: Run, cloud: Running) -> None:
    pool = {"nodePool": {"name": "default-pool", "initialNodeCount": 1, "config": {"machineType": "e2-medium"}}}
    url = f"{cloud.rest}/v1/{CLUSTER}/nodePools"
    session = session_of(cloud)
    assert session.post(url, json=pool).status_code == 200
    result = run("gke", "node-pool", "delete", "default-pool", "--yes")
    assert result.code == 1 and "Podway made no node pool default-pool" in result.err
    assert listed(run) == [] and living(cloud) == [f"{CLUSTER}/nodePools/default-pool"]
    assert session.delete(f"{url}/default-pool").status_code == 200
    wait_until(lambda: living(cloud) == [], 60, "the pool to be gone")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["v6e-16", "--spot", "--flex-start"], "spot and flex-start exclude each other"),
        (["v2-8"], "GKE has no machine type for v2-8"),
        (["nope"], "nope"),
        (["tpu7x-32"], "needs a workload policy"),
        (["v6e-16", "--name", "No_Name"], "cannot be the name of a node pool"),
        (["v6e-16", "--cluster", "somewhere"], "context somewhere does not say which GKE cluster it is"),
        (["v6e-16", "--cluster", CLUSTER.replace("main", "other")], "there is no GKE cluster"),
    ],
)
def test_bad_input(run: Run, cloud: Running, arguments: list[str], said: str) -> None:
    result = run("gke", "node-pool", "create", *arguments, "--yes")
    assert result.code == 1 and said in result.err and len(result.err.splitlines()) <= 3, result.err
    assert living(cloud) == []


def test_no_rights_and_no_login(run: Run, cloud: Running) -> None:
    message = f"Permission 'container.nodePools.create' denied on {CLUSTER.rpartition('/')[2]}"
    rule = {"service": "container", "kind": "error", "method": "CreateNodePool", "status": "PERMISSION_DENIED"}
    command(cloud, "POST", "faults", {**rule, "message": message})
    result = run("gke", "node-pool", "create", "v6e-16", "--yes")
    assert result.code == 1 and "permission container.nodePools.create is missing" in result.err
    assert "roles/container.admin" in result.err
    command(cloud, "DELETE", "faults")
    command(cloud, "POST", "faults", {**rule, "method": "ListNodePools", "status": "UNAUTHENTICATED"})
    result = run("gke", "node-pool", "list")
    assert result.code == 1 and "did not accept the credentials" in result.err


def test_what_would_be_sent_is_printed_and_nothing_else_happens(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    result = run("gke", "node-pool", "create", "v6e-16", "--dryrun", "--name", "x")
    assert result.code == 0 and json.loads(result.out)[0]["name"] == "x-0"


def test_names() -> None:
    assert free_names("a", 2, {"a-0", "a-2"}) == ["a-1", "a-3"]
    assert cluster_of("gke_p-1_europe-west4_c") == "projects/p-1/locations/europe-west4/clusters/c"
    for word in ("kind-kind", "", "gke_a_b", "projects/p/locations/l/clusters/", "projects/../x"):
        with pytest.raises(UserError):
            cluster_of(word)
