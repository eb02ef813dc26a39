"""The pretended cloud's rules, without wires or machines: histories that hypothesis makes up, and the known paths."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from podway.sandbox.hosts.machines import NoMachines
from podway.sandbox.status import ApiError
from podway.sandbox.tpu.api import TpuApi
from podway.sandbox.tpu.nodes import HOLDING
from podway.sandbox.world import World

ZONE = "projects/p/locations/us-east5-b"
QUIET = "projects/p/locations/us-east1-d"
FOREVER = 40 * 24 * 3600.0  # longer than anything takes


class Cloud:
    """A world, its API, and machines that come up as soon as they are asked for."""

    def __init__(self, speed: float = 1.0) -> None:
        self.lines: list[dict[str, Any]] = []
        self.world = World(speed, self.lines.append)
        self.api = TpuApi(self.world)
        self.machines = NoMachines()
        self.now = 1_700_000_000.0

    def call(self, method: str, version: str = "v2", doom: ApiError | None = None, **fields: Any) -> dict[str, Any]:
        try:
            return self.api.call(version, method, fields, self.now, doom)
        finally:
            self.do_actions()

    def pass_time(self, seconds: float) -> None:
        """Second by second where something happens, so that each action is answered at its time."""
        self.world.advance(self.now)
        self.do_actions()
        until = self.now + seconds
        while (due := self.world.agenda.next_due()) is not None and due <= until:
            self.now = max(self.now, due)
            self.world.advance(self.now)
            self.do_actions()
        self.now = until
        self.world.advance(self.now)
        self.do_actions()

    def do_actions(self) -> None:
        for action in self.world.take_actions():
            node = self.world.nodes.all.get(action.node)
            if action.what in ("boot", "reboot") and node is not None:
                hosts = self.machines.boot(action.number, [f"w{i}" for i in range(node.slice.hosts)])
                self.world.nodes.hosts_up(action.node, action.number, hosts, self.now)
            if action.operation:
                self.world.nodes.updated(action.operation, self.now)

    def node(self, id: str = "n", zone: str = ZONE) -> dict[str, Any]:
        return self.call("GetNode", name=f"{zone}/nodes/{id}")

    def queued(self, id: str = "q") -> dict[str, Any]:
        return self.call("GetQueuedResource", name=f"{ZONE}/queuedResources/{id}")

    def create(self, id: str = "n", type: str = "v6e-8", **more: Any) -> dict[str, Any]:
        body = {"acceleratorType": type, "runtimeVersion": "v2-alpha-tpuv6e", **more}
        return self.call("CreateNode", parent=ZONE, nodeId=id, node=body)

    def queue(self, id: str = "q", count: int = 2, type: str = "v6e-8", **more: Any) -> dict[str, Any]:
        node = {"acceleratorType": type, "runtimeVersion": "v2-alpha-tpuv6e"}
        named = {"multisliceParams": {"nodeCount": count}} if count > 1 else {"nodeId": f"{id}-0"}
        wish = {"tpu": {"nodeSpec": [{"parent": ZONE, "node": node, **named}]}, **more}
        return self.call("CreateQueuedResource", parent=ZONE, queuedResourceId=id, queuedResource=wish)

    def done(self, operation: dict[str, Any]) -> dict[str, Any]:
        return self.call("GetOperation", name=operation["name"])


def refused(call: Any, *args: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(*args, **fields)
    return caught.value


class Histories(RuleBasedStateMachine):
    """Anything anyone may do, in any order; what must hold at each moment, and in the end."""

    @initialize(speed=st.sampled_from([1.0, 60.0]))
    def begin(self, speed: float) -> None:
        self.cloud = Cloud(speed)
        self.operations: list[str] = []

    ids = st.sampled_from(["a", "b", "c"])
    dooms = st.sampled_from([None, None, None, ApiError("INTERNAL", "doomed")])

    def try_(self, method: str, doom: ApiError | None = None, version: str = "v2", **fields: Any) -> None:
        try:
            self.operations.append(self.cloud.call(method, version, doom, **fields)["name"])
        except ApiError as error:
            assert error.status in (
                *("NOT_FOUND", "ALREADY_EXISTS", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED"),
                "INVALID_ARGUMENT",
            ), error

    @rule(id=ids, doom=dooms, type=st.sampled_from(["v6e-1", "v6e-8", "v6e-16"]), spot=st.booleans())
    def create_node(self, id: str, doom: ApiError | None, type: str, spot: bool) -> None:
        body = {"acceleratorType": type, "runtimeVersion": "v2-alpha-tpuv6e", "schedulingConfig": {"spot": spot}}
        self.try_("CreateNode", doom, parent=ZONE, nodeId=id, node=body)

    @rule(id=ids, doom=dooms, method=st.sampled_from(["DeleteNode", "StopNode", "StartNode"]))
    def change_node(self, id: str, doom: ApiError | None, method: str) -> None:
        self.try_(method, doom, name=f"{ZONE}/nodes/{id}")

    @rule(id=ids, doom=dooms)
    def maintain(self, id: str, doom: ApiError | None) -> None:
        self.try_("SimulateMaintenanceEvent", doom, "v2alpha1", name=f"{ZONE}/nodes/{id}", workerIds=["0"])

    @rule(id=ids, doom=dooms)
    def label(self, id: str, doom: ApiError | None) -> None:
        node = {"name": f"{ZONE}/nodes/{id}", "labels": {"x": "y"}}
        self.try_("UpdateNode", doom, node=node, updateMask="labels")

    @rule(
        id=ids,
        doom=dooms,
        count=st.integers(1, 3),
        tier=st.sampled_from([{}, {"spot": {}}]),
        until=st.sampled_from([None, "30s", "3600s"]),
    )
    def queue(self, id: str, doom: ApiError | None, count: int, tier: dict[str, Any], until: str | None) -> None:
        node = {"acceleratorType": "v6e-8", "runtimeVersion": "v2-alpha-tpuv6e"}
        named = {"multisliceParams": {"nodeCount": count}} if count > 1 else {"nodeId": id}
        policy = {"queueingPolicy": {"validUntilDuration": until}} if until else {}
        wish = {"tpu": {"nodeSpec": [{"node": node, **named}]}, **tier, **policy}
        self.try_("CreateQueuedResource", doom, parent=ZONE, queuedResourceId=id, queuedResource=wish)

    @rule(id=ids, doom=dooms, force=st.booleans())
    def unqueue(self, id: str, doom: ApiError | None, force: bool) -> None:
        self.try_("DeleteQueuedResource", doom, name=f"{ZONE}/queuedResources/{id}", force=force)

    @rule(id=ids, doom=dooms)
    def reset(self, id: str, doom: ApiError | None) -> None:
        self.try_("ResetQueuedResource", doom, name=f"{ZONE}/queuedResources/{id}")

    @rule(id=ids, doom=dooms)
    def maintain_queued(self, id: str, doom: ApiError | None) -> None:
        self.try_("PerformMaintenanceQueuedResource", doom, "v2alpha1", name=f"{ZONE}/queuedResources/{id}")

    @rule(pick=st.integers(0, 5))
    def preempt(self, pick: int) -> None:
        names = sorted(self.cloud.world.nodes.all)
        if names:
            try:
                self.cloud.world.nodes.preempt(names[pick % len(names)], self.cloud.now)
            except ApiError as error:
                assert error.status == "FAILED_PRECONDITION"
            self.cloud.do_actions()

    @rule(chips=st.sampled_from([None, 0, 8, 16, 40]))
    def stock(self, chips: int | None) -> None:
        self.cloud.world.capacity.set_stock("*", "v6e", "*", chips)

    @rule(limit=st.sampled_from([None, 0, 16, 64]))
    def quota(self, limit: int | None) -> None:
        self.cloud.world.capacity.set_quota("*", "*", limit)

    @rule(seconds=st.sampled_from([0.1, 5.0, 30.0, 300.0]))
    def wait(self, seconds: float) -> None:
        self.cloud.pass_time(seconds)

    @invariant()
    def the_books_are_the_living(self) -> None:
        world = self.cloud.world
        assert set(world.ledger.living) == set(world.nodes.all) | set(world.queue.all)
        for name, node in world.nodes.all.items():
            bills = world.ledger.living[name].since is not None
            assert bills or node.state != "READY"
            assert not bills or node.state not in ("CREATING", "STOPPED", "PREEMPTED", "TERMINATED")

    @invariant()
    def the_file_tells_the_same(self) -> None:
        living: set[str] = set()
        for line in self.cloud.lines:
            {"made": living.add, "gone": living.remove}.get(line["event"], lambda name: None)(line["name"])
        assert living == set(self.cloud.world.ledger.living)

    @invariant()
    def no_node_outlives_its_queued_resource(self) -> None:
        for node in self.cloud.world.nodes.all.values():
            if node.queued:
                assert self.cloud.world.queue.all[node.queued].state not in ("CREATING", "ACCEPTED", "FAILED")

    @invariant()
    def an_active_resource_has_its_nodes(self) -> None:
        for queued in self.cloud.world.queue.all.values():
            nodes = [self.cloud.world.nodes.all.get(name) for name, _, _ in queued.specs]
            if queued.state == "ACTIVE":
                # Stopped, repaired and deleted by hand they are still there; lost, the resource is no longer ACTIVE.
                assert all(node is not None and node.state not in ("CREATING", "PREEMPTED") for node in nodes)

    def teardown(self) -> None:
        """In the end operations end, and what is deleted is gone."""
        if not hasattr(self, "cloud"):
            return
        self.cloud.world.capacity.set_stock("*", "v6e", "*", None)
        self.cloud.pass_time(FOREVER)
        for name in self.operations:
            assert self.cloud.call("GetOperation", name=name)["done"]
        for node in self.cloud.world.nodes.all.values():
            assert node.state in ("READY", "STOPPED", "PREEMPTED", "TERMINATED")
        for queued in list(self.cloud.world.queue.all.values()):
            assert queued.state in ("ACTIVE", "FAILED", "SUSPENDED")
            self.cloud.call("DeleteQueuedResource", name=queued.name, force=True)
        for node in list(self.cloud.world.nodes.all.values()):
            if node.state != "DELETING":
                self.cloud.call("DeleteNode", name=node.name)
        self.cloud.pass_time(FOREVER)
        assert not self.cloud.world.ledger.living
        assert not self.cloud.world.nodes.held()


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=25, stateful_step_count=25)


def test_a_node_from_wish_to_ready() -> None:
    cloud = Cloud()
    operation = cloud.create(type="v6e-16", labels={"podway-cluster": "c"})
    assert not operation["done"]
    assert cloud.node()["state"] == "CREATING"
    cloud.pass_time(300)
    ended = cloud.done(operation)
    assert ended["response"]["@type"].endswith("tpu.v2.Node")
    assert ended["response"]["state"] == "READY"
    assert len(ended["response"]["networkEndpoints"]) == 4
    assert isinstance(ended["response"]["id"], str)
    entry = cloud.world.ledger.view(cloud.now)["living"][0]
    assert entry["bills"]
    assert entry["labels"] == {"podway-cluster": "c"}


def test_no_capacity_is_an_operation_that_fails_and_a_node_that_is_not_there() -> None:
    cloud = Cloud()
    cloud.world.capacity.set_stock("us-east5-b", "v6e", "*", 4)
    operation = cloud.create()
    cloud.pass_time(300)
    error = cloud.done(operation)["error"]
    assert error["code"] == 8
    assert 'no more capacity in the zone "us-east5-b"' in error["message"]
    assert refused(cloud.node).status == "NOT_FOUND"
    assert not cloud.world.ledger.living


def test_quota_is_refused_at_once_and_counts_what_is_held() -> None:
    cloud = Cloud()
    cloud.world.capacity.set_quota("us-east5-b", "TPUV6EPerProjectPerZoneForTPUAPI", 12)
    cloud.create("one")
    error = refused(cloud.create, "two")
    assert error.http_code == 429
    assert (
        error.message
        == "Quota limit 'TPUV6EPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 12 in zone us-east5-b."
    )
    cloud.create("spot", schedulingConfig={"spot": True})  # another quota


def test_pods_cannot_be_stopped_and_single_hosts_can() -> None:
    cloud = Cloud()
    cloud.create("pod", "v6e-16")
    cloud.create("one", "v6e-8")
    cloud.pass_time(300)
    error = refused(cloud.call, "StopNode", name=f"{ZONE}/nodes/pod")
    assert error.status == "FAILED_PRECONDITION"
    assert "pod slice of 4 hosts" in error.message
    cloud.call("StopNode", name=f"{ZONE}/nodes/one")
    assert cloud.node("one")["state"] == "STOPPING"
    cloud.pass_time(300)
    assert cloud.node("one")["state"] == "STOPPED"
    assert not cloud.world.ledger.living[f"{ZONE}/nodes/one"].since
    cloud.world.capacity.set_stock("*", "v6e", "*", 16)
    assert refused(cloud.call, "StartNode", name=f"{ZONE}/nodes/one").status == "RESOURCE_EXHAUSTED"
    cloud.world.capacity.set_stock("*", "v6e", "*", 24)
    cloud.call("StartNode", name=f"{ZONE}/nodes/one")
    cloud.pass_time(300)
    assert cloud.node("one")["state"] == "READY"


def test_a_multislice_wish_waits_for_all_its_slices_and_is_shown_expanded() -> None:
    cloud = Cloud()
    cloud.world.capacity.set_stock("*", "v6e", "*", 8)
    cloud.queue(count=2)
    states = []
    for _ in range(60):
        cloud.pass_time(1)
        states.append(cloud.queued()["state"]["state"])
    assert list(dict.fromkeys(states)) == ["CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES"]
    assert not cloud.world.nodes.all
    cloud.world.capacity.set_stock("*", "v6e", "*", 16)
    cloud.pass_time(1)
    assert cloud.queued()["state"]["state"] == "PROVISIONING"
    cloud.pass_time(300)
    shown = cloud.queued()
    assert shown["state"]["state"] == "ACTIVE"
    assert [one["nodeId"] for one in shown["tpu"]["nodeSpec"]] == ["q-0", "q-1"]
    node = cloud.node("q-1")
    assert node["queuedResource"] == f"{ZONE}/queuedResources/q"
    assert node["multisliceNode"] is True


def test_a_wish_expires() -> None:
    cloud = Cloud()
    cloud.world.capacity.set_stock("*", "*", "*", 0)
    cloud.queue(queueingPolicy={"validUntilDuration": "3600s"})
    cloud.pass_time(3500)
    assert cloud.queued()["state"]["state"] == "WAITING_FOR_RESOURCES"
    cloud.pass_time(200)
    state = cloud.queued()["state"]
    assert state["state"] == "FAILED"
    assert state["failedData"]["error"]["code"] == 4


def test_over_quota_a_wish_fails_and_says_why() -> None:
    cloud = Cloud()
    cloud.world.capacity.set_quota("*", "*", 8)
    cloud.queue(count=2)
    cloud.pass_time(100)
    assert "Limit: 8 in zone us-east5-b" in cloud.queued()["state"]["failedData"]["error"]["message"]


def test_preemption_suspends_and_reset_queues_again() -> None:
    cloud = Cloud()
    cloud.queue(spot={})
    cloud.pass_time(300)
    cloud.world.nodes.preempt(f"{ZONE}/nodes/q-0", cloud.now)
    assert cloud.node("q-0")["state"] == "PREEMPTED"
    assert cloud.queued()["state"]["state"] == "SUSPENDING"
    cloud.pass_time(300)
    assert cloud.queued()["state"]["state"] == "SUSPENDED"
    assert refused(cloud.node, "q-1").status == "NOT_FOUND"
    cloud.call("ResetQueuedResource", name=f"{ZONE}/queuedResources/q")
    cloud.pass_time(300)
    assert cloud.queued()["state"]["state"] == "ACTIVE"


def test_a_preempted_node_stays_until_it_is_deleted_and_holds_nothing() -> None:
    cloud = Cloud()
    cloud.create(schedulingConfig={"spot": True})
    cloud.pass_time(300)
    cloud.world.nodes.preempt(f"{ZONE}/nodes/n", cloud.now)
    cloud.pass_time(FOREVER)
    assert cloud.node()["state"] == "PREEMPTED"
    assert not cloud.world.nodes.held()
    assert not cloud.world.ledger.view(cloud.now)["hourly_usd"]
    assert cloud.world.nodes.all[f"{ZONE}/nodes/n"].state not in HOLDING


def test_only_force_deletes_what_has_nodes() -> None:
    cloud = Cloud()
    cloud.queue()
    cloud.pass_time(300)
    name = f"{ZONE}/queuedResources/q"
    assert refused(cloud.call, "DeleteQueuedResource", name=name).status == "FAILED_PRECONDITION"
    operation = cloud.call("DeleteQueuedResource", name=name, force=True)
    assert cloud.queued()["state"]["state"] == "DELETING"
    cloud.pass_time(300)
    assert cloud.done(operation)["response"] == {"@type": "type.googleapis.com/google.protobuf.Empty"}
    assert not cloud.world.ledger.living


def test_the_same_request_id_is_the_same_request() -> None:
    cloud = Cloud()
    body = {
        "tpu": {
            "nodeSpec": [{"nodeId": "x", "node": {"acceleratorType": "v6e-8", "runtimeVersion": "v2-alpha-tpuv6e"}}]
        }
    }
    fields = {"parent": ZONE, "queuedResourceId": "q", "queuedResource": body, "requestId": "123"}
    first = cloud.call("CreateQueuedResource", **fields)
    assert cloud.call("CreateQueuedResource", **fields)["name"] == first["name"]
    assert (
        refused(cloud.call, "CreateQueuedResource", **{**fields, "queuedResourceId": "r"}).status == "INVALID_ARGUMENT"
    )
    assert refused(cloud.call, "CreateQueuedResource", **{**fields, "requestId": "124"}).status == "ALREADY_EXISTS"


def test_reservations_are_a_stock_of_their_own() -> None:
    cloud = Cloud()
    cloud.world.capacity.set_stock("*", "*", "*", 0)
    wish = {"reservationName": f"{ZONE}/reservations/mine"}
    assert refused(cloud.queue, **wish).status == "NOT_FOUND"
    cloud.world.capacity.reserve("p", "us-east5-b", "mine", "v6e", 16, cloud.now)
    cloud.queue("first", **wish)
    cloud.queue("second", reservationName=f"{ZONE}/reservations/-")
    cloud.pass_time(300)
    assert cloud.queued("first")["state"]["state"] == "ACTIVE"
    assert cloud.queued("second")["state"]["state"] == "WAITING_FOR_RESOURCES"
    listed = cloud.call("ListReservations", "v2alpha1", parent=ZONE)["reservations"]
    assert listed[0]["standard"]["usage"] == {"total": "16"}


def test_only_what_can_be_changed_is_changed() -> None:
    cloud = Cloud()
    cloud.create(labels={"a": "1"})
    cloud.pass_time(300)
    node = {**cloud.node(), "labels": {"b": "2"}, "runtimeVersion": "other"}
    operation = cloud.call("UpdateNode", node=node, updateMask="labels")
    cloud.pass_time(60)
    assert cloud.done(operation)["response"]["labels"] == {"b": "2"}
    assert cloud.node()["runtimeVersion"] == "v2-alpha-tpuv6e"
    assert refused(cloud.call, "UpdateNode", node=node, updateMask="runtimeVersion").status == "INVALID_ARGUMENT"
    cloud.call("UpdateNode", node={**node, "networkConfig": {"enableExternalIps": True}},
               updateMask="networkConfig.enableExternalIps")  # fmt: skip
    assert "externalIp" in cloud.node()["networkEndpoints"][0]["accessConfig"]


def test_pages_and_all_zones() -> None:
    cloud = Cloud()
    for id in ("a", "b", "c"):
        cloud.create(id)
    there = {"acceleratorType": "v6e-8", "runtimeVersion": "v2-alpha-tpuv6e"}
    cloud.call("CreateNode", parent=QUIET, nodeId="d", node=there)
    first = cloud.call("ListNodes", parent=ZONE, pageSize=2)
    rest = cloud.call("ListNodes", parent=ZONE, pageSize=2, pageToken=first["nextPageToken"])
    assert [node["name"][-1] for node in [*first["nodes"], *rest["nodes"]]] == ["a", "b", "c"]
    assert "nextPageToken" not in rest
    assert len(cloud.call("ListNodes", parent="projects/p/locations/-")["nodes"]) == 4
    assert cloud.call("ListNodes", parent="projects/other/locations/-")["nodes"] == []


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, "INVALID_ARGUMENT"),
        ({"acceleratorType": "v6e-8"}, "INVALID_ARGUMENT"),
        ({"acceleratorType": "v6e-7", "runtimeVersion": "v2-alpha-tpuv6e"}, "INVALID_ARGUMENT"),
        ({"acceleratorType": "v4-8", "runtimeVersion": "tpu-ubuntu2204-base"}, "NOT_FOUND"),
        ({"acceleratorType": "v6e-8", "runtimeVersion": "nonsense"}, "NOT_FOUND"),
        (
            {
                "acceleratorType": "v6e-8",
                "acceleratorConfig": {"type": "V6E", "topology": "2x4"},
                "runtimeVersion": "v2-alpha-tpuv6e",
            },
            "INVALID_ARGUMENT",
        ),
    ],
)
def test_what_a_node_cannot_be(body: dict[str, Any], status: str) -> None:
    cloud = Cloud()
    assert refused(cloud.call, "CreateNode", parent=ZONE, nodeId="n", node=body).status == status
    assert not cloud.world.ledger.living


def test_disks_outlive_nodes_and_cannot_be_pulled_out() -> None:
    cloud = Cloud()
    disks = "projects/p/zones/us-east5-b"
    wish = [{"sourceDisk": f"{disks}/disks/data", "mode": "READ_WRITE"}]
    assert refused(cloud.create, dataDisks=wish).status == "NOT_FOUND"
    cloud.world.compute.insert(disks, "disks", {"name": "data", "sizeGb": 100}, cloud.now)
    cloud.create(dataDisks=wish)
    cloud.pass_time(300)
    users = cloud.world.disk_users(f"{disks}/disks/data")
    assert users == [f"{ZONE}/nodes/n"]
    error = refused(cloud.world.compute.delete, f"{disks}/disks/data", cloud.now, None, users)
    assert "already being used" in error.message
    cloud.call("DeleteNode", name=f"{ZONE}/nodes/n")
    cloud.pass_time(300)
    assert list(cloud.world.ledger.living) == [f"{disks}/disks/data"]
