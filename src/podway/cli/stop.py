"""`podway stop`: stop hosts and keep their disks."""

import click

from podway.cli.choosing import chosen, for_each, raise_all
from podway.cli.confirmation import proceed
from podway.cli.options import cluster_names_argument, every_option, yes_option
from podway.cli.service import end_named_services
from podway.server.client import Client


@click.command(name="stop")
@cluster_names_argument
@every_option
@yes_option
def command(names: tuple[str, ...], every: bool, yes: bool) -> None:
    """Stop clusters and keep their disks.

    CLUSTER may be a name or a pattern such as 'exp-*'. Jobs that run are cancelled; the command returns when the hosts are
    stopped. A TPU slice of several hosts cannot be stopped by the cloud: take it down instead. The name of a service ends the
    service (as in dstack).
    """
    client = Client()
    names = end_named_services(client, names, every=False, yes=yes)
    found = chosen(client, names, every=every)
    found = found._replace(clusters=[cluster for cluster in found.clusters if cluster.state != "STOPPED"])
    if not found.clusters:
        raise_all(found.mistakes)
        click.echo("Nothing to stop.")
        return
    proceed(f"Stopping {len(found.clusters)} cluster(s): {', '.join(c.name for c in found.clusters)}.", yes=yes)
    for_each(found, client.stop, client, "STOPPED", "Stopping", "is stopped; start it again with: podway start {name}")
