"""What to do next for a service whose replicas are in groups: each group is decided as a service of its own. Pure.

1. A replica whose group runs the same in the revision that is wanted now belongs to that revision: an update of one group leaves
   the replicas of the others alone.
2. Every group is shown to `decide_service` as a service with its own scaling, failures and state, and what is decided is put
   back together. A worker takes the place of an old one only when the router lists it.
3. Replicas of a group that is no longer in the file go when all groups that are in it are as they should be.
4. Workers that were told the address of a router that has been replaced are replaced too.

A service without groups is decided as it is.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from podway.control.autoscale import LoadView
from podway.control.decide_service import Decision, decide_service, failed_again
from podway.control.replica_states import ReplicaSeen, advance, end
from podway.control.service_records import (
    LEAVING,
    GroupStatus,
    Replica,
    ReplicaState,
    ScalingMemory,
    Service,
    ServiceState,
)
from podway.control.traffic import taking_traffic, without_requests

SETTLED = (ServiceState.READY, ServiceState.NO_REPLICA)


def decide_service_groups(
    service: Service, replicas: Sequence[Replica], seen: Mapping[int, ReplicaSeen], load: LoadView | None, now: float
) -> Decision:
    """`replicas`: those that have not ended; `seen` by their number."""
    names = service.group_names
    others = [one for one in replicas if one.group not in names]
    if service.goal == "gone" or (names == [""] and not others):
        return decide_service(service, replicas, seen, load, now)
    unlisted = without_requests(service, replicas)
    seen = {number: msgspec.structs.replace(one, unlisted=number in unlisted) for number, one in seen.items()}
    decided: dict[str, Decision] = {}
    moved: dict[int, Replica] = {}
    for name in names:
        mine = [_carried(service, one) for one in replicas if one.group == name]
        part = decide_service(view_of(service, name), mine, seen, _share(service, name, replicas, load), now)
        decided[name] = part
        moved |= {one.number: one for one in part.replicas}
    states = {part.service.state for part in decided.values()}
    answering = ServiceState.NO_REPLICA in states or bool(taking_traffic(service, moved.values()))
    settled = states <= set(SETTLED) and answering
    for one in others:
        moved[one.number] = _leftover(service, one, seen.get(one.number, ReplicaSeen()), now, settled=settled)
    address = router_address(service, list(moved.values()))
    every = [_follow_router(moved[one.number], address, now) for one in replicas]
    service = _merged(service, {name: part.service for name, part in decided.items()})
    state, reason = _whole_state(service, every)
    return Decision(
        service=msgspec.structs.replace(service, state=state, reason=reason),
        replicas=tuple(every),
        create=tuple(msgspec.structs.replace(new, group=name) for name, part in decided.items() for new in part.create),
        scaled="; ".join(f"{_named(name)}{part.scaled}" for name, part in decided.items() if part.scaled),
        wait_s=min(part.wait_s for part in decided.values()),
    )


def view_of(service: Service, name: str) -> Service:
    """One group of a service as a service of its own."""
    if not name:
        return service
    revisions = tuple(found for one in service.revisions if (found := one.of_group(name)) is not None)
    plain = msgspec.structs.replace(service, revisions=revisions, groups={})
    kept = service.groups.get(name)
    if kept is None:
        kept = GroupStatus(memory=ScalingMemory(target=plain.spec.scaling.min_replicas))
    return msgspec.structs.replace(plain, **{part: getattr(kept, part) for part in GroupStatus.__struct_fields__})


def change_group(service: Service, name: str, change: Callable[[Service], Service]) -> Service:
    """The service with one of its groups changed, as if that were a service."""
    return _merged(service, {name: change(view_of(service, name))})


def group_failed(service: Service, name: str, reason: str, now: float) -> Service:
    """One more replica of a group has failed: a longer pause before the next."""
    failed = (
        change_group(service, name, lambda row: failed_again(row, 1, now)) if name in service.group_names else service
    )
    return msgspec.structs.replace(failed, reason=reason) if reason else failed


def _merged(service: Service, parts: Mapping[str, Service]) -> Service:
    if "" in parts:
        return msgspec.structs.replace(parts[""], groups={})
    groups = {name: service.groups[name] for name in service.group_names if name in service.groups}
    for name, part in parts.items():
        groups[name] = GroupStatus(**{one: getattr(part, one) for one in GroupStatus.__struct_fields__})
    return msgspec.structs.replace(service, groups=groups)


def _carried(service: Service, replica: Replica) -> Replica:
    """In the revision that is wanted now, where its group runs the same in it."""
    if not replica.group or replica.revision == service.revision:
        return replica
    old, new = service.find_revision(replica.revision), service.current
    if old is None or old.since.get(replica.group, old.number) != new.since.get(replica.group, new.number):
        return replica
    return msgspec.structs.replace(replica, revision=service.revision)


def _share(service: Service, name: str, replicas: Sequence[Replica], load: LoadView | None) -> LoadView | None:
    """The load that a group scales by: all of it behind a router; without one, its part of what all groups answer."""
    if load is None or not name or service.spec.router is not None:
        return load
    ready = [one.group for one in replicas if one.state is ReplicaState.READY]
    part = ready.count(name) / len(ready) if ready else 1.0
    waiting = load.waiting if name == service.group_names[0] else 0
    return msgspec.structs.replace(load, rps=load.rps * part, concurrency=load.concurrency * part, waiting=waiting)


def _leftover(service: Service, replica: Replica, seen: ReplicaSeen, now: float, *, settled: bool) -> Replica:
    revision = service.find_revision(replica.revision)
    part = revision.of_group(replica.group) if revision is not None else None
    if part is not None:
        replica = advance(replica, seen, part, now)
    if part is not None and not settled:
        return replica
    return end(replica, "updated", "its group is no longer in the file", now)


def _follow_router(replica: Replica, address: str | None, now: float) -> Replica:
    """A worker that knows its router by an address goes when the router has another one."""
    if replica.router_address in (None, address) or address is None or replica.state in LEAVING:
        return replica
    return end(replica, "updated", "its router has another address", now)


def router_address(service: Service, replicas: Sequence[Replica]) -> str | None:
    """Where the router of a service is, or the newest of several; None until that is known."""
    router = service.spec.router
    if router is None:
        return None
    mine = [one for one in replicas if one.group == router.name and one.state not in LEAVING]
    newest = max(mine, key=lambda one: one.number, default=None)
    return newest.host.address if newest is not None and newest.host is not None else None


def _whole_state(service: Service, replicas: Sequence[Replica]) -> tuple[ServiceState, str]:
    """What the groups come to. A service answers when a replica takes traffic, whatever else fails."""
    states = {name: status.state for name, status in service.groups.items()}
    if not states:
        return service.state, service.reason
    why = "; ".join(f"{_named(name)}{status.reason}" for name, status in service.groups.items() if status.reason)[:500]
    if taking_traffic(service, replicas):
        return ServiceState.READY, why
    if ServiceState.FAILED in states.values():
        return ServiceState.FAILED, why
    router = service.spec.router
    workers = [state for name, state in states.items() if router is None or name != router.name]
    if all(state in SETTLED for state in states.values()) and ServiceState.NO_REPLICA in workers:
        return ServiceState.NO_REPLICA, ""
    was_up = service.state in (ServiceState.READY, ServiceState.NOT_READY)
    return ServiceState.NOT_READY if was_up else ServiceState.STARTING, why


def _named(name: str) -> str:
    return f"group {name}: " if name else ""
