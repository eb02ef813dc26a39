"""Records of the store -> records of the API."""

import time

import msgspec

from podway.catalog.slices import find_slice
from podway.control.agreement import Preview
from podway.control.orphans import OrphanReport
from podway.control.records import Cluster, Event, Job
from podway.control.verbs import Launched
from podway.order import Order
from podway.provider_table import row_of
from podway.server.api import (
    AttemptView,
    ClusterView,
    EventView,
    ExitView,
    JobView,
    LaunchReply,
    OfferView,
    OrphansReply,
    OrphanView,
    PreviewReply,
)
from podway.task.ports import forwarded_ports


def resources_text(order: Order) -> str:
    """`1x[tpu-v6e-16]`, the way queues and tables show it."""
    kind = f"tpu-{order.accelerator_type}" if order.accelerator_type else "cpu"
    kind = kind.replace("tpu-tpu7x", "tpu7x")
    return f"{order.slices}x[{kind}]" + ("[spot]" if order.spot else "")


def infra_text(order: Order) -> str:
    """Where it is; a simulation says so."""
    if row_of(order.provider).simulated:
        return f"{order.provider} (simulated)"
    return "/".join(part for part in (order.provider, order.zone or order.region) if part)


def cluster_view(cluster: Cluster, open_jobs: int) -> ClusterView:
    """With the cost so far, where a price is known."""
    now = time.time()
    billed = cluster.billing.billed_s + (now - cluster.billing.up_since if cluster.billing.up_since else 0.0)
    hourly = cluster.order.hourly_cost
    return ClusterView(
        id=cluster.id,
        name=cluster.name,
        user=cluster.user,
        project=cluster.project,
        shared_with={grant.user: grant.right for grant in cluster.grants},
        state=cluster.state.value,
        goal=cluster.goal,
        infra=infra_text(cluster.order),
        resources=resources_text(cluster.order),
        simulated=row_of(cluster.order.provider).simulated,
        order=cluster.order,
        hosts=list(cluster.hosts),
        autostop=cluster.autostop,
        autostop_armed=cluster.autostop_armed,
        created=cluster.created,
        up_since=cluster.billing.up_since,
        ended=cluster.ended,
        billed_s=billed,
        hourly_cost=hourly,
        cost=None if hourly is None else cluster.billing.spent + hourly * (billed - cluster.billing.billed_s) / 3600,
        reason=cluster.reason,
        open_jobs=open_jobs,
        recovering=cluster.search.recovering,
        attempts=[AttemptView(**msgspec.structs.asdict(attempt)) for attempt in cluster.search.attempts],
    )


def job_view(cluster: Cluster, job: Job) -> JobView:
    """Without its task: that may be large."""
    exits = [
        ExitView(rank=e.rank, code=e.code, signal=e.signal, lost=e.lost, cpu_s=e.cpu_s, max_rss=e.max_rss)
        for e in job.outcome.exits
    ]
    return JobView(
        cluster=cluster.name,
        number=job.number,
        name=job.name,
        user=job.user,
        state=job.state.value,
        submitted=job.submitted,
        started=job.attempt.started,
        ended=job.outcome.ended,
        resources=resources_text(cluster.order),
        reason=job.reason,
        exits=exits,
        exclusive=job.exclusive,
        priority=job.task.priority,
        after=job.after,
        ad_hoc=not job.gang,
        attempt=job.attempt.number,
        kind=job.task.kind,
        ports=list(forwarded_ports(job.task)),
        ide=(job.task.dev.ide or "") if job.task.dev else "",
        working_dir=job.task.working_dir or "",
    )


def launched_view(done: Launched) -> LaunchReply:
    """As it is."""
    return LaunchReply(
        cluster=done.cluster,
        cluster_id=done.cluster_id,
        job=done.job,
        created=done.created,
        then=list(done.then),
        notes=list(done.notes),
    )


def event_view(event: Event) -> EventView:
    """As stored."""
    return EventView(id=event.id, time=event.time, job=event.job, kind=event.kind, text=event.text, detail=event.detail)


def orphans_view(look: OrphanReport) -> OrphansReply:
    """What was found, and who could not be asked."""
    rows = [
        OrphanView(
            provider=provider,
            kind=found.kind,
            name=found.name,
            cluster=found.cluster,
            zone=found.zone,
            condition=found.condition,
            accelerator_type=found.accelerator_type,
            created=found.created,
            hourly_cost=found.hourly_cost,
            volume=found.volume,
        )
        for provider, found in look.orphans
    ]
    return OrphansReply(orphans=rows, unreachable=look.unreachable)


def preview_view(preview: Preview) -> PreviewReply:
    """The offers with the chosen one marked."""
    chosen = preview.order
    offers = []
    for offer in preview.offers:
        tpu = find_slice(offer.accelerator_type, offer.topology) if offer.accelerator_type else None
        offers.append(
            OfferView(
                provider=offer.provider,
                accelerator_type=offer.accelerator_type,
                topology=offer.topology,
                slices=offer.slices,
                hosts=(tpu.hosts if tpu else 1) * offer.slices,
                chips=(tpu.chips if tpu else 0) * offer.slices,
                zone=offer.zone,
                spot=offer.spot,
                hourly_cost=offer.hourly_cost,
                note=offer.note,
                blocked=offer.blocked.reason if offer.blocked else "",
                blocked_code=offer.blocked.code if offer.blocked else "",
                chosen=(offer.provider, offer.accelerator_type, offer.topology, offer.zone, offer.spot)
                == (chosen.provider, chosen.accelerator_type, chosen.topology, chosen.zone, chosen.spot),
            )
        )
    return PreviewReply(
        cluster=preview.cluster,
        exists=preview.exists,
        offers=offers,
        order=chosen,
        request=msgspec.to_builtins(preview.request),
        digest=preview.digest,
        notes=list(preview.notes),
    )
