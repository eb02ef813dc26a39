"""SkyPilot's `sky serve up|update|status|down|logs`, by habit: the same things are `podway apply` and `podway service` here."""

import click

from podway.cli import services
from podway.cli.applying import apply_service
from podway.cli.launching import Interaction
from podway.cli.options import CommandGroup, output_option, yes_option
from podway.cli.service import command as service
from podway.cli.service import read_file
from podway.cli.task_options import task_options
from podway.launch_options import LaunchOptions
from podway.server.client import Client
from podway.task.environment import Overrides

VERBS = ("up", "update", "status", "down", "logs")


@click.group(name="serve", cls=CommandGroup)
def command() -> None:
    """Services, as `sky serve` has them; `podway serve MODEL` serves a model here instead."""


@command.command()
@click.argument("file")
@click.option("--service-name", help="Name of the service; that of the file by default.")
@click.option("-d", "--detach", is_flag=True, help="Return at once.")
@task_options
@yes_option
@output_option
@click.pass_context
def up(
    ctx: click.Context, file: str, service_name: str | None, detach: bool, overrides: Overrides, yes: bool, output: str
) -> None:
    """Make a service from FILE, as `podway apply -f FILE` does."""
    interaction = Interaction(yes=yes, detach=detach, json=output == "json")
    ctx.exit(apply_service(read_file(file, overrides), LaunchOptions(cluster=service_name), interaction))


@command.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@output_option
def status(names: tuple[str, ...], output: str) -> None:
    """Show services and their replicas."""
    client = Client()
    found = [client.service(name) for name in names] if names else client.services()
    services.show(found, output, verbose=True)


for _verb in ("update", "down", "logs"):
    command.add_command(service.commands[_verb])
