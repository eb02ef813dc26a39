"""From a task to the places to try: what is offered, what is not to be tried and why, and in which order."""

from typing import Any

import pytest

from podway.control.choosing import choose
from podway.errors import UserError
from podway.providers import Blocked, Offer, Provider
from podway.task.task import Accelerator, Placement, Resources, Task

NO_QUOTA = Blocked(code="quota", reason="no quota")
NOT_OFFERED = Blocked(code="not_offered", reason="not offered")


class FixedOffers:
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


def chosen(offers: FixedOffers, *wishes: Resources, ordered: bool = False, **more: Any) -> Any:
    def provider(name: str) -> Provider:
        if name != "gcp":
            raise UserError(f"there is no provider {name!r}", "")
        return offers  # type: ignore[return-value]

    return choose(Task(resources=wishes, ordered=ordered), provider, {}, usual=("gcp", "local"), **more)


def test_what_cannot_be_tried_is_kept_aside_with_the_reason() -> None:
    offers = FixedOffers(
        offer("z-a", 30.0), offer("z-b", 10.0), offer("z-c", 5.0, blocked=NO_QUOTA), offer("z-d", None)
    )
    choice = chosen(offers, wish(max_hourly_cost=20.0), valid_until_s=60.0)
    assert [order.zone for order in choice.best] == ["z-b"]
    assert choice.best[0].valid_until_s == 60.0
    assert choice.untried == (
        "v6e-8 in z-a: it costs $30.00/h, and the task allows $20/h",
        "v6e-8 in z-c: no quota",
        "v6e-8 in z-d: its price is not known, and the task allows $20/h",
    )
    assert len(choice.offers) == 4


def test_alternatives_by_price_or_in_their_order() -> None:
    offers = FixedOffers(offer("z-a", 30.0), offer("z-b", 10.0, "v5p-8"), offer("z-c", 20.0))
    wishes = (wish("v6e-8"), wish("v5p-8"))
    assert [order.zone for order in chosen(offers, *wishes).best] == ["z-b", "z-c", "z-a"]
    assert [order.zone for order in chosen(offers, *wishes, ordered=True).best] == ["z-c", "z-a", "z-b"]


def test_a_place_that_two_alternatives_name_is_tried_once() -> None:
    assert len(chosen(FixedOffers(offer("z-a", 1.0)), wish(), wish()).best) == 1


def test_nothing_left_says_why() -> None:
    with pytest.raises(UserError, match="z-a: no quota"):
        chosen(FixedOffers(offer("z-a", 1.0, blocked=NO_QUOTA)), wish())
    zones = [offer(f"z-{letter}", 1.0, blocked=NO_QUOTA if letter != "c" else NOT_OFFERED) for letter in "abcd"]
    with pytest.raises(UserError, match="try: v6e-8 in z-a, z-b, z-d: no quota; v6e-8 in z-c: not offered") as said:
        chosen(FixedOffers(*zones), wish())
    assert said.value.hint == "allow other zones or types, or ask for more quota"
    with pytest.raises(UserError) as said:
        chosen(FixedOffers(offer("z-a", 1.0, blocked=NOT_OFFERED)), wish())
    assert said.value.hint == "allow other zones or types"
    with pytest.raises(UserError, match="no provider can give"):
        chosen(FixedOffers(), wish())
    with pytest.raises(UserError, match="there is no provider 'nowhere'"):
        chosen(FixedOffers(), wish(), only="nowhere")


def any_place(*usual: str, **named: FixedOffers) -> Any:
    """A task that names no provider, where these are asked in this order."""

    def provider(name: str) -> Provider:
        if name not in named:
            raise UserError(f"{name} is broken", f"repair {name}")
        return named[name]  # type: ignore[return-value]

    return choose(Task(resources=(Resources(accelerator=Accelerator(type="v6e-8")),)), provider, {}, usual=usual)


def simulated() -> FixedOffers:
    return FixedOffers(Offer(provider="local", accelerator_type="v6e-8", zone="here", hourly_cost=0.0))


def test_a_simulated_slice_is_taken_where_nothing_else_is_set_up() -> None:
    choice = any_place("local", local=simulated())
    assert [order.provider for order in choice.best] == ["local"] and choice.offers[0].blocked is None


def test_a_cloud_that_is_set_up_comes_first_and_the_simulated_slice_is_shown_last_and_not_chosen() -> None:
    choice = any_place("gcp", "local", gcp=FixedOffers(offer("z-a", 21.6), offer("z-b", None)), local=simulated())
    assert [(one.provider, one.hourly_cost) for one in choice.offers] == [("gcp", 21.6), ("gcp", None), ("local", 0.0)]
    assert [order.zone for order in choice.best] == ["z-a", "z-b"]
    last = choice.offers[-1].blocked
    assert last and last.code == "simulated" and "--infra local" in last.reason
    assert choice.untried == ()


def test_a_cloud_that_is_set_up_and_gives_nothing_does_not_become_a_simulation() -> None:
    full = FixedOffers(offer("z-a", 21.6, blocked=NO_QUOTA))
    with pytest.raises(UserError, match="nothing is left to try: v6e-8 in z-a: no quota"):
        any_place("gcp", "local", gcp=full, local=simulated())
    with pytest.raises(UserError, match="gcp is broken") as said:
        any_place("gcp", "local", local=simulated())
    assert said.value.hint == "repair gcp; or simulate it: --infra local"
