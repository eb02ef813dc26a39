"""Clusters and jobs for tests."""

from typing import TypeVar

import msgspec

from podway.control.records import Cluster, ClusterState, Job, JobAttempt, JobState
from podway.order import Host, Order
from podway.task.task import Task

T = TypeVar("T", bound=msgspec.Struct)
ORDER = Order(
    accelerator_type="v6e-16", topology="4x4", provider="local", hosts_per_slice=4, chips_per_host=4, hourly_cost=0.0
)


def hosts(count: int = 4) -> tuple[Host, ...]:
    return tuple(
        Host(rank=i, slice=0, worker=i, address=f"127.20.0.{i + 1}", home=f"/h/{i}", id=f"x/c-{i}")
        for i in range(count)
    )


def changed(value: T, parts: tuple[str, ...], changes: dict[str, object]) -> T:
    """`value` with these changes, each in the part of it that has the field."""
    for part in parts:
        nested = getattr(value, part)
        inside = {name: changes.pop(name) for name in nested.__struct_fields__ if name in changes}
        changes[part] = msgspec.structs.replace(nested, **inside)
    return msgspec.structs.replace(value, **changes)


def cluster(**changes: object) -> Cluster:
    plain = Cluster(
        id="c0ffee",
        name="demo",
        user="ann",
        state=ClusterState.INIT,
        goal="up",
        order=ORDER,
        created=1000.0,
        active_at=1000.0,
    )
    return changed(plain, ("search", "billing"), changes)


def job(number: int = 1, attempt: int = 1, **changes: object) -> Job:
    plain = Job(
        cluster_id="c0ffee",
        number=number,
        name=None,
        user="ann",
        state=JobState.PENDING,
        task=Task(run="true"),
        submitted=1000.0,
        attempt=JobAttempt(number=attempt),
    )
    return changed(plain, ("attempt", "outcome"), changes)
