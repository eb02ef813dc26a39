"""Clusters and jobs for tests."""

import msgspec

from podway.control.records import Cluster, ClusterState, Job, JobState
from podway.order import Host, Order
from podway.task.task import Task

ORDER = Order(
    accelerator_type="v6e-16", topology="4x4", provider="local", hosts_per_slice=4, chips_per_host=4, hourly_cost=0.0
)


def hosts(count: int = 4) -> tuple[Host, ...]:
    return tuple(
        Host(rank=i, slice=0, worker=i, address=f"127.20.0.{i + 1}", home=f"/h/{i}", id=f"x/c-{i}")
        for i in range(count)
    )


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
    return msgspec.structs.replace(plain, **changes)


def job(number: int = 1, **changes: object) -> Job:
    plain = Job(
        cluster_id="c0ffee",
        number=number,
        name=None,
        user="ann",
        state=JobState.PENDING,
        task=Task(run="true"),
        submitted=1000.0,
    )
    return msgspec.structs.replace(plain, **changes)
