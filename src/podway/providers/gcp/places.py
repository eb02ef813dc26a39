"""Regions and zones of Google Cloud that a task or the settings name: whether there are such, told without asking anybody."""

from pathlib import Path

from podway.catalog.prices import all_prices
from podway.catalog.regions import is_region, regions
from podway.errors import UserError
from podway.providers.gcp.settings import read_settings
from podway.task.fields import did_you_mean, nearest
from podway.task.task import Placement


def check_place(place: Placement, zones: tuple[str, ...]) -> None:
    """Refuse a place that Google Cloud does not have, before anybody is asked; one that the settings name is believed."""
    region, zone = place.region, place.zone
    wanted = region or (region_of(zone) if zone else None)
    if wanted is None or is_region(wanted) or zone in zones or wanted in {region_of(one) for one in zones}:
        return
    if zone:
        raise UserError(f"Google Cloud has no zone {zone}", did_you_mean(zone, tpu_zones()))
    raise UserError(f"Google Cloud has no region {region}", did_you_mean(wanted, regions()))


def remark_on_place(root: Path, place: Placement) -> str:
    """What is doubtful about a place: new zones are not in the catalog, so the cloud itself decides."""
    zones = read_settings(root).zones
    check_place(place, zones)
    if place.zone is None or place.zone in tpu_zones() or place.zone in zones:
        return ""
    close = nearest(place.zone, tpu_zones())
    return f"no TPU is known in zone {place.zone}{f'; did you mean {close}?' if close else ''}"


def tpu_zones() -> list[str]:
    """The zones that the catalog knows."""
    return sorted({price.zone for price in all_prices() if price.zone})


def region_of(zone: str) -> str:
    """Of a zone; a region is its own."""
    return zone if is_region(zone) else zone.rpartition("-")[0]
