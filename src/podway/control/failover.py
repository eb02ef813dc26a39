"""Where to try next when hosts are not available, or were lost. Pure.

A cluster has *candidates*: one `Order` for each type, price model and zone that its task allows. They are ranked by what
getting one is expected to cost: the price an hour, divided by the chance that it is available, learnt from past attempts
(`PlaceRecord`, which forgets with a half-life). A task that fixes an order of alternatives keeps it; ranking works inside each.

`take` gives the next order to submit. Where capacity is waited for in a queue, one order waits in all zones of its kind at
once. `after_loss` ranks for a recovery: where it was first, or other regions first, as the task's strategy says.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from podway.control.records import Cluster
from podway.order import Order

HALF_LIFE_S = 6 * 3600.0  # capacity comes and goes within a day; yesterday's stock-out says little
BACKOFF_S, LONGEST_BACKOFF_S = 5.0, 300.0

Place = tuple[str, str | None, str | None, bool]  # provider, accelerator type, zone, spot


class PlaceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How tries at one place went, each worth less the longer ago it was."""

    good: float = 0.0
    bad: float = 0.0
    at: float = 0.0

    def later(self, now: float) -> "PlaceRecord":
        """What of it still counts."""
        kept = 0.5 ** (max(0.0, now - self.at) / HALF_LIFE_S)
        return PlaceRecord(good=self.good * kept, bad=self.bad * kept, at=now)

    def plus(self, good: bool, now: float) -> "PlaceRecord":
        """With one more try."""
        old = self.later(now)
        return PlaceRecord(good=old.good + good, bad=old.bad + (not good), at=now)

    def chance(self, now: float) -> float:
        """Of getting hosts there: one half where nothing is known."""
        then = self.later(now)
        return (then.good + 1.0) / (then.good + then.bad + 2.0)


def place_of(order: Order) -> Place:
    """What a record is kept for."""
    return order.provider, order.accelerator_type, order.zone, order.spot


def ranked(
    alternatives: Sequence[Sequence[Order]], records: Mapping[Place, PlaceRecord], now: float
) -> tuple[Order, ...]:
    """Candidates in the order to try them; the alternatives stay in theirs."""

    def expected(order: Order) -> tuple[bool, float, float]:
        chance = records.get(place_of(order), PlaceRecord()).chance(now)
        price = order.hourly_cost
        return price is None, (price or 0.0) / chance, -chance

    return tuple(order for group in alternatives for order in sorted(group, key=expected))


def take(left: Sequence[Order]) -> tuple[Order, tuple[Order, ...]]:
    """The next order to submit, and what is left after it."""
    first, rest = left[0], list(left[1:])
    if not (first.queued or first.valid_until_s) or first.zone is None:
        return first, tuple(rest)
    together = [other for other in rest if _same_but_place(first, other)]
    zones = tuple(dict.fromkeys(order.zone for order in (first, *together) if order.zone))
    kept = tuple(order for order in rest if order not in together)
    return (msgspec.structs.replace(first, zones=zones) if len(zones) > 1 else first), kept


def _same_but_place(one: Order, other: Order) -> bool:
    blank = {"zone": None, "region": None, "hourly_cost": None}
    return msgspec.structs.replace(one, **blank) == msgspec.structs.replace(other, **blank)


def settled(order: Order, zone: str | None, candidates: Iterable[Iterable[Order]]) -> Order:
    """The order as it came true: in the zone that gave the hosts, at that zone's price."""
    if zone is None or zone == order.zone:
        return order
    for other in (one for group in candidates for one in group):
        if other.zone == zone and _same_but_place(msgspec.structs.replace(order, zones=()), other):
            return msgspec.structs.replace(other, zones=order.zones)
    return msgspec.structs.replace(order, zone=zone)


def after_loss(cluster: Cluster, next_region: bool, order: tuple[Order, ...]) -> tuple[Order, ...]:
    """`order` (ranked) with the place that was lost first, or with other regions before it."""
    here = place_of(cluster.order)
    same = [one for one in order if place_of(one) == here]
    near = [one for one in order if one not in same and one.region == cluster.order.region]
    far = [one for one in order if one not in same and one not in near]
    return (*far, *near, *same) if next_region else (*same, *near, *far)


def backoff(rounds: int) -> float:
    """How long to rest after so many rounds in which no place had any."""
    return min(LONGEST_BACKOFF_S, BACKOFF_S * 2.0 ** min(rounds, 16))
