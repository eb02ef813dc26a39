"""Google's own clients against the sandbox: over gRPC in three versions, over REST, and Cloud Storage's.

The fidelity of the sandbox is what these clients accept and how they understand it, not what Podway makes of it.
"""

import io
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from google.api_core import exceptions
from google.cloud import storage, tpu_v1, tpu_v2, tpu_v2alpha1
from google.longrunning import operations_pb2
from googleapiclient import discovery
from googleapiclient.errors import HttpError

from podway.sandbox.running import Running, SandboxError, running_sandbox
from tests.conftest import wait_until
from tests.sandbox.clients import credentials_of, over_grpc, over_rest

SPEED = 2000.0


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_sandbox(tmp_path_factory.mktemp("sandbox"), hosts="none", speed=SPEED) as running:
        yield running


@pytest.fixture
def parent(sandbox: Running) -> Iterator[str]:
    """A zone without quota, stock or faults set; what a test leaves is deleted."""
    yield f"projects/{sandbox.project}/locations/{sandbox.zone}"
    sandbox.command("DELETE", "faults")
    sandbox.command("POST", "stock", {"chips": None})
    sandbox.command("POST", "quota", {"limit": None})


WIRES: dict[str, Callable[[Running], tpu_v2.TpuClient]] = {
    "grpc": lambda sandbox: over_grpc(tpu_v2, sandbox),
    "rest": over_rest,
}


@pytest.fixture(params=WIRES)
def client(request: pytest.FixtureRequest, sandbox: Running) -> tpu_v2.TpuClient:
    return WIRES[request.param](sandbox)


def a_node(**more: Any) -> tpu_v2.Node:
    return tpu_v2.Node(accelerator_type="v6e-16", runtime_version="v2-alpha-tpuv6e", **more)


def active(client: Any, name: str) -> Any:
    return wait_until(lambda: (one := client.get_queued_resource(name=name)).state.state.name == "ACTIVE" and one)


def test_the_life_of_a_node(client: tpu_v2.TpuClient, parent: str) -> None:
    config = tpu_v2.AcceleratorConfig(type_="V6E", topology="4x4")
    wish = tpu_v2.Node(
        accelerator_config=config,
        runtime_version="v2-alpha-tpuv6e",
        labels={"who": "me"},
        network_config={"enable_external_ips": True},
        scheduling_config={"spot": True},
        data_disks=[],
    )
    operation = client.create_node(parent=parent, node_id="life", node=wish)
    assert operation.metadata.verb == "create"
    node = operation.result(timeout=30)
    assert node.state == tpu_v2.Node.State.READY
    assert node.accelerator_type == "v6e-16"
    assert node.api_version == tpu_v2.Node.ApiVersion.V2
    assert len(node.network_endpoints) == 4
    assert node.network_endpoints[0].access_config.external_ip != node.network_endpoints[0].ip_address
    assert node.scheduling_config.spot
    assert node.id > 0
    assert client.get_node(name=node.name) == node
    assert [one.name for one in client.list_nodes(parent=parent.replace(parent.split("/")[3], "-"))] == [node.name]

    changed = tpu_v2.Node(name=node.name, labels={"who": "you"}, metadata={"k": "v"})
    updated = client.update_node(node=changed, update_mask={"paths": ["labels", "metadata"]}).result(timeout=30)
    assert dict(updated.labels) == {"who": "you"}
    assert dict(updated.metadata) == {"k": "v"}
    with pytest.raises(exceptions.BadRequest):
        client.update_node(node=changed, update_mask={"paths": ["runtime_version"]})

    attributes = client.get_guest_attributes(tpu_v2.GetGuestAttributesRequest(name=node.name, worker_ids=["2"]))
    assert [item.key for item in attributes.guest_attributes[0].query_value.items] == ["hostname"]
    with pytest.raises(exceptions.BadRequest, match="pod slice"):
        client.stop_node(tpu_v2.StopNodeRequest(name=node.name))
    with pytest.raises(exceptions.Conflict):
        client.create_node(parent=parent, node_id="life", node=wish)
    client.delete_node(name=node.name).result(timeout=30)
    with pytest.raises(exceptions.NotFound):
        client.get_node(name=node.name)


def test_stop_and_start(client: tpu_v2.TpuClient, parent: str) -> None:
    wish = tpu_v2.Node(accelerator_type="v6e-8", runtime_version="v2-alpha-tpuv6e")
    node = client.create_node(parent=parent, node_id="one", node=wish).result(timeout=30)
    stopped = client.stop_node(tpu_v2.StopNodeRequest(name=node.name)).result(timeout=30)
    assert stopped.state == tpu_v2.Node.State.STOPPED
    started = client.start_node(tpu_v2.StartNodeRequest(name=node.name)).result(timeout=30)
    assert started.state == tpu_v2.Node.State.READY
    client.delete_node(name=node.name).result(timeout=30)


def test_multislice_as_one_queued_resource(client: tpu_v2.TpuClient, parent: str) -> None:
    spec = {
        "parent": parent,
        "multislice_params": {"node_count": 2, "node_id_prefix": "s"},
        "node": {"accelerator_type": "v6e-16", "runtime_version": "v2-alpha-tpuv6e"},
    }
    wish = tpu_v2.QueuedResource(tpu={"node_spec": [spec]}, spot={}, queueing_policy={"valid_until_duration": "3600s"})
    operation = client.create_queued_resource(parent=parent, queued_resource_id="q", queued_resource=wish)
    assert operation.result(timeout=30).name == f"{parent}/queuedResources/q"
    queued = active(client, f"{parent}/queuedResources/q")
    assert [one.node_id for one in queued.tpu.node_spec] == ["s-0", "s-1"]
    node = client.get_node(name=f"{parent}/nodes/s-1")
    assert node.queued_resource == queued.name
    assert node.multislice_node
    with pytest.raises(exceptions.BadRequest, match="with force"):
        client.delete_queued_resource(name=queued.name)
    client.delete_queued_resource(tpu_v2.DeleteQueuedResourceRequest(name=queued.name, force=True)).result(timeout=30)
    assert not list(client.list_queued_resources(parent=parent))
    assert not list(client.list_nodes(parent=parent))


def test_preempted_and_reset(client: tpu_v2.TpuClient, parent: str, sandbox: Running) -> None:
    node = {"accelerator_type": "v6e-8", "runtime_version": "v2-alpha-tpuv6e"}
    wish = tpu_v2.QueuedResource(tpu={"node_spec": [{"parent": parent, "node_id": "p", "node": node}]}, spot={})
    client.create_queued_resource(parent=parent, queued_resource_id="p", queued_resource=wish).result(timeout=30)
    name = active(client, f"{parent}/queuedResources/p").name
    sandbox.command("POST", "preempt", {"queued": "p"})
    wait_until(lambda: client.get_queued_resource(name=name).state.state.name == "SUSPENDED")
    client.reset_queued_resource(tpu_v2.ResetQueuedResourceRequest(name=name)).result(timeout=30)
    active(client, name)
    client.delete_queued_resource(tpu_v2.DeleteQueuedResourceRequest(name=name, force=True)).result(timeout=30)


def test_capacity_and_quota_as_clients_know_them(client: tpu_v2.TpuClient, parent: str, sandbox: Running) -> None:
    sandbox.command("POST", "stock", {"chips": 0})
    with pytest.raises(exceptions.ResourceExhausted, match="no more capacity"):
        client.create_node(parent=parent, node_id="full", node=a_node()).result(timeout=30)
    sandbox.command("POST", "stock", {"chips": None})
    sandbox.command("POST", "quota", {"limit": 4})
    with pytest.raises(exceptions.TooManyRequests, match="Quota limit"):
        client.create_node(parent=parent, node_id="full", node=a_node())
    with pytest.raises(SandboxError, match="There is no zone"):
        sandbox.command("POST", "stock", {"zone": "moon-1", "chips": 0})


def test_what_is_offered(client: tpu_v2.TpuClient, parent: str) -> None:
    types = {one.type_: one for one in client.list_accelerator_types(parent=parent)}
    assert types["v6e-16"].accelerator_configs[0].topology == "4x4"
    assert client.get_accelerator_type(name=types["v6e-16"].name) == types["v6e-16"]
    assert "v4-8" not in types
    assert "v2-alpha-tpuv6e" in [one.version for one in client.list_runtime_versions(parent=parent)]
    assert "us-east5-b" in [one.location_id for one in client.list_locations({"name": "projects/sandbox"}).locations]
    identity = client.generate_service_identity(tpu_v2.GenerateServiceIdentityRequest(parent=parent))
    assert identity.identity.email.endswith("@cloud-tpu.iam.gserviceaccount.com")


def test_operations_are_listed_and_deleted(sandbox: Running, parent: str) -> None:
    client = over_grpc(tpu_v2, sandbox)
    begun = client.create_node(parent=parent, node_id="ops", node=a_node())
    begun.result(timeout=30)
    client.delete_node(name=f"{parent}/nodes/ops").result(timeout=30)
    listed = client.list_operations(operations_pb2.ListOperationsRequest(name=parent))
    assert begun.operation.name in [one.name for one in listed.operations]
    client.delete_operation(operations_pb2.DeleteOperationRequest(name=begun.operation.name))
    with pytest.raises(exceptions.NotFound):
        client.get_operation(operations_pb2.GetOperationRequest(name=begun.operation.name))


def test_legacy_nodes(sandbox: Running) -> None:
    client, zone = over_grpc(tpu_v1, sandbox), "projects/sandbox/locations/us-central1-a"
    wish = tpu_v1.Node(accelerator_type="v2-8", tensorflow_version="2.12.0", network="default")
    node = client.create_node(parent=zone, node_id="old", node=wish).result(timeout=30)
    assert node.ip_address
    assert node.api_version == tpu_v1.Node.ApiVersion.V1
    assert [one.name for one in client.list_nodes(parent=zone)] == [node.name]
    assert "2.12.0" in [one.version for one in client.list_tensor_flow_versions(parent=zone)]
    newer = over_rest(sandbox)
    newer_wish = tpu_v2.Node(accelerator_type="v5litepod-8", runtime_version="v2-alpha-tpuv5-lite")
    newer.create_node(parent=zone, node_id="new", node=newer_wish).result(timeout=30)
    assert len(list(client.list_nodes(parent=zone))) == 1
    assert len(list(newer.list_nodes(parent=zone))) == 2
    for id in ("old", "new"):
        client.delete_node(name=f"{zone}/nodes/{id}").result(timeout=30)


def test_the_alpha_api(sandbox: Running, parent: str) -> None:
    client = over_grpc(tpu_v2alpha1, sandbox)
    sandbox.command("POST", "reservations", {"zone": sandbox.zone, "name": "mine", "generation": "v6e", "chips": 8})
    (reservation,) = client.list_reservations(tpu_v2alpha1.ListReservationsRequest(parent=parent))
    assert reservation.standard.size == 8
    node = {"accelerator_type": "v6e-8", "runtime_version": "v2-alpha-tpuv6e"}
    spec = {"parent": parent, "node_id": "r", "node": node}
    wish = tpu_v2alpha1.QueuedResource(tpu={"node_spec": [spec]}, reservation_name=reservation.name)
    client.create_queued_resource(parent=parent, queued_resource_id="r", queued_resource=wish).result(timeout=30)
    active(client, f"{parent}/queuedResources/r")
    event = tpu_v2alpha1.SimulateMaintenanceEventRequest(name=f"{parent}/nodes/r", worker_ids=["0"])
    client.simulate_maintenance_event(event).result(timeout=30)
    assert client.get_node(name=f"{parent}/nodes/r").state == tpu_v2alpha1.Node.State.READY
    whole = tpu_v2alpha1.PerformMaintenanceQueuedResourceRequest(name=f"{parent}/queuedResources/r")
    assert client.perform_maintenance_queued_resource(whole).result(timeout=30).name == whole.name
    wait_until(lambda: client.get_node(name=f"{parent}/nodes/r").state == tpu_v2alpha1.Node.State.READY)
    forced = tpu_v2alpha1.DeleteQueuedResourceRequest(name=f"{parent}/queuedResources/r", force=True)
    client.delete_queued_resource(forced).result(timeout=30)
    best = tpu_v2alpha1.QueuedResource(tpu={"node_spec": [{**spec, "node_id": "b"}]}, best_effort={})
    client.create_queued_resource(parent=parent, queued_resource_id="b", queued_resource=best).result(timeout=30)
    active(client, f"{parent}/queuedResources/b")
    client.delete_queued_resource(
        tpu_v2alpha1.DeleteQueuedResourceRequest(name=f"{parent}/queuedResources/b", force=True)
    ).result(timeout=30)


def test_the_same_request_id_is_one_request(sandbox: Running, parent: str) -> None:
    client = over_rest(sandbox)
    node = {"accelerator_type": "v6e-8", "runtime_version": "v2-alpha-tpuv6e"}
    wish = tpu_v2.QueuedResource(tpu={"node_spec": [{"parent": parent, "node_id": "i", "node": node}]})
    request = tpu_v2.CreateQueuedResourceRequest(
        parent=parent, queued_resource_id="i", queued_resource=wish, request_id="11111111-1111-1111-1111-111111111111"
    )
    first = client.create_queued_resource(request)
    again = over_grpc(tpu_v2, sandbox).create_queued_resource(request)
    assert first.operation.name == again.operation.name
    forced = tpu_v2.DeleteQueuedResourceRequest(name=f"{parent}/queuedResources/i", force=True)
    client.delete_queued_resource(forced).result(timeout=30)


def test_faults_as_clients_meet_them(client: tpu_v2.TpuClient, parent: str, sandbox: Running) -> None:
    def fault(**rule: Any) -> None:
        sandbox.command("DELETE", "faults")
        sandbox.command("POST", "faults", {"method": "CreateNode", "times": 1, **rule})

    lost = (exceptions.ServiceUnavailable, requests.exceptions.ConnectionError)
    fault(kind="error", status="PERMISSION_DENIED", message="Permission 'tpu.nodes.create' denied")
    with pytest.raises(exceptions.Forbidden, match=r"tpu\.nodes\.create"):
        client.create_node(parent=parent, node_id="f", node=a_node(), retry=None)
    fault(kind="drop")
    with pytest.raises(lost):
        client.create_node(parent=parent, node_id="f", node=a_node(), retry=None)
    assert not list(client.list_nodes(parent=parent))
    fault(kind="lro", status="INTERNAL", message="broken")
    with pytest.raises(exceptions.InternalServerError, match="broken"):
        client.create_node(parent=parent, node_id="f", node=a_node()).result(timeout=30)
    assert not list(client.list_nodes(parent=parent))
    fault(kind="slow", seconds=2.0)
    with pytest.raises((exceptions.DeadlineExceeded, requests.exceptions.ReadTimeout, exceptions.RetryError)):
        client.create_node(parent=parent, node_id="slow", node=a_node(), retry=None, timeout=1.0)
    fault(kind="lost")
    with pytest.raises(lost):
        client.create_node(parent=parent, node_id="f", node=a_node(), retry=None)
    assert {one.name.rpartition("/")[2] for one in client.list_nodes(parent=parent)} == {"f", "slow"}
    living = {one["name"] for one in sandbox.command("GET", "ledger")["living"]}
    assert {f"{parent}/nodes/f", f"{parent}/nodes/slow"} <= living
    for id in ("f", "slow"):
        client.delete_node(name=f"{parent}/nodes/{id}").result(timeout=30)


def test_quotas_over_the_discovery_client(sandbox: Running, parent: str) -> None:
    """Service Usage has no generated client for quotas; the one that reads Google's own description of the API does."""
    api = discovery.build(
        "serviceusage",
        "v1beta1",
        credentials=credentials_of(sandbox),
        client_options={"api_endpoint": sandbox.rest},
        static_discovery=True,
    )
    metrics = api.services().consumerQuotaMetrics()
    service = f"projects/{sandbox.project}/services/tpu.googleapis.com"

    def limits(name: str) -> dict[str, str | None]:
        found, asked = [], metrics.list(parent=service, pageSize=5)
        while asked is not None:
            page = asked.execute()
            found += page["metrics"]
            asked = metrics.list_next(asked, page)
        (one,) = [metric for metric in found if metric["metric"] == f"tpu.googleapis.com/{name}"]
        (limit,) = one["consumerQuotaLimits"]
        assert limit["unit"] == "1/{project}/{zone}" and sandbox.zone in limit["supportedLocations"]
        return {
            bucket.get("dimensions", {}).get("zone", ""): bucket.get("effectiveLimit")
            for bucket in limit["quotaBuckets"]
        }

    assert limits("tpu-v6e") == {"": "-1"}
    sandbox.command("POST", "quota", {"limit": 64})
    sandbox.command("POST", "quota", {"zone": sandbox.zone, "limit": 0})
    try:
        assert limits("tpu-v5s-litepod-preemptible") == {"": "64", sandbox.zone: None}
    finally:
        sandbox.command("POST", "quota", {"zone": sandbox.zone, "limit": None})
    with pytest.raises(HttpError, match="was not found"):
        metrics.list(parent=f"projects/{sandbox.project}/services/nothing.googleapis.com").execute()
    with pytest.raises(HttpError, match="was not found"):
        metrics.get(name=f"{service}/consumerQuotaMetrics/x").execute()


@pytest.fixture
def bucket(sandbox: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[storage.Bucket]:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", sandbox.storage)
    client = storage.Client(project=sandbox.project, credentials=credentials_of(sandbox))
    made = client.create_bucket("my-bucket", location="us-east5")
    yield made
    sandbox.command("POST", "permissions", {"bucket": "my-bucket", "deny": []})
    sandbox.command("DELETE", "faults")
    made.delete(force=True)


def test_objects(bucket: storage.Bucket) -> None:
    with pytest.raises(exceptions.Conflict):
        bucket.client.create_bucket("my-bucket")
    assert bucket.client.lookup_bucket("another") is None
    blob = bucket.blob("a folder/ä b.txt")
    blob.metadata = {"k": "v"}
    blob.upload_from_string("hello", content_type="text/plain")
    found = bucket.get_blob("a folder/ä b.txt")
    assert found is not None
    assert (found.metadata, found.content_type, found.size) == ({"k": "v"}, "text/plain", 5)
    assert found.download_as_bytes() == b"hello"
    assert found.download_as_bytes(start=1, end=2) == b"el"
    first = found.generation
    blob.upload_from_string("other", if_generation_match=first)
    with pytest.raises(exceptions.PreconditionFailed):
        blob.upload_from_string("third", if_generation_match=first)
    with pytest.raises(exceptions.PreconditionFailed):
        blob.delete(if_generation_match=0)
    blob.patch()
    bucket.copy_blob(blob, bucket, "copy")
    bucket.rename_blob(bucket.blob("copy"), "moved/here")
    bucket.move_blob(bucket.blob("moved/here"), "moved/there")
    assert [one.name for one in bucket.list_blobs()] == ["a folder/ä b.txt", "moved/there"]
    with pytest.raises(exceptions.Conflict):
        bucket.delete()
    blob.delete()
    with pytest.raises(exceptions.NotFound):
        blob.download_as_bytes()


def test_big_objects_go_up_piece_by_piece(bucket: storage.Bucket) -> None:
    data = os.urandom(2_500_000)
    bucket.blob("pieces", chunk_size=1 << 20).upload_from_file(io.BytesIO(data))
    assert bucket.blob("pieces").download_as_bytes() == data
    bucket.blob("nothing", chunk_size=1 << 20).upload_from_file(io.BytesIO(b""))
    assert bucket.get_blob("nothing").size == 0
    bucket.blob("both").compose([bucket.blob("pieces"), bucket.blob("nothing")])
    assert bucket.get_blob("both").crc32c == bucket.get_blob("pieces").crc32c


def test_listing_by_folder_and_by_page(bucket: storage.Bucket) -> None:
    for name in ("a/1", "a/2", "b/1", "c", "d"):
        bucket.blob(name).upload_from_string("x")
    found = bucket.list_blobs(delimiter="/", page_size=1)
    assert [one.name for one in found] == ["c", "d"]
    assert found.prefixes == {"a/", "b/"}
    assert [one.name for one in bucket.list_blobs(prefix="a/")] == ["a/1", "a/2"]


def test_a_missing_permission_is_named(bucket: storage.Bucket, sandbox: Running) -> None:
    bucket.blob("x").upload_from_string("x")
    sandbox.command("POST", "permissions", {"bucket": "my-bucket", "deny": ["storage.objects.get"]})
    with pytest.raises(exceptions.Forbidden, match=r"storage\.objects\.get"):
        bucket.blob("x").download_as_bytes()
    asked = ["storage.objects.get", "storage.objects.create"]
    assert bucket.test_iam_permissions(asked) == ["storage.objects.create"]
    bucket.blob("y").upload_from_string("y")


@pytest.mark.skipif(shutil.which("rclone") is None, reason="rclone is not installed")
def test_rclone(bucket: storage.Bucket, sandbox: Running, tmp_path: Path) -> None:
    config = tmp_path / "rclone.conf"
    config.write_text(f"[s]\ntype = google cloud storage\nanonymous = true\nendpoint = {sandbox.storage}/storage/v1/\n")
    (tmp_path / "up").mkdir()
    (tmp_path / "up" / "f.bin").write_bytes(os.urandom(300_000))

    def rclone(*arguments: str) -> None:
        subprocess.run(["rclone", "--config", str(config), *arguments], check=True, timeout=60)

    rclone("copy", str(tmp_path / "up"), "s:my-bucket/there")
    rclone("moveto", "s:my-bucket/there/f.bin", "s:my-bucket/there/g.bin")
    rclone("copy", "s:my-bucket/there", str(tmp_path / "down"))
    assert (tmp_path / "down" / "g.bin").read_bytes() == (tmp_path / "up" / "f.bin").read_bytes()
