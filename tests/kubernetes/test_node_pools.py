"""Node pools that launches make, on real controllers: the sandbox's Kubernetes Engine makes them, and their nodes join the cluster."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tools.bench.own_kubernetes import CONTEXT, QUEUE, OwnKubernetes

from podway.errors import ProviderError, UserError
from podway.sandbox.kubernetes.nodes import NodePool
from podway.sandbox.running import Running, running_sandbox
from tests.conftest import wait_until
from tests.e2e.harness import Podway
from tests.e2e.test_kubernetes import podway
from tests.sandbox.clients import session_of

pytestmark = pytest.mark.kubernetes

GKE_CLUSTER = "projects/sandbox/locations/us-east5/clusters/main"
SETTINGS = f"queue: {QUEUE}\nnode_pools:\n  clusters: {{{CONTEXT}: {GKE_CLUSTER}}}\n"
LAUNCH = ("launch", "-y", "--infra", "k8s", "--gpus", "tpu-v6e-16", "--use-spot")
EFFECTS = {"NO_SCHEDULE": "NoSchedule"}


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """The sandbox, which this machine's Podway takes for Google Cloud; nothing is left in it."""
    with running_sandbox(tmp_path / "sandbox", hosts="none", speed=600.0) as sandbox:
        url = f"{sandbox.rest}/v1/{GKE_CLUSTER.rpartition('/')[0]}"
        assert session_of(sandbox).post(url, json={"cluster": {"name": "main"}}).status_code == 200
        for name, value in sandbox.environment(tmp_path).items():
            monkeypatch.setenv(name, value)
        yield sandbox
        assert pools_of(sandbox) == {}


def pools_of(sandbox: Running) -> dict[str, Any]:
    found = session_of(sandbox).get(f"{sandbox.rest}/v1/{GKE_CLUSTER}/nodePools").json()
    return {one["name"]: one for one in found.get("nodePools") or ()}


@contextlib.contextmanager
def joined(sandbox: Running, own: OwnKubernetes) -> Iterator[None]:
    """Nodes of the pools that Kubernetes Engine has made join the cluster, and leave it with their pool."""
    assert own.nodes is not None
    nodes, stop, there = own.nodes, threading.Event(), set[str]()

    def follow() -> None:
        with contextlib.suppress(ProviderError, UserError, OSError):
            running = {name: one for name, one in pools_of(sandbox).items() if one["status"] == "RUNNING"}
            for name in running.keys() - there:
                there.add(name)
                nodes.add(_nodes_of(running[name]))
            for name in there - running.keys():
                there.remove(name)
                nodes.remove(name)

    def run() -> None:
        while not stop.wait(0.2):
            follow()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
        wait_until(lambda: not there, 60, "the nodes to be gone")
    finally:
        stop.set()
        thread.join()


def _nodes_of(pool: dict[str, Any]) -> NodePool:
    config = pool["config"]
    spot = {"cloud.google.com/gke-spot": "true"} if config.get("spot") else {}
    return NodePool(
        name=pool["name"],
        accelerator_type=config["resourceLabels"]["podway-slice"],
        labels=config["labels"] | spot,
        taints=tuple({**one, "effect": EFFECTS[one["effect"]]} for one in config["taints"]),
    )


def test_a_launch_makes_its_pool_and_down_deletes_it(
    engine: Running, kubernetes: OwnKubernetes, pod: Podway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the server is killed right after it asked for the pool; and nobody else's pods run there."""
    if not isinstance(kubernetes, OwnKubernetes):
        pytest.skip("it adds nodes, which is not done to a person's cluster")
    (pod.home / "gke.yaml").write_text(SETTINGS)
    monkeypatch.setenv("KUBECONFIG", str(kubernetes.kubeconfig))
    with joined(engine, kubernetes):
        pod.start(crash_at="node-pool.after-create")
        said = podway(pod, *LAUNCH, "-c", "mine", "echo it runs", seconds=600)
        assert pod.child.poll() == -signal.SIGKILL
        assert "makes 1 node pool (ct6e-standard-4t, spot)" in said and "it runs" in said
        ((name, pool),) = pools_of(engine).items()
        assert pool["config"]["metadata"] == {"podway-cluster": "mine"}
        assert {one["spec"]["nodeName"].rpartition("-")[0] for one in kubernetes.pods()} == {name}

        (pod.home / "gke.yaml").write_text(f"queue: {QUEUE}\n")  # from here on launches make none
        podway(pod, *LAUNCH, "-d", "-c", "other", "echo no")
        wait_until(lambda: "untolerated taint" in pod.client.cluster("other").reason, 240, "why the other waits")
        podway(pod, "down", "-y", "other", "mine", seconds=600)
        wait_until(lambda: pod.client.clusters() == [], 240, "the end of both")
        assert pools_of(engine) == {} and list((pod.home / "gke" / "node-pools").rglob("*.json")) == []
    wait_until(lambda: kubernetes.left() == {}, 60, "an empty cluster")
