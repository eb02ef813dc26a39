"""`podway service VERB NAME`: look at one service, and change it."""

import re
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import click
import msgspec

from podway.cli import services
from podway.cli.applying import apply_service, follow_service, parse_share, summary
from podway.cli.confirmation import proceed
from podway.cli.launching import Interaction
from podway.cli.options import CommandGroup, output_option, yes_option
from podway.cli.screen import Screen
from podway.cli.task_options import task_options
from podway.cli.watching import follow
from podway.errors import UserError
from podway.launch_options import LaunchOptions
from podway.server.client import Client, LogKeywords
from podway.server.service_api import ReplicaView, ServiceView
from podway.task.environment import Overrides
from podway.task.read import read_task, read_task_text
from podway.task.task import Task

F = TypeVar("F", bound=Callable[..., Any])
RANGE = re.compile(r"(\d{1,4})(?:\.\.(\d{1,4}))?")
POLL_S = 0.3
EVENTS_SHOWN = 10


@click.group(name="service", cls=CommandGroup)
def command() -> None:
    """Look at a service, and change it."""


def read_file(path: str, overrides: Overrides) -> Task:
    """The service of a file (- for standard input)."""
    if path == "-":
        task = read_task_text(sys.stdin.buffer.read(), overrides=overrides)
    else:
        task = read_task(path, overrides=overrides)
    if task.service is None:
        raise UserError(f"{path}: not a service", "launch it: podway launch FILE")
    return task


@command.command()
@click.argument("name")
@click.option("--past", is_flag=True, help="Also replicas that ended.")
@output_option
def status(name: str, past: bool, output: str) -> None:
    """Show a service, its replicas and what happened last."""
    client = Client()
    found = client.service(name, past=past)
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
        return
    services.show([found], output, verbose=True)
    events = client.service_events(name)[-EVENTS_SHOWN:]
    click.echo("\nLatest events:")
    for event in events:
        click.echo(f"  {time.strftime('%H:%M:%S', time.localtime(event.time))}  {event.text}")


@command.command()
@click.argument("name")
@click.argument("replica", type=click.IntRange(min=1), required=False)
@click.option("--follow/--no-follow", "keep", default=True, help="Follow until the replica ends.  [default: follow]")
@click.option(
    "--tail", type=click.IntRange(min=0), metavar="N", default=0, help="Only the last N lines so far; 0: all."
)
@click.option("--timestamps", is_flag=True, help="Prefix each line with its time (UTC).")
def logs(name: str, replica: int | None, keep: bool, tail: int, timestamps: bool) -> None:
    """Show the output of a replica: REPLICA by its number, or the newest that takes traffic."""
    show_logs(Client(), name, replica, LogKeywords(follow=keep, tail=tail, timestamps=timestamps))


def show_logs(client: Client, name: str, number: int | None, keywords: LogKeywords) -> None:
    """Of one replica."""
    found = pick_replica(client.service(name, past=True), number)
    with Screen() as screen:
        screen.wait(f"Waiting for output of replica {found.number} of {name}")
        follow(client, screen, found.cluster, 1, **keywords)


def pick_replica(found: ServiceView, number: int | None) -> ReplicaView:
    """By number, or the newest that takes traffic, or the newest."""
    if number is not None:
        known = next((one for one in found.replicas if one.number == number), None)
        if known is None:
            raise UserError(
                f"service {found.name} has no replica {number}", f"see: podway service status {found.name} --past"
            )
        return known
    ready = [one for one in found.replicas if one.state == "READY"]
    living = [one for one in found.replicas if one.ended is None]
    best = ready or living or found.replicas
    if not best:
        raise UserError(f"service {found.name} has no replica yet", "try again in a moment")
    return best[-1]


@command.command()
@click.argument("name")
@click.argument("replicas", metavar="N|MIN..MAX")
@click.option("-g", "--group", metavar="GROUP", help="Of which group, in a service with groups of replicas.")
@click.option("-d", "--detach", is_flag=True, help="Return at once.")
@output_option
@click.pass_context
def scale(ctx: click.Context, name: str, replicas: str, group: str | None, detach: bool, output: str) -> None:
    """Keep another number of replicas, or a range for the autoscaler."""
    given = RANGE.fullmatch(replicas)
    if given is None:
        raise UserError(f"{replicas!r} is not a number of replicas", "give 3, or a range such as 1..4")
    low = int(given[1])
    client = Client()
    client.scale_service(name, low, int(given[2]) if given[2] else low, group)
    _finish(ctx, client, name, detach=detach, output=output)


@command.command()
@click.argument("service", metavar="[NAME]", required=False)
@click.argument("file", required=False)
@click.option("-f", "--file", "path", metavar="FILE", help="The service file; - reads it from stdin.")
@click.option("--canary", metavar="SHARE", help="Try the new revision with this share of the traffic (10%).")
@click.option("--promote", is_flag=True, help="Give the canary all the traffic.")
@click.option("--rollback", is_flag=True, help="From the canary, or to the revision before.")
@click.option("--revision", type=click.IntRange(min=1), metavar="N", help="With --rollback: to this revision.")
@click.option("-d", "--detach", is_flag=True, help="Return at once.")
@task_options
@yes_option
@output_option
@click.pass_context
def update(
    ctx: click.Context,
    service: str | None,
    file: str | None,
    path: str | None,
    canary: str | None,
    promote: bool,
    rollback: bool,
    revision: int | None,
    detach: bool,
    overrides: Overrides,
    yes: bool,
    output: str,
) -> None:
    """Update a service from a file, as `podway apply` does; or handle its canary and revisions.

    With --canary and no file, the canary there is gets another share of the traffic.
    """
    path = path or file
    share = parse_share(canary)
    if path is not None:
        if promote or rollback:
            raise UserError(
                "a file is not needed to promote or roll back", f"podway service update {service} --promote"
            )
        options = LaunchOptions(cluster=service)
        interaction = Interaction(yes=yes, detach=detach, json=output == "json")
        ctx.exit(apply_service(read_file(path, overrides), options, interaction, canary=share))
    if service is None or (share is not None) + promote + rollback != 1:
        raise click.UsageError("Give NAME with -f FILE, --canary SHARE, --promote or --rollback.")
    client = Client()
    if rollback:
        client.rollback_service(service, revision)
    else:
        client.set_canary(service, share)
    _finish(ctx, client, service, detach=detach, output=output)


@command.command()
@click.argument("name")
@click.argument("revision", type=click.IntRange(min=1), required=False)
@click.option("-d", "--detach", is_flag=True, help="Return at once.")
@output_option
@click.pass_context
def rollback(ctx: click.Context, name: str, revision: int | None, detach: bool, output: str) -> None:
    """Go back to REVISION; without it, from the canary, or to the revision before."""
    client = Client()
    client.rollback_service(name, revision)
    _finish(ctx, client, name, detach=detach, output=output)


@command.command()
@click.argument("names", nargs=-1, metavar="NAME...")
@click.option("-a", "--all", "every", is_flag=True, help="All services.")
@yes_option
def down(names: tuple[str, ...], every: bool, yes: bool) -> None:
    """End services and delete all their replicas."""
    client = Client()
    if bool(names) == every:
        raise click.UsageError("Give the names of services, or --all.")
    chosen = [one.name for one in client.services()] if every else list(names)
    end_services(client, chosen, yes=yes)


def end_services(client: Client, names: list[str], *, yes: bool) -> None:
    """All of them, and wait until nothing is left."""
    if not names:
        click.echo("No services to end.")
        return
    for name in names:
        if client.service(name).state == "GONE":
            raise UserError(f"there is no service {name!r}", "see: podway services", status=404)
    proceed(f"Ending {len(names)} service(s): {', '.join(names)}.", yes=yes)
    for name in names:
        client.end_service(name)
    with Screen() as screen:
        for name in names:
            screen.wait(f"Ending service {name}")
            while client.service(name).state != "GONE":
                time.sleep(POLL_S)
            screen.done(f"Service {name} is ended.")


def end_named_services(client: Client, names: tuple[str, ...], *, every: bool, yes: bool) -> tuple[str, ...]:
    """Of names that a command for clusters was given: end those that are services, and answer the others."""
    if bool(names) == every:
        return names  # a mistake, which the command tells
    known = {one.name for one in services.existing_services(client)}
    if known and names:
        known -= {one.name for one in client.clusters()}
    chosen = sorted(known) if every else [name for name in names if name in known]
    if chosen:
        end_services(client, chosen, yes=yes)
    left = tuple(name for name in names if name not in chosen)
    if names and not left:
        raise click.exceptions.Exit(0)
    return left


def _finish(ctx: click.Context, client: Client, name: str, *, detach: bool, output: str) -> None:
    """Follow the change to its end, unless detached."""
    with Screen(err=output == "json") as screen:
        code = 0 if detach else follow_service(client, screen, name)
        found = client.service(name)
        screen.line(summary(found))
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
    ctx.exit(code)
