"""All of it together: the API, its controllers and nodes, and a kubeconfig that leads there."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from podway.providers.gke.api import KubernetesApi
from podway.providers.gke.kubeconfig import KubeContext
from podway.sandbox.hosts import why_no_namespaces
from podway.sandbox.kubernetes.controllers import Controllers
from podway.sandbox.kubernetes.nodes import NodePool, Nodes
from podway.sandbox.kubernetes.objects import Fields, Objects
from podway.sandbox.kubernetes.server import Api, ApiServer

CONTEXT = "pretend"
LASTING = ("nodes", "csidrivers", "storageclasses", "clusterqueues", "localqueues", "resourceflavors")
FLAVOR, CLUSTER_QUEUE, QUEUE = "v6e", "cluster-queue", "multislice-queue"


class RunningKubernetes:
    """A Kubernetes that runs in this process."""

    def __init__(
        self, place: Path, pools: tuple[NodePool, ...], *, kueue: str | None, jobset: bool, network: int
    ) -> None:
        self.objects = Objects()
        groups = ({"jobset.x-k8s.io": "v1alpha2"} if jobset else {}) | ({"kueue.x-k8s.io": kueue} if kueue else {})
        self.token = secrets.token_hex(16)
        self.api = Api(self.objects, token=self.token, groups=groups)
        self.server = ApiServer(self.api)
        self.server.start()
        self.controllers = Controllers(self.objects, kueue=kueue is not None)
        self.controllers.start()
        self.kubeconfig = place / "kubeconfig"
        self.kubeconfig.write_text(kubeconfig_text(CONTEXT, self.server.url, self.token))
        self.nodes = None
        if pools:
            client = KubernetesApi(KubeContext(name=CONTEXT, server=self.server.url, token=self.token))
            self.nodes = Nodes(client, place / "nodes", pools, network=network)
            self.api.node_token = self.nodes.token

    def set_quota(self, chips: int) -> None:
        """A LocalQueue whose ClusterQueue has so many chips."""
        resources = [{"name": "google.com/tpu", "nominalQuota": str(chips)}]
        groups = [{"coveredResources": ["google.com/tpu"], "flavors": [{"name": FLAVOR, "resources": resources}]}]
        for plural, namespace, name, spec in (
            ("resourceflavors", "", FLAVOR, {"nodeLabels": {"cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice"}}),
            ("clusterqueues", "", CLUSTER_QUEUE, {"resourceGroups": groups}),
            ("localqueues", "default", QUEUE, {"clusterQueue": CLUSTER_QUEUE}),
        ):
            self.objects.create(plural, namespace, {"metadata": {"name": name}, "spec": spec})

    def pods(self) -> list[Fields]:
        """Every pod there is."""
        return self.objects.find("pods")

    def left(self) -> dict[str, int]:
        """How many objects of each kind there are that a launch makes: none at the end of a test."""
        return {kind: count for kind, count in self.objects.count().items() if kind not in LASTING}

    def close(self) -> None:
        if self.nodes is not None:
            self.nodes.close()
        self.controllers.close()
        self.server.close()


def kubeconfig_text(context: str, server: str, token: str) -> str:
    """A kubeconfig of one context."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": context,
        "clusters": [{"name": context, "cluster": {"server": server}}],
        "users": [{"name": context, "user": {"token": token}}],
        "contexts": [{"name": context, "context": {"cluster": context, "user": context}}],
    }
    return yaml.safe_dump(document)


@contextmanager
def running_kubernetes(
    place: Path,
    pools: tuple[NodePool, ...] = (),
    *,
    kueue: str | None = None,
    jobset: bool = True,
    network: int = 93,
) -> Iterator[RunningKubernetes]:
    """A Kubernetes for as long as the block lasts. `network`: nodes have addresses 127.NETWORK.x.y."""
    running = RunningKubernetes(place, pools, kueue=kueue, jobset=jobset, network=network)
    try:
        yield running
    finally:
        running.close()


__all__ = ["NodePool", "RunningKubernetes", "kubeconfig_text", "running_kubernetes", "why_no_namespaces"]
