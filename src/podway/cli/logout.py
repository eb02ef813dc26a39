"""`podway logout`: commands go to this machine's own server again."""

import click

from podway.home import home


@click.command(name="logout")
def command() -> None:
    """Log out, and use the server of this machine again.

    The token is forgotten here; an administrator ends it everywhere with: podway server revoke USER
    """
    path = home() / "remote.json"
    if not path.exists():
        click.echo("You are not logged in to a team's server.")
        return
    path.unlink()
    click.echo("Logged out. Commands go to this machine's own server.")
