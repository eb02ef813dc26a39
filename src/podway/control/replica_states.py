"""How one replica changes by what is seen of it: its cluster, its job, its probes. Pure.

Only a replica whose probes pass takes traffic, at all times: one that was ready and stops answering is NOT_READY until it answers
again, and is replaced when it does not for long enough. A replica that is asked to end drains first if it had traffic, then its
cluster goes, and only when nothing is left of that has it ended.
"""

import msgspec

from podway.control.records import ENDED, Cluster, ClusterState, JobState
from podway.control.service_records import EndCause, Replica, ReplicaState, Revision
from podway.order import Host

UNREADY_AFTER = 2  # failed probes in a row, before a replica loses its traffic; a refused connection counts at once
FAIL_AFTER_S = 180.0  # as SkyServe: so long without an answer, and a replica is replaced
DRAIN_S = 60.0  # the longest wait for requests that are under way, where the task says nothing


class ProbeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What the probes of one replica have come to."""

    passing: bool = False  # every probe has passed as often as it is to
    failures: int = 0  # of the probe that fails, in a row
    refused: bool = False  # nothing listens on the port
    error: str = ""  # of the last failure


class ReplicaSeen(msgspec.Struct, frozen=True, kw_only=True):
    """What is there of a replica."""

    cluster: Cluster | None = None
    job: JobState | None = None
    job_reason: str = ""
    probe: ProbeSummary = ProbeSummary()
    unlisted: bool = False  # a worker that its router does not list yet: ready or not, it gets no requests
    busy: bool | None = None  # whether requests are under way with it; None: nobody knows


def advance(replica: Replica, seen: ReplicaSeen, revision: Revision, now: float) -> Replica:
    """The replica as it is now."""
    if replica.done:
        return replica
    cluster = seen.cluster
    if replica.cluster_id is None and cluster is not None:
        replica = msgspec.structs.replace(replica, cluster_id=cluster.id)
    match replica.state:
        case ReplicaState.SHUTTING_DOWN:
            if cluster is None or cluster.state is ClusterState.GONE:
                state = ReplicaState.FAILED if replica.cause == "failed" else ReplicaState.GONE
                return msgspec.structs.replace(replica, state=state, ended=now)
            return replica
        case ReplicaState.DRAINING:
            return _drained(replica, seen, revision, now)
    if cluster is None:
        # Before its launch; a row that vanished later is none that this store can have.
        return replica if replica.cluster_id is None else end(replica, "failed", "its cluster is gone", now)
    if cluster.goal != "up":
        return _lost(replica, cluster, now)
    if seen.job in ENDED:
        what = f"its program ended: {seen.job_reason or (seen.job or '')}"
        return end(replica, "failed", what, now)
    if cluster.state is not ClusterState.UP:
        return msgspec.structs.replace(replica, state=ReplicaState.PROVISIONING, reason="")
    return _probed(_placed(replica, cluster, now), seen, revision, now)


def _placed(replica: Replica, cluster: Cluster, now: float) -> Replica:
    """With the host that listens: the first of its cluster."""
    host: Host | None = cluster.hosts[0] if cluster.hosts else None
    up = replica.up_since or now
    return msgspec.structs.replace(replica, host=host, zone=cluster.order.zone, up_since=up)


def _lost(replica: Replica, cluster: Cluster, now: float) -> Replica:
    """Its cluster goes, and nobody here asked for that."""
    was_up = cluster.billing.up_since is not None or cluster.billing.billed_s > 0
    cause: EndCause = "preempted" if cluster.order.spot and was_up else "failed"
    return end(replica, cause, cluster.reason or "its cluster was taken down", now)


def _probed(replica: Replica, seen: ReplicaSeen, revision: Revision, now: float) -> Replica:
    probe = seen.probe
    if probe.passing:
        ready = replica.ready_since if replica.state is ReplicaState.READY else now
        return msgspec.structs.replace(
            replica, state=ReplicaState.READY, ready_since=ready, failing_since=None, reason=""
        )
    failing = replica.failing_since or (now if probe.failures else None)
    if replica.state is ReplicaState.READY:
        if probe.failures < UNREADY_AFTER and not probe.refused:
            return replica  # also right after a restart of the server, before the first probe
        return msgspec.structs.replace(replica, state=ReplicaState.NOT_READY, failing_since=failing, reason=probe.error)
    if replica.state is ReplicaState.NOT_READY:
        limits = [one.fail_after_s for one in revision.spec.probes if one.fail_after_s is not None]
        limit = min(limits, default=FAIL_AFTER_S)
        if failing is not None and now - failing >= limit:
            return end(replica, "failed", f"it has not answered for {limit:g} s: {probe.error}", now)
        return msgspec.structs.replace(replica, failing_since=failing, reason=probe.error)
    patience = min((one.initial_delay_s for one in revision.spec.probes), default=1200.0)
    if replica.up_since is not None and now - replica.up_since >= patience:
        return end(replica, "failed", f"it was not ready within {patience:g} s: {probe.error or 'no answer'}", now)
    return msgspec.structs.replace(replica, state=ReplicaState.STARTING, reason=probe.error)


def _drained(replica: Replica, seen: ReplicaSeen, revision: Revision, now: float) -> Replica:
    since = replica.drain_since or now
    longest = revision.task.stop_duration_s if revision.task.stop_duration_s is not None else DRAIN_S
    gone = seen.cluster is None or seen.cluster.goal != "up" or seen.job in ENDED
    if gone or seen.busy is False or now - since >= longest:
        return msgspec.structs.replace(replica, state=ReplicaState.SHUTTING_DOWN)
    return replica


def end(replica: Replica, cause: EndCause, reason: str, now: float) -> Replica:
    """Ask it to end: one with traffic drains first, unless it has failed."""
    if replica.done or replica.state is ReplicaState.SHUTTING_DOWN:
        return replica
    drains = replica.state is ReplicaState.READY and cause not in ("failed", "preempted")
    if replica.state is ReplicaState.DRAINING:
        drains = True
    return msgspec.structs.replace(
        replica,
        state=ReplicaState.DRAINING if drains else ReplicaState.SHUTTING_DOWN,
        cause=replica.cause or cause,
        reason=reason,
        drain_since=(replica.drain_since or now) if drains else replica.drain_since,
    )
