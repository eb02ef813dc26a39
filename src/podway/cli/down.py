"""`podway down`: delete clusters and everything they made."""

import click

from podway.cli.asking import proceed
from podway.cli.choosing import chosen, for_each
from podway.cli.options import cluster_names_argument, every_option, yes_option
from podway.server.client import Client


@click.command(name="down")
@cluster_names_argument
@every_option
@yes_option
def command(names: tuple[str, ...], every: bool, yes: bool) -> None:
    """Delete clusters and everything they made.

    CLUSTER may be a name or a pattern such as 'exp-*'. Jobs that run are cancelled; the command returns when nothing is left.
    """
    client = Client()
    clusters = chosen(client, names, every=every)
    if not clusters:
        click.echo("Nothing to take down.")
        return
    proceed(f"Terminating {len(clusters)} cluster(s): {', '.join(c.name for c in clusters)}.", yes=yes)
    for_each(clusters, client.down, client, "GONE", "Taking down", "is gone: nothing of it is left")
