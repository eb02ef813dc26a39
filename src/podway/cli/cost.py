"""`podway cost`: what clusters have cost so far, at the prices they were launched at."""

import time

import click
import msgspec

from podway.cli.options import output_option
from podway.cli.tables import table
from podway.cli.words import ago, duration
from podway.server.api import ClusterView
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

    Estimated from published prices and the time hosts were up. `-` is unknown; a simulated cluster costs nothing.
    """
    now = time.time()
    clusters = Client().clusters(past=now - days * 86400)
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(clusters)))
    elif not clusters:
        click.echo("No existing clusters.")
    else:
        click.echo(page(clusters, now))


def page(clusters: list[ClusterView], now: float) -> str:
    """The table, latest first, and the sum of what is known."""
    rows = [
        (
            cluster.name,
            ago(cluster.created, now),
            duration(cluster.billed_s),
            cluster.resources,
            "TERMINATED" if cluster.state == "GONE" else cluster.state,
            _dollars(cluster, cluster.hourly_cost),
            _dollars(cluster, cluster.cost),
        )
        for cluster in sorted(clusters, key=lambda cluster: -cluster.created)
    ]
    known = [cluster.cost for cluster in clusters if cluster.cost is not None and not cluster.simulated]
    unknown = sum(1 for cluster in clusters if cluster.cost is None and not cluster.simulated)
    total = f"Total: ${sum(known):,.2f}" + (f", and {unknown} at an unknown price" if unknown else "")
    return f"{table(HEADERS, rows)}\n\n{total}"


def _dollars(cluster: ClusterView, amount: float | None) -> str | None:
    if cluster.simulated:
        return "$0.00 (simulated)"
    return None if amount is None else f"${amount:,.2f}"
