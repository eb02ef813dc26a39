"""Task -> the offers for it: offers of the providers, as ranked candidates to try one after another.

Each alternative of the task (`any_of`, `ordered`, several accelerators) asks its provider for offers; an offer is one zone. What
the provider says is not available there, and what costs more than the task allows, is kept aside with the reason, so that a launch
that ends with nothing can say why each place was not tried.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from podway.catalog.slices import find_slice
from podway.control.bucket_mounts import check_mounted
from podway.control.failover import Place, PlaceRecord, ranked
from podway.control.records import Cluster
from podway.control.volumes import check_attached
from podway.errors import UserError
from podway.order import Order
from podway.provider_table import row_of
from podway.providers import Blocked, Offer, Provider
from podway.task.task import Resources, Task


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What was offered, the candidates by alternative and in the order to try them, and what is not a candidate and why."""

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
    usual: Sequence[str],
    valid_until_s: float | None = None,
    isolate: bool = False,
) -> Choice:
    """Everything there is; a UserError when nothing is left to try. `only` overrides the task's own providers.

    `usual` are the providers to ask where the task names none, the preferred ones first. A simulated one among real ones is
    shown and not chosen: whoever wants it names it. `isolate`: hosts on the server's own machine run as a user of their own.
    """
    offers: list[Offer] = []
    groups: list[list[Order]] = []
    kept_aside: dict[tuple[str, Blocked], list[str]] = {}  # (type, why not) -> places
    refusal = UserError("no provider can give what the task asks for", "see the sizes there are with: podway tpus")
    for resources in task.resources:
        named = only or resources.placement.provider
        found: list[Offer] = []
        for name in (named,) if named else usual:
            try:
                found += provider(name).offers(resources, task.slices)
            except UserError as error:  # another provider or alternative may do; the reason counts when none does
                refusal = error
        if not named and any(not row_of(name).simulated for name in usual):
            found = [_not_in_silence(offer) for offer in found]
        offers += found
        group = []
        for offer in found:
            why = offer.blocked or _too_dear(offer, resources)
            if why is None:
                order = order_of(offer, resources, valid_until_s)
                here = isolate and row_of(offer.provider).on_server
                group.append(msgspec.structs.replace(order, isolated=True) if here else order)
            elif why.code != "simulated":
                places = kept_aside.setdefault((offer.accelerator_type or "CPU host", why), [])
                places.append(offer.zone or offer.provider)
        groups.append(group)
    if not any(groups) and not kept_aside:
        raise _or_simulated(refusal, offers)
    untried = tuple(
        f"{kind} in {', '.join(dict.fromkeys(places))}: {why.reason}" for (kind, why), places in kept_aside.items()
    )
    if not any(groups):
        codes = {why.code for _, why in kept_aside}
        more = (
            ", or ask for more quota" if "quota" in codes else ", or raise max_hourly_cost" if "price" in codes else ""
        )
        raise UserError(f"nothing is left to try: {'; '.join(untried)}", f"allow other zones or types{more}")
    if not task.ordered:
        groups = [[order for group in groups for order in group]]
    candidates = tuple(tuple(_unique(group)) for group in groups)
    best = ranked(candidates, tries, time.time())
    return Choice(offers=tuple(offers), candidates=candidates, best=best, untried=untried)


def with_orders(choice: Choice, change: Callable[[Order], Order]) -> Choice:
    """The choice, each of its orders changed."""
    candidates = tuple(tuple(change(one) for one in group) for group in choice.candidates)
    return msgspec.structs.replace(choice, candidates=candidates, best=tuple(change(one) for one in choice.best))


def _unique(orders: list[Order]) -> list[Order]:
    kept: list[Order] = []
    for order in orders:
        if order not in kept:
            kept.append(order)
    return kept


def _too_dear(offer: Offer, resources: Resources) -> Blocked | None:
    limit, price = resources.max_hourly_cost, offer.hourly_cost
    if limit is None or (price is not None and price <= limit):
        return None
    told = "its price is not known" if price is None else f"it costs ${price:.2f}/h"
    return Blocked(code="price", reason=f"{told}, and the task allows ${limit:g}/h")


def _or_simulated(refusal: UserError, offers: Sequence[Offer]) -> UserError:
    name = next((offer.provider for offer in offers if row_of(offer.provider).simulated), None)
    return (
        UserError(refusal.what, f"{refusal.hint}; or simulate it: --infra {name}", status=refusal.status)
        if name
        else refusal
    )


def _not_in_silence(offer: Offer) -> Offer:
    """A simulated slice beside real ones: for nothing, and not what was meant."""
    if not row_of(offer.provider).simulated:
        return offer
    why = Blocked(code="simulated", reason=f"simulated; take it with --infra {offer.provider}")
    return msgspec.structs.replace(offer, blocked=offer.blocked or why)


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
        priority_class=resources.priority_class,
    )


def check_fit(cluster: Cluster, task: Task) -> None:
    """A task that names other resources than the cluster has must not run there unnoticed."""
    have = cluster.order
    check_attached(have, cluster.name, task)
    check_mounted(have, cluster.name, task)
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
