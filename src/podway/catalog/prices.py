"""What slices cost, where anyone has published it.

`prices.csv` holds dollars per chip-hour from sources that differ (docs/catalog.md). They become one offer a zone so:

1. A row that names a zone is believed first. A figure it lacks is taken from the row of its region, if there is one.
2. A region of which no zone is known stays an offer without a zone.
3. v2 and v3 have two tariffs, one for a single host ("device price") and one for more ("pod price").
4. A figure that cannot be right is dropped, and the note says so: not above 0, or spot dearer than on demand.

An unknown price is None everywhere: never 0, never the cheapest.
"""

import csv
import functools
from collections.abc import Iterable
from pathlib import Path

import msgspec

from podway.catalog.slices import Slice


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `prices.csv`: dollars per chip-hour, as a source gives them."""

    generation: str
    region: str
    zone: str | None
    on_demand: float | None
    spot: float | None
    source: str
    note: str


class ZonePrice(msgspec.Struct, frozen=True, kw_only=True):
    """What one slice costs in one place: dollars per hour of the whole slice."""

    accelerator_type: str
    region: str
    zone: str | None
    on_demand: float | None
    spot: float | None
    source: str
    note: str


@functools.cache
def all_prices() -> tuple[Price, ...]:
    """All rows of `prices.csv`."""
    with open(Path(__file__).with_name("prices.csv"), encoding="utf-8", newline="") as file:
        return tuple(
            Price(
                generation=row["generation"],
                region=row["region"],
                zone=row["zone"] or None,
                on_demand=_dollars(row["price_per_chip_hour"]),
                spot=_dollars(row["spot_price_per_chip_hour"]),
                source=row["source"],
                note=row["note"],
            )
            for row in csv.DictReader(file)
        )


def offers_for(slice: Slice, *, spot: bool = False) -> list[ZonePrice]:
    """Where the slice is available and what it costs per hour: cheapest on demand (or spot) first, unknown last."""
    offers = [_offer(slice, row) for row in _per_place(slice.generation, slice.single_host)]
    return sorted(offers, key=lambda offer: _rank(offer, spot))


def price_of(slice: Slice, place: str | None = None, spot: bool = False) -> float | None:
    """Dollars per hour of the slice in a zone, or the least in a region or (None) anywhere; None where unknown."""
    offers = offers_for(slice, spot=spot)
    if place is not None:
        offers = [offer for offer in offers if place in (offer.zone, offer.region)]
    return _figure(offers[0], spot) if offers else None


def chip_price_of(generation: str, spot: bool = False) -> float | None:
    """The least known dollars per chip-hour of a generation, at whichever tariff."""
    rows = [*_per_place(generation, True), *_per_place(generation, False)]
    known = [figure for row in rows if (figure := row.spot if spot else row.on_demand) is not None]
    return min(known, default=None)


def zones_of(generation: str) -> tuple[str, ...]:
    """All zones known to have this generation, priced or not, in alphabetical order."""
    return tuple(sorted({row.zone for row in all_prices() if row.generation == generation and row.zone}))


@functools.cache
def _per_place(generation: str, single_host: bool) -> tuple[Price, ...]:
    """The rows of a generation that apply to one or to many hosts, made one for each place."""
    rows = [row for row in all_prices() if row.generation == generation and _applies(row, single_host)]
    return tuple(merge(rows))


def merge(rows: Iterable[Price]) -> list[Price]:
    """One believable row for each place: rules 1, 2 and 4 of this module."""
    zones: dict[str, Price] = {}
    regions: dict[str, Price] = {}
    for row in map(_believable, rows):
        where, key = (zones, row.zone) if row.zone else (regions, row.region)
        where[key] = _filled(where[key], row) if key in where else row
    merged = [_filled(row, regions[row.region]) if row.region in regions else row for row in zones.values()]
    covered = {row.region for row in merged}
    return merged + [row for region, row in regions.items() if region not in covered]


def _filled(row: Price, other: Price) -> Price:
    """`row` with the figures it lacks from `other`, which is then named as their source."""
    lacks_on_demand = row.on_demand is None and other.on_demand is not None
    lacks_spot = row.spot is None and other.spot is not None
    if not (lacks_on_demand or lacks_spot):
        return row
    what = "price" if lacks_on_demand and lacks_spot else "on-demand price" if lacks_on_demand else "spot price"
    filled = msgspec.structs.replace(
        row,
        on_demand=other.on_demand if lacks_on_demand else row.on_demand,
        spot=other.spot if lacks_spot else row.spot,
        note="; ".join(filter(None, [row.note, f"{what} of {other.zone or other.region}: {other.source}"])),
    )
    return _believable(filled)


def _believable(row: Price) -> Price:
    """`row` without figures that cannot be right."""
    on_demand = row.on_demand if row.on_demand is not None and row.on_demand > 0 else None
    spot = row.spot if row.spot is not None and row.spot > 0 else None
    note = row.note
    if on_demand is not None and spot is not None and spot > on_demand:
        note = "; ".join(filter(None, [note, f"spot price {spot:g} dropped: above on demand"]))
        spot = None
    return msgspec.structs.replace(row, on_demand=on_demand, spot=spot, note=note)


def _applies(row: Price, single_host: bool) -> bool:
    """Whether a row is of the tariff for one host or for many; only v2 and v3 have two."""
    if row.generation not in ("v2", "v3"):
        return True
    return ("device price" in row.note) if single_host else ("pod price" in row.note)


def _offer(slice: Slice, row: Price) -> ZonePrice:
    return ZonePrice(
        accelerator_type=slice.accelerator_type,
        region=row.region,
        zone=row.zone,
        on_demand=None if row.on_demand is None else round(row.on_demand * slice.chips, 4),
        spot=None if row.spot is None else round(row.spot * slice.chips, 4),
        source=row.source,
        note=row.note,
    )


def _figure(offer: ZonePrice, spot: bool) -> float | None:
    return offer.spot if spot else offer.on_demand


def _rank(offer: ZonePrice, spot: bool) -> tuple[float, float, str, str]:
    """Sorts by the price asked about, then by the other one, then by name; an unknown one is infinitely dear."""
    first, second = _figure(offer, spot), _figure(offer, not spot)
    infinite = float("inf")
    return (
        infinite if first is None else first,
        infinite if second is None else second,
        offer.region,
        offer.zone or "",
    )


def _dollars(text: str) -> float | None:
    return float(text) if text.strip() else None
