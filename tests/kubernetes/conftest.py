"""One Kubernetes for all of these tests: real servers and controllers of our own, or the cluster of the person who runs them.

`make test-kubernetes` builds the servers and runs the tests on them; `make test-kubernetes KUBECONFIG=FILE` runs those that need no
control over the cluster itself on the current context of FILE, in a namespace `podway-test` that is made and deleted.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools.bench.own_kubernetes import QUEUE, OwnKubernetes, build, own_kubernetes

from podway.sandbox.hosts import why_no_namespaces
from podway.sandbox.kubernetes.nodes import NodePool
from tests.conftest import processes_of, wait_until
from tests.e2e.harness import Podway
from tests.kubernetes.persons_cluster import PersonsKubernetes

POOLS = (
    NodePool(name="pool-0", accelerator_type="v6e-16"),
    NodePool(name="pool-1", accelerator_type="v6e-16"),
    *(NodePool(name=f"single-{number}", accelerator_type="v6e-4") for number in range(4)),
)


@pytest.fixture(scope="session")
def kubernetes() -> Iterator[OwnKubernetes | PersonsKubernetes]:
    if given := os.environ.get("PODWAY_TEST_KUBECONFIG"):
        with PersonsKubernetes(Path(given)) as persons:
            yield persons
        return
    why_not = why_no_namespaces()
    if why_not:
        pytest.skip(why_not)
    network = 100 + os.getpid() % 150  # pods of two runs on one machine may not have the same addresses
    with own_kubernetes(build(), POOLS, quota=32, network=network) as own:
        yield own


@pytest.fixture
def pod(podway_home: Path) -> Iterator[Podway]:
    podway = Podway(podway_home)
    yield podway
    podway.close()
    assert [process.cmdline() for process in processes_of(podway_home)] == []


@pytest.fixture
def cluster(
    kubernetes: OwnKubernetes | PersonsKubernetes, pod: Podway, monkeypatch: pytest.MonkeyPatch
) -> Iterator[OwnKubernetes | PersonsKubernetes]:
    """The cluster, a server that uses it, and afterwards nothing left in it."""
    queue = f"queue: {QUEUE}\n" if isinstance(kubernetes, OwnKubernetes) else kubernetes.settings
    (pod.home / "gke.yaml").write_text(queue)
    monkeypatch.setenv("KUBECONFIG", str(kubernetes.kubeconfig))  # `podway ssh` asks the cluster itself
    pod.start()
    yield kubernetes
    for one in pod.client.clusters():
        pod.client.down(one.name)
    try:
        wait_until(lambda: kubernetes.left() == {}, 60, "an empty cluster")
    except AssertionError:
        raise AssertionError(f"{kubernetes.left()} is left, and {pod.client.clusters()}") from None
    nodes = kubernetes.nodes
    if nodes is not None:
        wait_until(lambda: nodes.processes() == 0, 60, "no process of a pod")


@pytest.fixture
def own(cluster: OwnKubernetes | PersonsKubernetes) -> OwnKubernetes:
    """For what only a cluster of our own lets a test do: to kill its servers, lose its nodes, change its quota."""
    if not isinstance(cluster, OwnKubernetes):
        pytest.skip("it stops servers and nodes, which is not done to a person's cluster")
    return cluster
