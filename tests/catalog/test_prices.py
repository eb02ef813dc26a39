"""Prices: which source is believed, what is dropped, and that an unknown price never looks cheap."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.catalog.generations import GENERATIONS
from podway.catalog.prices import Price, all_prices, chip_price_of, merge, offers_for, price_of, zones_of
from podway.catalog.slices import all_slices, find_slice


def row(
    zone: str | None, on_demand: float | None, spot: float | None, *, region: str = "r1", source: str = "s"
) -> Price:
    return Price(generation="v6e", region=region, zone=zone, on_demand=on_demand, spot=spot, source=source, note="")


def test_every_row_is_read_and_belongs_to_a_generation() -> None:
    assert len(all_prices()) == 99
    assert {price.generation for price in all_prices()} == set(GENERATIONS)
    assert all(price.zone is None or price.zone.startswith(price.region) for price in all_prices())


def test_a_zone_is_believed_before_its_region() -> None:
    merged = merge([row("r1-a", 2.0, 0.5), row(None, 3.0, 1.5)])
    assert [(price.zone, price.on_demand, price.spot) for price in merged] == [("r1-a", 2.0, 0.5)]


def test_a_region_fills_what_its_zone_lacks_and_says_so() -> None:
    (price,) = merge([row("r1-a", 2.0, None), row(None, 3.0, 1.5, source="other")])
    assert (price.on_demand, price.spot) == (2.0, 1.5)
    assert price.note == "spot price of r1: other"


def test_a_fill_is_checked_too() -> None:
    (price,) = merge([row("r1-a", 1.0, None), row(None, 3.0, 1.5, source="other")])
    assert price.spot is None
    assert "dropped: above on demand" in price.note


def test_a_region_without_zones_stays() -> None:
    merged = merge([row("r1-a", 2.0, 0.5), row(None, 3.0, 1.5, region="r2")])
    assert [(price.region, price.zone) for price in merged] == [("r1", "r1-a"), ("r2", None)]


def test_spot_above_on_demand_is_dropped_and_flagged() -> None:
    (price,) = merge([row("r1-a", 2.0, 2.5)])
    assert (price.on_demand, price.spot) == (2.0, None)
    assert price.note == "spot price 2.5 dropped: above on demand"


def test_zero_is_no_price() -> None:
    (price,) = merge([row("r1-a", 0.0, -1.0)])
    assert (price.on_demand, price.spot) == (None, None)


def test_devices_and_pods_of_v2_and_v3_have_their_own_tariff() -> None:
    # prices.csv, europe-west4-a: v3 device 2.2 / 0.561, pod 2 / 0.66 dollars a chip-hour
    assert price_of(find_slice("v3-8"), "europe-west4-a", spot=False) == pytest.approx(4 * 2.2)
    assert price_of(find_slice("v3-32"), "europe-west4-a", spot=False) == pytest.approx(16 * 2.0)
    assert price_of(find_slice("v3-8"), "europe-west4-a", spot=True) == pytest.approx(4 * 0.561)
    assert price_of(find_slice("v3-32"), "europe-west4-a", spot=True) == pytest.approx(16 * 0.66)
    assert {offer.zone for offer in offers_for(find_slice("v2-32"))} == {"europe-west4-a", "us-central1-a"}


def test_price_in_a_zone_a_region_and_anywhere() -> None:
    slice = find_slice("v6e-16")
    assert price_of(slice, "us-east5-b", spot=True) == pytest.approx(16 * 1.5437)
    assert price_of(slice, "us-east5", spot=True) == pytest.approx(16 * 1.5437)
    assert price_of(slice) == pytest.approx(16 * 2.7)
    assert price_of(slice, spot=True) == pytest.approx(16 * 0.2673)
    assert price_of(slice, "asia-east1-c") is None
    assert price_of(slice, "atlantis-1") is None
    assert price_of(find_slice("tpu7x-8")) is None


def test_cheapest_chip() -> None:
    assert chip_price_of("v5e") == 1.2
    assert chip_price_of("v5e", spot=True) == 0.177
    assert chip_price_of("tpu7x") is None


def test_zones() -> None:
    assert zones_of("v4") == ("us-central2-b",)
    assert zones_of("tpu7x") == ("us-central1-c",)
    assert len(zones_of("v5e")) == 27


@pytest.mark.parametrize("spot", [False, True])
def test_offers_of_every_slice_are_sorted_with_the_unknown_last(spot: bool) -> None:
    for slice in all_slices():
        offers = offers_for(slice, spot=spot)
        figures = [offer.spot if spot else offer.on_demand for offer in offers]
        known = [figure for figure in figures if figure is not None]
        assert figures == sorted(known) + [None] * (len(figures) - len(known))
        assert all(figure > 0 for figure in known)
        places = [(offer.region, offer.zone) for offer in offers]
        assert len(set(places)) == len(places) > 0
        for offer in offers:
            assert offer.spot is None or offer.on_demand is None or offer.spot <= offer.on_demand


_figures = st.none() | st.floats(min_value=-1, max_value=100)
_rows = st.lists(
    st.builds(
        row,
        st.sampled_from([None, "r1-a", "r1-b"]),
        _figures,
        _figures,
        region=st.sampled_from(["r1", "r2"]),
        source=st.sampled_from(["one", "two"]),
    ),
    max_size=8,
)


@given(_rows)
def test_merging_never_invents_or_keeps_a_wrong_figure(rows: list[Price]) -> None:
    merged = merge(rows)
    given_figures = {figure for price in rows for figure in (price.on_demand, price.spot)}
    for price in merged:
        for figure in (price.on_demand, price.spot):
            assert figure is None or (figure > 0 and figure in given_figures)
        assert price.spot is None or price.on_demand is None or price.spot <= price.on_demand
    assert {price.zone for price in rows if price.zone} == {price.zone for price in merged if price.zone}
    assert {price.region for price in rows if price.zone is None} <= {price.region for price in merged}
