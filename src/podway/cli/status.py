"""`podway status` (and `podway ps`): existing clusters."""

import time

import click
import msgspec

from podway.cli.choosing import matching
from podway.cli.options import cluster_names_argument, output_option
from podway.cli.tables import table
from podway.errors import UserError
from podway.quantities import format_ago, format_count, format_duration
from podway.server.api import ClusterView, OrphansReply
from podway.server.client import Client
from podway.task.task import Autostop

HEADERS = ("NAME", "INFRA", "RESOURCES", "STATUS", "AUTOSTOP", "LAUNCHED")
ORPHAN_HEADERS = ("RESOURCE", "KIND", "INFRA", "TPU", "STATUS", "MADE")
LESS_IMPORTANT = ("HOSTS", "USER", "HEAD_IP", "LAUNCHED", "AUTOSTOP", "INFRA", "JOBS", "REASON", "RESOURCES")
MORE_HEADERS = ("USER", "HOSTS", "HEAD_IP", "JOBS", "REASON")


@click.command(name="status")
@cluster_names_argument
@output_option
@click.option("-r", "--refresh", is_flag=True, help="Also ask every provider for orphaned resources.")
@click.option("-a", "--all", "every", is_flag=True, help="Also show deleted clusters.")
@click.option("--ip", is_flag=True, help="Show only the address of the first host of CLUSTER.")
@click.option(
    "-v", "--verbose", is_flag=True, help="Also show owner, hosts, unfinished jobs and the reason for the status."
)
def command(names: tuple[str, ...], output: str, refresh: bool, every: bool, ip: bool, verbose: bool) -> None:
    """Show clusters.

    CLUSTER may be a name or a pattern such as 'exp-*'; without it, all are shown.
    """
    client = Client()
    overview = client.overview(1.0 if every else None)
    clusters = overview.clusters
    if names:
        clusters = matching(clusters, names)
    if ip:
        _show_address(clusters, names)
        return
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(clusters)))
    elif not clusters:
        click.echo("No existing clusters.")
    else:
        click.echo(page(clusters, time.time(), verbose))
    if overview.services and output != "json" and not names:
        _show_services(client)
    if overview.schedules and output != "json" and not names:
        _show_schedules(client)
    if refresh:
        click.echo(orphans_page(client.orphans(), time.time()), err=output == "json")
    elif overview.orphans:
        click.echo(
            f"{format_count(overview.orphans, 'resource')} belong to no cluster. List them: podway status --refresh",
            err=True,
        )


def _show_address(clusters: list[ClusterView], names: tuple[str, ...]) -> None:
    if len(names) != 1 or len(clusters) != 1:
        raise click.UsageError("--ip needs the name of one cluster.")
    address = _address(clusters[0])
    if address is None:
        hint = f"see: podway status -v {clusters[0].name}"
        raise UserError(f"{clusters[0].name} has no hosts now: it is {clusters[0].state}", hint)
    click.echo(address)


def _show_services(client: Client) -> None:
    """Those there are, below the clusters that their replicas are."""
    from podway.cli.services import show  # most people have none

    click.echo("\nServices")
    show(client.services(), "table", verbose=False)


def _show_schedules(client: Client) -> None:
    """Runs that start by the clock, and when."""
    from podway.cli.schedule import schedules_page  # most people have none

    click.echo("\nSchedules")
    click.echo(schedules_page(client.schedules()))


def orphans_page(found: OrphansReply, now: float) -> str:
    """Orphaned resources, and providers that could not be reached."""
    lines = [f"Could not reach {provider}: {why}" for provider, why in found.unreachable.items()]
    if not found.orphans:
        return "\n".join(["No orphaned resources.", *lines])
    rows = [
        (
            orphan.name,
            f"{orphan.kind} of volume {orphan.volume}" if orphan.volume else orphan.kind,
            f"{orphan.provider}/{orphan.zone}" if orphan.zone else orphan.provider,
            orphan.accelerator_type,
            orphan.condition,
            format_ago(orphan.created, now),
        )
        for orphan in found.orphans
    ]
    title = "Resources that belong to no cluster (delete them with: podway down --purge)"
    return "\n".join([title, table(ORPHAN_HEADERS, rows), *lines])


def page(clusters: list[ClusterView], now: float, verbose: bool = False) -> str:
    """The table."""
    rows = []
    for cluster in clusters:
        row = (
            cluster.name,
            cluster.infra,
            cluster.resources,
            f"{cluster.state} (recovering)" if cluster.recovering else cluster.state,
            autostop_text(cluster.autostop),
            format_ago(cluster.created, now),
        )
        rows.append(row + (_more(cluster) if verbose else ()))
    waiting = [
        f"{one.name} waits: {one.reason}" for one in clusters if one.state == "INIT" and one.reason and not verbose
    ]
    return "\n".join([table(HEADERS + (MORE_HEADERS if verbose else ()), rows, drop=LESS_IMPORTANT), *waiting])


def _more(cluster: ClusterView) -> tuple[object, ...]:
    return cluster.user, cluster.order.hosts, _address(cluster), cluster.open_jobs, cluster.reason or None


def _address(cluster: ClusterView) -> str | None:
    head = cluster.hosts[0] if cluster.hosts else None
    return (head.external_address or head.address) if head else None


def autostop_text(rest: Autostop | None) -> str | None:
    """`10m`, `1h (down)`."""
    if rest is None:
        return None
    return f"{format_duration(rest.idle_minutes * 60)}{' (down)' if rest.down else ''}"
