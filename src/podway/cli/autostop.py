"""`podway autostop`: stop or delete an idle cluster automatically."""

import time

import click

from podway.cli.options import cluster_argument
from podway.errors import UserError
from podway.quantities import format_duration
from podway.server.api import ClusterView
from podway.server.client import Client
from podway.task.task import Autostop

DEFAULT_MINUTES = 5.0
CONFIRM_S = 30.0


@click.command(name="autostop")
@cluster_argument
@click.option(
    "-i",
    "--idle-minutes",
    type=click.FloatRange(min=0),
    metavar="MINUTES",
    help=f"Minutes without a job.  [default: {DEFAULT_MINUTES:g}]",
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
    if set_to.self_teardown:
        click.echo(_told_to_head(client, set_to))
    elif not set_to.simulated:
        click.echo("Only the server does this: keep it running. Hosts of this provider cannot stop themselves.")


def _told_to_head(client: Client, cluster: ClusterView) -> str:
    """Wait until the head host has confirmed, so that what is said is true."""
    deadline = time.monotonic() + CONFIRM_S
    while cluster.state == "UP" and not cluster.autostop_armed and time.monotonic() < deadline:
        time.sleep(0.2)
        cluster = client.cluster(cluster.name)
    if cluster.autostop_armed:
        return "Its head host does this even while no server runs."
    if cluster.state != "UP":
        return (
            f"The cluster is {cluster.state}: its head host is told once it is up. Until then, keep the server running."
        )
    return "Warning: its head host has not confirmed. While no server runs, nothing will end the cluster."
