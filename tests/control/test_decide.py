"""The pure decisions: every pair of goal and condition, the queue, autostop, and the verdict over a gang."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.control.decide import RankStatus, decide, judge
from podway.control.records import ENDED, ClusterState, Exit, JobState
from podway.providers import Condition, Observation
from podway.task.task import Autostop
from tests.control.samples import cluster, hosts, job

UP = {"state": ClusterState.UP, "hosts": hosts(), "up_since": 1000.0}

# (goal, state, condition, open jobs) -> verb
TABLE = [
    ("up", ClusterState.INIT, "absent", 0, "submit"),
    ("up", ClusterState.INIT, "creating", 1, "submit"),
    ("up", ClusterState.INIT, "deleting", 1, "submit"),
    ("up", ClusterState.INIT, "ready", 1, "mark"),
    ("up", ClusterState.INIT, "stopped", 1, "start"),
    ("up", ClusterState.INIT, "failed", 0, "destroy"),
    ("up", ClusterState.INIT, "preempted", 0, "destroy"),
    ("up", ClusterState.INIT, "stopping", 0, "wait"),
    ("up", ClusterState.UP, "ready", 0, "wait"),
    ("up", ClusterState.UP, "ready", 2, "begin-jobs"),
    ("up", ClusterState.UP, "absent", 0, "mark"),
    ("up", ClusterState.UP, "absent", 1, "cancel-jobs"),
    ("stopped", ClusterState.STOPPING, "ready", 1, "cancel-jobs"),
    ("stopped", ClusterState.STOPPING, "ready", 0, "stop"),
    ("stopped", ClusterState.STOPPING, "creating", 0, "stop"),
    ("stopped", ClusterState.STOPPING, "stopped", 0, "mark"),
    ("stopped", ClusterState.STOPPED, "stopped", 0, "wait"),
    ("stopped", ClusterState.STOPPING, "absent", 0, "mark"),
    ("gone", ClusterState.TERMINATING, "ready", 1, "cancel-jobs"),
    ("gone", ClusterState.TERMINATING, "ready", 0, "destroy"),
    ("gone", ClusterState.TERMINATING, "creating", 0, "destroy"),
    ("gone", ClusterState.TERMINATING, "deleting", 0, "destroy"),
    ("gone", ClusterState.TERMINATING, "stopped", 0, "destroy"),
    ("gone", ClusterState.TERMINATING, "absent", 0, "mark"),
]


@pytest.mark.parametrize(("goal", "state", "condition", "open_jobs", "verb"), TABLE)
def test_table(goal: str, state: ClusterState, condition: Condition, open_jobs: int, verb: str) -> None:
    here = cluster(**UP | {"goal": goal, "state": state})
    seen = Observation(condition=condition, hosts=hosts() if condition == "ready" else ())
    action = decide(here, [job(n + 1) for n in range(open_jobs)], seen, 1001.0)
    assert action.verb == verb


def test_a_cluster_whose_hosts_are_gone_is_marked_gone() -> None:
    action = decide(cluster(**UP), [], Observation(condition="absent"), 1001.0)
    assert (action.state, action.reason) == (ClusterState.GONE, "its hosts disappeared")


@given(
    goal=st.sampled_from(["up", "stopped", "gone"]),
    state=st.sampled_from([s for s in ClusterState if s is not ClusterState.GONE]),
    condition=st.sampled_from(get_args(Condition)),
    states=st.lists(st.sampled_from([s for s in JobState if s not in ENDED]), max_size=4),
    now=st.floats(0, 1e9),
)
def test_every_state_has_an_answer(goal, state, condition, states, now) -> None:  # type: ignore[no-untyped-def]
    jobs = [job(n + 1, state=s) for n, s in enumerate(states)]
    here = cluster(**UP | {"goal": goal, "state": state})
    action = decide(here, jobs, Observation(condition=condition, hosts=hosts()), now)
    if goal == "up":
        assert action.verb != "stop"
    if goal == "gone":
        assert action.verb in ("cancel-jobs", "destroy", "mark")
        assert action.verb != "mark" or (condition == "absent" and action.state is ClusterState.GONE)
    if action.verb == "wait":
        assert 0 < action.wait_s <= 30


class TestQueue:
    seen = Observation(condition="ready", hosts=hosts())

    def begun(self, *jobs) -> tuple[int, ...]:  # type: ignore[no-untyped-def]
        return decide(cluster(**UP), list(jobs), self.seen, 1001.0).jobs

    def test_first_come_first_served(self) -> None:
        assert self.begun(job(3), job(4)) == (3,)

    def test_one_job_owns_the_chips(self) -> None:
        assert self.begun(job(3, state=JobState.RUNNING), job(4)) == (3,)

    def test_a_job_that_is_being_cancelled_still_owns_them(self) -> None:
        assert self.begun(job(3, state=JobState.CANCELLING), job(4)) == (3,)

    def test_a_waiting_job_can_be_cancelled_past_the_head(self) -> None:
        assert self.begun(job(3, state=JobState.RUNNING), job(4), job(5, cancel=True)) == (3, 5)

    def test_commands_beside_the_queue_run_at_once(self) -> None:
        assert self.begun(job(3, state=JobState.RUNNING), job(4), job(5, exclusive=False)) == (3, 5)

    @given(st.lists(st.tuples(st.sampled_from([s for s in JobState if s not in ENDED]), st.booleans(), st.booleans())))
    def test_never_two_owners(self, rows) -> None:  # type: ignore[no-untyped-def]
        active = False
        jobs = []
        for number, (state, exclusive, cancel) in enumerate(rows, 1):
            if exclusive and state is not JobState.PENDING:
                state = state if not active else JobState.PENDING
                active = True
            jobs.append(job(number, state=state, exclusive=exclusive, cancel=cancel))
        begun = set(self.begun(*jobs))
        owners = [j for j in jobs if j.number in begun and j.exclusive and not j.cancel]
        assert len(owners) <= 1 or all(j.state is not JobState.PENDING for j in owners[1:])


class TestAutostop:
    seen = Observation(condition="ready", hosts=hosts())

    def test_idle_for_long_enough(self) -> None:
        here = cluster(**UP | {"autostop": Autostop(idle_minutes=10, down=True)})
        assert decide(here, [], self.seen, 1000 + 599).verb == "wait"
        assert decide(here, [], self.seen, 1000 + 600).verb == "autostop"

    def test_a_job_keeps_it_up(self) -> None:
        here = cluster(**UP | {"autostop": Autostop(idle_minutes=0)})
        assert decide(here, [job(state=JobState.RUNNING)], self.seen, 9999).verb == "begin-jobs"


def rank(number: int, code: int | None = None, signal: int | None = None, lost: bool = False) -> RankStatus:
    if code is None and signal is None and not lost:
        return RankStatus(rank=number, state="running")
    return RankStatus(rank=number, state="exited", exit=Exit(rank=number, code=code, signal=signal, lost=lost))


class TestJudge:
    def test_waits_for_all(self) -> None:
        assert judge([rank(0, code=0), rank(1)]).outcome == "wait"

    def test_all_well(self) -> None:
        assert judge([rank(0, code=0), rank(1, code=0)]).outcome == "ok"

    def test_one_failure_is_enough(self) -> None:
        verdict = judge([rank(0), rank(1, code=3)])
        assert (verdict.outcome, verdict.first and verdict.first.rank) == ("failed", 1)

    def test_the_cause_is_named_before_its_consequences(self) -> None:
        verdict = judge([rank(0, signal=9), rank(1, lost=True), rank(2, code=7)])
        assert verdict.first and verdict.first.rank == 2

    @given(st.lists(st.one_of(st.none(), st.integers(0, 3)), min_size=1))
    def test_never_ok_while_one_runs_or_failed(self, codes) -> None:  # type: ignore[no-untyped-def]
        verdict = judge([rank(i, code=c) for i, c in enumerate(codes)])
        assert (verdict.outcome == "ok") == all(c == 0 for c in codes)
        assert (verdict.outcome == "failed") == any(c for c in codes)
