"""The rows of a cluster on its way to hosts: each function answers what happened, in words, and what changes. Pure.

    failed   a place could not give the hosts: the next one, or nothing is left to try (no changes)
    lost     the hosts are gone and a job waits for new ones
    again    what was there is deleted: take the next place
    up       the hosts are there

A stretch of billing begins with `up` and ends when nothing is left of the hosts; each is kept at the price of its place.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from podway.control.failover import Place, Record, after_loss, backoff, ranked, settled, take
from podway.control.records import Attempt, Cluster, ClusterState, Job
from podway.control.recovery import is_patient
from podway.order import Order
from podway.provider_table import row_of
from podway.providers import Observation

ATTEMPTS_KEPT = 100

Change = tuple[str, dict[str, Any]]


def failed(cluster: Cluster, jobs: Sequence[Job], reason: str, tries: Mapping[Place, Record], now: float) -> Change:
    """The next place after this failure; without changes, the text is why there is none."""
    attempts = closed(cluster, ended=now, outcome="failed", reason=reason)
    changes: dict[str, Any] = {"attempts": attempts, "clearing": True, "reason": reason}
    if cluster.left:
        return f"Could not get {_place(cluster.order)}: {reason}. Trying {_place(take(cluster.left)[0])}", changes
    if not (cluster.retry or cluster.recovering or any(is_patient(job) for job in jobs)):
        return story(msgspec.structs.replace(cluster, attempts=attempts)), {}
    wait = backoff(cluster.rounds)
    changes |= {
        "rounds": cluster.rounds + 1,
        "left": ranked(cluster.candidates or ((cluster.order,),), tries, now),
        "not_before": now + wait,
    }
    return f"Could not get {_place(cluster.order)}: {reason}. Every place was tried; again in {wait:g} s", changes


def lost(cluster: Cluster, back: Sequence[Job], reason: str, tries: Mapping[Place, Record], now: float) -> Change:
    """The hosts are gone: make them anew, where the waiting job's task wants them first."""
    recovery = next((job.task.recovery for job in back if job.task.recovery), None)
    next_region = recovery is not None and recovery.strategy == "next-region"
    order = ranked(cluster.candidates or ((_single(cluster.order),),), tries, now)
    return f"lost its hosts: {reason}", {
        "state": ClusterState.INIT,
        "reason": reason,
        "hosts": (),
        "recovering": True,
        "clearing": True,
        "rounds": 0,
        "not_before": 0.0,
        "left": after_loss(cluster, next_region, order),
        "attempts": closed(cluster, ended=now, outcome="lost", reason=reason),
    }


def again(cluster: Cluster, tries: Mapping[Place, Record], now: float) -> dict[str, Any]:
    """Take the next place; that it is asked for is told when it is."""
    left = cluster.left or ranked(cluster.candidates or ((_single(cluster.order),),), tries, now)
    order, rest = take(left)
    new = msgspec.structs.replace(cluster, order=order)
    return {
        "order": order,
        "left": rest,
        "hosts": (),
        "clearing": False,
        "generation": cluster.generation + 1,
        "attempts": begun(new, now),
        **stretch(cluster, now),
    }


def up(cluster: Cluster, seen: Observation, now: float) -> Change:
    """The hosts are there."""
    order = settled(cluster.order, seen.zone, cluster.candidates)
    changes = {
        "state": ClusterState.UP,
        "reason": "",
        "order": order,
        "hosts": seen.hosts,
        "up_since": cluster.up_since or now,
        "active_at": now,
        "recovering": False,
        "rounds": 0,
        "attempts": closed(cluster, zone=order.zone, outcome="up"),
    }
    return f"is up: {what(msgspec.structs.replace(cluster, order=order))}", changes


def stretch(cluster: Cluster, now: float) -> dict[str, Any]:
    """Close the stretch of billing that is open."""
    if cluster.up_since is None:
        return {}
    seconds = max(0.0, now - cluster.up_since)
    cost = (cluster.order.hourly_cost or 0.0) * seconds / 3600
    return {"up_since": None, "billed_s": cluster.billed_s + seconds, "spent": cluster.spent + cost}


def begun(cluster: Cluster, now: float) -> tuple[Attempt, ...]:
    """The attempts, with a new one of the cluster's order."""
    order = cluster.order
    new = Attempt(
        provider=order.provider,
        accelerator_type=order.accelerator_type,
        zone=", ".join(order.zones) or order.zone,
        spot=order.spot,
        begun=now,
    )
    return (*cluster.attempts, new)[-ATTEMPTS_KEPT:]


def closed(cluster: Cluster, **changes: Any) -> tuple[Attempt, ...]:
    """The attempts, the last one changed so."""
    if not cluster.attempts:
        return ()
    return (*cluster.attempts[:-1], msgspec.structs.replace(cluster.attempts[-1], **changes))


def story(cluster: Cluster) -> str:
    """Each place that was tried and why it did not do, and each that was not tried and why."""
    why: dict[str, str] = {}
    for attempt in cluster.attempts:
        if attempt.outcome == "failed":
            why[_attempt_text(attempt)] = attempt.reason or "it failed"
    parts = [f"{place}: {reason}" for place, reason in why.items()]
    return "; ".join([*parts, *(f"not tried, {text}" for text in cluster.untried)])


def what(cluster: Cluster) -> str:
    """`2 x v6e-16 (8 hosts, gcp us-east5-b)`."""
    order = cluster.order
    kind = order.accelerator_type or "CPU host"
    many = f"{order.slices} x {kind}" if order.slices > 1 else kind
    zones = " or ".join(order.zones) or order.zone or ""
    where = "simulated on this machine" if row_of(order.provider).simulated else f"{order.provider} {zones}".strip()
    return f"{many} ({order.hosts} host{'s' if order.hosts > 1 else ''}, {where}{', spot' if order.spot else ''})"


def _single(order: Order) -> Order:
    return msgspec.structs.replace(order, zones=())


def _place(order: Order) -> str:
    where = " or ".join(order.zones) or order.zone or order.provider
    return f"{order.accelerator_type or 'CPU host'} in {where}{' (spot)' if order.spot else ''}"


def _attempt_text(attempt: Attempt) -> str:
    where = attempt.zone or attempt.provider
    return f"{attempt.accelerator_type or 'CPU host'} in {where}{' (spot)' if attempt.spot else ''}"
