"""A hundred random operations while pods, nodes, controllers and the API server are taken away; then nothing of it is left."""

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from tools.bench.own_kubernetes import CLUSTER_QUEUE, NAMESPACE, QUEUE, OwnKubernetes

from podway.errors import ProviderError, UserError
from podway.providers.gke.manifests import JOBSET_NAME, NAME
from podway.providers.gke.state import condition_of
from podway.task.task import Accelerator, Placement, Recovery, Resources, Task
from tests.conftest import wait_until
from tests.e2e.chaos import Chaos, Operation, SmallDisk, small_disk, wanted_operations, wanted_seed
from tests.e2e.harness import Podway

pytestmark = pytest.mark.kubernetes

JOBSETS = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{NAMESPACE}/jobsets"
CONTROLLERS = ("jobset", "kueue", "kube-controller-manager", "kube-scheduler", "kube-apiserver")


@pytest.fixture
def disk(podway_home: Any) -> Iterator[SmallDisk]:
    with small_disk(podway_home) as found:
        yield found


@pytest.fixture
def pod(disk: SmallDisk, podway_home: Any) -> Iterator[Podway]:
    podway = Podway(podway_home)
    yield podway
    disk.free()
    podway.close()


class KubernetesChaos(Chaos):
    """Pods are deleted, nodes preempted, workloads evicted, and the control plane's processes killed."""

    weights: ClassVar = {
        **Chaos.weights, "stop": 2, "start": 2, "delete_pod": 3, "lose_node": 2, "evict": 1, "kill_controller": 2, "kill_apiserver": 1,
    }  # fmt: skip

    def __init__(self, own: OwnKubernetes, *more: Any) -> None:
        super().__init__(*more)
        self.own = own
        (self.pod.home / "gke.yaml").write_text(f"queue: {QUEUE}\n")

    def task(self, operation: Operation) -> Task:
        wanted = Accelerator(type=("v6e-4", "v6e-4", "v6e-16")[int(3 * operation.which)])
        resources = Resources(accelerator=wanted, placement=Placement(provider="gke"))
        back = Recovery(strategy="failover") if operation.at < 0.5 else None
        return Task(run=f"echo operation {operation.number}; sleep 0.5", resources=(resources,), recovery=back)

    def stop(self, operation: Operation) -> None:
        self.pod.client.stop(self._name(operation))

    def start(self, operation: Operation) -> None:
        self.pod.client.start(self._name(operation))

    def delete_pod(self, operation: Operation) -> None:
        if name := self._pod(operation):
            with contextlib.suppress(ProviderError):
                self.own.admin.call("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/{name}")

    def lose_node(self, operation: Operation) -> None:
        pods = [one for one in self.own.pods() if one["spec"].get("nodeName")]
        if pods and self.own.nodes is not None:
            with contextlib.suppress(ProviderError):
                self.own.nodes.lose(pods[int(operation.at * len(pods))]["spec"]["nodeName"])

    def evict(self, operation: Operation) -> None:
        """Kueue takes the quota of all of them back, until the next eviction ends that."""
        path = f"/apis/kueue.x-k8s.io/v1beta2/clusterqueues/{CLUSTER_QUEUE}"
        stopped = self.own.admin.call("GET", path)["spec"].get("stopPolicy") == "HoldAndDrain"
        self._stop_policy("None" if stopped else "HoldAndDrain")

    def kill_controller(self, operation: Operation) -> None:
        self.own.restart(CONTROLLERS[int(operation.which * 4)])

    def kill_apiserver(self, operation: Operation) -> None:
        self.own.restart("kube-apiserver")

    def _stop_policy(self, policy: str) -> None:
        path, body = f"/apis/kueue.x-k8s.io/v1beta2/clusterqueues/{CLUSTER_QUEUE}", {"spec": {"stopPolicy": policy}}
        wait_until(lambda: self._sent(path, body), 60, "Kueue's webhook")

    def _sent(self, path: str, body: dict[str, Any]) -> bool:
        with contextlib.suppress(ProviderError, UserError):  # the webhook is away for a moment
            self.own.admin.call("PATCH", path, body, kind="application/merge-patch+json")
            return True
        return False

    def _pod(self, operation: Operation) -> str:
        names = sorted(one["metadata"]["name"] for one in self.own.pods())
        return names[int(operation.at * len(names))] if names else ""

    def calm(self) -> None:
        self._stop_policy("None")
        super().calm()

    def _at_rest(self) -> bool:
        """An idle cluster is looked at every half minute: until then one that has lost its pods counts as UP."""
        views = self.pod.client.clusters()
        calm = all(view.state in ("UP", "STOPPED", "FAILED", "GONE") and view.open_jobs == 0 for view in views)
        return calm and {view.name for view in views if view.state == "UP"} <= self._with_pods()

    def _with_pods(self) -> set[str]:
        """The clusters whose pods are all ready."""
        pods = self.own.pods()
        found = set()
        for jobset in self.own.admin.read_items(JOBSETS, {}):
            its = [one for one in pods if one["metadata"]["labels"].get(JOBSET_NAME) == jobset["metadata"]["name"]]
            if condition_of(jobset, its) == "ready":
                found.add(jobset["metadata"]["annotations"][NAME])
        return found

    def judge(self) -> None:
        for view in self.pod.client.clusters():
            if view.state in ("STOPPED", "FAILED"):
                self.pod.client.down(view.name)
        super().judge()

    def nothing_is_left(self) -> None:
        wait_until(lambda: self.own.left() == {}, 120, "an empty cluster")
        nodes = self.own.nodes
        assert nodes is not None
        wait_until(lambda: nodes.processes() == 0, 60, "no process of a pod")

    def summary(self) -> str:
        return f"left in the cluster: {self.own.left()}"


def test_a_hundred_operations(
    kubernetes: OwnKubernetes, pod: Podway, disk: SmallDisk, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if not isinstance(kubernetes, OwnKubernetes):
        pytest.skip("it stops servers and nodes, which is not done to a person's cluster")
    env = {"KUBECONFIG": str(kubernetes.kubeconfig)}
    chaos = KubernetesChaos(kubernetes, pod, tmp_path_factory.mktemp("chaos"), disk, wanted_seed(19), env)
    chaos.run(wanted_operations(100))
