"""`podway cost`: what clusters have cost so far, at the prices they were launched at."""

import time
from collections.abc import Sequence

import click
import msgspec

from podway.cli.options import output_option
from podway.cli.tables import table
from podway.quantities import format_ago, format_count, format_duration
from podway.server.api import ClusterView, StrayView
from podway.server.client import Client

HEADERS = ("NAME", "LAUNCHED", "DURATION", "RESOURCES", "STATUS", "COST/hr", "COST (est.)")


@click.command(name="cost")
@click.option(
    "--days",
    type=click.FloatRange(min=0),
    default=30,
    show_default=True,
    help="How far back to show clusters that are gone.",
)
@output_option
def command(days: float, output: str) -> None:
    """Show what clusters cost, the gone ones too.

    Estimated from published prices and the time hosts were up, each stretch at the price of the place it was in. `-` is unknown;
    a simulated cluster costs nothing. Resources that no cluster accounts for are listed as STRAY, from when they were made.
    """
    now = time.time()
    client = Client()
    clusters = client.clusters(past=now - days * 86400)
    strays = client.strays(look=False).strays
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(clusters)))
    elif not clusters and not strays:
        click.echo("No existing clusters.")
    else:
        click.echo(page(clusters, now, strays))


def page(clusters: list[ClusterView], now: float, strays: Sequence[StrayView] = ()) -> str:
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
    rows += [_stray_row(stray, now) for stray in strays]
    known = [cluster.cost for cluster in clusters if cluster.cost is not None and not cluster.simulated]
    unknown = sum(1 for cluster in clusters if cluster.cost is None and not cluster.simulated)
    spent = sum(known) + sum(_spent(stray, now) or 0.0 for stray in strays)
    total = f"Total: ${spent:,.2f}" + (f", and {unknown} at an unknown price" if unknown else "")
    return f"{table(HEADERS, rows)}\n\n{_billing(clusters, strays)}\n{total}"


def _billing(clusters: list[ClusterView], strays: Sequence[StrayView]) -> str:
    """What costs money at this moment."""
    up = [cluster for cluster in clusters if cluster.up_since and cluster.state != "GONE" and not cluster.simulated]
    rates = [cluster.hourly_cost for cluster in up] + [stray.hourly_cost for stray in strays if stray.hourly_cost != 0]
    if not rates:
        return "Nothing is billing now."
    unknown = sum(1 for rate in rates if rate is None)
    sums = f"${sum(rate or 0.0 for rate in rates):,.2f}/h" + (f", and {unknown} at an unknown price" if unknown else "")
    return f"Billing now: {sums} ({format_count(len(up), 'cluster')}, {format_count(len(rates) - len(up), 'stray')})"


def _stray_row(stray: StrayView, now: float) -> tuple[object, ...]:
    cost = _spent(stray, now)
    return (
        stray.name,
        format_ago(stray.created, now),
        format_duration(now - stray.created) if stray.created else None,
        f"{stray.kind} {stray.accelerator_type or ''}".strip(),
        "STRAY",
        None if stray.hourly_cost is None else f"${stray.hourly_cost:,.2f}",
        None if cost is None else f"${cost:,.2f}",
    )


def _spent(stray: StrayView, now: float) -> float | None:
    if stray.hourly_cost is None or stray.created is None:
        return None
    return stray.hourly_cost * max(0.0, now - stray.created) / 3600


def _dollars(cluster: ClusterView, amount: float | None) -> str | None:
    if cluster.simulated:
        return "$0.00 (simulated)"
    return None if amount is None else f"${amount:,.2f}"
