"""From a task to the places to try: what is offered, what is not to be tried and why, and in which order."""

from typing import Any

import pytest

from podway.control.choosing import choose
from podway.errors import UserError
from podway.providers import Offer, Provider
from podway.task.task import Accelerator, Placement, Resources, Task


class Market:
    """A provider that has these offers, and nothing else."""

    def __init__(self, *offers: Offer) -> None:
        self.mine = offers

    def offers(self, resources: Resources, slices: int) -> list[Offer]:
        kind = resources.accelerator.type if resources.accelerator else None
        return [offer for offer in self.mine if offer.accelerator_type == kind]


def offer(zone: str, price: float | None, kind: str = "v6e-8", **more: Any) -> Offer:
    return Offer(
        provider="gcp", accelerator_type=kind, topology=None, zone=zone, region=zone[:-2], hourly_cost=price, **more
    )


def wish(kind: str = "v6e-8", **more: Any) -> Resources:
    return Resources(accelerator=Accelerator(type=kind), placement=Placement(provider="gcp"), **more)


def chosen(market: Market, *wishes: Resources, ordered: bool = False, **more: Any) -> Any:
    def provider(name: str) -> Provider:
        if name != "gcp":
            raise UserError(f"there is no provider {name!r}", "")
        return market  # type: ignore[return-value]

    return choose(Task(resources=wishes, ordered=ordered), provider, {}, **more)


def test_what_cannot_be_tried_is_kept_aside_with_the_reason() -> None:
    market = Market(offer("z-a", 30.0), offer("z-b", 10.0), offer("z-c", 5.0, blocked="no quota"), offer("z-d", None))
    choice = chosen(market, wish(max_hourly_cost=20.0), valid_until_s=60.0)
    assert [order.zone for order in choice.best] == ["z-b"]
    assert choice.best[0].valid_until_s == 60.0
    assert choice.untried == (
        "v6e-8 in z-a: it costs $30.00/h, and the task allows $20/h",
        "v6e-8 in z-c: no quota",
        "v6e-8 in z-d: its price is not known, and the task allows $20/h",
    )
    assert len(choice.offers) == 4


def test_alternatives_by_price_or_in_their_order() -> None:
    market = Market(offer("z-a", 30.0), offer("z-b", 10.0, "v5p-8"), offer("z-c", 20.0))
    wishes = (wish("v6e-8"), wish("v5p-8"))
    assert [order.zone for order in chosen(market, *wishes).best] == ["z-b", "z-c", "z-a"]
    assert [order.zone for order in chosen(market, *wishes, ordered=True).best] == ["z-c", "z-a", "z-b"]


def test_a_place_that_two_alternatives_name_is_tried_once() -> None:
    assert len(chosen(Market(offer("z-a", 1.0)), wish(), wish()).best) == 1


def test_nothing_left_says_why() -> None:
    with pytest.raises(UserError, match="z-a: no quota"):
        chosen(Market(offer("z-a", 1.0, blocked="no quota")), wish())
    zones = [offer(f"z-{letter}", 1.0, blocked="no quota" if letter != "c" else "not offered") for letter in "abcd"]
    with pytest.raises(UserError, match="try: v6e-8 in z-a, z-b, z-d: no quota; v6e-8 in z-c: not offered") as said:
        chosen(Market(*zones), wish())
    assert said.value.hint == "allow other zones or types, or ask for more quota"
    with pytest.raises(UserError, match="no provider can give"):
        chosen(Market(), wish())
    with pytest.raises(UserError, match="there is no provider 'nowhere'"):
        chosen(Market(), wish(), only="nowhere")
