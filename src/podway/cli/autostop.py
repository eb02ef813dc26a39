"""`podway autostop`: when an idle cluster rests."""

import click

from podway.cli.options import cluster_argument
from podway.errors import UserError
from podway.quantities import format_duration
from podway.server.client import Client
from podway.task.task import Autostop

DEFAULT_MINUTES = 5.0


@click.command(name="autostop")
@cluster_argument
@click.option(
    "-i", "--idle-minutes", type=click.FloatRange(min=0), help=f"Minutes without a job.  [default: {DEFAULT_MINUTES:g}]"
)
@click.option("--down", is_flag=True, help="Delete the cluster instead of stopping it.")
@click.option("--cancel", is_flag=True, help="Never by itself.")
def command(cluster: str, idle_minutes: float | None, down: bool, cancel: bool) -> None:
    """Stop or delete a cluster once it is idle."""
    client = Client()
    if cancel:
        if idle_minutes is not None or down:
            raise UserError("--cancel goes with no other option", f"podway autostop {cluster} --cancel")
        client.autostop(cluster, None)
        click.echo(f"Cluster {cluster} stays up until you stop it.")
        return
    minutes = DEFAULT_MINUTES if idle_minutes is None else idle_minutes
    set_to = client.autostop(cluster, Autostop(idle_minutes=minutes, down=down))
    verb = "taken down" if down else "stopped"
    click.echo(f"Cluster {cluster} will be {verb} after {format_duration(minutes * 60)} without a job.")
    if set_to.rests_alone:
        click.echo("While no server runs, its head host does it.")
    elif not set_to.simulated:
        click.echo("The server does it: hosts of this provider have no way to do it by themselves.")
