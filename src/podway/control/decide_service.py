"""What to do next for a service, as a pure function of what is wanted and what is seen.

1. Every replica is brought up to date (`replica_states.py`); what failed counts against the revision it ran.
2. The autoscaler moves the number of replicas wanted (`autoscale.py`).
3. What is there is compared with what is wanted. New replicas are made, up to a surge above the target while a revision rolls out;
   replicas of an old revision leave as new ones become ready (and their router, if there is one, lists them), never so that
   fewer are ready than before or than wanted.

The controller writes what is answered here, each row with a guard, and then does it: a row that says what is to happen is there
before it happens, so a server killed in between finds it.
"""

import math
from collections.abc import Mapping, Sequence, Set

import msgspec

from podway.control.autoscale import LoadView, autoscale, clamp, explain
from podway.control.replica_states import ReplicaSeen, advance, end
from podway.control.service_records import (
    LEAVING,
    Replica,
    ReplicaState,
    ScalingMemory,
    Service,
    ServiceState,
)

SURGE = 0.25  # of the target, at least one: how many more there may be while a revision rolls out
MOST_FAILURES = 5  # in a row, none ready in between: nothing more is created until somebody changes the service
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 120.0  # after a failure, before the next replica


class NewReplica(msgspec.Struct, frozen=True, kw_only=True):
    """A replica to make."""

    revision: int
    group: str = ""
    spot: bool | None = None


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The rows as they are to be, and the replicas to make."""

    service: Service
    replicas: tuple[Replica, ...]
    create: tuple[NewReplica, ...] = ()
    scaled: str = ""  # where the autoscaler moved the target: why
    wait_s: float = 5.0


def decide_service(
    service: Service,
    replicas: Sequence[Replica],
    seen: Mapping[int, ReplicaSeen],
    load: LoadView | None,
    now: float,
) -> Decision:
    """`replicas`: those that have not ended; `seen` by their number."""
    moved = [_advanced(service, one, seen.get(one.number, ReplicaSeen()), now) for one in replicas]
    service = _count_failures(service, replicas, moved, now)
    if service.goal == "gone":
        return _towards_gone(service, moved, now)
    types = [_type_of(seen.get(one.number)) for one in moved]
    scaling, before = service.spec.scaling, service.memory.target
    service = _replace(service, memory=autoscale(service.memory, scaling, load, now, types))
    target = service.memory.target
    scaled = explain(scaling, load, before, target, types) if target != before else ""
    unlisted = {number for number, one in seen.items() if one.unlisted}
    moved = _retire(service, moved, unlisted, now)
    create = () if _paused(service, now) else _missing(service, moved)
    state, reason = _state(service, moved)
    service = _replace(service, state=state, reason=reason)
    wait_s = _pace(service, moved, create, now)
    return Decision(service=service, replicas=tuple(moved), create=create, scaled=scaled, wait_s=wait_s)


def _advanced(service: Service, replica: Replica, seen: ReplicaSeen, now: float) -> Replica:
    revision = service.find_revision(replica.revision)
    if revision is None:
        return end(replica, "updated", "its revision is forgotten", now)
    return advance(replica, seen, revision, now)


def _type_of(seen: ReplicaSeen | None) -> str | None:
    return seen.cluster.order.accelerator_type if seen is not None and seen.cluster is not None else None


def _count_failures(service: Service, before: Sequence[Replica], after: Sequence[Replica], now: float) -> Service:
    """A replica that becomes ready clears the count; each that fails adds to it, and to the pause before the next."""
    failed = sum(
        new.cause == "failed" and old.cause is None for old, new in zip(before, after, strict=True) if new is not old
    )
    # Only the newest revision's success says that creating more of it makes sense.
    newest = _newest(service)
    if any(one.state is ReplicaState.READY and one.revision == newest for one in after):
        service = _replace(service, failures=0) if not failed else service
    return failed_again(service, failed, now) if failed else service


def failed_again(service: Service, times: int, now: float) -> Service:
    """So many more replicas have failed: a longer pause before the next."""
    count = service.failures + times
    pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(count - 1, 20))
    return _replace(service, failures=count, not_before=now + pause)


def _newest(service: Service) -> int:
    return service.canary if service.canary is not None else service.revision


def _paused(service: Service, now: float) -> bool:
    return service.failures >= MOST_FAILURES or now < service.not_before


def _towards_gone(service: Service, replicas: list[Replica], now: float) -> Decision:
    ending = tuple(end(one, "service-down", "the service is being taken down", now) for one in replicas)
    # Nobody is routed to it any more: there is nothing to drain but what is under way already.
    if all(one.done for one in ending):
        gone = _replace(service, state=ServiceState.GONE, ended=now)
        return Decision(service=gone, replicas=ending, wait_s=0)
    service = _replace(service, state=ServiceState.SHUTTING_DOWN)
    return Decision(service=service, replicas=ending, wait_s=0.5)


# which replicas there should be


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """How many replicas of a revision there should be, and how many of them may not be spot."""

    revision: int
    count: int
    on_demand: int | None = None  # None: as the task says


def _wanted(service: Service, replicas: Sequence[Replica]) -> list[Wanted]:
    target = clamp(service.spec.scaling, service.memory.target)
    found = [Wanted(revision=service.revision, count=target, on_demand=_on_demand(service, replicas, target))]
    if service.canary is not None and target:
        count = max(1, math.ceil(target * service.canary_share))
        found.append(Wanted(revision=service.canary, count=count))
    return found


def _on_demand(service: Service, replicas: Sequence[Replica], target: int) -> int | None:
    """Of a service on spot capacity: how many replicas are on demand, in the place of spot ones that are missing too."""
    spec = service.spec
    if all(one.spot == "no" for one in service.current.task.resources):
        return None
    if not spec.spot_fallback and not spec.dynamic_fallback:
        return None
    base = min(spec.spot_fallback, target)
    if not spec.dynamic_fallback:
        return base
    ready = sum(one.state is ReplicaState.READY and one.spot is True for one in replicas)
    return base + max(0, target - base - ready)


def _alive(replicas: Sequence[Replica]) -> list[Replica]:
    return [one for one in replicas if one.state not in LEAVING]


def _surge(count: int) -> int:
    return max(1, math.ceil(count * SURGE))


def _missing(service: Service, replicas: Sequence[Replica]) -> tuple[NewReplica, ...]:
    """The replicas to make now: all that are missing, and while a revision rolls out no more at once than the surge allows."""
    alive, create = _alive(replicas), list[NewReplica]()
    for wanted in _wanted(service, replicas):
        mine = [one for one in alive if one.revision == wanted.revision]
        others = [one for one in alive if one.revision not in (wanted.revision, service.canary)]
        if wanted.on_demand is not None:
            fixed = sum(one.spot is False for one in mine)
            cheap = sum(one.spot is not False for one in mine)
            spot = wanted.count - min(service.spec.spot_fallback, wanted.count)
            more = [False] * max(0, wanted.on_demand - fixed) + [True] * max(0, spot - cheap)
            create += [NewReplica(revision=wanted.revision, spot=kind) for kind in more]
            continue
        lacking = wanted.count - len(mine)
        if others and wanted.revision == service.revision:
            room = wanted.count + _surge(wanted.count) - len(mine) - len(others)
            lacking = min(lacking, max(0, room))
        create += [NewReplica(revision=wanted.revision)] * max(0, lacking)
    return tuple(create)


def _retire(service: Service, replicas: list[Replica], unlisted: Set[int], now: float) -> list[Replica]:
    """Ask those to end that are too many: of revisions that are over, and above what is wanted."""
    leave: dict[int, tuple[str, str]] = {}
    wanted = {one.revision: one for one in _wanted(service, replicas)}
    alive = _alive(replicas)
    for revision, part in wanted.items():
        mine = [one for one in alive if one.revision == revision]
        for one in _surplus(service, part, mine, unlisted):
            leave[one.number] = ("scaled-down", f"{part.count} are enough")
    old = [one for one in alive if one.revision not in wanted]
    current = [one for one in alive if one.revision == service.revision]
    for one in _replaced(old, current, wanted[service.revision].count, unlisted):
        leave[one.number] = ("updated", f"revision {service.revision} takes its place")
    return [
        end(one, leave[one.number][0], leave[one.number][1], now)  # type: ignore[arg-type]
        if one.number in leave
        else one
        for one in replicas
    ]


def _surplus(service: Service, part: Wanted, mine: Sequence[Replica], unlisted: Set[int]) -> list[Replica]:
    """Those to let go: the ones that do not answer first, then the newest."""
    if part.on_demand is None:
        return _expendable(mine, unlisted)[: max(0, len(mine) - part.count)]
    fixed = [one for one in mine if one.spot is False]
    cheap = [one for one in mine if one.spot is not False]
    spot = part.count - min(service.spec.spot_fallback, part.count)
    return [
        *_expendable(fixed)[: max(0, len(fixed) - part.on_demand)],
        *_expendable(cheap)[: max(0, len(cheap) - spot)],
    ]


def _expendable(replicas: Sequence[Replica], unlisted: Set[int] = frozenset()) -> list[Replica]:
    progress = (ReplicaState.PENDING, ReplicaState.PROVISIONING, ReplicaState.STARTING, ReplicaState.NOT_READY)
    return sorted(
        replicas,
        key=lambda one: (
            progress.index(one.state) if one.state in progress else len(progress),
            one.number not in unlisted,
            -one.number,
        ),
    )


def _replaced(old: Sequence[Replica], current: Sequence[Replica], target: int, unlisted: Set[int]) -> list[Replica]:
    """Replicas of old revisions that may go: as many as the ready ones of the new revision, that get requests, make up for."""
    if not old:
        return []
    if target == 0:
        return list(old)
    ready = sum(one.state is ReplicaState.READY and one.number not in unlisted for one in current)
    unready_old = [one for one in old if one.state is not ReplicaState.READY]
    ready_old = [one for one in old if one.state is ReplicaState.READY]
    # One that takes no traffic is not missed, once its successor is on the way.
    gone = _expendable(unready_old)[: len(current)]
    spare = max(0, ready + len(ready_old) - target)
    return [*gone, *_expendable(ready_old, unlisted)[: min(spare, len(ready_old))]]


def _state(service: Service, replicas: Sequence[Replica]) -> tuple[ServiceState, str]:
    alive = _alive(replicas)
    failing = service.failures >= MOST_FAILURES
    last = next((one.reason for one in reversed(replicas) if one.cause == "failed" and one.reason), "")
    why = ""
    if failing:
        told = last or service.reason.partition(": ")[2]
        why = f"revision {_newest(service)} failed {service.failures} times and is not tried again: {told}"[:500]
    if any(one.state is ReplicaState.READY for one in alive):
        return ServiceState.READY, why
    if failing and not alive:
        return ServiceState.FAILED, why
    if not alive and clamp(service.spec.scaling, service.memory.target) == 0:
        return ServiceState.NO_REPLICA, ""
    if service.state in (ServiceState.READY, ServiceState.NOT_READY):
        return ServiceState.NOT_READY, why or last
    return ServiceState.STARTING, why or last


def _pace(service: Service, replicas: Sequence[Replica], create: tuple[NewReplica, ...], now: float) -> float:
    """Soon while something moves, seldom when all is well; probes and reports wake the controller anyway."""
    if create:
        return 0.0
    if any(one.state is not ReplicaState.READY for one in replicas):
        return 0.5
    if now < service.not_before:
        return min(5.0, service.not_before - now + 0.01)
    return 5.0 if service.spec.scaling.min_replicas == service.spec.scaling.max_replicas else 2.0


def _replace(service: Service, **changes: object) -> Service:
    return msgspec.structs.replace(service, **changes)


__all__ = ["Decision", "LoadView", "NewReplica", "ScalingMemory", "decide_service"]
