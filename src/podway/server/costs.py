"""What clusters cost, and what of it idled. Pure, from rows.

A cluster that is up bills whether or not a job runs. It was busy while any of its jobs was between start and end; the rest of its time
up idled. Rows tell how long it was up in all, not when: its cost is spread evenly from its creation to its end.
"""

import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from podway.control.records import Cluster, Job
from podway.server import page_api, views

DAY_S = 86400.0


def busy_seconds(jobs: Iterable[Job], now: float) -> float:
    """How long at least one of the jobs ran."""
    spans = sorted(
        (job.attempt.started, now if job.outcome.ended is None else job.outcome.ended)
        for job in jobs
        if job.attempt.started is not None
    )
    busy, until = 0.0, 0.0
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy


def cost_view(cluster: Cluster, jobs: Sequence[Job], now: float, model: str = "") -> page_api.CostView:
    """One cluster."""
    seen = views.cluster_view(cluster, 0)
    idle = max(0.0, seen.billed_s - busy_seconds(jobs, now))
    share = idle / seen.billed_s if seen.billed_s else 0.0
    return page_api.CostView(
        id=cluster.id,
        name=cluster.name,
        user=cluster.user,
        project=cluster.project or "",
        model=model,
        resources=seen.resources,
        state=seen.state,
        created=cluster.created,
        ended=cluster.ended,
        hourly_cost=seen.hourly_cost,
        up_s=seen.billed_s,
        idle_s=idle,
        cost=seen.cost or 0.0,
        idle_cost=(seen.cost or 0.0) * share,
    )


def by_day(costs: Iterable[page_api.CostView], since: float, now: float) -> list[page_api.DayCost]:
    """Of each day from `since` to now (UTC), the oldest first; days without cost among them."""
    first, last = int(since // DAY_S), int(now // DAY_S)
    cost = dict.fromkeys(range(first, last + 1), 0.0)
    idle = dict(cost)
    for one in costs:
        end = max(one.ended or now, one.created + 1.0)
        for day in range(max(first, int(one.created // DAY_S)), min(last, int(end // DAY_S)) + 1):
            overlap = min(end, (day + 1) * DAY_S) - max(one.created, day * DAY_S)
            part = max(0.0, overlap) / (end - one.created)
            cost[day] += one.cost * part
            idle[day] += one.idle_cost * part
    return [
        page_api.DayCost(
            day=datetime.fromtimestamp(day * DAY_S, UTC).date().isoformat(), cost=cost[day], idle_cost=idle[day]
        )
        for day in sorted(cost)
    ]


def model_of(jobs: Iterable[Job]) -> str:
    """What the latest job trains or serves, as its command says."""
    from podway.plan.task_needs import command_of  # the planner takes a while to import

    for job in reversed(list(jobs)):
        command = command_of(job.task)
        if command is None:
            continue
        if command.verb == "serve":
            return next((word for word in command.words if not word.startswith("-")), "")
        return next((word.partition("=")[2] for word in command.words if word.startswith("model.name=")), "")
    return ""


def costs_since(clusters: Iterable[tuple[Cluster, Sequence[Job]]], since: float) -> page_api.CostsReply:
    """The reply for these clusters."""
    now = time.time()
    found = [cost_view(cluster, jobs, now, model_of(jobs)) for cluster, jobs in clusters]
    return page_api.CostsReply(clusters=found, days=by_day(found, since, now))
