"""Task -> the ways there are to get what it asks for: offers of the providers, as ranked candidates to try one after another.

Each alternative of the task (`any_of`, `ordered`, several accelerators) asks its provider for offers; an offer is one zone. What
the provider says cannot be had there, and what costs more than the task allows, is kept aside with the reason, so that a launch
that ends with nothing can say why each place was not tried.
"""

import time
from collections.abc import Callable, Mapping

import msgspec

from podway.catalog.slices import find_slice
from podway.control.failover import Place, PlaceRecord, ranked
from podway.control.records import Cluster
from podway.errors import UserError
from podway.order import Order
from podway.providers import Offer, Provider
from podway.task.task import Resources, Task


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What was offered, the candidates by alternative and in the order to try them, and what is no candidate and why."""

    offers: tuple[Offer, ...]
    candidates: tuple[tuple[Order, ...], ...]
    best: tuple[Order, ...]
    untried: tuple[str, ...]


def choose(
    task: Task,
    provider: Callable[[str], Provider],
    tries: Mapping[Place, PlaceRecord],
    *,
    only: str | None = None,
    valid_until_s: float | None = None,
) -> Choice:
    """Everything there is; a UserError when nothing is left to try. `only` overrides the task's own providers."""
    offers: list[Offer] = []
    groups: list[list[Order]] = []
    blocked: dict[tuple[str, str], list[str]] = {}  # (type, why not) -> places
    refusal = UserError("no provider can give what the task asks for", "see the sizes there are with: podway tpus")
    for resources in task.resources:
        try:
            found = provider(only or resources.placement.provider or "local").offers(resources, task.slices)
        except UserError as error:  # another alternative may do; the reason counts when none does
            refusal = error
            continue
        offers += found
        group = []
        for offer in found:
            why = offer.blocked or _too_dear(offer, resources)
            if why:
                places = blocked.setdefault((offer.accelerator_type or "CPU host", why), [])
                places.append(offer.zone or offer.provider)
            else:
                group.append(order_of(offer, resources, valid_until_s))
        groups.append(group)
    if not offers:
        raise refusal
    untried = tuple(f"{kind} in {', '.join(dict.fromkeys(places))}: {why}" for (kind, why), places in blocked.items())
    if not any(groups):
        quota = any("quota" in text for text in untried)
        raise UserError(
            f"nothing is left to try: {'; '.join(untried)}",
            f"allow other zones or types, or {'ask for more quota' if quota else 'raise max_hourly_cost'}",
        )
    if not task.ordered:
        groups = [[order for group in groups for order in group]]
    candidates = tuple(tuple(_unique(group)) for group in groups)
    best = ranked(candidates, tries, time.time())
    return Choice(offers=tuple(offers), candidates=candidates, best=best, untried=untried)


def _unique(orders: list[Order]) -> list[Order]:
    kept: list[Order] = []
    for order in orders:
        if order not in kept:
            kept.append(order)
    return kept


def _too_dear(offer: Offer, resources: Resources) -> str:
    limit = resources.max_hourly_cost
    if limit is None:
        return ""
    if offer.hourly_cost is None:
        return f"its price is not known, and the task allows ${limit:g}/h"
    return (
        "" if offer.hourly_cost <= limit else f"it costs ${offer.hourly_cost:.2f}/h, and the task allows ${limit:g}/h"
    )


def order_of(offer: Offer, resources: Resources, valid_until_s: float | None = None) -> Order:
    """An offer, resolved: what to provision."""
    wanted = resources.accelerator
    tpu = find_slice(offer.accelerator_type, offer.topology) if offer.accelerator_type else None
    return Order(
        accelerator_type=offer.accelerator_type,
        topology=offer.topology,
        slices=offer.slices,
        provider=offer.provider,
        region=offer.region,
        zone=offer.zone,
        spot=offer.spot,
        runtime_version=(wanted.runtime_version if wanted else None)
        or (tpu.generation_facts.default_runtime if tpu else None),
        hosts_per_slice=tpu.hosts if tpu else 1,
        chips_per_host=tpu.chips_per_host if tpu else 0,
        hourly_cost=offer.hourly_cost,
        disk_gb=resources.disk_gb,
        image=resources.image,
        labels=resources.labels,
        ports=resources.ports,
        tpu_vm=wanted.tpu_vm if wanted else True,
        queued=wanted.queued if wanted else None,
        reservation=wanted.reservation if wanted else None,
        best_effort=wanted.best_effort if wanted else False,
        valid_until_s=valid_until_s,
        instance_type=resources.instance_type,
        tpu_name=wanted.tpu_name if wanted else None,
        network=resources.network,
    )


def check_fit(cluster: Cluster, task: Task) -> None:
    """A task that names other resources than the cluster has must not run there unnoticed."""
    have = cluster.order
    wanted = [resources.accelerator for resources in task.resources]
    if any(accelerator is None for accelerator in wanted):
        return
    asked = [find_slice(a.type, a.topology).accelerator_type for a in wanted if a is not None]
    if have.accelerator_type not in asked or task.slices not in (1, have.slices):
        many = f"{task.slices} x " if task.slices > 1 else ""
        raise UserError(
            f"cluster {cluster.name} is {have.slices} x {have.accelerator_type}, and the task asks for {many}{' or '.join(asked)}",
            f"use another cluster name (-c), or take this one down: podway down {cluster.name}",
            status=409,
        )
