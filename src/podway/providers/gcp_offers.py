"""Where on Google Cloud a slice may be had: the catalog's zones and prices, and what the project is offered there.

Whether the project is offered an accelerator type in a zone is read before it is tried (and remembered for a while); so is a quota
that was found to be nothing. Such an offer stays in the list with the reason, and is not tried.
"""

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from podway.catalog.prices import ZonePrice, offers_for
from podway.catalog.slices import Slice, find_slice
from podway.errors import UserError
from podway.providers import Offer
from podway.providers.gcp_cloud import Cloud
from podway.providers.gcp_errors import Trouble
from podway.providers.gcp_settings import Settings
from podway.task.task import Resources

FRESH_S = 900.0  # what a project is offered changes by days, quotas by requests that take hours
AT_ONCE = 8
CPU_ZONE = "us-central1-a"


class Market:
    """What one project may be offered."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self._known: dict[tuple[str, str], tuple[float, str]] = {}  # (zone, type) -> when, why it is blocked

    def offers(self, resources: Resources, slices: int, settings: Settings) -> list[Offer]:
        """One for each zone (and tariff, where spot is left open), the cheapest first, unknown prices last."""
        zones = settings.zones
        place = resources.placement
        if resources.accelerator is None:
            zone = place.zone or next((z for z in zones if place.region in (None, _region(z))), None)
            zone = zone or (f"{place.region}-a" if place.region else CPU_ZONE)
            note = "a virtual machine; its price is not in the catalog"
            return [
                Offer(provider="gcp", accelerator_type=None, slices=slices, region=_region(zone), zone=zone, note=note)
            ]
        tpu = find_slice(resources.accelerator.type, resources.accelerator.topology)
        prices = [price for price in offers_for(tpu) if price.zone and _wanted(price, resources, zones)]
        named = [place.zone] if place.zone else [zone for zone in zones if place.region in (None, _region(zone))]
        prices += [_unpriced(tpu, zone) for zone in named if zone not in {price.zone for price in prices}]
        if not prices:
            where = place.zone or place.region or ", ".join(zones) or "any zone"
            raise UserError(
                f"{tpu.accelerator_type} is not known in {where} of Google Cloud",
                f"see where it is: podway tpus {tpu.accelerator_type}",
            )
        tariffs = {"yes": (True,), "no": (False,), "auto": (True, False)}[resources.spot]
        blocked = self._blocked(tpu.accelerator_type, [price.zone for price in prices if price.zone])
        made = [_offer(tpu, price, slices, spot, blocked) for price in prices for spot in tariffs]
        return sorted(made, key=lambda offer: (offer.hourly_cost is None, offer.hourly_cost or 0.0, offer.zone or ""))

    def remember(self, zone: str, accelerator_type: str, why: str) -> None:
        """A zone said no for a reason that will not pass by itself."""
        self._known[zone, accelerator_type] = (time.monotonic(), why)

    def _blocked(self, accelerator_type: str, zones: Iterable[str]) -> dict[str, str]:
        """zone -> why it is not to be tried, '' where it may be; asked of the cloud where it is not known yet."""
        now = time.monotonic()
        unknown = [
            zone
            for zone in dict.fromkeys(zones)
            if now - self._known.get((zone, accelerator_type), (-FRESH_S, ""))[0] >= FRESH_S
        ]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for zone, why in zip(unknown, pool.map(lambda z: self._ask(z, accelerator_type), unknown), strict=True):
                if why is not None:
                    self._known[zone, accelerator_type] = (now, why)
        return {zone: self._known.get((zone, accelerator_type), (0.0, ""))[1] for zone in zones}

    def _ask(self, zone: str, accelerator_type: str) -> str | None:
        """'' when offered, the reason when not, None when nobody can tell now: trying will."""
        try:
            offered = self._cloud.has_type(zone, accelerator_type)
        except (Trouble, UserError):
            return None
        return "" if offered else f"{accelerator_type} is not offered to the project in {zone}"


def _wanted(price: ZonePrice, resources: Resources, zones: tuple[str, ...]) -> bool:
    place = resources.placement
    if place.zone:
        return price.zone == place.zone
    return place.region in (None, price.region) and (not zones or price.zone in zones)


def _unpriced(tpu: Slice, zone: str) -> ZonePrice:
    return ZonePrice(
        accelerator_type=tpu.accelerator_type,
        region=_region(zone),
        zone=zone,
        on_demand=None,
        spot=None,
        source="",
        note="its price is not in the catalog",
    )


def _offer(tpu: Slice, price: ZonePrice, slices: int, spot: bool, blocked: dict[str, str]) -> Offer:
    each = price.spot if spot else price.on_demand
    return Offer(
        provider="gcp",
        accelerator_type=tpu.accelerator_type,
        topology=tpu.topology_text,
        slices=slices,
        region=price.region,
        zone=price.zone,
        spot=spot,
        hourly_cost=None if each is None else round(each * slices, 4),
        note=price.note,
        blocked=blocked.get(price.zone or "", ""),
    )


def _region(zone: str) -> str:
    return zone.rpartition("-")[0]
