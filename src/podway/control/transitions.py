"""Every change of a cluster or a job, as a pure function from the old value to the new one.

`Store.update` and `Store.update_job` apply them to the row as it is at that moment, so each reads what it needs from the value
it is given and never from an older copy. A function that has nothing to change returns its argument, and nothing is written.
The search for capacity has its own in `provisioning.py`.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec.structs import replace

from podway.control.access import with_grant
from podway.control.records import (
    Billing,
    Cluster,
    ClusterState,
    Exit,
    Job,
    JobAttempt,
    JobOutcome,
    JobState,
    ProvisionAttempt,
)
from podway.task.task import Autostop

# clusters


def request_stop(cluster: Cluster) -> Cluster:
    """Stop the hosts, unless they are already being stopped or deleted."""
    if cluster.goal != "up":
        return cluster
    return replace(cluster, goal="stopped", state=ClusterState.STOPPING)


def request_start(cluster: Cluster) -> Cluster:
    """Start stopped hosts."""
    if cluster.goal != "stopped":
        return cluster
    return replace(cluster, goal="up", state=ClusterState.INIT)


def request_down(cluster: Cluster, reason: str | None = None) -> Cluster:
    """Delete it, for a reason that is kept where there is one."""
    if cluster.goal == "gone":
        return cluster
    why = cluster.reason if reason is None else reason
    return replace(cluster, goal="gone", state=ClusterState.TERMINATING, reason=why)


def refuse_start(cluster: Cluster, reason: str) -> Cluster:
    """Stopped hosts that do not start are stopped again: their disks are kept."""
    return replace(cluster, goal="stopped", state=ClusterState.STOPPING, reason=reason)


def set_autostop(cluster: Cluster, autostop: Autostop | None, now: float | None = None) -> Cluster:
    """Set or clear the policy; with `now`, the idle time counts from then."""
    active_at = cluster.active_at if now is None else now
    return replace(cluster, autostop=autostop, autostop_armed=False, active_at=active_at)


def arm_autostop(cluster: Cluster, autostop: Autostop | None) -> Cluster:
    """Its head host has confirmed this policy, which may have been changed meanwhile."""
    armed = autostop is not None and cluster.autostop == autostop
    return replace(cluster, autostop_armed=armed) if cluster.autostop_armed != armed else cluster


def mark_active(cluster: Cluster, now: float) -> Cluster:
    """Autostop counts from here."""
    return replace(cluster, active_at=now)


def mark_stopped(cluster: Cluster, reason: str, now: float) -> Cluster:
    """The hosts are stopped and not billed."""
    return replace(cluster, state=ClusterState.STOPPED, reason=reason, billing=close_billing(cluster, now))


def mark_gone(cluster: Cluster, reason: str, now: float) -> Cluster:
    """Nothing of it is left."""
    attempts = close_attempt(cluster.search.attempts, now)
    search = replace(cluster.search, attempts=attempts)
    billing = close_billing(cluster, now)
    return replace(cluster, state=ClusterState.GONE, reason=reason, ended=now, search=search, billing=billing)


def open_billing(cluster: Cluster, since: float | None) -> Cluster:
    """The cloud asks money since then, whether or not the hosts can be used yet; None: no more is known."""
    if since is None or cluster.billing.up_since is not None:
        return cluster
    return replace(cluster, billing=replace(cluster.billing, up_since=since))


def close_billing(cluster: Cluster, now: float) -> Billing:
    """With the interval that is open, if any, added at the price of where the cluster is."""
    billing = cluster.billing
    if billing.up_since is None:
        return billing
    seconds = max(0.0, now - billing.up_since)
    cost = (cluster.order.hourly_cost or 0.0) * seconds / 3600
    return Billing(billed_s=billing.billed_s + seconds, spent=billing.spent + cost)


def close_attempt(attempts: tuple[ProvisionAttempt, ...], now: float) -> tuple[ProvisionAttempt, ...]:
    """The last attempt ended now."""
    return (*attempts[:-1], replace(attempts[-1], ended=now)) if attempts else ()


def set_grant(cluster: Cluster, user: str, right: Literal["view", "use"] | None) -> Cluster:
    """Let a person view or use it, or (None) no longer."""
    return replace(cluster, grants=with_grant(cluster.grants, user, right))


# jobs


def request_cancel(job: Job, reason: str) -> Job:
    """Ask for its end; whoever drives it sees to that."""
    if job.cancel:
        return job
    return replace(job, cancel=True, reason=reason)


def cancel_follower(job: Job, before: Job) -> Job:
    """The job it follows has ended without success."""
    return request_cancel(job, f"job {before.number}, which it follows, is {before.state.value}")


def begin_attempt(job: Job, now: float) -> Job:
    """The first attempt, or after a recovery the next one."""
    if job.state is not JobState.RECOVERING:
        return replace(job, state=JobState.SETTING_UP, attempt=replace(job.attempt, started=now))
    attempt = JobAttempt(
        number=job.attempt.number + 1,
        started=now,
        pids=job.attempt.pids,
        skew_ms=job.attempt.skew_ms,
        error_restarts=job.attempt.error_restarts,
    )
    return replace(job, state=JobState.SETTING_UP, attempt=attempt, reason="")


def mark_running(job: Job) -> Job:
    """Setup is done on every host."""
    return replace(job, state=JobState.RUNNING)


def mark_phase_started(job: Job, phase: str, pids: Sequence[int], skew_ms: tuple[int, ...]) -> Job:
    """A phase runs on every host."""
    known = {**job.attempt.pids, job.label(phase): list(pids)}
    return replace(job, attempt=replace(job.attempt, pids=known, skew_ms=skew_ms or job.attempt.skew_ms))


def mark_recovering(job: Job, reason: str, now: float, *, lost_generation: int | None) -> Job:
    """It is to begin again: on other hosts than those of `lost_generation`, or (None) on the same after its own failure."""
    attempt = replace(
        job.attempt,
        recovering_since=now,
        lost_generation=lost_generation,
        error_restarts=job.attempt.error_restarts + (lost_generation is None),
    )
    return replace(job, state=JobState.RECOVERING, reason=reason, attempt=attempt, outcome=JobOutcome())


def mark_cancelling(job: Job, reason: str) -> Job:
    """Its processes are being stopped."""
    return replace(job, state=JobState.CANCELLING, reason=reason)


def mark_ended(
    job: Job,
    state: JobState,
    reason: str,
    now: float,
    exits: tuple[Exit, ...] = (),
    blamed_rank: int | None = None,
    *,
    hosts_lost: bool = False,
) -> Job:
    """It will not change again; its secrets go."""
    outcome = JobOutcome(ended=now, exits=exits, blamed_rank=blamed_rank, hosts_lost=hosts_lost)
    return replace(job, state=state, reason=reason, outcome=outcome, sealed_secrets=b"")
