"""`podway schedule VERB`: runs that start by the clock."""

import datetime
import time

import click
import msgspec

from podway.cli.confirmation import proceed
from podway.cli.launching import Interaction, show_notes
from podway.cli.options import CommandGroup, output_option, yes_option
from podway.cli.screen import Screen
from podway.cli.tables import table
from podway.launch_options import LaunchOptions, LaunchRequest
from podway.server.client import Client
from podway.server.schedule_api import ScheduleView
from podway.server.uploading import upload
from podway.task.cron import next_time
from podway.task.task import Task

HEADERS = ("NAME", "KIND", "CRON (UTC)", "NEXT", "LAST", "REASON")


@click.group(name="schedule", cls=CommandGroup)
def command() -> None:
    """List and end runs that start by the clock.

    podway apply -f FILE keeps a file with a `schedule`, and replaces the one of the same name.
    """


@command.command(name="list")
@output_option
def list_schedules(output: str) -> None:
    """Show schedules, and when each is due next."""
    found = Client().schedules()
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
        return
    click.echo(schedules_page(found) if found else "No existing schedules.")


@command.command(name="delete")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@yes_option
def delete(names: tuple[str, ...], yes: bool) -> None:
    """End schedules. Runs that they started go on."""
    proceed(f"Ending the schedule of {', '.join(names)}.", yes=yes)
    client = Client()
    for name in names:
        client.delete_schedule(name)
        click.echo(f"Schedule {name} is deleted.")


def schedules_page(found: list[ScheduleView]) -> str:
    """The table of schedules."""
    rows = [
        (
            one.name,
            one.kind,
            "; ".join(one.cron),
            _utc(one.next_at),
            f"{one.last} {_utc(one.last_at)}" if one.last_at is not None else None,
            one.reason or None,
        )
        for one in found
    ]
    return table(HEADERS, rows, drop=("REASON", "KIND", "LAST"))


def apply_schedule(task: Task, options: LaunchOptions, interaction: Interaction) -> None:
    """Keep the run of a file with a schedule, as `podway apply` does."""
    client = Client()
    with Screen(err=interaction.json or interaction.dryrun) as screen:
        show_notes(task)
        due = _utc(next_time(task.schedule, time.time()))
        if interaction.dryrun:
            click.echo(
                f"{options.cluster or task.name or 'the run'} would start at {due}, by {'; '.join(task.schedule)}"
            )
            return
        proceed(f"Keeping {options.cluster or task.name}, to start at {due}.", yes=interaction.yes)
        made = client.put_schedule(LaunchRequest(task=task, options=options, files=upload(client, screen, task)))
    if interaction.json:
        click.echo(msgspec.json.format(msgspec.json.encode(made)))
        return
    click.echo(f"{made.name} starts next at {_utc(made.next_at)}. End the schedule: podway schedule delete {made.name}")


def _utc(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
