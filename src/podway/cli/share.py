"""`podway share`: let somebody else view or use a cluster or a service."""

from typing import Literal

import click

from podway.cli.options import complete_clusters
from podway.errors import UserError
from podway.server.client import Client


@click.command(name="share")
@click.argument("name", shell_complete=complete_clusters)
@click.argument("user")
@click.option(
    "--view",
    is_flag=True,
    help="Only to see it and, of a cluster, its jobs and their logs; without it, also to use it.",
)
@click.option("--remove", is_flag=True, help="Take it back.")
def command(name: str, user: str, view: bool, remove: bool) -> None:
    """Let another user of the server view or use a cluster or service.

    Who may use a cluster can queue jobs, run commands and open shells on it; who may use a service can send it requests, with
    their own token or keys. Changing, stopping and deleting it stays with you, your project and administrators.

    NAME is a cluster, or a service where there is no cluster of that name.
    """
    if view and remove:
        raise click.UsageError("Give --view or --remove, not both.")
    kind = _share(Client(), name, user, None if remove else "view" if view else "use")
    if remove:
        click.echo(f"{kind.capitalize()} {name} is no longer shared with {user}.")
    else:
        click.echo(f"{user} may {'view' if view else 'use'} {kind} {name}.")


def _share(client: Client, name: str, user: str, right: Literal["view", "use"] | None) -> str:
    """What it was that is shared now."""
    try:
        client.share(name, user, right)
        return "cluster"
    except UserError as error:
        if error.status != 404:
            raise
    try:
        client.share_service(name, user, right)
        return "service"
    except UserError as error:
        if error.status != 404:
            raise
    raise UserError(f"there is no cluster and no service {name!r}", "see: podway status, podway services", status=404)
