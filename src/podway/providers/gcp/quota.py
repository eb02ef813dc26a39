"""How much of each TPU a project may hold in a place, as Service Usage tells it before anything is asked for. Pure.

1. The cloud lists the metrics of tpu.googleapis.com (api.py asks); a name such as `tpu-v6e-preemptible` or
   `tpu-v5s-litepod-serving` says of which generation and which tariff it is.
2. A metric has limits, by zone and by region, and all of them hold. In a limit the bucket of the place counts, else the one without a
   place. A limit that is left out is 0, and -1 is none.
3. A generation may have several metrics for one tariff (v5e one for training and one for serving, v2 to v4 one for pods), and which of
   them a slice is counted against is Google's to say: a slice is held back only where none of them would let it through.

A limit is not what is free of it: that is known when it is asked for.
"""

import re
from collections.abc import Iterable

import msgspec

from podway.catalog.slices import Slice

SERVICE = "tpu.googleapis.com"
# The generation's part of a metric's name, as seen in names and error messages of projects. v5e is "v5s-litepod".
_GENERATIONS = {
    "v2": r"v2s?",
    "v3": r"v3s?",
    "v4": r"v4s?",
    "v5e": r"v5s.*litepod|v5e",
    "v5p": r"v5p",
    "v6e": r"v6e",
    "tpu7x": r"v?7x",
}
_METRIC = re.compile(r"(?:.*/)?tpu-?(?P<rest>(?:v\d|7x).*)")


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """One limit of a metric: by zone, by region, or for the whole project."""

    by: str  # zone | region | ''
    default: int | None
    places: dict[str, int]

    def at(self, zone: str) -> int | None:
        """What it allows there; None: no limit."""
        place = {"zone": zone, "region": zone.rpartition("-")[0]}.get(self.by, "")
        limit = self.places.get(place, self.default)
        return None if limit is None or limit < 0 else limit


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """One metric: what a project may hold of a generation at a tariff."""

    metric: str
    generation: str
    spot: bool
    limits: tuple[Limit, ...]

    def at(self, zone: str) -> int | None:
        """The least that its limits allow in a zone; None: no limit."""
        return min((limit for one in self.limits if (limit := one.at(zone)) is not None), default=None)


class _QuotaBucket(msgspec.Struct, frozen=True, rename="camel"):
    effective_limit: int = 0  # a limit that is left out is 0
    dimensions: dict[str, str] = {}


class _LimitItem(msgspec.Struct, frozen=True, rename="camel"):
    unit: str = ""
    quota_buckets: tuple[_QuotaBucket, ...] = ()


class MetricItem(msgspec.Struct, frozen=True, rename="camel"):
    """A consumer quota metric, as Service Usage lists it."""

    metric: str = ""
    consumer_quota_limits: tuple[_LimitItem, ...] = ()


def read_quotas(metrics: Iterable[MetricItem]) -> tuple[Quota, ...]:
    """The quotas of slices, from Service Usage's list; those of requests a minute and the like are left out."""
    found = []
    for item in metrics:
        generation = _generation(item.metric)
        if generation is not None:
            limits = tuple(_limit(limit) for limit in item.consumer_quota_limits)
            short = item.metric.rpartition("/")[2]
            found.append(Quota(metric=short, generation=generation, spot="preemptible" in item.metric, limits=limits))
    return tuple(found)


def too_little(quotas: Iterable[Quota], tpu: Slice, slices: int, spot: bool, zone: str) -> str:
    """Why that many slices are not available in a zone, '' where they may be."""
    need = tpu.count * slices
    allowed = [(one.at(zone), one) for one in quotas if (one.generation, one.spot) == (tpu.generation, spot)]
    if not allowed or any(limit is None or limit >= need for limit, _ in allowed):
        return ""
    limit, most = max(allowed, key=lambda pair: pair[0] or 0)
    many = f"{slices} x " if slices > 1 else ""
    return f"quota {most.metric} is {limit}, and {many}{tpu.accelerator_type} takes {need}"


def _generation(metric: str) -> str | None:
    found = _METRIC.fullmatch(metric.lower())
    if found is None:
        return None
    rest = found["rest"]
    return next((one for one, shape in _GENERATIONS.items() if re.match(rf"(?:{shape})(?:$|[-_])", rest)), None)


def _limit(item: _LimitItem) -> Limit:
    by = next((one for one in ("zone", "region") if f"{{{one}}}" in item.unit), "")
    default: int | None = None
    places: dict[str, int] = {}
    for bucket in item.quota_buckets:
        place = bucket.dimensions.get(by)
        if place:
            places[place] = bucket.effective_limit
        elif not bucket.dimensions:
            default = bucket.effective_limit
    return Limit(by=by, default=default, places=places)
