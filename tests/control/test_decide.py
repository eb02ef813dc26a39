"""The pure decisions: every pair of goal and condition, the queue, autostop, and the verdict over a gang."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.control.decide import Action, RankStatus, decide, judge
from podway.control.records import ENDED, ClusterState, Exit, Job, JobState
from podway.providers import Condition, Observation
from podway.task.task import Autostop, Recovery, Task
from tests.control.samples import cluster, hosts, job

UP = {"state": ClusterState.UP, "hosts": hosts(), "up_since": 1000.0}

# (goal, state, condition, open jobs) -> verb
TABLE = [
    ("up", ClusterState.INIT, "absent", 0, "submit"),
    ("up", ClusterState.INIT, "creating", 1, "submit"),
    ("up", ClusterState.INIT, "deleting", 1, "submit"),
    ("up", ClusterState.INIT, "ready", 1, "mark"),
    ("up", ClusterState.INIT, "stopped", 1, "start"),
    ("up", ClusterState.INIT, "failed", 0, "fail-over"),
    ("up", ClusterState.INIT, "preempted", 0, "fail-over"),
    ("up", ClusterState.INIT, "stopping", 0, "wait"),
    ("up", ClusterState.UP, "ready", 0, "wait"),
    ("up", ClusterState.UP, "ready", 2, "begin-jobs"),
    ("up", ClusterState.UP, "absent", 0, "lose"),
    ("up", ClusterState.UP, "absent", 1, "lose"),
    ("up", ClusterState.UP, "preempted", 1, "lose"),
    ("up", ClusterState.UP, "failed", 1, "lose"),
    ("up", ClusterState.UP, "deleting", 1, "lose"),
    ("stopped", ClusterState.STOPPING, "ready", 1, "cancel-jobs"),
    ("stopped", ClusterState.STOPPING, "ready", 0, "stop"),
    ("stopped", ClusterState.STOPPING, "creating", 0, "stop"),
    ("stopped", ClusterState.STOPPING, "stopped", 0, "mark"),
    ("stopped", ClusterState.STOPPED, "stopped", 0, "wait"),
    ("stopped", ClusterState.STOPPING, "absent", 0, "mark"),
    ("gone", ClusterState.TERMINATING, "ready", 1, "cancel-jobs"),
    ("gone", ClusterState.TERMINATING, "preempted", 1, "end-jobs"),  # the cloud is asked first: nothing runs there
    ("gone", ClusterState.TERMINATING, "absent", 1, "end-jobs"),
    ("stopped", ClusterState.STOPPING, "stopped", 1, "end-jobs"),
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


def test_a_cluster_whose_hosts_are_gone_says_so() -> None:
    action = decide(cluster(**UP), [], Observation(condition="absent"), 1001.0)
    assert (action.verb, action.reason) == ("lose", "its hosts disappeared")


class TestRecovery:
    recovery = Task(run="true", recovery=Recovery())

    def lost(self, *jobs: Job, condition: Condition = "preempted") -> Action:
        seen = Observation(condition=condition, hosts=hosts() if condition == "ready" else ())
        return decide(cluster(**UP | {"generation": 3}), list(jobs), seen, 1001.0)

    def test_a_job_that_comes_back_has_the_cluster_made_anew(self) -> None:
        action = self.lost(job(1, state=JobState.RUNNING, task=self.recovery))
        assert (action.verb, action.jobs) == ("recover", (1,))

    def test_what_has_not_begun_and_brings_its_setup_stays_in_the_queue(self) -> None:
        action = self.lost(job(1, state=JobState.RUNNING, task=self.recovery), job(2), job(3, run_setup=False))
        assert action.jobs == (1, 2)

    def test_without_recovery_nothing_is_made_anew(self) -> None:
        assert self.lost(job(1, state=JobState.RUNNING)).verb == "lose"

    def test_a_lost_rank_is_enough(self) -> None:
        back = job(1, state=JobState.RECOVERING, task=self.recovery, lost_generation=3)
        assert self.lost(back, condition="ready").verb == "recover"

    def test_a_job_on_its_new_hosts_begins(self) -> None:
        back = job(1, state=JobState.RECOVERING, task=self.recovery, lost_generation=2)
        assert self.lost(back, job(2), condition="ready") == Action(verb="begin-jobs", jobs=(1,))

    def waiting(self, now: float, *jobs: Job, condition: Condition = "absent", **changes: object) -> Action:
        here = cluster(**{"recovering": True, "clearing": True, **changes})
        return decide(here, list(jobs), Observation(condition=condition), now)

    def test_what_is_left_is_deleted_before_the_next_place_is_taken(self) -> None:
        back = job(1, state=JobState.RECOVERING, task=self.recovery)
        assert self.waiting(1.0, back, condition="preempted").verb == "clear"
        assert self.waiting(1.0, back).verb == "take-next"
        assert self.waiting(1.0, back, clearing=False).verb == "submit"

    def test_a_cancelled_job_needs_no_hosts_to_end(self) -> None:
        assert self.waiting(1.0, job(1, state=JobState.RECOVERING, cancel=True)).verb == "begin-jobs"

    def test_nobody_waits_any_more(self) -> None:
        assert self.waiting(1.0).verb == "lose"

    def test_it_waits_no_longer_than_its_task_allows(self) -> None:
        task = Task(run="true", recovery=Recovery(duration_s=60))
        back = job(1, state=JobState.RECOVERING, task=task, recovering_since=1000.0)
        assert self.waiting(1060.0, back).verb == "take-next"
        assert self.waiting(1060.5, back).verb == "fail-jobs"

    def test_no_try_before_its_time(self) -> None:
        action = self.waiting(1000.0, job(1), clearing=False, not_before=1003.0)
        assert (action.verb, round(action.wait_s, 1)) == ("wait", 3.0)


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
        assert action.verb in ("cancel-jobs", "end-jobs", "destroy", "mark")
        assert action.verb != "mark" or (condition == "absent" and action.state is ClusterState.GONE)
    if action.verb == "wait":
        assert 0 < action.wait_s <= 30


class TestQueue:
    seen = Observation(condition="ready", hosts=hosts())

    def begun(self, *jobs, driven=()) -> tuple[int, ...]:  # type: ignore[no-untyped-def]
        return decide(cluster(**UP), list(jobs), self.seen, 1001.0, driven).jobs

    def test_first_come_first_served(self) -> None:
        assert self.begun(job(3), job(4)) == (3,)

    def test_higher_priority_goes_first_among_those_waiting(self) -> None:
        jobs = [job(3), job(4, task=Task(priority=5)), job(5, task=Task(priority=5)), job(6, task=Task(priority=-1))]
        assert self.begun(*jobs) == (4,)
        assert self.begun(jobs[0], jobs[3]) == (3,)
        assert self.begun(job(2, state=JobState.RUNNING), *jobs) == (2,), "what runs is not put aside"
        assert self.begun(job(2, state=JobState.RECOVERING), *jobs) == (2,)

    def test_a_job_that_is_driven_is_not_overtaken_before_its_row_says_so(self) -> None:
        assert self.begun(job(3), job(4, task=Task(priority=5)), driven={3}) == (3,)

    def test_one_job_owns_the_chips(self) -> None:
        assert self.begun(job(3, state=JobState.RUNNING), job(4)) == (3,)

    def test_a_job_that_is_being_cancelled_still_owns_them(self) -> None:
        assert self.begun(job(3, state=JobState.CANCELLING), job(4)) == (3,)

    def test_a_waiting_job_can_be_cancelled_past_the_head(self) -> None:
        assert self.begun(job(3, state=JobState.RUNNING), job(4), job(5, cancel=True)) == (3, 5)

    def test_commands_beside_the_queue_run_at_once(self) -> None:
        assert self.begun(job(3, state=JobState.RUNNING), job(4), job(5, exclusive=False)) == (3, 5)

    @given(
        st.lists(
            st.tuples(
                st.sampled_from([s for s in JobState if s not in ENDED]),
                st.booleans(),
                st.booleans(),
                st.integers(-2, 2),
            )
        )
    )
    def test_never_two_owners(self, rows) -> None:  # type: ignore[no-untyped-def]
        active = False
        jobs = []
        for number, (state, exclusive, cancel, priority) in enumerate(rows, 1):
            if exclusive and state is not JobState.PENDING:
                state = state if not active else JobState.PENDING
                active = True
            task = Task(priority=priority)
            jobs.append(job(number, state=state, exclusive=exclusive, cancel=cancel, task=task))
        begun = set(self.begun(*jobs))
        owners = [j for j in jobs if j.number in begun and j.exclusive and not j.cancel]
        assert len(owners) <= 1 or all(j.state is not JobState.PENDING for j in owners[1:])
        waiting = [j for j in jobs if j.exclusive]
        if waiting and all(j.state is JobState.PENDING for j in waiting):
            best = max(j.task.priority for j in waiting)
            assert min(j.number for j in waiting if j.task.priority == best) in begun


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


def test_a_job_that_follows_another_waits_for_its_end() -> None:
    here, seen = cluster(**UP), Observation(condition="ready", hosts=hosts())
    first, second = job(1, state=JobState.RUNNING), job(2, after=1, task=Task(run="x", priority=9))
    assert decide(here, [first, second], seen, 1001.0).jobs == (1,)
    beside = job(3, after=2, exclusive=False)
    assert decide(here, [first, second, beside], seen, 1001.0).jobs == (1,)
    assert decide(here, [second, beside], seen, 1001.0).jobs == (2,)
    cancelled = job(2, after=1, cancel=True)
    assert decide(here, [first, cancelled, beside], seen, 1001.0).jobs == (1, 2)


def test_a_job_that_follows_another_is_not_late_for_hosts() -> None:
    impatient = Task(run="x", recovery=Recovery(duration_s=60))
    here, seen = cluster(state=ClusterState.INIT), Observation(condition="creating")
    jobs = [job(1), job(2, after=1, task=impatient)]
    assert decide(here, jobs, seen, 2000.0).verb == "submit"
    assert decide(here, jobs[1:], seen, 2000.0).verb == "fail-jobs"
