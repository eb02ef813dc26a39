"""`podway gke prepare` on a bare control plane, with the published releases and their real controllers; launches with the least rights."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools.bench.own_kubernetes import OwnKubernetes, build, count_left, own_kubernetes

from podway.providers.gke.prepare.releases import RELEASES
from podway.providers.gke.provider import GkeProvider
from podway.sandbox.hosts import why_no_namespaces
from podway.sandbox.kubernetes.nodes import NodePool
from podway.task.task import Accelerator, Resources
from tests.conftest import wait_until
from tests.e2e.harness import Podway
from tests.e2e.test_kubernetes import podway
from tests.kubernetes.released import released_controllers

pytestmark = pytest.mark.kubernetes

NAMESPACE = "team-a"
SETTINGS = f"namespace: {NAMESPACE}\nqueue: training\npriority_class: high\nservice_account: trainer\n"
POOL = NodePool(name="pool-0", accelerator_type="v6e-16")
WORKLOADS = f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{NAMESPACE}/workloads"


@pytest.fixture(scope="module")
def bare() -> Iterator[OwnKubernetes]:
    """Nodes of one slice, and nothing installed; what is installed runs."""
    if os.environ.get("PODWAY_TEST_KUBECONFIG"):
        pytest.skip("it installs controllers, which is not done to a person's cluster")
    if why_not := why_no_namespaces():
        pytest.skip(why_not)
    network = 100 + (os.getpid() + 75) % 150  # not that of the cluster of the other tests
    with own_kubernetes(build(), (POOL,), installed=(), network=network) as own, released_controllers(own):
        yield own


def test_the_files_that_are_built_are_the_published_ones(bare: OwnKubernetes) -> None:
    for release in RELEASES:
        data = (bare.built / "releases" / f"{release.name.lower()}.yaml").read_bytes()
        assert hashlib.sha256(data).hexdigest() == release.sha256, release.name


def test_a_cluster_is_prepared_and_used_with_the_least_rights(
    bare: OwnKubernetes, pod: Podway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pod.home / "gke.yaml").write_text(SETTINGS)
    files = [word for name in ("jobset", "kueue") for word in ("--from", str(bare.built / "releases" / f"{name}.yaml"))]
    monkeypatch.setenv("KUBECONFIG", str(bare.admin_kubeconfig))
    said = podway(pod, "gke", "prepare", *files, "--yes", seconds=900)
    for release in RELEASES:
        assert f"{release.name} {release.version} from" in said
    assert "Nothing to do" in podway(pod, "gke", "prepare", *files, "--yes")
    wait_until(lambda: _is_active(bare), 120, "Kueue to take the queue")

    monkeypatch.setenv("KUBECONFIG", str(bare.account_kubeconfig(NAMESPACE, "podway")))
    (offer,) = GkeProvider(pod.home).offers(Resources(accelerator=Accelerator(type="v6e-16")), 1)
    assert offer.blocked is None and "queue training: 16 of 16 chips are free" in offer.note
    podway(pod, "doctor", "gke")
    pod.start()
    launch = ("launch", "-y", "--infra", "k8s", "--gpus", "tpu-v6e-16")
    podway(pod, *launch, "-c", "stays", "echo rank $PODWAY_RANK of $PODWAY_NUM_HOSTS", seconds=600)
    said = podway(pod, "logs", "stays", "--raw")
    assert all(f"rank {rank} of 4" in said for rank in range(4)), said
    (workload,) = bare.admin.read_items(WORKLOADS, {})
    assert workload["spec"]["priority"] == 750 and workload["spec"]["queueName"] == "training"
    assert {one["spec"]["serviceAccountName"] for one in bare.pods()} == {"trainer"}
    assert "again" in podway(pod, "exec", "stays", "echo again")
    podway(pod, "down", "-y", "stays", seconds=600)

    task = tmp_path / "task.yaml"
    task.write_text("secrets: {KEY: hidden}\nrun: '[ $KEY = hidden ] && echo it may run'\n")
    assert "it may run" in podway(pod, *launch, "--one-shot", "-c", "ends", str(task), seconds=600)
    wait_until(lambda: count_left(bare.admin, NAMESPACE) == {}, 240, "an empty namespace")


def _is_active(own: OwnKubernetes) -> bool:
    queue = own.admin.call("GET", "/apis/kueue.x-k8s.io/v1beta2/clusterqueues/podway")
    conditions = (queue.get("status") or {}).get("conditions") or ()
    return any(one["type"] == "Active" and one["status"] == "True" for one in conditions)
