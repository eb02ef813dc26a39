"""Queued resources: a request for nodes that waits until all of them are available at once.

    CREATING -> ACCEPTED -> WAITING_FOR_RESOURCES -> PROVISIONING -> ACTIVE -> SUSPENDING -> SUSPENDED -> (reset) ACCEPTED
                    |               |                     |                                      |
                    +---------------+--- expired, quota ---+--> FAILED                           any -> DELETING -> gone

The node specs are kept expanded: a multislice request for n nodes is n specs with their ids. A node that is lost takes the whole
resource down with it; a resource that is deleted takes its nodes along (with force), so no node outlives its queued resource.
"""

from typing import Any

import msgspec

from podway.sandbox.agenda import Agenda
from podway.sandbox.jsons import JsonObject
from podway.sandbox.ledger import Ledger
from podway.sandbox.names import check_id, read_duration, read_stamp, split_name, split_parent, stamp
from podway.sandbox.status import ApiError, already_exists, invalid, not_found, out_of_order
from podway.sandbox.tpu.capacity import BEST_EFFORT, ON_DEMAND, RESERVED, SPOT, Capacity, Claim
from podway.sandbox.tpu.nodes import REPAIR_S, Node, Nodes
from podway.sandbox.tpu.operations import Operation, Operations
from podway.sandbox.tpu.shapes import read_node, zones

# Seconds of the cloud: choices of this sandbox in the order of what people report.
ACCEPT_S, LOOK_S, SUSPEND_S, DELETE_S = 5.0, 15.0, 20.0, 10.0
WAITING = ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES")


class Queued(msgspec.Struct, frozen=True, kw_only=True):
    """One queued resource at one moment."""

    name: str
    version: str
    body: JsonObject  # tier, policy and the rest, as asked for
    specs: tuple[tuple[str, JsonObject, Claim], ...]  # full node name, node spec, what it needs
    multislice: bool
    state: str
    created: float
    initiator: str = "SERVICE"
    not_before: float = 0.0
    error: JsonObject | None = None
    operation: str = ""  # the delete that ends when it is gone
    round: int = 0  # how often it was reset; what was due in an earlier round is void
    number: int = 0  # tells it from an earlier one of the same name


class Queue:
    """All queued resources, and what happens to them."""

    def __init__(
        self, agenda: Agenda, operations: Operations, capacity: Capacity, ledger: Ledger, nodes: Nodes
    ) -> None:
        self._agenda, self._operations, self._capacity, self._ledger = agenda, operations, capacity, ledger
        self._nodes = nodes
        self.all: dict[str, Queued] = {}
        self._made = 0
        nodes.changed.append(self._node_changed)

    def get(self, name: str) -> Queued:
        """By name."""
        split_name(name, "queuedResources")
        if name not in self.all:
            raise not_found(name)
        return self.all[name]

    def create(
        self, version: str, parent: str, id: str, body: JsonObject, now: float, failure: ApiError | None = None
    ) -> Operation:
        """Accept a request. The operation ends when it is in the queue, not when it is granted."""
        project, zone = split_parent(parent)
        name = f"{parent}/queuedResources/{check_id('queued_resource_id', id)}"
        if zone not in zones():
            raise not_found(f"projects/{project}/locations/{zone}")
        specs, multislice = self._read_specs(version, parent, id, body)
        if name in self.all:
            raise already_exists(name)
        for node, _, _ in specs:
            taken = any(node == other for queued in self.all.values() for other, _, _ in queued.specs)
            if node in self._nodes.all or taken:
                raise already_exists(node)
        not_before, until = _window(body.get("queueingPolicy") or {}, now, self._agenda.speed)
        self._made += 1
        self.all[name] = made = Queued(
            name=name,
            version=version,
            body={key: value for key, value in body.items() if key not in ("name", "createTime", "state", "tpu")},
            specs=tuple(specs),
            multislice=multislice,
            state="CREATING",
            created=now,
            not_before=not_before,
            number=self._made,
        )
        self._ledger.made("queuedResource", name, now, tier=specs[0][2].tier, labels=specs[0][1].get("labels"))
        operation = self._operations.start(version=version, verb="create", target=name, now=now, failure=failure)
        self._agenda.after(now, ACCEPT_S, lambda due: self._accept(made, operation, due))
        if until is not None:
            self._agenda.at(until, lambda due: self._expire(made, due))
        return operation

    def delete(self, version: str, name: str, force: bool, now: float, failure: ApiError | None = None) -> Operation:
        """Delete one without nodes; with force, its nodes first."""
        queued = self.get(name)
        if queued.state == "DELETING":
            raise out_of_order(f"Resource '{name}' is being deleted by another operation.")
        nodes = self._nodes_of(queued)
        if nodes and not force and queued.state not in ("ACCEPTED", "FAILED", "SUSPENDED"):
            raise out_of_order(
                f"Queued resource '{name}' is {queued.state} and has nodes; delete its nodes first or delete it with force."
            )
        operation = self._operations.start(version=version, verb="delete", target=name, now=now, failure=failure)
        if failure is not None:
            self._agenda.after(now, DELETE_S, lambda due: self._operations.finish(operation.name, due, error=failure))
            return operation
        self._set(queued, state="DELETING", initiator="USER", operation=operation.name)
        self._delete_nodes(queued, now)
        self._agenda.after(now, DELETE_S, lambda due: self._maybe_gone(name, due))
        return operation

    def reset(self, version: str, name: str, now: float, failure: ApiError | None = None) -> Operation:
        """Queue a suspended one again."""
        queued = self.get(name)
        if queued.state not in ("SUSPENDED", "FAILED"):
            raise out_of_order(f"Queued resource '{name}' is {queued.state}; only SUSPENDED or FAILED can be reset.")
        operation = self._operations.start(version=version, verb="reset", target=name, now=now, failure=failure)
        if failure is None:
            self._set(queued, state="CREATING", error=None, initiator="USER", round=queued.round + 1)
        again = self.all[name]
        self._agenda.after(now, ACCEPT_S, lambda due: self._accept(again, operation, due))
        return operation

    def maintain(
        self, version: str, name: str, nodes: list[str], now: float, failure: ApiError | None = None
    ) -> Operation:
        """Maintenance of the nodes named, or of all."""
        queued = self.get(name)
        mine = [one for one, _, _ in queued.specs]
        for one in nodes or mine:
            if one not in mine:
                raise not_found(one)
            if self._nodes.get(one).state != "READY":
                raise out_of_order(f"Resource '{one}' is {self._nodes.get(one).state}; maintenance needs READY.")
        for one in nodes or mine:
            self._nodes.maintain(version, one, (), now, failure)
        operation = self._operations.start(version=version, verb="maintenance", target=name, now=now, failure=failure)
        self._agenda.after(now, REPAIR_S, lambda due: self._end_maintenance(operation, due))
        return operation

    def _end_maintenance(self, operation: Operation, now: float) -> None:
        queued = self.all.get(operation.target)
        if queued is None or operation.failure is not None:
            self._operations.finish(operation.name, now, error=operation.failure or not_found(operation.target))
        else:
            self._finish_with(operation.name, queued, now)

    def look(self, now: float) -> None:
        """Give those that wait, oldest first, what there is; called whenever something may have become free."""
        for queued in sorted(self.all.values(), key=lambda one: one.created):
            if queued.state == "WAITING_FOR_RESOURCES":
                self._provision(queued, now)

    def view(self, queued: Queued, version: str) -> JsonObject:
        """As a version of the API shows it."""
        specs = []
        for name, spec, _ in queued.specs:
            parent, id = name.rsplit("/nodes/", 1)
            node = self._nodes.all.get(name)
            shown = self._nodes.view(node, version) if node is not None and node.queued == queued.name else spec
            specs.append({"parent": parent, "nodeId": id, "node": {**shown, "name": name}})
        state: JsonObject = {"state": queued.state, "stateInitiator": queued.initiator}
        if queued.state == "FAILED":
            state["failedData"] = {"error": queued.error}
        elif queued.state != "WAITING_FOR_RESOURCES":
            state[f"{queued.state.lower()}Data"] = {}
        return {
            **queued.body,
            "name": queued.name,
            "createTime": stamp(queued.created),
            "tpu": {"nodeSpec": specs},
            "state": state,
        }

    # The steps.

    def _read_specs(
        self, version: str, parent: str, id: str, body: JsonObject
    ) -> tuple[list[tuple[str, JsonObject, Claim]], bool]:
        """Each node that is wanted, by name; whether they are slices of one whole."""
        project, zone = split_parent(parent)
        found: list[tuple[str, JsonObject, Claim]] = []
        multislice = False
        for request in (body.get("tpu") or {}).get("nodeSpec") or []:
            if request.get("parent") not in (None, "", parent):
                raise invalid(f"node_spec.parent is '{request['parent']}'; it must be '{parent}'.")
            many = request.get("multisliceParams") or request.get("multiNodeParams")
            if bool(many) == bool(request.get("nodeId")):
                raise invalid("Exactly one of node_id and multislice_params must be given.")
            spec, slice = read_node(version, request.get("node") or {}, zone)
            tier = _tier(body)
            reserved = ""
            if tier == RESERVED:
                wanted = body.get("reservationName") or ""
                reserved = self._capacity.find_reservation(project, zone, slice.generation, wanted)
            claim = Claim(project=project, zone=zone, slice=slice, tier=tier, reservation=reserved)
            spec = {**spec, "schedulingConfig": {**(spec.get("schedulingConfig") or {}), **_scheduling(tier)}}
            found += [(f"{parent}/nodes/{one}", spec, claim) for one in _ids(request, many, id)]
            multislice = multislice or bool(many)
        if not found:
            raise invalid("Missing required field: tpu.node_spec")
        if len({name for name, _, _ in found}) < len(found):
            raise invalid("Two node_specs have the same node_id.")
        return found, multislice

    def _accept(self, was: Queued, operation: Operation, now: float) -> None:
        if operation.failure is not None:
            queued = self._same(was, "CREATING")
            self._operations.finish(operation.name, now, error=operation.failure)
            if queued is not None:
                self._fail(queued, operation.failure)
            return
        queued = self._same(was, "CREATING")
        if queued is None:
            self._operations.finish(operation.name, now, error=ApiError("CANCELLED", f"'{was.name}' was deleted."))
            return
        self._set(queued, state="ACCEPTED", initiator="SERVICE")
        self._finish_with(operation.name, self.all[queued.name], now)
        wait = max(now + LOOK_S / self._agenda.speed, queued.not_before)
        self._agenda.at(wait, lambda due: self._first_look(was, due))

    def _finish_with(self, operation: str, queued: Queued, now: float) -> None:
        version = self._operations.version_of(operation)
        if version:
            kind = f"type.googleapis.com/google.cloud.tpu.{version}.QueuedResource"
            self._operations.finish(operation, now, response={"@type": kind, **self.view(queued, version)})

    def _first_look(self, was: Queued, now: float) -> None:
        queued = self._same(was, "ACCEPTED")
        if queued is not None:
            self._set(queued, state="WAITING_FOR_RESOURCES")
            self._provision(self.all[queued.name], now)

    def _provision(self, queued: Queued, now: float) -> None:
        wanted, held = [claim for _, _, claim in queued.specs], self._nodes.held()
        taken = [name for name, _, _ in queued.specs if name in self._nodes.all]
        try:
            if taken:
                raise already_exists(taken[0])
            self._capacity.check_quota(wanted, held)
        except ApiError as error:
            self._fail(queued, error)
            return
        try:
            self._capacity.check_stock(wanted, held)
        except ApiError:
            return  # it waits
        self._set(queued, state="PROVISIONING")
        for name, spec, claim in queued.specs:
            self._nodes.create_for(queued.name, queued.version, name, spec, claim, queued.multislice, now)

    def _expire(self, was: Queued, now: float) -> None:
        queued = self.all.get(was.name)
        if queued is not None and queued.number == was.number and queued.state in WAITING:
            said = f"Queued resource '{was.name}' was not provisioned before its valid-until time."
            self._fail(queued, ApiError("DEADLINE_EXCEEDED", said))

    def _fail(self, queued: Queued, error: ApiError) -> None:
        self._set(queued, state="FAILED", error=error.as_rpc())

    def _node_changed(self, node: Node, now: float) -> None:
        """A node is READY, was lost or is gone."""
        queued = self.all.get(node.queued)
        if queued is None:
            return
        exists = node.name in self._nodes.all
        if queued.state == "PROVISIONING" and exists and node.state == "READY":
            nodes = self._nodes_of(queued)
            if len(nodes) == len(queued.specs) and all(one.state == "READY" for one in nodes):
                self._activate(queued, now)
        elif queued.state in ("PROVISIONING", "ACTIVE") and (not exists or node.state in ("PREEMPTED", "TERMINATED")):
            self.suspend(queued, "USER" if not exists else "SERVICE", now)
        elif queued.state == "SUSPENDING" and not self._nodes_of(queued):
            self._set(queued, state="SUSPENDED")
        elif queued.state == "DELETING":
            self._maybe_gone(queued.name, now)

    def _activate(self, queued: Queued, now: float) -> None:
        self._set(queued, state="ACTIVE")
        run = (queued.body.get("runDuration") or {}).get("maxRunDuration")
        if run:
            self._agenda.after(now, read_duration(run), lambda due: self._run_out(queued, due))

    def _run_out(self, was: Queued, now: float) -> None:
        queued = self._same(was, "ACTIVE")
        if queued is not None:
            self.suspend(queued, "SERVICE", now)

    def suspend(self, queued: Queued, initiator: str, now: float) -> None:
        """Take the nodes away; the request stays."""
        self._set(queued, state="SUSPENDING", initiator=initiator)
        was = self.all[queued.name]
        self._agenda.after(now, SUSPEND_S, lambda due: self._end_suspend(was, due))

    def _end_suspend(self, was: Queued, now: float) -> None:
        queued = self._same(was, "SUSPENDING")
        if queued is not None:
            self._delete_nodes(queued, now)
            if not self._nodes_of(queued):
                self._set(queued, state="SUSPENDED")

    def _delete_nodes(self, queued: Queued, now: float) -> None:
        for node in self._nodes_of(queued):
            if node.state != "DELETING":
                self._nodes.begin_delete(node, now)

    def _maybe_gone(self, name: str, now: float) -> None:
        queued = self.all.get(name)
        if queued is not None and queued.state == "DELETING" and not self._nodes_of(queued):
            if self._operations.version_of(queued.operation) == "v2alpha1":
                self._finish_with(queued.operation, queued, now)  # which answers with what was deleted, v2 with nothing
            del self.all[name]
            self._ledger.gone(name, now)
            self._operations.finish(queued.operation, now)

    def _nodes_of(self, queued: Queued) -> list[Node]:
        found = [self._nodes.all.get(name) for name, _, _ in queued.specs]
        return [node for node in found if node is not None and node.queued == queued.name]

    def _same(self, was: Queued, state: str) -> Queued | None:
        """The queued resource, unless it is another by now or went another way."""
        queued = self.all.get(was.name)
        same = queued is not None and (queued.number, queued.round, queued.state) == (was.number, was.round, state)
        return queued if same else None

    def _set(self, queued: Queued, **changes: Any) -> None:
        self.all[queued.name] = msgspec.structs.replace(queued, **changes)


def _ids(request: JsonObject, many: JsonObject | None, queued_id: str) -> list[str]:
    if not many:
        return [check_id("node_id", request["nodeId"])]
    count = int(many.get("nodeCount") or 0)
    if count < 2:
        raise invalid(f"node_count is {count}; it must be greater than 1.")
    prefix = check_id("node_id_prefix", many.get("nodeIdPrefix") or queued_id)
    return [f"{prefix}-{index}" for index in range(count)]


def _tier(body: JsonObject) -> str:
    """The tier oneof; a reservation by name comes with it or alone."""
    tiers = [key for key in ("spot", "guaranteed", "bestEffort") if body.get(key) is not None]
    if len(tiers) > 1:
        raise invalid(f"Only one tier may be given; got {' and '.join(tiers)}.")
    reserved = body.get("reservationName") or (body.get("guaranteed") or {}).get("reserved")
    if reserved:
        return RESERVED
    if "spot" in tiers or body.get("provisioningModel") == "SPOT":
        return SPOT
    return BEST_EFFORT if "bestEffort" in tiers else ON_DEMAND


def _scheduling(tier: str) -> dict[str, bool]:
    return {SPOT: {"spot": True}, BEST_EFFORT: {"preemptible": True}, RESERVED: {"reserved": True}}.get(tier, {})


def _window(policy: JsonObject, now: float, speed: float) -> tuple[float, float | None]:
    """When it may be granted: not before, and until. Durations and times ahead pass at the cloud's speed."""
    given = [key for key, value in policy.items() if value]
    if len(given) > 1:
        raise invalid(f"Only one of the start timings may be given; got {' and '.join(given)}.")

    def ahead(text: str) -> float:
        return now + (read_stamp(text) - now) / speed

    interval = policy.get("validInterval") or {}
    after, until = 0.0, None
    if policy.get("validAfterDuration"):
        after = now + read_duration(policy["validAfterDuration"]) / speed
    if policy.get("validAfterTime") or interval.get("startTime"):
        after = ahead(policy.get("validAfterTime") or interval["startTime"])
    if policy.get("validUntilDuration"):
        until = now + read_duration(policy["validUntilDuration"]) / speed
    if policy.get("validUntilTime") or interval.get("endTime"):
        until = ahead(policy.get("validUntilTime") or interval["endTime"])
    return after, until
