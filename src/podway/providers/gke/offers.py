"""What each context can offer: its TPU nodes, and what Kueue's quota leaves.

Both are read before a launch, a few seconds at most, and only said: a node pool may grow or be made, a quota may be freed, and a job
that waits in Kueue's queue is what the queue is for. An offer is blocked only where the cluster cannot be reached, refuses its caller,
has no JobSet, or has no such Kueue queue, or one with quota for less than the task asks for at all; and where the launch would have to
make node pools and Kubernetes Engine refuses its caller.
"""

import contextlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from podway.catalog.prices import price_of
from podway.catalog.slices import Slice
from podway.errors import ProviderError, UserError
from podway.order import Order
from podway.providers import Blocked, Offer
from podway.providers.gke.api import Fields, KubernetesApi, NotFound
from podway.providers.gke.clusters import KUEUE, Clusters
from podway.providers.gke.launch_pools import LaunchPools
from podway.providers.gke.manifests import NODE_POOL, TPU, JobSetContext, node_selector, slice_of
from podway.providers.gke.pool_render import hourly_price, plan_pools
from podway.quantities import format_count
from podway.task.task import Resources

LOOK_S = 5.0
NO_NODE = "no such node is there now: a node pool must grow"
UNSEEN = "no right to see the nodes"
REGION, ZONE = "topology.kubernetes.io/region", "topology.kubernetes.io/zone"


class NoQueue(UserError):
    """The queue that the settings name is not there."""


class QueueQuota(msgspec.Struct, frozen=True, kw_only=True):
    """Chips of a ClusterQueue for one kind of node."""

    queue: str
    nominal: int
    used: int


def find_offers(clusters: Clusters, pools: LaunchPools, resources: Resources, slices: int) -> list[Offer]:
    """One for each context, those that can be used first."""
    named = resources.placement.region
    contexts = [named] if named else clusters.names()
    with ThreadPoolExecutor(max_workers=max(1, len(contexts))) as pool:
        found = list(pool.map(lambda context: _offer(clusters, pools, context, resources, slices), contexts))
    known = sorted((one for one in found if one.hourly_cost is not None), key=lambda one: one.hourly_cost or 0.0)
    rest = [one for one in found if one.hourly_cost is None]
    return [*known, *sorted(rest, key=lambda one: one.blocked is not None)]


def _offer(clusters: Clusters, pools: LaunchPools, context: str | None, resources: Resources, slices: int) -> Offer:
    target = clusters.render_context(context)
    order = _order(resources, slices)
    tpu = slice_of(order)
    offer = Offer(
        provider="gke",
        accelerator_type=order.accelerator_type,
        topology=order.topology,
        slices=slices,
        region=target.context,
        zone=target.context,
        spot=order.spot,
    )
    try:
        api = clusters.api(target.context)
        _check_jobset(api)
        note, price = _nodes(api, order, tpu)
        if note in (NO_NODE, UNSEEN):
            note, price = _pools(pools, target, order, note)
        quota = _quota(api, target, tpu) if tpu is not None else None
    except UserError as error:
        return msgspec.structs.replace(offer, blocked=Blocked(code="refused", reason=f"{error.what} ({error.hint})"))
    except ProviderError as error:
        return msgspec.structs.replace(offer, blocked=Blocked(code="refused", reason=str(error)))
    offer = msgspec.structs.replace(offer, note=note, hourly_cost=price)
    if quota is None or tpu is None:
        return offer
    wanted, free = tpu.chips * slices, max(0, quota.nominal - quota.used)
    if wanted > quota.nominal:
        why = f"queue {quota.queue} has a quota of {quota.nominal} such chips, and {wanted} are asked for"
        return msgspec.structs.replace(offer, blocked=Blocked(code="quota", reason=why))
    left = f"queue {quota.queue}: {free} of {quota.nominal} chips are free"
    return msgspec.structs.replace(offer, note="; ".join(filter(None, [note, left])))


def _order(resources: Resources, slices: int) -> Order:
    wanted = resources.accelerator
    if wanted is None:
        return Order(accelerator_type=None, provider="gke", slices=slices)
    asked = Order(
        accelerator_type=wanted.type,
        topology=wanted.topology,
        provider="gke",
        slices=slices,
        spot=resources.spot == "yes",
        reservation=wanted.reservation,
        queued=wanted.queued,
    )
    tpu = slice_of(asked)
    assert tpu is not None
    return msgspec.structs.replace(asked, accelerator_type=tpu.accelerator_type, topology=tpu.topology_text)


def _check_jobset(api: KubernetesApi) -> None:
    api.call("GET", "/apis/jobset.x-k8s.io/v1alpha2", timeout=LOOK_S)


def _nodes(api: KubernetesApi, order: Order, tpu: Slice | None) -> tuple[str, float | None]:
    """How many such slices there are nodes for, and what they cost where Google's regions are known."""
    if tpu is None:
        return "", None
    selector = ",".join(f"{key}={value}" for key, value in node_selector(order, tpu).items())
    try:
        nodes = api.read_items("/api/v1/nodes", {"labelSelector": selector}, LOOK_S)
    except UserError:
        return UNSEEN, None
    if not nodes:
        return NO_NODE, None
    pools: dict[str, int] = {}
    for node in nodes:
        pool = (node["metadata"].get("labels") or {}).get(NODE_POOL) or node["metadata"]["name"]
        pools[pool] = pools.get(pool, 0) + 1
    whole = sum(count // tpu.hosts for count in pools.values())
    labels = [node["metadata"].get("labels") or {} for node in nodes]
    price = next((cost for one in labels if (cost := _price(tpu, one, order)) is not None), None)
    return f"nodes for {whole} such slice{'' if whole == 1 else 's'}", price


def _pools(pools: LaunchPools, target: JobSetContext, order: Order, known: str) -> tuple[str, float | None]:
    """Where no node is seen: what a launch makes, and what that costs; where it makes none, what is `known`."""
    plan = plan_pools(target, "offer", order)
    if not plan.bodies:
        return f"{known} ({plan.why_none})" if known == NO_NODE else known, None
    if pools.count_fitting(plan) >= order.slices:
        return known, None
    assert order.accelerator_type is not None
    size = f"{plan.bodies[0]['config']['machineType']}, {plan.tier}"
    price = hourly_price(order.accelerator_type, order.topology, plan.place, spot=order.spot)
    what = f"makes {format_count(order.slices, 'node pool')} ({size}), deleted with the cluster"
    return what, None if price is None else price * order.slices


def _price(tpu: Slice, labels: dict[str, str], order: Order) -> float | None:
    region = labels.get(REGION)
    price = price_of(tpu, region, order.spot) if region else None
    return None if price is None else price * order.slices


def _quota(api: KubernetesApi, target: JobSetContext, tpu: Slice) -> QueueQuota | None:
    """What the ClusterQueue behind the LocalQueue has for such nodes; None where that cannot be read."""
    queue = target.settings.queue
    if not queue:
        return None
    with contextlib.suppress(ProviderError, KeyError, ValueError, TypeError):
        try:
            group = api.call("GET", KUEUE, timeout=LOOK_S)
            base = f"{KUEUE}/{group['preferredVersion']['version']}"
            local = _local_queue(api, base, target.namespace, queue)
            behind = api.call("GET", f"{base}/clusterqueues/{local['spec']['clusterQueue']}", timeout=LOOK_S)
            flavors = api.read_items(f"{base}/resourceflavors", {}, LOOK_S)
        except NoQueue:
            raise
        except UserError:
            return None  # no right to read quotas: Kueue says what it says when the job waits
        fitting = {one["metadata"]["name"] for one in flavors if _fits(one, tpu)}
        return QueueQuota(
            queue=queue,
            nominal=sum(_chips(_resources(behind["spec"].get("resourceGroups") or ()), fitting, "nominalQuota")),
            used=sum(_chips((behind.get("status") or {}).get("flavorsReservation") or (), fitting, "total")),
        )
    return None


def _local_queue(api: KubernetesApi, base: str, namespace: str, queue: str) -> Fields:
    try:
        return api.call("GET", f"{base}/namespaces/{namespace}/localqueues/{queue}", timeout=LOOK_S)
    except NotFound:
        there = [
            one["metadata"]["name"] for one in api.read_items(f"{base}/namespaces/{namespace}/localqueues", {}, LOOK_S)
        ]
        hint = (
            f"name one of these in gke.yaml: {', '.join(sorted(there)[:10])}" if there else "ask for a LocalQueue there"
        )
        raise NoQueue(f"Kueue has no queue {queue} in namespace {namespace}", hint) from None


def _fits(flavor: Fields, tpu: Slice) -> bool:
    labels = (flavor.get("spec") or {}).get("nodeLabels") or {}
    wanted = node_selector(Order(accelerator_type=tpu.accelerator_type, provider="gke"), tpu)
    return all(wanted.get(key, value) == value for key, value in labels.items())


def _resources(groups: Iterable[Fields]) -> list[Fields]:
    return [flavor for group in groups for flavor in group.get("flavors") or ()]


def _chips(flavors: Iterable[Fields], fitting: set[str], key: str) -> list[int]:
    return [
        int(one.get(key) or 0)
        for flavor in flavors
        if flavor["name"] in fitting
        for one in flavor.get("resources") or ()
        if one["name"] == TPU
    ]
