"""`podway ssh`: a shell on one host, or one command there."""

import os
from typing import NoReturn

import click

from podway.cli.options import cluster_argument
from podway.cli.quoting import command_text
from podway.errors import UserError
from podway.server.client import Client


@click.command(name="ssh")
@cluster_argument
@click.option(
    "-w", "--worker", type=click.IntRange(min=0), metavar="N", default=0, show_default=True, help="Rank of the host."
)
@click.argument("command", nargs=-1, metavar="[-- COMMAND]...")
def command(cluster: str, worker: int, command: tuple[str, ...]) -> None:
    """Open a shell on a host of a cluster.

    The shell has the environment a job on that host has. With a COMMAND, runs that and exits with its code.
    """
    open_shell(Client(), cluster, worker, command_text(command) if command else None)


def open_shell(client: Client, cluster: str, worker: int, command: str | None) -> NoReturn:
    """Become a shell on a host, or one command there."""
    how = client.shell(cluster, worker, command)
    if how.by_ssh and not client.own_server:
        from podway.cli.ssh_names import write_team_entry  # so that `ssh NAME` works from here on

        write_team_entry(client.cluster(cluster))
    argv = how.argv
    if how.cwd is not None:
        os.chdir(how.cwd)
    try:
        os.execvpe(argv[0], argv, {**os.environ, **how.env})
    except FileNotFoundError:
        raise UserError(
            f"{argv[0]} is not installed on this machine", f"install {argv[0]}, then run the command again"
        ) from None
