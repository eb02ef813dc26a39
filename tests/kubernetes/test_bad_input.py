"""What can be wrong around a cluster, told by real servers: one sentence each, before anything is made where it can be known."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tools.bench.own_kubernetes import NAMESPACE, QUEUE, OwnKubernetes, build, own_kubernetes

from podway.errors import UserError
from podway.order import Order
from podway.providers.gke.provider import GkeProvider
from podway.task.task import Accelerator, Resources
from tests.conftest import wait_until
from tests.e2e.harness import Podway
from tests.e2e.test_kubernetes import podway

pytestmark = pytest.mark.kubernetes

V6E = Resources(accelerator=Accelerator(type="v6e-16"))
ORDER = Order(accelerator_type="v6e-16", topology="4x4", provider="gke", hosts_per_slice=4, chips_per_host=4)
BINDING = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/rolebindings"


@pytest.fixture
def provider(kubernetes: OwnKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GkeProvider]:
    if not isinstance(kubernetes, OwnKubernetes):
        pytest.skip("it takes rights away, which is not done to a person's cluster")
    monkeypatch.setenv("KUBECONFIG", str(kubernetes.kubeconfig))
    (tmp_path / "gke.yaml").write_text(f"queue: {QUEUE}\n")
    yield GkeProvider(tmp_path)
    wait_until(lambda: kubernetes.left() == {}, 60, "an empty cluster")


def test_no_rights(kubernetes: OwnKubernetes, provider: GkeProvider) -> None:
    """Nothing is made; and what would be missing is named with where the rights are written down."""
    binding = kubernetes.admin.call("GET", f"{BINDING}/podway")
    kubernetes.admin.call("DELETE", f"{BINDING}/podway")
    try:
        wait_until(lambda: _refused(provider), 60, "the right to be gone")
        with pytest.raises(UserError, match='User "podway" cannot create resource') as caught:
            asyncio.run(provider.submit(provider.render("demo", ORDER)))
        assert "docs/kubernetes.md" in caught.value.hint
        assert kubernetes.left() == {}
    finally:
        body = {key: binding[key] for key in ("roleRef", "subjects")} | {"metadata": {"name": "podway"}}
        kubernetes.admin.call("POST", BINDING, body)
        wait_until(lambda: not _refused(provider), 60, "the right to be there again")


def _refused(provider: GkeProvider) -> bool:
    try:
        asyncio.run(provider.clusters.api(None).items(f"/api/v1/namespaces/{NAMESPACE}/configmaps"))
    except UserError:
        return True
    return False


def test_kueue_of_either_version(kubernetes: OwnKubernetes, provider: GkeProvider) -> None:
    """Quota and Workloads are read in both of the versions that Kueue serves."""
    assert asyncio.run(provider.clusters.kueue_version("real")) == "v1beta2"

    async def reason(version: str) -> str:
        provider.clusters._kueue["real"] = version
        async with asyncio.timeout(240):
            while "insufficient" not in (found := await provider.observe("demo")).reason:
                await asyncio.sleep(0.2)
        return found.reason

    async def both() -> set[str]:
        await provider.submit(provider.render("demo", msgspec.structs.replace(ORDER, slices=3)))
        try:
            return {await reason(version) for version in ("v1beta1", "v1beta2")}
        finally:
            while (await provider.observe("demo")).condition != "absent":
                await provider.destroy("demo")
                await asyncio.sleep(0.2)

    (said,) = asyncio.run(both())
    assert said.startswith(f"queue {QUEUE}: couldn't assign flavors to pod set slice: insufficient quota")


def test_names_of_any_length(kubernetes: OwnKubernetes, provider: GkeProvider) -> None:
    """The longest name of a cluster, with more slices than any has, is one that JobSet takes."""
    name = "a" + "_B.c" * 15

    async def life() -> None:
        await provider.submit(provider.render(name, msgspec.structs.replace(ORDER, slices=100)))
        assert (await provider.observe(name)).condition == "creating"
        async with asyncio.timeout(240):
            while (await provider.observe(name)).condition != "absent":
                await provider.destroy(name)
                await asyncio.sleep(0.2)

    asyncio.run(life())


def test_an_unknown_topology_and_an_unknown_queue(own: OwnKubernetes, pod: Podway, tmp_path: Path) -> None:
    """Both are known before anything is made."""
    (tmp_path / "task.yaml").write_text(
        "resources: {infra: k8s, accelerators: tpu-v6e-16, accelerator_args: {topology: 3x5}}\nrun: echo no\n"
    )
    said = podway(pod, "launch", "-y", str(tmp_path / "task.yaml"), code=1)
    assert "3x5" in said and "Traceback" not in said and own.left() == {}
    (pod.home / "gke.yaml").write_text("queue: nobodys-queue\n")
    said = podway(pod, "launch", "-y", "--infra", "k8s", "--gpus", "tpu-v6e-16", "-c", "no", "echo no", code=1)
    assert "Kueue has no queue nobodys-queue in namespace default" in said and QUEUE in said
    assert "Traceback" not in said and own.left() == {}


def test_an_image_that_cannot_be_pulled(own: OwnKubernetes, pod: Podway, tmp_path: Path) -> None:
    assert own.nodes is not None
    own.nodes.unpullable.add("registry.example/nobodys:1")
    (tmp_path / "task.yaml").write_text(
        "resources: {infra: k8s, accelerators: tpu-v6e-16, image_id: docker:registry.example/nobodys:1}\nrun: echo no\n"
    )
    podway(pod, "launch", "-y", "-c", "waits", "-d", str(tmp_path / "task.yaml"))
    wait_until(lambda: "cannot be pulled" in pod.client.cluster("waits").reason, 60, "the reason")
    assert "the image registry.example/nobodys:1 cannot be pulled" in pod.client.cluster("waits").reason


def test_jobset_is_not_installed(provider: GkeProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A control plane without it: the offer is blocked, and says how to install it."""
    with own_kubernetes(build(), installed=()) as bare:
        monkeypatch.setenv("KUBECONFIG", str(bare.kubeconfig))
        (offer,) = GkeProvider(tmp_path).offers(V6E, 1)
        assert offer.blocked is not None
        assert "JobSet is not installed in the cluster of context real" in offer.blocked.reason
        assert "podway gke prepare" in offer.blocked.reason
