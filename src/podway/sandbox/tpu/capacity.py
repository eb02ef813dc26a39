"""What there is to be had: quota of a project, stock of a zone, reservations.

Quota is what a project may hold; it is asked when a node is wanted, and refused at once. Stock is what the zone has; it is
taken when machines are found, which may be later, and without it a create fails or a queued resource waits. Both are endless
until a command sets them. A node holds its share until it is deleted, stopped or preempted.
"""

from typing import TypeVar

import msgspec

from podway.catalog.slices import Slice
from podway.sandbox.names import parent_of
from podway.sandbox.status import ApiError, already_exists, not_found

SPOT, ON_DEMAND, RESERVED, BEST_EFFORT = "spot", "on-demand", "reserved", "best-effort"

# The middle of a quota's name. v4's is from an error message people met; the others are made after it.
_QUOTA_NAMES = {"v2": "V2", "v3": "V3", "v4": "V4", "v5e": "V5sLitepod", "v5p": "V5P", "v6e": "V6E", "tpu7x": "7X"}
_PODS_APART = ("v2", "v3", "v4")

Key = TypeVar("Key")


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A share that something holds or wants."""

    project: str
    zone: str
    slice: Slice
    tier: str
    reservation: str = ""  # its full name, for the tier `reserved`


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """Chips of one generation that a project has put aside."""

    name: str
    generation: str
    chips: int
    created: float


class QuotaKind(msgspec.Struct, frozen=True, kw_only=True):
    """What one quota counts."""

    generation: str
    spot: bool
    pod: bool  # of v2 to v4, slices of several hosts are counted apart

    @property
    def name(self) -> str:
        """As the API calls it when it is exceeded."""
        words = f"{_QUOTA_NAMES[self.generation]}{'Preemptible' * self.spot}{'Pod' * self.pod}"
        return f"TPU{words}PerProjectPerZoneForTPUAPI"


def quota_kinds() -> list[QuotaKind]:
    """Every quota there is."""
    return [
        QuotaKind(generation=generation, spot=spot, pod=pod)
        for generation in _QUOTA_NAMES
        for pod in ((False, True) if generation in _PODS_APART else (False,))
        for spot in (False, True)
    ]


def quota_name(slice: Slice, tier: str) -> str:
    """The quota that a slice is counted against."""
    pod = slice.generation in _PODS_APART and not slice.single_host
    return QuotaKind(generation=slice.generation, spot=tier == SPOT, pod=pod).name


class Capacity:
    """Limits, and the rule whether a claim fits beside those that are held."""

    def __init__(self) -> None:
        self.quotas: dict[tuple[str, str], int] = {}  # (zone or *, quota name or *) -> limit
        self.stocks: dict[tuple[str, str, str], int] = {}  # (zone or *: each zone, generation or *, tier or *) -> chips
        self.reservations: dict[str, Reservation] = {}

    def set_quota(self, zone: str, name: str, limit: int | None) -> None:
        """Set a limit, or lift it."""
        _put(self.quotas, (zone, name), limit)

    def limits_of(self, name: str) -> tuple[int | None, dict[str, int]]:
        """A quota's limit in zones of which nothing else is said (None: endless), and in those of which it is."""
        of = [key for key in self.quotas if key[1] in (name, "*")]
        places = {zone: self._quota(zone, name) for zone, _ in of if zone != "*"}
        return self._quota("*", name), {zone: limit for zone, limit in places.items() if limit is not None}

    def _quota(self, zone: str, name: str) -> int | None:
        keys = [(place, quota) for place in dict.fromkeys((zone, "*")) for quota in (name, "*")]
        return next((self.quotas[key] for key in keys if key in self.quotas), None)

    def set_stock(self, zone: str, generation: str, tier: str, chips: int | None) -> None:
        """Say how many chips a zone has, or that they are endless."""
        _put(self.stocks, (zone, generation, tier), chips)

    def reserve(self, project: str, zone: str, name: str, generation: str, chips: int, now: float) -> Reservation:
        """Put chips aside."""
        full = f"{parent_of(project, zone)}/reservations/{name}"
        if full in self.reservations:
            raise already_exists(full)
        self.reservations[full] = Reservation(name=full, generation=generation, chips=chips, created=now)
        return self.reservations[full]

    def check_quota(self, wanted: list[Claim], held: list[Claim]) -> None:
        """Refuse what a project may not have."""
        for claim in wanted:
            name = quota_name(claim.slice, claim.tier)
            limit = self._quota(claim.zone, name)
            if limit is None:
                continue
            same = [
                one
                for one in [*held, *wanted]
                if (one.project, one.zone, quota_name(one.slice, one.tier)) == (claim.project, claim.zone, name)
            ]
            if sum(one.slice.count for one in same) > limit:
                said = f"Quota limit '{name}' has been exceeded. Limit: {limit} in zone {claim.zone}."
                raise ApiError("RESOURCE_EXHAUSTED", said)

    def check_stock(self, wanted: list[Claim], held: list[Claim]) -> None:
        """Refuse what is not there now."""
        for claim in wanted:
            if claim.tier == RESERVED:
                self._check_reservation(claim, wanted, held)
                continue
            for key in self._stock_keys(claim):
                limit = self.stocks.get(key)
                taken = [
                    one
                    for one in [*held, *wanted]
                    if one.tier != RESERVED and one.zone == claim.zone and _counts(key, one)
                ]
                if limit is not None and sum(one.slice.chips for one in taken) > limit:
                    raise ApiError(
                        "RESOURCE_EXHAUSTED",
                        f'There is no more capacity in the zone "{claim.zone}"; you can try in another zone where Cloud TPU '
                        "Nodes are offered (see https://cloud.google.com/tpu/docs/regions) [EID: 0x1]",
                    )

    def find_reservation(self, project: str, zone: str, generation: str, wanted: str) -> str:
        """The full name of the reservation meant, `-` for any that fits."""
        ending = wanted.rpartition("/")[2]
        for name, one in self.reservations.items():
            here = name.startswith(f"{parent_of(project, zone)}/")
            if here and one.generation == generation and ending in ("-", "", name.rpartition("/")[2]):
                return name
        raise not_found(wanted or f"{parent_of(project, zone)}/reservations/-")

    def _stock_keys(self, claim: Claim) -> list[tuple[str, str, str]]:
        return [
            (zone, generation, tier)
            for zone in (claim.zone, "*")
            for generation in (claim.slice.generation, "*")
            for tier in (claim.tier, "*")
        ]

    def _check_reservation(self, claim: Claim, wanted: list[Claim], held: list[Claim]) -> None:
        reservation = self.reservations.get(claim.reservation)
        if reservation is None:
            raise not_found(claim.reservation)
        used = sum(one.slice.chips for one in [*held, *wanted] if one.reservation == claim.reservation)
        if used > reservation.chips:
            raise ApiError(
                "RESOURCE_EXHAUSTED",
                f"Reservation '{claim.reservation}' has {reservation.chips} chips; {used} are wanted.",
            )


def _counts(key: tuple[str, str, str], claim: Claim) -> bool:
    """Whether a claim takes from a stock."""
    return all(
        mine in ("*", its) for mine, its in zip(key, (claim.zone, claim.slice.generation, claim.tier), strict=True)
    )


def _put(limits: dict[Key, int], key: Key, limit: int | None) -> None:
    if limit is None:
        limits.pop(key, None)
    else:
        limits[key] = limit
