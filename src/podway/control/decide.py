"""What to do next, as pure functions of what is wanted and what is seen.

`decide` looks at a cluster: its goal, its open jobs, what the provider observes. `judge` looks at one phase of a gang: the
state of every rank. Neither touches the clock, the store or a host; the loops in `reconcile.py` and `gang.py` act on what they
answer and then look again.
"""

from collections.abc import Collection
from typing import Literal

import msgspec

from podway.control.records import ACTIVE, Cluster, ClusterState, Exit, Job
from podway.control.recovery import comes_back, needs_new_hosts, overdue, survives_loss
from podway.providers import Observation

Verb = Literal[
    "submit",  # ask the provider to create (or finish creating) it
    "start",  # start stopped hosts
    "stop",  # stop the hosts
    "destroy",  # delete everything
    "mark",  # only the row is behind: write `state`
    "fail-over",  # it could not be created here: try the next place, or give up
    "recover",  # its hosts are lost and `jobs` come back: recreate it; the other jobs that ran have failed
    "lose",  # its hosts are lost and no job comes back: all have failed, and it goes
    "clear",  # delete what there is, to recreate it
    "take-next",  # nothing is left of the last try: take the next place
    "fail-jobs",  # they waited for hosts longer than they may
    "cancel-jobs",  # end what runs before the hosts go
    "end-jobs",  # the hosts have gone already: nothing runs that could be cancelled
    "begin-jobs",  # drive the jobs listed
    "autostop",  # idle for long enough: change the goal
    "wait",
]


_NOTHING_RUNS = frozenset({"absent", "deleting", "failed", "preempted", "stopped"})


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One verb, with what it needs."""

    verb: Verb
    state: ClusterState | None = None
    jobs: tuple[int, ...] = ()
    reason: str = ""
    wait_s: float = 1.0


def decide(
    cluster: Cluster, jobs: list[Job], seen: Observation, now: float, driven: Collection[int] = frozenset()
) -> Action:
    """The next action for a cluster; `jobs` are those not yet ended, oldest first. `driven` are the numbers of the jobs that are
    being driven now, whatever their rows say yet.
    """
    if cluster.goal == "up" and cluster.one_shot and not (jobs and not jobs[0].cancel):
        return _end_of_run(cluster, jobs)
    if cluster.goal == "up":
        return _towards_up(cluster, jobs, seen, now, driven)
    if jobs:
        why = "the cluster is being taken down" if cluster.goal == "gone" else "the cluster is being stopped"
        over = (
            {"absent"} if cluster.one_shot else _NOTHING_RUNS
        )  # what ends a run's job deletes the run, and sees that through
        verb: Verb = "end-jobs" if seen.condition in over else "cancel-jobs"
        return Action(verb=verb, jobs=tuple(job.number for job in jobs), reason=why)
    if seen.condition == "absent":
        return Action(verb="mark", state=ClusterState.GONE, reason=cluster.reason)
    if cluster.goal == "gone":
        return Action(verb="destroy")
    if seen.condition == "stopped":
        done = cluster.state is ClusterState.STOPPED
        return Action(verb="wait", wait_s=30) if done else Action(verb="mark", state=ClusterState.STOPPED)
    return Action(verb="stop")


def _end_of_run(cluster: Cluster, jobs: list[Job]) -> Action:
    """A one-shot run goes with its job. Its policy is written after the job: without one, the job is still to come."""
    if jobs:
        return Action(verb="begin-jobs", jobs=(jobs[0].number,))
    ended = cluster.autostop is not None
    return Action(verb="autostop", reason="its run has ended") if ended else Action(verb="wait")


def _towards_up(cluster: Cluster, jobs: list[Job], seen: Observation, now: float, driven: Collection[int]) -> Action:
    if cluster.state is not ClusterState.UP:
        waiting = _while_waiting(cluster, jobs, now)
        if waiting is not None:
            return waiting
        if cluster.search.clearing:
            return Action(verb="take-next") if seen.condition == "absent" else Action(verb="clear")
        if now < cluster.search.not_before:
            return Action(verb="wait", wait_s=min(30.0, cluster.search.not_before - now + 0.01))
    match seen.condition:
        case "ready":
            if cluster.state is not ClusterState.UP or cluster.hosts != seen.hosts:
                return Action(verb="mark", state=ClusterState.UP)
            if any(needs_new_hosts(job, cluster.search.generation) for job in jobs):
                return lost(cluster, jobs, "a host was lost")
            return _when_up(cluster, jobs, now, driven)
        case "stopped" if cluster.state is ClusterState.UP and cluster.autostop is not None and not jobs:
            return Action(verb="autostop", reason="stopped by its head host, idle without a server")
        case "stopped":
            return Action(verb="start")
        case "failed" | "preempted" | "absent" | "deleting" if cluster.state is ClusterState.UP:
            return lost(cluster, jobs, _why_lost(cluster, jobs, seen, now))
        case "failed" | "preempted":
            return Action(verb="fail-over", reason=seen.reason or seen.condition)
        case "absent" | "creating" | "deleting":
            return Action(verb="submit")
        case _:
            return Action(verb="wait")


def _why_lost(cluster: Cluster, jobs: list[Job], seen: Observation, now: float) -> str:
    rest = cluster.autostop
    idle = rest is not None and rest.down and not jobs and now - cluster.active_at >= rest.idle_minutes * 60
    if idle and not (cluster.order.spot and seen.condition == "preempted"):
        return "it was taken down by its head host, idle without a server"
    known = {"failed": "its hosts failed", "preempted": "its hosts were preempted"}
    return seen.reason or known.get(seen.condition, "its hosts disappeared")


def _while_waiting(cluster: Cluster, jobs: list[Job], now: float) -> Action | None:
    """What does not need hosts: jobs that are cancelled or waited too long, and a recovery nobody waits for."""
    cancelled = tuple(job.number for job in jobs if job.cancel)
    if cancelled:
        return Action(verb="begin-jobs", jobs=cancelled)  # without hosts a job only ends
    late = tuple(job.number for job in jobs if overdue(job, now) and not _is_held(job, jobs))
    if late:
        return Action(verb="fail-jobs", jobs=late, reason="no hosts were available in the time its task allows")
    if cluster.search.recovering and not jobs:
        return Action(verb="lose", reason="its hosts were lost, and no job waits for new ones")
    return None


def _is_held(job: Job, jobs: list[Job]) -> bool:
    """Whether others of its group have no hosts yet, or the job it follows is open (had it failed, this one were cancelled)."""
    return not job.cancel and (job.held or (job.after is not None and any(one.number == job.after for one in jobs)))


def lost(cluster: Cluster, jobs: list[Job], why: str) -> Action:
    """The hosts are gone: recreate them for the jobs that outlive them, or let the cluster go too. A one-shot run begins again by
    itself; when it is gone, somebody has deleted it."""
    if not cluster.one_shot and any(survives_loss(job) and comes_back(job, "interruption") for job in jobs):
        return Action(verb="recover", jobs=tuple(job.number for job in jobs if survives_loss(job)), reason=why)
    return Action(verb="lose", reason=why)


def _when_up(cluster: Cluster, jobs: list[Job], now: float, driven: Collection[int]) -> Action:
    # The chips belong to one exclusive job at a time: of those waiting, the oldest of the highest priority is next. One that has
    # begun keeps them, also while its row does not say so yet. Jobs that bypass the queue run at once. What follows a job that
    # is open waits for it.
    ready = [job for job in jobs if not _is_held(job, jobs)]
    queue = [job for job in ready if job.exclusive]
    active = [job for job in queue if job.state in ACTIVE or job.number in driven]
    head = active[:1] or sorted(queue, key=lambda job: (-job.task.priority, job.number))[:1]
    wanted_gone = [job for job in queue if job.cancel]
    begin = {job.number for job in [*head, *wanted_gone, *(job for job in ready if not job.exclusive)]}
    if begin:
        return Action(verb="begin-jobs", jobs=tuple(sorted(begin)))
    rest = cluster.autostop
    if rest is not None and not jobs:
        idle = now - max(cluster.active_at, cluster.billing.up_since or 0.0)
        if idle >= rest.idle_minutes * 60:
            return Action(verb="autostop", reason=f"idle for {rest.idle_minutes:g} min")
        return Action(verb="wait", wait_s=min(30.0, rest.idle_minutes * 60 - idle + 0.05))
    return Action(verb="wait", wait_s=30)


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a phase, as its host's agent reports it."""

    rank: int
    state: Literal["absent", "running", "exited", "lost"]
    pid: int | None = None
    exit: Exit | None = None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a phase has come to: go on waiting, all well, or failed at `first`."""

    outcome: Literal["wait", "ok", "failed"]
    first: Exit | None = None


def judge(ranks: list[RankStatus]) -> Verdict:
    """One failure fails the gang. Of several, the one that ended by itself is named before those that were killed."""
    failures = [rank.exit for rank in ranks if rank.exit is not None and not rank.exit.ok]
    if failures:
        # A rank that exits with a code is a cause; a signal or a loss is more often a consequence.
        failures.sort(key=lambda end: (end.code is None, end.lost, end.rank))
        return Verdict(outcome="failed", first=failures[0])
    if all(rank.exit is not None for rank in ranks):
        return Verdict(outcome="ok")
    return Verdict(outcome="wait")
