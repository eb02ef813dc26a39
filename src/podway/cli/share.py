"""`podway share`: let somebody else view or use a cluster."""

import click

from podway.cli.options import cluster_argument
from podway.server.client import Client


@click.command(name="share")
@cluster_argument
@click.argument("user")
@click.option(
    "--view", is_flag=True, help="Only to see it, its jobs and their logs; without it, also to run jobs on it."
)
@click.option("--remove", is_flag=True, help="Take it back.")
def command(cluster: str, user: str, view: bool, remove: bool) -> None:
    """Let another user of the server view or use a cluster of yours.

    They can queue jobs, run commands and open shells on it; stopping and deleting it stays with you, your project and
    administrators.
    """
    if view and remove:
        raise click.UsageError("Give --view or --remove, not both.")
    Client().share(cluster, user, None if remove else "view" if view else "use")
    if remove:
        click.echo(f"Cluster {cluster} is no longer shared with {user}.")
    else:
        click.echo(f"{user} may {'view' if view else 'use'} cluster {cluster}.")
