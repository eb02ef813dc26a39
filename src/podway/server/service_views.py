"""Records of services -> records of the API."""

import time
from collections.abc import Iterable
from urllib.parse import urlsplit, urlunsplit

from podway.certificates import CertificateFacts, covers
from podway.control.access import Caller, right_on
from podway.control.autoscale import summarize
from podway.control.decide_groups import view_of
from podway.control.decide_service import MOST_FAILURES
from podway.control.records import Cluster
from podway.control.route_table import direct_address
from podway.control.service_records import Replica, Service
from podway.control.service_store import ServiceRows
from podway.control.service_verbs import ServicePreview
from podway.control.store import Store
from podway.server import views
from podway.server.service_api import (
    DifferenceView,
    ReplicaGroupView,
    ReplicaView,
    RevisionView,
    ServicePreviewReply,
    ServiceView,
)
from podway.task.task import Scaling

RECENT_S = 60.0  # a gateway that has not reported for so long is not shown
RATE_S = 60.0


def service_view(store: Store, service: Service, *, ended: bool = False) -> ServiceView:
    """With its open replicas, or (`ended`) all that are remembered."""
    rows, now = store.services, time.time()
    replicas = [_replica_view(store, one) for one in rows.replicas(service.id, open_only=not ended)]
    gateway = live_gateway(rows)
    path = f"/services/{service.name}/"
    load = summarize(rows.loads(service.name, now - RATE_S), now, RATE_S)
    spec = service.spec
    groups = [_group_view(service, name, replicas) for name in service.group_names if name]
    parts: list[ReplicaGroupView] | list[Scaling] = groups or [spec.scaling]
    return ServiceView(
        id=service.id,
        name=service.name,
        user=service.user,
        project=service.project,
        shared_with={grant.user: grant.right for grant in service.grants},
        state=service.state.value,
        reason=service.reason,
        model=spec.model.name if spec.model else None,
        url=f"{_reached(gateway, spec.tls).rstrip('/')}{path}" if gateway else None,
        path=path,
        port=spec.port,
        auth=spec.auth,
        created=service.created,
        ended=service.ended,
        revision=service.revision,
        revisions=[RevisionView(number=one.number, created=one.created, user=one.user) for one in service.revisions],
        canary=service.canary,
        canary_share=service.canary_share,
        min_replicas=sum(one.min_replicas for one in parts),
        max_replicas=sum(one.max_replicas for one in parts),
        target_replicas=sum(one.target_replicas for one in groups) if groups else service.memory.target,
        replicas=replicas,
        stalled=any(view_of(service, name).failures >= MOST_FAILURES for name in service.group_names),
        rps=None if load is None else load.rps,
        hourly_cost=_total(one.hourly_cost for one in replicas if one.ended is None),
        cost=_total(one.cost for one in replicas),
        groups=tuple(groups),
    )


def _group_view(service: Service, name: str, replicas: Iterable[ReplicaView]) -> ReplicaGroupView:
    part, group = view_of(service, name), service.spec.find_group(name)
    scaling = part.spec.scaling
    return ReplicaGroupView(
        name=name,
        state=part.state.value,
        reason=part.reason,
        router=group.router if group is not None else None,
        min_replicas=scaling.min_replicas,
        max_replicas=scaling.max_replicas,
        target_replicas=part.memory.target,
        ready_replicas=sum(one.group == name and one.state == "READY" for one in replicas),
    )


def live_gateway(rows: ServiceRows) -> str | None:
    """Where a gateway that has reported lately listens."""
    now = time.time()
    return next((one.url for one in rows.gateways() if one.url and now - one.seen < RECENT_S), None)


def _reached(gateway: str, certificate: CertificateFacts | None) -> str:
    """The gateway's URL as the clients of a service use it: by https, under a name that its certificate is for."""
    if certificate is None:
        return gateway
    found = urlsplit(gateway)
    host = found.hostname or ""
    if not covers(certificate.names, host):
        host = next((name for name in certificate.names if not name.startswith("*.")), host)
    shown = f"[{host}]" if ":" in host else host
    return urlunsplit(("https", f"{shown}:{found.port}" if found.port else shown, found.path, "", ""))


def _total(parts: Iterable[float | None]) -> float | None:
    known = [one for one in parts if one is not None]
    return sum(known) if known else None


def _replica_view(store: Store, replica: Replica) -> ReplicaView:
    cluster: Cluster | None = store.cluster(replica.cluster_id) if replica.cluster_id is not None else None
    shown = views.cluster_view(cluster, 0) if cluster is not None else None
    return ReplicaView(
        number=replica.number,
        revision=replica.revision,
        state=replica.state.value,
        reason=replica.reason,
        cluster=replica.cluster,
        spot=cluster.order.spot if cluster is not None else bool(replica.spot),
        zone=replica.zone,
        infra=shown.infra if shown else "",
        resources=shown.resources if shown else "",
        address=direct_address(replica),
        port=replica.port,
        created=replica.created,
        ready_since=replica.ready_since,
        ended=replica.ended,
        hourly_cost=shown.hourly_cost if shown else None,
        cost=shown.cost if shown else None,
        group=replica.group,
        workers=replica.workers,
    )


def services_for(store: Store, caller: Caller) -> list[ServiceView]:
    """Those that the caller may see."""
    return [service_view(store, one) for one in store.services.live() if right_on(one, caller) is not None]


def preview_view(found: ServicePreview) -> ServicePreviewReply:
    """As it is."""
    rows = [DifferenceView(path=one.path, old=one.old, new=one.new, rolls=one.rolls) for one in found.differences]
    launch = views.preview_view(found.launch) if found.launch is not None else None
    groups = {name: views.preview_view(one) for name, one in found.groups.items()}
    return ServicePreviewReply(name=found.name, change=found.kind, differences=rows, launch=launch, groups=groups)
