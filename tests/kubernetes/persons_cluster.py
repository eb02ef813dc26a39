"""The cluster of the person who runs the tests: used through their KUBECONFIG, in a namespace of our own."""

import os
from pathlib import Path
from typing import Self

from tools.bench.own_kubernetes import Fields, count_left

from podway.providers.gke.api import Conflict, KubernetesApi
from podway.providers.gke.kubeconfig import find_context

NAMESPACE = "podway-test"


class PersonsKubernetes:
    """As a block: the namespace is made, and deleted with all that is in it."""

    nodes = None

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig
        os.environ["KUBECONFIG"] = str(kubeconfig)
        self.api = KubernetesApi(find_context(None))
        self.settings = f"namespace: {NAMESPACE}\n{os.environ.get('PODWAY_TEST_GKE', '')}\n"

    def __enter__(self) -> Self:
        try:
            self.api.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        except Conflict as error:
            raise RuntimeError(
                f"there is a namespace {NAMESPACE} already: of a run that was killed? Delete it"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        self.api.call("DELETE", f"/api/v1/namespaces/{NAMESPACE}")

    def pods(self) -> list[Fields]:
        return self.api.read_items(f"/api/v1/namespaces/{NAMESPACE}/pods", {})

    def left(self) -> dict[str, int]:
        return count_left(self.api, NAMESPACE)
