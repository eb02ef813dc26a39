"""From the cloud's words to Podway's: what the resources of a cluster amount to. Pure.

1. Each resource's state becomes a condition by the tables below; nowhere else do the cloud's words occur.
2. All of a cluster in one zone make a `Unit`: a queued resource with its nodes, or nodes, or a host VM with its TPU Node.
3. Of several zones that were queued in, the first whole unit is kept; what there is in the others is `surplus`, to be deleted.
"""

import contextlib

import msgspec

from podway.catalog.disks import disk_hourly_cost
from podway.catalog.prices import price_of
from podway.catalog.slices import find_slice
from podway.errors import UserError
from podway.order import Host
from podway.providers import Condition, OwnedResource, Request
from podway.providers.gcp.resources import Resource, zone_of

# Cloud TPU API, Node.State
NODE: dict[str, Condition] = {
    "STATE_UNSPECIFIED": "creating",
    "CREATING": "creating",
    "READY": "ready",
    "RESTARTING": "creating",
    "REIMAGING": "creating",
    "DELETING": "deleting",
    "REPAIRING": "preempted",  # its hosts were taken for maintenance; what ran there is over
    "STOPPED": "stopped",
    "STOPPING": "stopping",
    "STARTING": "creating",
    "PREEMPTED": "preempted",
    "TERMINATED": "preempted",
    "HIDING": "preempted",
    "HIDDEN": "preempted",
    "UNHIDING": "creating",
    "UNKNOWN": "creating",
}
# Cloud TPU API, QueuedResourceState.State
QUEUED: dict[str, Condition] = {
    "STATE_UNSPECIFIED": "creating",
    "CREATING": "creating",
    "ACCEPTED": "creating",
    "WAITING_FOR_RESOURCES": "creating",
    "PROVISIONING": "creating",
    "FAILED": "failed",
    "DELETING": "deleting",
    "ACTIVE": "ready",  # its nodes say whether they are
    "SUSPENDING": "preempted",
    "SUSPENDED": "preempted",
}
# Compute Engine, the life cycle of an instance, and of a disk
INSTANCE: dict[str, Condition] = {
    "PROVISIONING": "creating",
    "STAGING": "creating",
    "RUNNING": "ready",
    "STOPPING": "stopping",
    "SUSPENDING": "stopping",
    "SUSPENDED": "stopped",
    "STOPPED": "stopped",
    "TERMINATED": "stopped",
    "REPAIRING": "preempted",
}
DISK: dict[str, Condition] = {
    "CREATING": "creating",
    "RESTORING": "creating",
    "READY": "ready",
    "FAILED": "failed",
    "DELETING": "deleting",
}
# States of a queued resource in which nothing happens until there is capacity, in words for people.
WAITING = {"WAITING_FOR_RESOURCES": "waiting for capacity", "ACCEPTED": "accepted, in the queue"}
UNDER_MAINTENANCE = "UNHEALTHY_MAINTENANCE"  # Node.Health


class ClusterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What this Podway began for a cluster; written before it is done. The cloud stays the truth about what there is."""

    request: Request
    nonce: str
    began: float
    asked: dict[str, float] = {}  # target -> when it was last asked for; without an operation, it may still come to be
    operations: dict[str, str] = {}  # target -> the operation that makes it
    failures: dict[str, str] = {}  # zone -> why not there
    seen_ready: float | None = None
    waits_for: str = ""  # what the last try to use the hosts ended with
    zone: str | None = None  # where the cluster is, once its agents answered
    hosts: tuple[Host, ...] = ()
    halted: bool = False  # stopped by us
    ending: bool = False
    endpoint: str | None = ""  # of the emulator that it was begun in; None: Google Cloud itself; "": not known

    @property
    def project(self) -> str:
        """The project that the request names."""
        return self.request.steps[0].target.split("/")[1] if self.request.steps else ""

    @property
    def zones(self) -> tuple[str, ...]:
        """Every zone that the request has a step for, in its order."""
        found = [zone_of(step.target) for step in self.request.steps]
        return tuple(dict.fromkeys(zone for zone in found if zone))


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster in one zone."""

    zone: str
    condition: Condition
    reason: str = ""
    nodes: tuple[Resource, ...] = ()  # those with hosts, slice by slice


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The whole cluster."""

    condition: Condition
    reason: str = ""
    elsewhere: bool = False
    unit: Unit | None = None  # the one that is kept
    surplus: tuple[Resource, ...] = ()


def condition_of(resource: Resource) -> Condition:
    """One resource's condition."""
    match resource.kind:
        case "queued resource":
            return QUEUED.get(resource.state, "creating")
        case "node" | "tpu node":
            found = NODE.get(resource.state, "creating")
            return "preempted" if found == "ready" and resource.health == UNDER_MAINTENANCE else found
        case "instance":
            found = INSTANCE.get(resource.state, "creating")
            return "preempted" if found == "stopped" and resource.spot else found
        case "disk":
            return DISK.get(resource.state, "creating")
        case "firewall rule":
            return "ready"


def owned_resource(resource: Resource) -> OwnedResource:
    """One resource for those who look for orphans, with what it costs where that is known."""
    cost: float | None = 0.0 if resource.kind in ("queued resource", "firewall rule") else None
    if resource.kind in ("node", "tpu node") and resource.accelerator_type:
        with contextlib.suppress(UserError):
            cost = price_of(find_slice(resource.accelerator_type), resource.zone, resource.spot)
    if resource.kind == "disk":
        cost = disk_hourly_cost(resource.disk_type, resource.size_gb)
    return OwnedResource(
        cluster=resource.cluster,
        volume=resource.volume,
        owner=resource.owner,
        kind=resource.kind,
        name=resource.path,
        zone=resource.zone,
        condition=condition_of(resource),
        accelerator_type=resource.accelerator_type,
        created=resource.created,
        hourly_cost=cost,
    )


def judge(resources: tuple[Resource, ...], record: ClusterRecord | None) -> State:
    """What is to be said of a cluster, and what is to be done about it."""
    carriers = [resource for resource in resources if resource.kind not in ("disk", "firewall rule")]
    seen = dict.fromkeys(resource.zone for resource in carriers if resource.zone)
    zones = tuple(dict.fromkeys([*(record.zones if record else ()), *sorted(zone for zone in seen if zone)]))
    units = {zone: _unit(zone, [resource for resource in carriers if resource.zone == zone], record) for zone in zones}
    if record is not None and record.ending:
        return State(condition="deleting")
    if record is not None and record.zone is not None:
        unit = units.get(record.zone) or Unit(zone=record.zone, condition="preempted", reason="its zone is gone")
        return _kept(unit, resources)
    ready = [unit for unit in units.values() if unit.condition == "ready"]
    if ready:
        return _kept(ready[0], resources)
    return _between(list(units.values()), resources, record)


def is_placed(record: ClusterRecord | None, state: State) -> bool:
    """Whether agents were started on these very nodes."""
    if record is None or not record.hosts or state.unit is None:
        return False
    there = {
        (f"{node.number}.{worker}", outside or inside)  # a node that was stopped has other addresses afterwards
        for node in state.unit.nodes
        for worker, (inside, outside) in enumerate(node.addresses)
    }
    return {(host.id.partition("/")[0], host.external_address) for host in record.hosts} == there


def _kept(unit: Unit, resources: tuple[Resource, ...]) -> State:
    surplus = tuple(resource for resource in resources if resource.zone not in (unit.zone, None))
    return State(condition=unit.condition, reason=unit.reason, unit=unit, surplus=surplus)


def _between(units: list[Unit], resources: tuple[Resource, ...], record: ClusterRecord | None) -> State:
    """Nothing is whole: what comes next is what counts, and failure only when nothing is to come."""
    by_condition = {unit.condition: unit for unit in reversed(units)}
    told = "; ".join(unit.reason for unit in units if unit.reason)
    for condition in ("creating", "stopping", "stopped", "preempted", "deleting"):
        if condition in by_condition:
            return State(condition=condition, reason=told, unit=by_condition[condition] if len(units) == 1 else None)
    if "failed" in by_condition and "absent" not in by_condition:
        return State(condition="failed", reason=told, elsewhere=True)
    if record is not None:
        return State(condition="creating", reason=told)
    return State(condition="deleting" if resources else "absent")  # a disk or a rule is left


def _unit(zone: str, resources: list[Resource], record: ClusterRecord | None) -> Unit:
    placed = record is not None and record.zone == zone
    if record is not None and zone in record.failures and not placed:
        return Unit(zone=zone, condition="failed", reason=record.failures[zone])
    queued = next((resource for resource in resources if resource.kind == "queued resource"), None)
    parts = sorted((resource for resource in resources if resource.kind != "queued resource"), key=_slice_number)
    if queued is not None and condition_of(queued) != "ready":
        return _queued_unit(zone, queued)
    if resources:
        whole = max(resource.parts for resource in resources)
        return _whole_unit(zone, parts, whole, placed, halted=record is not None and record.halted)
    if placed:
        return Unit(zone=zone, condition="preempted", reason=f"its resources in {zone} are gone")
    asked = record is not None and any(zone_of(target) == zone for target in record.asked)
    return Unit(zone=zone, condition="creating" if asked else "absent")


def _queued_unit(zone: str, queued: Resource) -> Unit:
    condition = condition_of(queued)
    wanted = queued.accelerator_type or "the slice"
    if condition == "failed":
        reason = queued.why or f"the queue gave up {wanted} in {zone}"
    elif condition == "preempted":
        reason = f"{wanted} in {zone} was preempted: its queued resource is {queued.state.lower()}"
    else:
        reason = f"{wanted} in {zone}: {WAITING.get(queued.state, queued.state.lower())}"
    return Unit(zone=zone, condition=condition, reason=reason)


def _whole_unit(zone: str, parts: list[Resource], whole: int, placed: bool, *, halted: bool) -> Unit:
    conditions = {condition_of(part) for part in parts}
    hosts = tuple(part for part in parts if part.addresses or part.kind == "instance")
    for condition in ("preempted", "failed", "deleting", "stopping"):
        if condition in conditions:
            part = next(part for part in parts if condition_of(part) == condition)
            return Unit(zone=zone, condition=condition, reason=_why(part), nodes=hosts)
    if len(parts) < whole:
        gone = Unit(zone=zone, condition="preempted", reason=f"{whole - len(parts)} of {whole} in {zone} are gone")
        return gone if placed else Unit(zone=zone, condition="creating", reason=f"{len(parts)} of {whole} are there")
    if conditions == {"ready"}:
        return Unit(zone=zone, condition="ready", nodes=hosts)
    if "stopped" in conditions and "creating" not in conditions:
        # Some run and some do not: a stop, or a start, that was cut short; the next stop or start goes on with it.
        return Unit(zone=zone, condition="stopping" if "ready" in conditions and halted else "stopped", nodes=hosts)
    return Unit(zone=zone, condition="creating", reason=f"{parts[0].id} is {parts[0].state.lower()}")


def _why(part: Resource) -> str:
    kind = part.accelerator_type or part.id
    if part.health == UNDER_MAINTENANCE:
        return f"{kind} in {part.zone} is under maintenance"
    told = f" ({' '.join(part.why.split())})" if part.why else ""
    return f"{kind} in {part.zone} is {part.state.lower()}{told}"


def _slice_number(resource: Resource) -> tuple[int, str]:
    """Slice by slice: the number after the last dash of `NAME-HASH-3`; a TPU Node after its host VM."""
    tail = resource.id.rpartition("-")[2]
    return (int(tail) if tail.isdigit() and len(tail) < 6 else 0, "" if resource.kind == "instance" else resource.id)
