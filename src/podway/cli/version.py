"""`podway version`."""

import click

from podway.version import __version__


@click.command(name="version")
def command() -> None:
    """Show the version."""
    click.echo(f"podway {__version__}")
