"""`podway start`: start stopped clusters."""

import click

from podway.cli.choosing import chosen, for_each, raise_all
from podway.cli.confirmation import proceed
from podway.cli.options import cluster_names_argument, every_option, yes_option
from podway.server.client import Client


@click.command(name="start")
@cluster_names_argument
@every_option
@yes_option
def command(names: tuple[str, ...], every: bool, yes: bool) -> None:
    """Start stopped clusters.

    CLUSTER may be a name or a pattern such as 'exp-*'. The command returns when the hosts are up.
    """
    client = Client()
    found = chosen(client, names, every=every)
    found = found._replace(clusters=[cluster for cluster in found.clusters if cluster.state != "UP"])
    if not found.clusters:
        raise_all(found.mistakes)
        click.echo("Nothing to start.")
        return
    proceed(f"Starting {len(found.clusters)} cluster(s): {', '.join(c.name for c in found.clusters)}.", yes=yes)
    for_each(found, client.start, client, "UP", "Starting", "is up")
