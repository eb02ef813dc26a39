"""Where a slice may be: the two dialects' words for clouds, regions and zones, and which of them Podway serves."""

import re
from typing import NoReturn

from podway.catalog.prices import all_prices
from podway.provider_table import ProviderRow, broken_rows, find_row, provider_rows, provider_words
from podway.task.fields import Field, NotHere, did_you_mean
from podway.task.task import Placement

# Clouds that the peers know and Podway does not: refused by name, so that nobody waits for one.
_OTHER_CLOUDS = (
    "aws azure lambda ibm scp oci runpod vast vastai vsphere cudo fluidstack paperspace primeintellect do digitalocean "
    "nebius slurm hyperbolic seeweb shadeform yotta mithril datacrunch verda tensordock vultr amddevcloud hotaisle "
    "cloudrift crusoe coreweave jarvislabs"
)
OTHER_CLOUDS = frozenset(_OTHER_CLOUDS.split())

_ZONE = re.compile(r"([a-z]+-[a-z]+[0-9]+)-[a-z][a-z0-9]*")  # us-east5-b; AI zones end in ai1a


def provider(field: Field, word: str) -> str:
    """Podway's name of a cloud."""
    return _row(field, word).name


def _row(field: Field, word: str) -> ProviderRow:
    name = word.strip().lower()
    row = find_row(name)
    if row is not None:
        return row
    if name in broken_rows():
        raise field.error(broken_rows()[name], "repair or uninstall that package")
    if name in OTHER_CLOUDS:
        raise NotHere(
            field, f"{name} has no TPUs Podway can reach", f"use one of: {', '.join(sorted(provider_rows()))}"
        )
    raise field.error(f"{field.found} is not a cloud Podway knows", did_you_mean(name, provider_words()))


def from_infra(field: Field) -> Placement:
    """`cloud[/region[/zone]]` with `*` for any; some providers have one word of their own there (the pool, the context)."""
    text = field.words()
    cloud, _, rest = text.partition("/")
    row = None if cloud == "*" else _row(field, cloud)
    if row is not None and row.place == "word":
        return Placement(provider=row.name, region=rest if rest not in ("", "*") else None)
    parts = [None if part in ("", "*") else part for part in rest.split("/")] if rest else []
    if len(parts) > 2 or (rest and not any(parts) and "*" not in rest):
        _malformed(field)
    region, zone = (*parts, None, None)[:2]
    return place(field, row.name if row else None, region, zone)


def place(field: Field, where: str | None, region: str | None, zone: str | None) -> Placement:
    """The three together; a zone names its region by itself."""
    row = find_row(where) if where else None
    google = row is None or row.place == "google-zone"
    if google and zone is None and region and _ZONE.fullmatch(region):  # gcp/us-east5-b, without the region between
        region, zone = None, region
    match = _ZONE.fullmatch(zone) if zone and google else None
    if zone and google and match is None:
        zones = sorted({price.zone for price in all_prices() if price.zone})
        raise field.error(f"{zone} is not a zone of Google Cloud", did_you_mean(zone, zones))
    if match and region and match[1] != region:
        raise field.error(f"the zone {zone} is not in the region {region}", f"leave the region out: it is {match[1]}")
    if match and not region:
        region = match[1]
    return Placement(provider=where, region=region, zone=zone)


def over(outer: Placement, inner: Placement) -> Placement:
    """`inner` where it says something, else `outer`."""
    if inner.provider and inner.provider != outer.provider:
        return inner
    region = inner.region or outer.region
    zone = inner.zone or (outer.zone if inner.region in (None, outer.region) else None)
    return Placement(provider=inner.provider or outer.provider, region=region, zone=zone)


def _malformed(field: Field) -> NoReturn:
    raise field.error(f"{field.found} is not cloud/region/zone", "write gcp, gcp/us-east5 or gcp/us-east5/us-east5-b")
