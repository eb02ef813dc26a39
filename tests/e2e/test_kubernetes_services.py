"""A service whose replica is a pod: its program listens on the pod's loopback, and the gateway reaches it through the API server."""

from collections.abc import Iterator

import httpx
import msgspec
import pytest

from podway.sandbox.kubernetes.running import NodePool, RunningKubernetes, running_kubernetes, why_no_namespaces
from tests.conftest import free_port, wait_until
from tests.e2e.harness import Podway
from tests.e2e.test_gateway import gateway_url
from tests.e2e.test_gateway_hosts import QUESTION, on
from tests.e2e.test_services import ready


@pytest.fixture
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningKubernetes]:
    why_not = why_no_namespaces()
    if why_not:
        pytest.skip(why_not)
    place = tmp_path_factory.mktemp("kubernetes")
    with running_kubernetes(place, (NodePool(name="pool", accelerator_type="v6e-1"),), network=97) as running:
        yield running


@pytest.mark.long
def test_a_replica_on_a_pod(pod: Podway, kubernetes: RunningKubernetes) -> None:
    """Asked through its gateway, replaced when its pod is deleted, asked again while the server is killed, and gone at the end."""
    environment = {"KUBECONFIG": str(kubernetes.kubeconfig)}
    pod.start(**environment)
    plain = on("gke", "v6e-1", low=1)
    assert plain.task.service is not None
    spec = msgspec.structs.replace(plain.task.service, port=free_port())  # pods share this machine's loopback here
    pod.client.apply_service(msgspec.structs.replace(plain, task=msgspec.structs.replace(plain.task, service=spec)))
    (first,) = ready(pod, 1, seconds=150).replicas
    url, key = gateway_url(pod), pod.client.make_gateway_key("first")

    def answered_by() -> str:
        head = {"authorization": f"Bearer {key}"}
        answer = httpx.post(f"{url}/v1/chat/completions", json=QUESTION, headers=head, timeout=60)
        return str(answer.json()["system_fingerprint"]) if answer.status_code == 200 else ""

    wait_until(lambda: answered_by() == first.cluster, 60, "an answer")
    (found,) = kubernetes.objects.find("pods")
    kubernetes.api.answer("DELETE", f"/api/v1/namespaces/default/pods/{found['metadata']['name']}", {}, {})
    wait_until(lambda: answered_by() == "web-2", 150, "an answer of the replica that replaces it")
    assert all(one.tunnel for one in pod.client.gateway_routes().services[0].backends)
    pod.kill_server()
    assert answered_by() == "web-2"
    pod.start(**environment)
    pod.client.end_service("web")
    wait_until(lambda: pod.client.service("web").state == "GONE", 90, "the end of the service")
    wait_until(lambda: kubernetes.left() == {}, 60, "an empty cluster")
