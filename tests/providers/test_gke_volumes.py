"""What pods have mounted: buckets by the gcsfuse driver, and volumes, which are claims."""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from podway.control.bucket_mounts import check_mounted, with_buckets
from podway.control.capability_check import remarks
from podway.errors import UserError
from podway.order import Order, OrderBucket, OrderVolume
from podway.provider_table import row_of
from podway.providers.gke.claims import render_claim
from podway.providers.gke.diagnose import diagnose
from podway.providers.gke.manifests import JobSetContext
from podway.providers.gke.pod_volumes import DRIVER, pod_volumes
from podway.providers.gke.provider import GkeProvider
from podway.providers.gke.render import render
from podway.providers.gke.settings import GkeSettings
from podway.providers.gke.state import Seen, observation
from podway.sandbox.kubernetes.running import RunningKubernetes, running_kubernetes
from podway.task.read import read_task_text
from podway.task.task import Bucket, FileMount, LocalDir, Placement, Task
from podway.task.volumes import VolumeSpec, read_volume_text

GOLDEN = Path(__file__).parent.parent / "golden" / "gke"
CONTEXT = JobSetContext(
    owner="ab12cd34", context="east", namespace="default", settings=GkeSettings(service_account="trainer")
)
ORDER = Order(accelerator_type="v6e-16", topology="4x4", provider="gke", hosts_per_slice=4, chips_per_host=4)
TASK = Task(
    run="x",
    file_mounts=(
        FileMount(target="/data", source=Bucket(uri="gs://corpus/c4/en/", read_only=True)),
        FileMount(target="~/out", source=Bucket(uri="gs://runs", options={"mount_options": "--uid 7 -o noexec"})),
        FileMount(target="cache", source=Bucket(uri="gs://cache", mode="MOUNT_CACHED", options={"transfers": "9"})),
        FileMount(target="~/copied", source=Bucket(uri="gs://corpus", mode="COPY")),
        FileMount(target="~/own", source=LocalDir(path="/x")),
    ),
)


def golden(name: str, found: Any) -> None:
    """PODWAY_REWRITE_GOLDEN=1 after a wanted change."""
    text = json.dumps(msgspec.to_builtins(found), indent=2) + "\n"
    path = GOLDEN / f"{name}.json"
    if os.environ.get("PODWAY_REWRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def test_a_cluster_with_buckets_is_golden() -> None:
    golden("buckets", render(CONTEXT, "demo", with_buckets(ORDER, [TASK])))


def test_the_identity_of_a_pod() -> None:
    """By name on the node's network; by itself elsewhere; the node's where no service account is named."""
    order = with_buckets(ORDER, [TASK])

    def attributes(**settings: Any) -> dict[str, str]:
        context = msgspec.structs.replace(CONTEXT, settings=GkeSettings(**settings))
        found: dict[str, str] = pod_volumes(context, order, "/h").volumes[0]["csi"]["volumeAttributes"]
        return found

    assert attributes(service_account="trainer")["hostNetworkPodKSA"] == "true"
    assert "hostNetworkPodKSA" not in attributes(service_account="trainer", host_network=False)
    assert "hostNetworkPodKSA" not in attributes()
    assert attributes() == {"bucketName": "corpus", "mountOptions": "implicit-dirs,only-dir=c4/en"}


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ("", []),
        ("--uid=7 --gid 8", ["uid=7", "gid=8"]),
        ("-o ro -o allow_other", ["ro", "allow_other"]),
        ("file-mode=664", ["file-mode=664"]),
    ],
)
def test_arguments_of_gcsfuse_become_options_of_the_driver(given: str, options: list[str]) -> None:
    order = msgspec.structs.replace(ORDER, buckets=(OrderBucket(uri="gs://b", target="/d", arguments=given),))
    (volume,) = pod_volumes(CONTEXT, order, "/h").volumes
    assert volume["csi"]["volumeAttributes"]["mountOptions"].split(",") == ["implicit-dirs", *options]


@pytest.mark.parametrize(("given", "said"), [("--a 'b", "cannot be taken apart"), ("--a b,c", "a comma")])
def test_arguments_that_cannot_be(given: str, said: str) -> None:
    order = msgspec.structs.replace(ORDER, buckets=(OrderBucket(uri="gs://b", target="/d", arguments=given),))
    with pytest.raises(UserError, match=said):
        pod_volumes(CONTEXT, order, "/h")


def test_a_task_on_a_cluster_whose_pods_lack_its_mounts_is_refused() -> None:
    order = with_buckets(ORDER, [TASK])
    check_mounted(order, "demo", TASK)
    check_mounted(order, "demo", Task(run="x"))
    for mount in (
        FileMount(target="/data", source=Bucket(uri="gs://other")),
        FileMount(target="/elsewhere", source=Bucket(uri="gs://corpus/c4/en", read_only=True)),
        FileMount(target="/data", source=Bucket(uri="gs://corpus/c4/en")),
    ):
        with pytest.raises(UserError, match=r"cluster demo does not have gs://.* mounted at /") as caught:
            check_mounted(order, "demo", Task(run="x", file_mounts=(mount,)))
        assert all(word in caught.value.hint for word in ("podway down demo", "--one-shot", "mode: COPY"))
    copied = FileMount(target="/data", source=Bucket(uri="gs://other", mode="COPY"))
    check_mounted(order, "demo", Task(run="x", file_mounts=(copied,)))
    check_mounted(msgspec.structs.replace(ORDER, provider="gcp"), "demo", TASK)  # its hosts mount by themselves


def test_steps_of_a_pipeline_share_their_pods() -> None:
    one, other = (
        Task(run="x", file_mounts=(FileMount(target="/d", source=Bucket(uri=uri)),)) for uri in ("gs://a", "gs://b")
    )
    assert len(with_buckets(ORDER, [one, one]).buckets) == 1
    with pytest.raises(UserError, match="both gs://a and gs://b"):
        with_buckets(ORDER, [one, other])


def test_what_is_not_as_elsewhere_is_said() -> None:
    found = remarks(TASK, row_of("gke").capabilities, simulated=False)
    assert found.refusal is None
    assert any("MOUNT_CACHED is MOUNT here" in note for note in found.notes)


@pytest.fixture
def kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningKubernetes]:
    """Without nodes, and so without the driver."""
    with running_kubernetes(tmp_path) as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        yield running


def test_a_cluster_without_the_driver(kubernetes: RunningKubernetes, tmp_path: Path) -> None:
    """Nothing is made; whoever may not see drivers is not refused."""
    provider = GkeProvider(tmp_path)
    request = provider.render("demo", with_buckets(ORDER, [TASK]))
    with pytest.raises(UserError, match=f"context pretend has no {DRIVER}") as caught:
        asyncio.run(provider.submit(request))
    assert "GcsFuseCsiDriver=ENABLED" in caught.value.hint and "mode: COPY" in caught.value.hint
    assert kubernetes.objects.count() == {}
    said = {one.what: one for one in diagnose(tmp_path)}
    assert said["buckets"].ok and "the gcsfuse driver is not there" in said["buckets"].note
    kubernetes.api.forbidden = lambda method, plural: plural == "csidrivers"
    asyncio.run(provider.submit(request))
    assert "no right to see" in {one.what: one for one in diagnose(tmp_path)}["buckets"].note
    kubernetes.api.forbidden = lambda method, plural: False
    asyncio.run(provider.destroy("demo"))
    asyncio.run(provider.destroy("demo"))


def test_a_mount_that_fails_is_why_it_waits() -> None:
    pod = {"metadata": {"name": "demo-0"}, "spec": {"nodeName": "n"}, "status": {"phase": "Pending"}}
    about = {"involvedObject": {"name": "demo-0"}}
    event = {"reason": "FailedMount", "message": "MountVolume.SetUp failed:\n bucket corpus not found", **about}
    template = {"spec": {"parallelism": 1}}
    jobset = {"metadata": {"name": "demo"}, "spec": {"replicatedJobs": [{"template": template}]}}
    seen = observation(Seen(jobset=jobset, pods=(pod,), events=(event,)), "o", "/h")
    assert seen.reason == "a volume of pod demo-0 cannot be mounted: MountVolume.SetUp failed: bucket corpus not found"


# volumes

SPEC = VolumeSpec(
    name="Data.1",
    placement=Placement(provider="gke"),
    size_gb=200,
    disk_type="filestore",
    access_mode="ReadWriteMany",
)


def test_a_volume_and_its_pods_are_golden() -> None:
    volumes = (
        OrderVolume(name="data", disk="volume-data-1", size_gb=200, shared=True),
        OrderVolume(name="models", disk="models", shared=True, read_only=True),
    )
    order = msgspec.structs.replace(ORDER, volumes=volumes)
    golden("volumes", {"claim": render_claim(CONTEXT, SPEC), "cluster": render(CONTEXT, "demo", order)})


def test_one_node_at_a_time() -> None:
    volume = OrderVolume(name="data", disk="volume-data-1", size_gb=200)
    with pytest.raises(UserError, match="volume data is of one node at a time, and 4 hosts would have it") as caught:
        render(CONTEXT, "demo", msgspec.structs.replace(ORDER, volumes=(volume,)))
    assert "ReadWriteMany" in caught.value.hint
    one = Order(accelerator_type="v6e-4", topology="2x2", provider="gke", chips_per_host=4, volumes=(volume,))
    render(CONTEXT, "demo", one)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"size_gb": None}, "has no size"),
        ({"access_mode": "ReadWrite"}, "is not an access mode"),
        ({"disk_type": "A b"}, "cannot be a storage class"),
    ],
)
def test_a_claim_that_cannot_be(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        render_claim(CONTEXT, msgspec.structs.replace(SPEC, **change))


def test_a_claim_is_made_registered_and_deleted(kubernetes: RunningKubernetes, tmp_path: Path) -> None:
    provider = GkeProvider(tmp_path)

    def create(**change: Any) -> Any:
        return asyncio.run(provider.create_volume(msgspec.structs.replace(SPEC, **change)))

    with pytest.raises(UserError, match="context pretend has no storage class filestore") as caught:
        create()
    assert caught.value.hint == "use one of: none is there" and kubernetes.objects.count() == {}
    kubernetes.objects.create("storageclasses", "", {"metadata": {"name": "filestore"}})
    made = create()
    assert made == create()  # an interrupted call comes again
    assert (made.size_gb, made.disk_type, made.shared, made.region) == (200, "filestore", True, "pretend")
    assert made.directory == "/podway/volumes/Data.1"
    (claim,) = kubernetes.objects.find("persistentvolumeclaims")
    assert claim["metadata"]["name"] == made.disk
    registered = create(name="other", disk_id=made.disk)
    assert (registered.disk, registered.shared, registered.size_gb) == (made.disk, True, 200)
    with pytest.raises(UserError, match="has no claim nobodys"):
        create(name="x", disk_id="nobodys")
    with pytest.raises(UserError, match=r"has no claim \.\./secrets/x"):
        create(name="x", disk_id="../secrets/x")
    kubernetes.api.forbidden = lambda method, plural: (method, plural) == ("POST", "persistentvolumeclaims")
    with pytest.raises(UserError, match='cannot create resource "persistentvolumeclaims"'):
        create(name="second")
    kubernetes.api.forbidden = lambda method, plural: plural == "storageclasses"
    assert not create(name="third", disk_type="unseen", access_mode=None).shared
    owned = {one.volume: one for one in asyncio.run(provider.list_resources())}
    assert set(owned) == {"Data.1", "third"} and owned["third"].owner == provider.owner
    asyncio.run(provider.purge(owned["third"]))
    assert [one.volume for one in asyncio.run(provider.list_resources())] == ["Data.1"]
    kubernetes.api.forbidden = lambda method, plural: plural == "persistentvolumeclaims"
    assert asyncio.run(provider.list_resources()) == []
    kubernetes.api.forbidden = lambda method, plural: False
    for name in ("third", "Data.1", "Data.1"):
        asyncio.run(provider.delete_volume(msgspec.structs.replace(SPEC, name=name)))
    assert kubernetes.objects.find("persistentvolumeclaims") == []


def test_a_claim_of_somebody_else_is_not_taken(kubernetes: RunningKubernetes, tmp_path: Path) -> None:
    provider = GkeProvider(tmp_path)
    spec = msgspec.structs.replace(SPEC, disk_type=None)
    made = asyncio.run(provider.create_volume(spec))
    asyncio.run(provider.delete_volume(spec))
    kubernetes.objects.create("persistentvolumeclaims", "default", {"metadata": {"name": made.disk}})
    with pytest.raises(UserError, match="exists, and is not this volume's"):
        asyncio.run(provider.create_volume(spec))


SKYPILOT_FILE = """
name: shared-data
type: k8s-pvc
infra: k8s/east
size: 100Gi
labels: {team: a}
config: {namespace: team-a, storage_class_name: filestore, access_mode: ReadWriteMany}
"""


def test_volume_files_of_both_dialects() -> None:
    spec = read_volume_text(SKYPILOT_FILE)
    assert spec is not None and spec.placement == Placement(provider="gke", region="east")
    assert (spec.name, spec.size_gb, spec.disk_type, spec.access_mode) == (
        "shared-data",
        100,
        "filestore",
        "ReadWriteMany",
    )
    assert len(spec.notes) == 2
    existing = read_volume_text("name: old\ntype: k8s-pvc\nuse_existing: true\n")
    assert existing is not None and (existing.disk_id, existing.placement) == ("old", Placement(provider="gke"))
    dstack = read_volume_text("type: volume\nname: data\nbackend: kubernetes\nregion: east\nsize: 100GB\n")
    assert dstack is not None and dstack.placement == Placement(provider="gke", region="east")
    for text, said in (
        ("name: a\ntype: k8s-pvc\n", "has no size"),
        ("type: k8s-pvc\nsize: 1Gi\n", "has no name"),
        ("name: a\ntype: k8s-pvc\ninfra: gcp\nsize: 1Gi\n", "a k8s-pvc volume is on k8s"),
        ("name: a\ntype: k8s-pvc\nsize: 1Gi\nconfig: {access: x}\n", "unknown key"),
        ("type: volume\nname: data\nbackend: kubernetes\n", "neither a size nor a volume_id"),
    ):
        with pytest.raises(UserError) as caught:
            read_volume_text(text)
        assert said in str([caught.value.what, *(one.what for one in caught.value.others)])
    with pytest.raises(UserError, match="is not a task") as refused:
        read_task_text(SKYPILOT_FILE)
    assert refused.value.hint == "create it with: podway apply -f FILE"
