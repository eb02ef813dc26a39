"""`podway autostop`: stop or delete an idle cluster automatically."""

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
@click.option("--cancel", is_flag=True, help="Turn autostop off.")
def command(cluster: str, idle_minutes: float | None, down: bool, cancel: bool) -> None:
    """Stop or delete a cluster once it is idle."""
    client = Client()
    if cancel:
        if idle_minutes is not None or down:
            raise UserError("--cancel cannot be combined with other options", f"podway autostop {cluster} --cancel")
        client.autostop(cluster, None)
        click.echo(f"Cluster {cluster} stays up until you stop it.")
        return
    minutes = DEFAULT_MINUTES if idle_minutes is None else idle_minutes
    set_to = client.autostop(cluster, Autostop(idle_minutes=minutes, down=down))
    verb = "taken down" if down else "stopped"
    click.echo(f"Cluster {cluster} will be {verb} after {format_duration(minutes * 60)} of idle time.")
    if set_to.rests_alone:
        click.echo("Its head host does this even while no server runs.")
    elif not set_to.simulated:
        click.echo("Only the server does this: keep it running. Hosts of this provider cannot stop themselves.")
