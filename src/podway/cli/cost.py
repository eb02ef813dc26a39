"""`podway cost`: what clusters have cost so far, at the prices they were launched at."""

import time
from collections.abc import Sequence

import click
import msgspec

from podway.cli.options import output_option
from podway.cli.tables import table
from podway.quantities import format_ago, format_count, format_duration
from podway.server.api import ClusterView, OrphanView
from podway.server.client import Client
from podway.server.volume_api import VolumeView

HEADERS = ("NAME", "LAUNCHED", "DURATION", "RESOURCES", "STATUS", "COST/hr", "COST (est.)")


@click.command(name="cost")
@click.option(
    "--days",
    type=click.FloatRange(min=0),
    metavar="DAYS",
    default=30,
    show_default=True,
    help="How far back to show deleted clusters.",
)
@output_option
def command(days: float, output: str) -> None:
    """Show what clusters cost, including deleted ones.

    Estimated from published prices and the time the cloud bills for hosts, also before they can be used, each stretch at the price of
    the place it was in. `-` is unknown; a simulated cluster costs nothing. Volumes are listed for as long as they exist, at the price of
    disks in the United States; the disks that a stopped cluster keeps, and network traffic, are not included. Resources that no
    cluster accounts for are listed as ORPHAN, from when they were made.
    """
    now = time.time()
    client = Client()
    overview = client.overview(past=now - days * 86400)
    clusters = overview.clusters
    orphans = client.orphans(look=False).orphans if overview.orphans else []
    volumes = [one for one in client.volumes() if one.hourly_cost != 0]
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(clusters)))
    elif not (clusters or orphans or volumes):
        click.echo("No existing clusters.")
    else:
        click.echo(page(clusters, now, orphans, volumes))


def page(
    clusters: list[ClusterView], now: float, orphans: Sequence[OrphanView] = (), volumes: Sequence[VolumeView] = ()
) -> str:
    """The table, latest first, what is billing now, and the sum of what is known."""
    rows: list[tuple[object, ...]] = [
        (
            cluster.name,
            format_ago(cluster.created, now),
            format_duration(cluster.billed_s),
            cluster.resources,
            "TERMINATED" if cluster.state == "GONE" else cluster.state,
            _dollars(cluster, cluster.hourly_cost),
            _dollars(cluster, cluster.cost),
        )
        for cluster in sorted(clusters, key=lambda cluster: -cluster.created)
    ]
    rows += [_volume_row(volume, now) for volume in volumes]
    rows += [_orphan_row(orphan, now) for orphan in orphans]
    known = [cluster.cost for cluster in clusters if cluster.cost is not None and not cluster.simulated]
    unknown = sum(1 for cluster in clusters if cluster.cost is None and not cluster.simulated)
    unknown += sum(1 for volume in volumes if _volume_cost(volume, now) is None)
    others = [*(_spent(orphan, now) for orphan in orphans), *(_volume_cost(volume, now) for volume in volumes)]
    spent = sum(known) + sum(cost or 0.0 for cost in others)
    total = f"Total: ${spent:,.2f}" + (f", and {unknown} at an unknown price" if unknown else "")
    return f"{table(HEADERS, rows, drop=('LAUNCHED', 'RESOURCES', 'COST/hr'))}\n\n{_billing(clusters, orphans, volumes)}\n{total}"


def _billing(clusters: list[ClusterView], orphans: Sequence[OrphanView], volumes: Sequence[VolumeView]) -> str:
    """What costs money at this moment."""
    up = [cluster for cluster in clusters if cluster.up_since and cluster.state != "GONE" and not cluster.simulated]
    left = [orphan.hourly_cost for orphan in orphans if orphan.hourly_cost != 0]
    rates = [*(cluster.hourly_cost for cluster in up), *left, *(volume.hourly_cost for volume in volumes)]
    if not rates:
        return "Nothing is billing now."
    unknown = sum(1 for rate in rates if rate is None)
    sums = f"${sum(rate or 0.0 for rate in rates):,.2f}/h" + (f", and {unknown} at an unknown price" if unknown else "")
    what = [format_count(len(up), "cluster"), format_count(len(left), "orphan")]
    what += [format_count(len(volumes), "volume")] if volumes else []
    return f"Billing now: {sums} ({', '.join(what)})"


def _volume_row(volume: VolumeView, now: float) -> tuple[object, ...]:
    cost = _volume_cost(volume, now)
    size = f"disk {volume.size_gb} GB {volume.disk_type or ''}".strip() if volume.size_gb else "disk"
    return (
        volume.name,
        format_ago(volume.created, now),
        format_duration(now - volume.created),
        size,
        "VOLUME" if volume.used_by else "VOLUME (unused)",
        None if volume.hourly_cost is None else f"${volume.hourly_cost:,.3f}",
        None if cost is None else f"${cost:,.2f}",
    )


def _volume_cost(volume: VolumeView, now: float) -> float | None:
    """Since it was made, or registered here."""
    return None if volume.hourly_cost is None else volume.hourly_cost * max(0.0, now - volume.created) / 3600


def _orphan_row(orphan: OrphanView, now: float) -> tuple[object, ...]:
    cost = _spent(orphan, now)
    return (
        orphan.name,
        format_ago(orphan.created, now),
        format_duration(now - orphan.created) if orphan.created else None,
        f"{orphan.kind} {orphan.accelerator_type or ''}".strip(),
        "ORPHAN",
        None if orphan.hourly_cost is None else f"${orphan.hourly_cost:,.2f}",
        None if cost is None else f"${cost:,.2f}",
    )


def _spent(orphan: OrphanView, now: float) -> float | None:
    if orphan.hourly_cost is None or orphan.created is None:
        return None
    return orphan.hourly_cost * max(0.0, now - orphan.created) / 3600


def _dollars(cluster: ClusterView, amount: float | None) -> str | None:
    if cluster.simulated:
        return "$0.00 (simulated)"
    return None if amount is None else f"${amount:,.2f}"
