"""Records as a server answers them, to be varied by a test."""

from typing import Any

import msgspec

from podway.order import Host, Order
from podway.server.api import ClusterView, ExitView, JobView, OfferView
from podway.server.service_api import ServiceView

NOW = 1_800_000_000.0


def order(**changes: Any) -> Order:
    made = Order(
        accelerator_type="v6e-16", topology="4x4", provider="local", zone="here", hosts_per_slice=4, chips_per_host=4
    )
    return msgspec.structs.replace(made, **changes)


def hosts(count: int = 4) -> list[Host]:
    return [
        Host(rank=rank, slice=0, worker=rank, address=f"127.20.0.{rank + 1}", home=f"/h/{rank}", id=f"x/{rank}")
        for rank in range(count)
    ]


def cluster(name: str = "demo", **changes: Any) -> ClusterView:
    made = ClusterView(
        id=f"id-{name}",
        name=name,
        user="ada",
        state="UP",
        goal="up",
        infra="local (simulated)",
        resources="1x[tpu-v6e-16]",
        simulated=True,
        order=order(),
        hosts=hosts(),
        autostop=None,
        created=NOW - 200,
        up_since=NOW - 190,
        ended=None,
        billed_s=190.0,
        hourly_cost=0.0,
        cost=0.0,
        reason="",
        open_jobs=0,
    )
    return msgspec.structs.replace(made, **changes)


def job(number: int = 1, **changes: Any) -> JobView:
    made = JobView(
        cluster="demo",
        number=number,
        name="train",
        user="ada",
        state="SUCCEEDED",
        submitted=NOW - 100,
        started=NOW - 95,
        ended=NOW - 30,
        resources="1x[tpu-v6e-16]",
        reason="",
        exits=[],
        exclusive=True,
    )
    return msgspec.structs.replace(made, **changes)


def exit_(rank: int, code: int | None = 0, signal: int | None = None, lost: bool = False) -> ExitView:
    return ExitView(rank=rank, code=code, signal=signal, lost=lost, cpu_s=0.1, max_rss=1 << 20)


def offer(**changes: Any) -> OfferView:
    made = OfferView(
        provider="local",
        accelerator_type="v6e-16",
        topology="4x4",
        slices=1,
        hosts=4,
        chips=16,
        zone="here",
        spot=False,
        hourly_cost=0.0,
        note="simulated; the real slice costs $43.20/h",
        chosen=True,
    )
    return msgspec.structs.replace(made, **changes)


def service(name: str = "llama", **changes: Any) -> ServiceView:
    """A service without replicas."""
    plain = ServiceView(
        id=f"id-{name}",
        name=name,
        user="ada",
        state="NO_REPLICA",
        reason="",
        model=None,
        url=None,
        path=f"/services/{name}/",
        port=8000,
        auth=True,
        created=1.0,
        ended=None,
        revision=1,
        revisions=[],
        canary=None,
        canary_share=0.0,
        min_replicas=0,
        max_replicas=1,
        target_replicas=0,
        replicas=[],
        stalled=False,
        rps=None,
        project=None,
        shared_with={},
        hourly_cost=None,
        cost=None,
    )
    return msgspec.structs.replace(plain, **changes)
