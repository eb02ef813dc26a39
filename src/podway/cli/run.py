"""`podway run`: a command on every host at once, bypassing the queue (`--worker=all` in other tools)."""

import click

from podway.cli.options import cluster_argument
from podway.cli.quoting import command_text
from podway.cli.screen import Screen
from podway.cli.watching import follow
from podway.errors import UserError
from podway.server.api import ExitView
from podway.server.client import Client

LOST = 255  # what ssh exits with when the connection is lost


@click.command(name="run")
@cluster_argument
@click.argument("command", nargs=-1, required=True)
@click.option("--all-hosts", is_flag=True, help="The default: a command always runs on every host.")
@click.option("--raw", is_flag=True, help="Show lines that several hosts print alike once per host.")
@click.pass_context
def command(ctx: click.Context, cluster: str, command: tuple[str, ...], all_hosts: bool, raw: bool) -> None:
    """Run a command on every host at once, bypassing the queue.

    It does not wait for the chips and does not take them. The exit code is the worst of all hosts.
    Quote a COMMAND that has options of its own, or put it after --.
    """
    client = Client()
    job = client.run(cluster, command_text(command)).job
    if job is None:
        raise UserError(f"cluster {cluster} did not accept the command", f"see: podway status {cluster}")
    with Screen() as screen:
        end = follow(client, screen, cluster, job, raw=raw)
        view = client.job(cluster, job)
        for exit_ in view.exits:
            if worst([exit_]):
                screen.line(f"rank {exit_.rank} {_how(exit_)}")
    ctx.exit(worst(view.exits) or (0 if end.state == "SUCCEEDED" else LOST))


def worst(exits: list[ExitView]) -> int:
    """The highest exit code; a signal counts as in a shell."""
    return max((_code(end) for end in exits), default=0)


def _code(end: ExitView) -> int:
    if end.lost or (end.code is None and end.signal is None):
        return LOST
    return end.code if end.code is not None else 128 + (end.signal or 0)


def _how(end: ExitView) -> str:
    if end.lost:
        return "was lost"
    return f"exited with code {end.code}" if end.signal is None else f"was killed by signal {end.signal}"
