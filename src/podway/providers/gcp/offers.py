"""Where on Google Cloud a slice is available: the catalog's zones and prices, and what the project is offered there.

Whether the project is offered an accelerator type in a zone, and how much of it it may hold there (quota.py), is read before
it is tried and remembered for a while; so is a quota that a zone said to be nothing. Such an offer stays in the list with the reason,
and is not tried. Where nobody can tell, trying will.
"""

import difflib
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from podway.catalog.prices import ZonePrice, offers_for, zones_of
from podway.catalog.regions import distance_km, is_region
from podway.catalog.slices import Slice, find_slice
from podway.errors import UserError
from podway.providers import Blocked, Offer
from podway.providers.gcp.api import Cloud
from podway.providers.gcp.errors import GcpError
from podway.providers.gcp.places import check_place, region_of
from podway.providers.gcp.quota import Quota, too_little
from podway.providers.gcp.settings import Settings
from podway.task.task import Resources

FRESH_S = 900.0  # what a project is offered changes by days, quotas by requests that take hours
AT_ONCE = 8
CPU_ZONE = "us-central1-a"


class OfferFinder:
    """What one project may be offered."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self._offered: dict[tuple[str, str], tuple[float, bool]] = {}  # (zone, type) -> when, whether
        self._no_quota: dict[tuple[str, str, bool], tuple[float, str]] = {}  # (zone, type, spot) -> when, why
        self._quotas: tuple[float, tuple[Quota, ...]] = (-FRESH_S, ())

    def offers(self, resources: Resources, slices: int, settings: Settings) -> list[Offer]:
        """One for each zone (and tariff, where spot is left open), the cheapest first, unknown prices last."""
        zones = settings.zones
        place = resources.placement
        check_place(place, zones)
        if resources.accelerator is None:
            preferred = [*zones, *([settings.near] if settings.near and not is_region(settings.near) else [])]
            zone = place.zone or next((one for one in preferred if place.region in (None, region_of(one))), None)
            zone = zone or (f"{place.region}-a" if place.region else CPU_ZONE)
            note = "a virtual machine; its price is not in the catalog"
            return [
                Offer(
                    provider="gcp", accelerator_type=None, slices=slices, region=region_of(zone), zone=zone, note=note
                )
            ]
        tpu = find_slice(resources.accelerator.type, resources.accelerator.topology)
        prices = [price for price in offers_for(tpu) if price.zone and _wanted(price, resources, zones)]
        named = [place.zone] if place.zone else [zone for zone in zones if place.region in (None, region_of(zone))]
        prices += [_unpriced(tpu, zone) for zone in named if zone not in {price.zone for price in prices}]
        if not prices:
            where = place.zone or place.region or ", ".join(zones) or "any zone"
            raise UserError(
                f"{tpu.accelerator_type} is not known in {where} of Google Cloud",
                f"see where it is: podway tpus {tpu.accelerator_type}",
            )
        tariffs = {"yes": (True,), "no": (False,), "auto": (True, False)}[resources.spot]
        own_quota = bool(resources.accelerator.reservation or resources.accelerator.best_effort)

        def judged() -> list[Offer]:
            self._ask(tpu.accelerator_type, [price.zone for price in prices if price.zone])
            quotas = () if own_quota else self._quotas[1]
            return [
                _offer(tpu, price, slices, spot, self._blocked(tpu, slices, price.zone or "", spot, quotas))
                for price in prices
                for spot in tariffs
            ]

        begun = time.monotonic()
        made = judged()
        if all(offer.blocked for offer in made) and self._quotas[0] < begun:
            self._quotas = (-FRESH_S, ())  # perhaps somebody asked for quota since, and got it
            made = judged()
        return sorted(made, key=lambda offer: _rank(offer, zones, settings.near))

    def remember(self, zone: str, accelerator_type: str, spot: bool, why: str) -> None:
        """A zone said that the project has no quota there, which does not change by itself."""
        self._no_quota[zone, accelerator_type, spot] = (time.monotonic(), why)

    def _blocked(self, tpu: Slice, slices: int, zone: str, spot: bool, quotas: tuple[Quota, ...]) -> Blocked | None:
        """Why a zone is not to be tried, None where it may be."""
        kind = tpu.accelerator_type
        if not self._offered.get((zone, kind), (0.0, True))[1]:
            return Blocked(code="not_offered", reason=f"it is not offered to the project{_elsewhere(tpu, zone)}")
        when, why = self._no_quota.get((zone, kind, spot), (0.0, ""))
        if not why or time.monotonic() - when >= FRESH_S:
            why = too_little(quotas, tpu, slices, spot, zone)
        return Blocked(code="quota", reason=why) if why else None

    def _ask(self, accelerator_type: str, zones: Iterable[str]) -> None:
        """Learn of the cloud what is not known, or no longer."""
        now = time.monotonic()
        unknown = [
            zone
            for zone in dict.fromkeys(zones)
            if now - self._offered.get((zone, accelerator_type), (-FRESH_S, True))[0] >= FRESH_S
        ]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            limits = pool.submit(self._ask_quotas) if now - self._quotas[0] >= FRESH_S else None
            answers = list(pool.map(lambda zone: self._ask_offered(zone, accelerator_type), unknown))
            if unknown and all(offered is None for offered in answers):
                self._cloud.check_project()  # before each zone is tried in turn, for nothing
            for zone, offered in zip(unknown, answers, strict=True):
                if offered is not None:
                    self._offered[zone, accelerator_type] = (now, offered)
            if limits is not None:
                self._quotas = (now, limits.result())

    def _ask_offered(self, zone: str, accelerator_type: str) -> bool | None:
        try:
            return self._cloud.has_type(zone, accelerator_type)
        except (GcpError, UserError):
            return None

    def _ask_quotas(self) -> tuple[Quota, ...]:
        """Empty where the account may not read them (serviceusage.quotas.get)."""
        try:
            return self._cloud.quotas()
        except (GcpError, UserError):
            return ()


def _elsewhere(tpu: Slice, zone: str) -> str:
    """For a zone that is not known to have such TPUs, perhaps misspelt: the nearest names of those that are."""
    known = zones_of(tpu.generation)
    if zone in known:
        return ""
    near = difflib.get_close_matches(zone, known, n=3, cutoff=0.5) or known[:3]
    return f"; zones known to have {tpu.generation}: {', '.join(near)}{', …' if len(known) > len(near) else ''}"


def _rank(offer: Offer, zones: tuple[str, ...], near: str | None) -> tuple[bool, float, int, float, str]:
    """By price; of one price the zone that the settings name first, then the nearest to the one that is preferred."""
    zone = offer.zone or ""
    place = zones.index(zone) if zone in zones else len(zones)
    home = zones[0] if zones else near
    far = (
        distance_km(region_of(home), region_of(zone)) if home and zone != home else -1.0
    )  # before others of its region
    return offer.hourly_cost is None, offer.hourly_cost or 0.0, place, far, zone


def _wanted(price: ZonePrice, resources: Resources, zones: tuple[str, ...]) -> bool:
    place = resources.placement
    if place.zone:
        return price.zone == place.zone
    return place.region in (None, price.region) and (not zones or price.zone in zones)


def _unpriced(tpu: Slice, zone: str) -> ZonePrice:
    return ZonePrice(
        accelerator_type=tpu.accelerator_type,
        region=region_of(zone),
        zone=zone,
        on_demand=None,
        spot=None,
        source="",
        note="its price is not in the catalog",
    )


def _offer(tpu: Slice, price: ZonePrice, slices: int, spot: bool, blocked: Blocked | None) -> Offer:
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
        blocked=blocked,
    )
