"""What clusters cost and what of it idled."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.control.records import ClusterState, Job, JobState
from podway.server.costs import DAY_S, busy_seconds, by_day, cost_view
from podway.task.task import Task
from tests.control.samples import ORDER, cluster, job

spans = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 500)), max_size=8)


def jobs_of(spans: list[tuple[int, int]]) -> list[Job]:
    return [
        job(number, state=JobState.SUCCEEDED, started=float(start), ended=float(start + length))
        for number, (start, length) in enumerate(spans, start=1)
    ]


@given(spans)
def test_busy_is_the_union_of_the_jobs(spans: list[tuple[int, int]]) -> None:
    covered = {second for start, length in spans for second in range(start, start + length)}
    assert busy_seconds(jobs_of(spans), now=2000.0) == len(covered)


def test_idle_is_what_is_left_and_costs_its_share() -> None:
    order = msgspec.structs.replace(ORDER, hourly_cost=36.0)
    gone = cluster(state=ClusterState.GONE, created=0.0, ended=1000.0, billed_s=1000.0, spent=10.0, order=order)
    found = cost_view(gone, jobs_of([(100, 200), (200, 200)]), now=5000.0)
    assert (found.up_s, found.idle_s) == (1000.0, 700.0)
    assert found.cost == pytest.approx(10.0) and found.idle_cost == pytest.approx(7.0)


def test_days_add_up_and_have_no_gaps() -> None:
    order = msgspec.structs.replace(ORDER, hourly_cost=1.0)
    one = cluster(
        state=ClusterState.GONE, created=0.5 * DAY_S, ended=2.5 * DAY_S, billed_s=60.0, spent=8.0, order=order
    )
    view = cost_view(one, [job(state=JobState.PENDING, task=Task(run="true"))], now=4 * DAY_S)
    days = by_day([view], since=0.0, now=4 * DAY_S)
    assert [day.day for day in days] == [f"1970-01-0{n}" for n in range(1, 6)]
    assert [day.cost for day in days] == pytest.approx([2.0, 4.0, 2.0, 0.0, 0.0])
