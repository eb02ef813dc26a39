"""`podway down`: delete clusters and everything that belongs to them."""

import time

import click

from podway.cli.choosing import chosen, for_each
from podway.cli.confirmation import proceed
from podway.cli.options import cluster_names_argument, every_option, yes_option
from podway.cli.pool_jobs import end_named_pools
from podway.cli.screen import Screen
from podway.cli.service import end_named_services
from podway.cli.status import orphans_page
from podway.errors import UserError
from podway.quantities import format_count
from podway.server.client import Client


@click.command(name="down")
@cluster_names_argument
@every_option
@click.option("-p", "--purge", is_flag=True, help="Delete orphaned resources (those of no cluster) instead.")
@yes_option
def command(names: tuple[str, ...], every: bool, purge: bool, yes: bool) -> None:
    """Delete clusters and everything that belongs to them.

    CLUSTER may be a name or a pattern such as 'exp-*'. Running jobs are cancelled; the command returns when everything is deleted.
    The name of a service or pool ends it with all its replicas or workers. An unknown name does not stop the others. While a provider
    fails, its error is shown and the server keeps trying.
    """
    client = Client()
    if purge:
        if names or every:
            raise UserError("--purge deletes resources of no cluster", "use it without names: podway down --purge")
        _purge(client, yes)
        return
    names = end_named_services(client, names, every=every, yes=yes)
    names = end_named_pools(client, names, every=every, yes=yes)
    found = chosen(client, names, every=every)
    if not found.clusters:
        click.echo("No clusters to delete.")
        return
    proceed(f"Deleting {len(found.clusters)} cluster(s): {', '.join(c.name for c in found.clusters)}.", yes=yes)
    for_each(found, client.down, client, "GONE", "Deleting", "is deleted")


def _purge(client: Client, yes: bool) -> None:
    found = client.orphans()
    click.echo(orphans_page(found, time.time()))
    if not found.orphans:
        return
    volumes = sum(bool(one.volume) for one in found.orphans)
    held = f" {format_count(volumes, 'disk')} of volumes among them, with all that is on them." if volumes else ""
    what = format_count(len(found.orphans), "resource")
    proceed(f"Deleting {what} that belong to no cluster.{held}", yes=yes)
    with Screen() as screen:
        screen.wait("Deleting them")
        left = client.purge()
    if left.orphans or left.unreachable:
        why = (
            "; ".join(f"{provider}: {reason}" for provider, reason in left.unreachable.items())
            or "they are still there"
        )
        raise UserError(f"{format_count(len(left.orphans), 'resource')} could not be deleted: {why}", "run it again")
    click.echo(f"Deleted {format_count(len(found.orphans), 'resource')}; none are left.")
