"""A cluster's search for capacity, each step as a pure function from the old value to the new one, with the sentence for people.

    failed      a place could not give the hosts: the next one, or None when nothing is left to try
    lost        the hosts are gone and a job waits for new ones
    take_next   what was there is deleted: take the next place
    up          the hosts are there

A billed interval begins when the provider says that the cloud asks money (`Observation.billed_since`), or with `up` where it does not
say; it ends when nothing is left of the hosts. Each is kept at the price of its place.
"""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from podway.control.failover import Place, PlaceRecord, after_loss, backoff, ranked, settled, take
from podway.control.records import Billing, Cluster, ClusterState, Job, ProvisionAttempt
from podway.control.recovery import is_patient
from podway.control.transitions import close_billing, open_billing
from podway.order import Order
from podway.provider_table import row_of
from podway.providers import Observation

ATTEMPTS_KEPT = 100


def failed(
    cluster: Cluster, jobs: Sequence[Job], reason: str, tries: Mapping[Place, PlaceRecord], now: float
) -> tuple[str, Cluster | None]:
    """The next place after this failure; with None, the text is why there is none."""
    attempts = _end_attempt(cluster, ended=now, outcome="failed", reason=reason)
    search = replace(cluster.search, attempts=attempts, clearing=True)
    here = _place(cluster.order)
    if search.left:
        new = replace(cluster, search=search, reason=reason)
        return f"Could not get {here}: {reason}. Trying {_place(take(search.left)[0])}", new
    if not (search.retry or search.recovering or any(is_patient(job) for job in jobs)):
        return attempts_summary(replace(cluster, search=search)), None
    wait = backoff(search.rounds)
    search = replace(
        search,
        rounds=search.rounds + 1,
        left=ranked(search.candidates or ((cluster.order,),), tries, now),
        not_before=now + wait,
    )
    text = f"Could not get {here}: {reason}. Every place was tried; again in {wait:g} s"
    return text, replace(cluster, search=search, reason=reason)


def lost(
    cluster: Cluster, back: Sequence[Job], reason: str, tries: Mapping[Place, PlaceRecord], now: float
) -> tuple[str, Cluster]:
    """The hosts are gone: recreate them, where the waiting job's task wants them first."""
    recovery = next((job.task.recovery for job in back if job.task.recovery), None)
    next_region = recovery is not None and recovery.strategy == "next-region"
    order = ranked(cluster.search.candidates or ((_single(cluster.order),),), tries, now)
    search = replace(
        cluster.search,
        recovering=True,
        clearing=True,
        rounds=0,
        not_before=0.0,
        left=after_loss(cluster, next_region, order),
        attempts=_end_attempt(cluster, ended=now, outcome="lost", reason=reason),
    )
    new = replace(cluster, state=ClusterState.INIT, reason=reason, hosts=(), autostop_armed=False, search=search)
    return f"lost its hosts: {reason}", new


def take_next(cluster: Cluster, tries: Mapping[Place, PlaceRecord], now: float) -> Cluster:
    """Ask for hosts in the next place."""
    search = cluster.search
    left = search.left or ranked(search.candidates or ((_single(cluster.order),),), tries, now)
    order, rest = take(left)
    new = replace(
        cluster,
        order=order,
        hosts=(),
        billing=close_billing(cluster, now),
        search=replace(search, left=rest, clearing=False, generation=search.generation + 1),
    )
    return begin_attempt(new, now)


def up(cluster: Cluster, seen: Observation, now: float) -> tuple[str, Cluster]:
    """The hosts are there."""
    search, billing = cluster.search, open_billing(cluster, seen.billed_since).billing
    order = settled(cluster.order, seen.zone, search.candidates)
    attempts = _end_attempt(cluster, zone=order.zone, outcome="up")
    new = replace(
        cluster,
        state=ClusterState.UP,
        reason="",
        order=order,
        hosts=seen.hosts,
        active_at=now,
        search=replace(search, recovering=False, rounds=0, attempts=attempts),
        billing=Billing(up_since=billing.up_since or now, billed_s=billing.billed_s, spent=billing.spent),
    )
    return f"is up: {describe(new.order)}", new


def begin_attempt(cluster: Cluster, now: float) -> Cluster:
    """With one more attempt, of the cluster's present order."""
    order = cluster.order
    new = ProvisionAttempt(
        provider=order.provider,
        accelerator_type=order.accelerator_type,
        zone=", ".join(order.zones) or order.zone,
        spot=order.spot,
        begun=now,
    )
    attempts = (*cluster.search.attempts, new)[-ATTEMPTS_KEPT:]
    return replace(cluster, search=replace(cluster.search, attempts=attempts))


def _end_attempt(cluster: Cluster, **changes: object) -> tuple[ProvisionAttempt, ...]:
    attempts = cluster.search.attempts
    return (*attempts[:-1], replace(attempts[-1], **changes)) if attempts else ()


def attempts_summary(cluster: Cluster) -> str:
    """Each place that was tried and why it did not do, and each that was not tried and why."""
    why: dict[str, str] = {}
    for attempt in cluster.search.attempts:
        if attempt.outcome == "failed":
            why[_attempt_text(attempt)] = attempt.reason or "it failed"
    parts = [f"{place}: {reason}" for place, reason in why.items()]
    return "; ".join([*parts, *(f"not tried, {text}" for text in cluster.search.untried)])


def describe(order: Order) -> str:
    """`2 x v6e-16 (8 hosts, gcp us-east5-b)`."""
    kind = order.accelerator_type or "CPU host"
    many = f"{order.slices} x {kind}" if order.slices > 1 else kind
    zones = " or ".join(order.zones) or order.zone or ""
    where = "simulated on this machine" if row_of(order.provider).simulated else f"{order.provider} {zones}".strip()
    return f"{many} ({order.hosts} host{'s' if order.hosts > 1 else ''}, {where}{', spot' if order.spot else ''})"


def _single(order: Order) -> Order:
    return replace(order, zones=())


def _place(order: Order) -> str:
    where = " or ".join(order.zones) or order.zone or order.provider
    return f"{order.accelerator_type or 'CPU host'} in {where}{' (spot)' if order.spot else ''}"


def _attempt_text(attempt: ProvisionAttempt) -> str:
    where = attempt.zone or attempt.provider
    return f"{attempt.accelerator_type or 'CPU host'} in {where}{' (spot)' if attempt.spot else ''}"
