"""Order -> the node pools that its launch makes where the cluster has none, and what its JobSet needs to run there. Pure; golden-tested.

Only with `node_pools` in gke.yaml, and only in a cluster of Kubernetes Engine whose full name is known. Such a pool is for one launch: its
nodes have a taint that no other JobSet tolerates, so that nobody else's pods run there when `podway down` deletes it. Its name, its
labels and its metadata say whose it is.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from podway.catalog.prices import price_of
from podway.catalog.slices import find_slice
from podway.errors import UserError
from podway.order import Order
from podway.providers import Request, Step
from podway.providers.gke.manifests import CLUSTER, JobSetContext, Manifest, object_name
from podway.providers.gke.node_pools import LAUNCH_LABEL, Body, NodePoolOrder, cluster_of, node_pool, slice_of
from podway.providers.gke.settings import GkeSettings

CREATE_POOL = "create-node-pool"
POOLS = "podway.dev/node-pools"  # an annotation of a JobSet: the GKE cluster that may hold pools made for it
TURN_ON = "`node_pools` in gke.yaml lets launches make node pools"
_LONGEST_STEM = 26


class PoolPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The node pools that one launch may make, a slice each."""

    cluster: str
    bodies: tuple[Body, ...]
    tier: str = ""
    why_none: str = ""  # why there are none, in one sentence

    @property
    def place(self) -> str:
        """The region or zone of its nodes."""
        zones: list[str] = self.bodies[0].get("locations") or [self.cluster.split("/")[3]]
        return zones[0]


def gke_cluster_of(settings: GkeSettings, context: str) -> str | None:
    """The full name of the cluster of a context; None where neither settings nor the context's name tell it."""
    named = settings.node_pools.clusters.get(context) if settings.node_pools is not None else None
    try:
        return named or cluster_of(context)
    except UserError:
        return None


def plan_pools(context: JobSetContext, name: str, order: Order) -> PoolPlan:
    """What a launch may make."""
    allowed = context.settings.node_pools
    if allowed is None:
        return PoolPlan(cluster="", bodies=(), why_none=TURN_ON)
    if order.accelerator_type is None:
        return PoolPlan(cluster="", bodies=(), why_none="node pools are made for TPU slices alone")
    cluster = gke_cluster_of(context.settings, context.context)
    if cluster is None:
        why = f"context {context.context} does not say which GKE cluster it is: name it in node_pools.clusters of gke.yaml"
        return PoolPlan(cluster="", bodies=(), why_none=why)
    other = order.spot or bool(order.reservation) or bool(order.queued)
    asked = NodePoolOrder(
        accelerator_type=order.accelerator_type,
        topology=order.topology,
        spot=order.spot,
        reservation=order.reservation,
        queued=bool(order.queued) and not order.reservation,
        flex_start=allowed.flex_start and not other,
        placement_policy=allowed.placement_policy,
        zone=allowed.zone,
        service_account=allowed.service_account,
    )
    try:
        slice_of(asked)
        tier = asked.tier
    except UserError as error:
        return PoolPlan(cluster="", bodies=(), why_none=f"{error.what} ({error.hint})")
    ident = object_name(context.owner, name)
    bodies = tuple(
        _marked(node_pool(pool_name(ident, index), context.owner, asked), ident, name) for index in range(order.slices)
    )
    return PoolPlan(cluster=cluster, bodies=bodies, tier=tier)


def with_pools(request: Request, pools: PoolPlan, ident: str) -> Request:
    """The request with a step for each pool before its objects; its pods may run there, and rather there than elsewhere."""
    if not pools.bodies:
        return request
    steps = [
        Step(verb=CREATE_POOL, target=f"{pools.cluster}/nodePools/{body['name']}", body=body) for body in pools.bodies
    ]
    *others, last = request.steps
    placed = msgspec.structs.replace(last, body=_placed(dict(last.body), pools.cluster, ident))
    return msgspec.structs.replace(request, steps=(*steps, *others, placed))


def pool_name(ident: str, index: int) -> str:
    """One for the launch and the slice, within the 40 characters that a node pool may have."""
    slug, _, digest = ident.rpartition("-")
    return f"{slug[:_LONGEST_STEM].strip('-')}-{digest}-{index}"


def fits(pool: Mapping[str, Any], wanted: Body) -> bool:
    """Whether a pool that somebody made holds the same kind of slice, got in the same way."""
    return (
        _kind(pool) == _kind(wanted)
        and LAUNCH_LABEL not in ((pool.get("config") or {}).get("resourceLabels") or {})
        and pool.get("status") not in ("ERROR", "STOPPING")
    )


def grows_from_zero(body: Body) -> bool:
    """Whether it costs nothing until a pod waits for its nodes."""
    return bool((body.get("autoscaling") or {}).get("enabled"))


def hourly_price(accelerator_type: str, topology: str | None, place: str, *, spot: bool) -> float | None:
    """Of one slice in a cluster's region or zone; None where it is not known."""
    tpu = find_slice(accelerator_type, topology)
    price = price_of(tpu, place, spot)
    return price if price is not None else price_of(tpu, region_of(place), spot)


def region_of(place: str) -> str:
    """`us-east5` of itself and of `us-east5-b`."""
    return "-".join(place.split("-")[:2])


def _kind(pool: Mapping[str, Any]) -> tuple[object, ...]:
    config, placement = pool.get("config") or {}, pool.get("placementPolicy") or {}
    return (
        config.get("machineType"),
        placement.get("tpuTopology") or "",
        placement.get("policyName") or "",
        bool(config.get("spot")),
        tuple((config.get("reservationAffinity") or {}).get("values") or ()),
        bool((pool.get("queuedProvisioning") or {}).get("enabled")),
    )


def _marked(body: Body, ident: str, name: str) -> Body:
    config = body["config"]
    taint = {"key": CLUSTER, "value": ident, "effect": "NO_SCHEDULE"}
    return {
        **body,
        "config": {
            **config,
            "resourceLabels": config["resourceLabels"] | {LAUNCH_LABEL: ident},
            "metadata": {LAUNCH_LABEL: name},  # a label may not have the cluster's name as it is
            "labels": config["labels"] | {CLUSTER: ident},
            "taints": [taint],
        },
    }


def _placed(jobset: Manifest, cluster: str, ident: str) -> Manifest:
    """The JobSet whose pods tolerate the taint of their own pools and prefer them."""
    preferred = {
        "weight": 100,
        "preference": {"matchExpressions": [{"key": CLUSTER, "operator": "In", "values": [ident]}]},
    }
    tolerated = {"key": CLUSTER, "operator": "Equal", "value": ident, "effect": "NoSchedule"}

    def pod(spec: Manifest) -> Manifest:
        affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}}
        return {**spec, "tolerations": [*spec.get("tolerations", ()), tolerated], "affinity": affinity}

    def job(one: Manifest) -> Manifest:
        spec = one["template"]["spec"]
        template = {**spec["template"], "spec": pod(spec["template"]["spec"])}
        return {**one, "template": {**one["template"], "spec": {**spec, "template": template}}}

    metadata = jobset["metadata"]
    jobs = [job(one) for one in jobset["spec"]["replicatedJobs"]]
    return {
        **jobset,
        "metadata": {**metadata, "annotations": {**metadata["annotations"], POOLS: cluster}},
        "spec": {**jobset["spec"], "replicatedJobs": jobs},
    }
