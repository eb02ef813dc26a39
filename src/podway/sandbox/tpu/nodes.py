"""TPU nodes: created, stopped, started, changed, lost, deleted; each step an operation that takes its time.

    create -> CREATING -> READY -> STOPPING -> STOPPED -> STARTING -> READY
                 |          |-> REPAIRING (maintenance) -> READY
                 |          |-> PREEMPTED (spot)
                 +-> gone (no capacity)      any -> DELETING -> gone

A node is READY when its time has come *and* its hosts are up: hosts are asked for through `MachineAction`s, which the caller
carries out and answers with `hosts_up`. All time comes in as arguments; nothing here waits.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from podway.catalog.slices import Slice
from podway.sandbox.agenda import Agenda
from podway.sandbox.jsons import JsonObject
from podway.sandbox.ledger import Ledger
from podway.sandbox.names import check_id, check_labels, split_name, split_parent, stamp
from podway.sandbox.status import ApiError, already_exists, invalid, not_found, out_of_order
from podway.sandbox.tpu.capacity import BEST_EFFORT, RESERVED, SPOT, Capacity, Claim
from podway.sandbox.tpu.operations import Operation, Operations
from podway.sandbox.tpu.shapes import NODE_PORT, UPDATABLE, read_node, tier_of, to_v1, with_defaults, zones

# How long things take, in seconds of the cloud: choices of this sandbox in the order of what people report.
FIND_S, BOOT_S, BOOT_PER_HOST_S = 20.0, 60.0, 1.0
DELETE_S, STOP_S, START_S, UPDATE_S, REPAIR_S = 45.0, 40.0, 60.0, 5.0, 120.0
HOLDING = ("CREATING", "READY", "RESTARTING", "REPAIRING", "STOPPING", "STARTING", "DELETING")


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """A machine of a node, as the API tells of it."""

    address: str
    external: str
    name: str = ""
    key: str = ""  # the public host key, "TYPE BASE64"
    port: int = 22


class MachineAction(msgspec.Struct, frozen=True, kw_only=True):
    """Something to be done to a node's machines: boot, reboot, halt, remove, keys."""

    what: str
    node: str
    number: int  # the node's own: another may have its name by the time the action is done
    workers: tuple[int, ...] = ()
    operation: str = ""  # which ends only when this is done, too


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One node at one moment."""

    name: str
    spec: JsonObject
    slice: Slice
    tier: str
    version: str
    number: int
    state: str
    created: float
    reservation: str = ""
    queued: str = ""  # the name of its queued resource
    multislice: bool = False
    health: str = "HEALTHY"
    description: str = ""  # of its health
    maintenance: JsonObject | None = None
    hosts: tuple[Host, ...] = ()
    up: bool = False  # all hosts are
    due: bool = False  # the time to become READY has come
    operation: str = ""  # the one that ends when it is READY, STOPPED or gone

    @property
    def place(self) -> tuple[str, str, str]:
        """Project, zone and id."""
        return split_name(self.name, "nodes")

    @property
    def claim(self) -> Claim:
        """What it holds."""
        project, zone, _ = self.place
        return Claim(project=project, zone=zone, slice=self.slice, tier=self.tier, reservation=self.reservation)


class Nodes:
    """All nodes, and what happens to them."""

    def __init__(self, agenda: Agenda, operations: Operations, capacity: Capacity, ledger: Ledger) -> None:
        self._agenda, self._operations, self._capacity, self._ledger = agenda, operations, capacity, ledger
        self.all: dict[str, Node] = {}
        self.actions: list[MachineAction] = []
        self.changed: list[Callable[[Node, float], None]] = []  # told of each node that is READY, lost or gone
        self._updating: dict[str, int] = {}  # an update's operation -> how many things it waits for
        self._made = 0

    # What is asked through the API.

    def get(self, name: str) -> Node:
        """By name."""
        split_name(name, "nodes")
        if name not in self.all:
            raise not_found(name)
        return self.all[name]

    def held(self) -> list[Claim]:
        """What all nodes hold."""
        return [node.claim for node in self.all.values() if node.state in HOLDING]

    def create(
        self, version: str, parent: str, id: str, body: JsonObject, now: float, failure: ApiError | None = None
    ) -> Operation:
        """Accept a node; whether there is capacity shows later."""
        project, zone = split_parent(parent)
        name = f"{parent}/nodes/{check_id('node_id', id)}"
        if zone not in zones():
            raise not_found(f"projects/{project}/locations/{zone}")
        spec, slice = read_node(version, body, zone)
        if name in self.all:
            raise already_exists(name)
        node = self._new(version, name, spec, slice, tier_of(spec), now)
        if node.tier == RESERVED:
            wanted = (spec.get("schedulingConfig") or {}).get("reservationName", "")
            found = self._capacity.find_reservation(project, zone, slice.generation, wanted)
            node = msgspec.structs.replace(node, reservation=found)
        self._capacity.check_quota([node.claim], self.held())
        operation = self._operations.start(version=version, verb="create", target=name, now=now, failure=failure)
        self.all[name] = msgspec.structs.replace(node, operation=operation.name)
        self._ledger.made("node", node.name, now, slice=slice, tier=node.tier, labels=spec.get("labels"))
        self._agenda.after(now, FIND_S, lambda due: self._find_capacity(name, node.number, due))
        return operation

    def create_for(
        self, queued: str, version: str, name: str, spec: JsonObject, claim: Claim, multislice: bool, now: float
    ) -> None:
        """A node of a queued resource, whose capacity is already found."""
        node = self._new(version, name, spec, claim.slice, claim.tier, now)
        self.all[name] = msgspec.structs.replace(
            node, queued=queued, multislice=multislice, reservation=claim.reservation
        )
        self._ledger.made("node", name, now, slice=claim.slice, tier=claim.tier, labels=spec.get("labels"))
        self._boot(self.all[name], "boot", BOOT_S + BOOT_PER_HOST_S * claim.slice.hosts, now)

    def delete(self, version: str, name: str, now: float, failure: ApiError | None = None) -> Operation:
        """Begin to delete; deleting twice at once is refused."""
        node = self.get(name)
        if node.state == "DELETING":
            raise out_of_order(f"Resource '{name}' is being deleted by another operation.")
        operation = self._operations.start(version=version, verb="delete", target=name, now=now, failure=failure)
        if failure is None:
            self.begin_delete(node, now, operation.name)
        else:
            self._fail_later(operation, DELETE_S, now)
        return operation

    def begin_delete(self, node: Node, now: float, operation: str = "") -> None:
        """The way out; a create that is still under way ends with an error."""
        self._operations.finish(node.operation, now, error=ApiError("CANCELLED", f"'{node.name}' was deleted."))
        self._set(node, state="DELETING", operation=operation, up=False, due=False)
        self.actions.append(MachineAction(what="halt", node=node.name, number=node.number))
        self._agenda.after(now, DELETE_S, lambda due: self._end_delete(node.name, node.number, due))

    def stop(self, version: str, name: str, now: float, failure: ApiError | None = None) -> Operation:
        """Stop the machine of a node that has one."""
        return self._halfway(version, name, "stop", STOP_S, now, failure)

    def start(self, version: str, name: str, now: float, failure: ApiError | None = None) -> Operation:
        """Start it again, if there is capacity."""
        node = self.get(name)
        if node.state == "STOPPED":
            self._capacity.check_stock([node.claim], self.held())
        return self._halfway(version, name, "start", START_S, now, failure)

    def update(
        self, version: str, name: str, body: JsonObject, mask: list[str], now: float, failure: ApiError | None = None
    ) -> Operation:
        """Change the fields of the mask, and only those that can be changed."""
        node = self.get(name)
        if not mask:
            raise invalid("Missing required field: update_mask")
        bad = [field for field in mask if field not in UPDATABLE]
        if bad:
            raise invalid(
                f"Invalid update_mask: '{bad[0]}' cannot be updated; only {', '.join(sorted(UPDATABLE))} can."
            )
        if "labels" in mask:
            check_labels(body.get("labels"))
        operation = self._operations.start(version=version, verb="update", target=name, now=now, failure=failure)
        if failure is not None:
            self._fail_later(operation, UPDATE_S, now)
            return operation
        self._set(node, spec=_patched(node.spec, body, mask))
        self._updating[operation.name] = 1
        if node.up:
            self._updating[operation.name] += 1
            self.actions.append(MachineAction(what="keys", node=name, number=node.number, operation=operation.name))
        self._agenda.after(now, UPDATE_S, lambda due: self.updated(operation.name, due))
        return operation

    def maintain(
        self, version: str, name: str, workers: tuple[int, ...], now: float, failure: ApiError | None = None
    ) -> Operation:
        """Maintenance now: the hosts named (or all) go down and come back."""
        node = self.get(name)
        if node.state != "READY":
            raise out_of_order(f"Resource '{name}' is {node.state}; maintenance needs READY.")
        beyond = [worker for worker in workers if worker >= node.slice.hosts]
        if beyond:
            raise invalid(f"'{name}' has {node.slice.hosts} workers; there is no worker {beyond[0]}.")
        operation = self._operations.start(version=version, verb="maintenance", target=name, now=now, failure=failure)
        if failure is not None:
            self._fail_later(operation, REPAIR_S, now)
            return operation
        window = {"type": "UNSCHEDULED", "maintenanceStatus": "ONGOING", "windowStartTime": stamp(now)}
        self._set(node, health="UNHEALTHY_MAINTENANCE", maintenance=window, state="REPAIRING", operation=operation.name)
        self._boot(self.all[name], "reboot", REPAIR_S, now, workers=workers)
        return operation

    # What the cloud and its machines do.

    def preempt(self, name: str, now: float) -> None:
        """Take a spot node's machines away, at once."""
        node = self.get(name)
        if node.tier not in (SPOT, BEST_EFFORT):
            raise out_of_order(f"Resource '{name}' is {node.tier}; only spot and best-effort nodes are preempted.")
        if node.state not in ("CREATING", "READY", "REPAIRING", "STARTING"):
            raise out_of_order(f"Resource '{name}' is {node.state}.")
        self.lose(node, "PREEMPTED", "The node was preempted.", now)

    def lose(self, node: Node, state: str, why: str, now: float) -> None:
        """The machines are gone; the record stays until someone deletes it."""
        self._operations.finish(node.operation, now, error=ApiError("ABORTED", why))
        self.actions.append(MachineAction(what="halt", node=node.name, number=node.number))
        self._set(node, state=state, description=why, up=False, due=False, operation="")
        self._ledger.stopped(node.name, now)
        self._notify(self.all[node.name], now)

    def hosts_up(self, name: str, number: int, hosts: tuple[Host, ...], now: float) -> None:
        """The answer to a `boot` or `reboot`."""
        node = self._same(name, number, "CREATING", "STARTING", "REPAIRING")
        if node is not None:
            self._set(node, hosts=hosts, up=True)
            self._maybe_ready(name, now)

    def hosts_failed(self, name: str, number: int, why: str, now: float) -> None:
        """The machines did not come up: our own fault, shown as the cloud shows its own."""
        node = self._same(name, number, "CREATING", "STARTING", "REPAIRING")
        if node is not None:
            self._operations.finish(node.operation, now, error=ApiError("INTERNAL", why))
            self.lose(self.all[name], "TERMINATED", why, now)

    def updated(self, operation: str, now: float) -> None:
        """One of the things that an update waits for is done: its time, or the keys on the hosts."""
        left = self._updating.get(operation, 0) - 1
        self._updating[operation] = left
        if left > 0:
            return
        self._updating.pop(operation)
        target = self._operations.target_of(operation)
        node = self.all.get(target)
        if node is None:
            self._operations.finish(operation, now, error=not_found(target))
        else:
            self._finish_with(operation, node, now)

    def view(self, node: Node, version: str) -> JsonObject:
        """As a version of the API shows it."""
        project, zone, _ = node.place
        outside = (node.spec.get("networkConfig") or {}).get("enableExternalIps", version == "v1")
        cidr = f"{node.hosts[0].address.rsplit('.', 1)[0]}.0/24" if node.hosts else ""
        shown = {
            **with_defaults(node.spec, project, zone, cidr),
            "name": node.name,
            "state": node.state,
            "createTime": stamp(node.created),
            "health": node.health,
            "healthDescription": node.description,
            "id": str(node.number),
            "apiVersion": {"v1": "V1", "v2": "V2", "v2alpha1": "V2_ALPHA1"}[node.version],
            "networkEndpoints": [_endpoint(host, outside) for host in node.hosts],
            "queuedResource": node.queued,
            "multisliceNode": node.multislice,
        }
        if version == "v2alpha1" and node.maintenance:
            shown["upcomingMaintenance"] = node.maintenance
        return to_v1(shown) if version == "v1" else {key: value for key, value in shown.items() if value != ""}

    # The steps.

    def _new(self, version: str, name: str, spec: JsonObject, slice: Slice, tier: str, now: float) -> Node:
        self._made += 1
        number = int(now) * 1_000_000_000 + self._made
        return Node(
            name=name, spec=spec, slice=slice, tier=tier, version=version, number=number, state="CREATING", created=now
        )

    def _find_capacity(self, name: str, number: int, now: float) -> None:
        node = self._same(name, number, "CREATING")
        if node is None:
            return
        try:
            failure = self._operations.failure_of(node.operation)
            if failure:
                raise failure
            others = [other.claim for other in self.all.values() if other.state in HOLDING and other.name != name]
            self._capacity.check_stock([node.claim], others)
        except ApiError as error:
            self._operations.finish(node.operation, now, error=error)
            self._forget(node, now)
            return
        self._boot(node, "boot", BOOT_S + BOOT_PER_HOST_S * node.slice.hosts, now)

    def _boot(self, node: Node, how: str, seconds: float, now: float, workers: tuple[int, ...] = ()) -> None:
        """Ask for hosts, and remember when the node may be READY."""
        self._set(node, up=False, due=False)
        self.actions.append(MachineAction(what=how, node=node.name, number=node.number, workers=workers))
        self._agenda.after(now, seconds, lambda due: self._time_is_up(node.name, node.number, node.state, due))

    def _time_is_up(self, name: str, number: int, state: str, now: float) -> None:
        node = self._same(name, number, state)
        if node is not None:
            self._set(node, due=True)
            self._maybe_ready(name, now)

    def _maybe_ready(self, name: str, now: float) -> None:
        node = self.all[name]
        if not (node.up and node.due):
            return
        self._set(node, state="READY", health="HEALTHY", description="", maintenance=None, operation="")
        ready = self.all[name]
        self._ledger.started(name, now)
        self._finish_with(node.operation, ready, now)
        self._notify(ready, now)

    def _halfway(
        self, version: str, name: str, verb: str, seconds: float, now: float, failure: ApiError | None
    ) -> Operation:
        """Stop and start: from one resting state, through another."""
        node = self.get(name)
        source, through = {"stop": ("READY", "STOPPING"), "start": ("STOPPED", "STARTING")}[verb]
        if not node.slice.single_host:
            raise out_of_order(f"Cloud TPU cannot {verb} '{name}': it is a pod slice of {node.slice.hosts} hosts.")
        if node.state != source:
            raise out_of_order(f"Cloud TPU cannot {verb} '{name}': it is {node.state}, not {source}.")
        operation = self._operations.start(version=version, verb=verb, target=name, now=now, failure=failure)
        if failure is not None:
            self._fail_later(operation, seconds, now)
            return operation
        self._set(node, state=through, operation=operation.name)
        if verb == "start":
            self._boot(self.all[name], "boot", seconds, now)
        else:
            self.actions.append(MachineAction(what="halt", node=name, number=node.number))
            self._agenda.after(now, seconds, lambda due: self._rest(name, node.number, due))
        return operation

    def _fail_later(self, operation: Operation, seconds: float, now: float) -> None:
        """An operation bound to fail on a node that is there does nothing, and fails when it would have been done."""
        self._agenda.after(
            now, seconds, lambda due: self._operations.finish(operation.name, due, error=operation.failure)
        )

    def _rest(self, name: str, number: int, now: float) -> None:
        node = self._same(name, number, "STOPPING")
        if node is not None:
            self._set(node, state="STOPPED", up=False, operation="")
            self._ledger.stopped(name, now)
            self._finish_with(node.operation, self.all[name], now)

    def _end_delete(self, name: str, number: int, now: float) -> None:
        node = self._same(name, number, "DELETING")
        if node is not None:
            self._forget(node, now)
            if self._operations.version_of(node.operation) == "v1":
                self._finish_with(node.operation, node, now)  # v1 answers with what was deleted, v2 with nothing
            self._operations.finish(node.operation, now)

    def _forget(self, node: Node, now: float) -> None:
        del self.all[node.name]
        self.actions.append(MachineAction(what="remove", node=node.name, number=node.number))
        self._ledger.gone(node.name, now)
        self._notify(node, now)

    def _finish_with(self, operation: str, node: Node, now: float) -> None:
        version = self._operations.version_of(operation)
        if version:
            answer = {"@type": f"type.googleapis.com/google.cloud.tpu.{version}.Node", **self.view(node, version)}
            self._operations.finish(operation, now, response=answer)

    def _same(self, name: str, number: int, *states: str) -> Node | None:
        """The node, unless it is another of that name by now or went another way."""
        node = self.all.get(name)
        return node if node is not None and node.number == number and node.state in states else None

    def _set(self, node: Node, **changes: Any) -> None:
        self.all[node.name] = msgspec.structs.replace(node, **changes)

    def _notify(self, node: Node, now: float) -> None:
        for listener in self.changed:
            listener(node, now)


def _endpoint(host: Host, outside: bool) -> JsonObject:
    shown: JsonObject = {"ipAddress": host.address, "port": NODE_PORT}
    if outside:
        shown["accessConfig"] = {"externalIp": host.external}
    return shown


def _patched(spec: JsonObject, body: JsonObject, mask: list[str]) -> JsonObject:
    changed = dict(spec)
    for field in mask:
        if field == "network_config.enable_external_ips":
            wanted = bool((body.get("networkConfig") or {}).get("enableExternalIps"))
            changed["networkConfig"] = {**(spec.get("networkConfig") or {}), "enableExternalIps": wanted}
            continue
        key = "dataDisks" if field == "data_disks" else field
        changed[key] = body.get(key, [] if key in ("tags", "dataDisks") else "" if key == "description" else {})
    return changed
