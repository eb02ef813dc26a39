"""`podway group VERB`, and the launch of a file whose tasks run together."""

import time

import click
import msgspec

from podway.cli.confirmation import proceed
from podway.cli.launching import Interaction, offers_page, show_notes
from podway.cli.options import CommandGroup, output_option, yes_option
from podway.cli.screen import LAST, MORE, Screen
from podway.cli.tables import table
from podway.cli.watching import ProgressPrinter, exit_code, follow, show_end
from podway.errors import UserError
from podway.launch_options import LaunchOptions, LaunchRequest
from podway.quantities import format_ago, format_count
from podway.server.client import Client
from podway.server.group_api import GroupTaskBody, GroupView
from podway.server.uploading import upload
from podway.task.job_groups import GroupSpec, GroupTask

POLL_S = 0.3


@click.group(name="group", cls=CommandGroup)
def command() -> None:
    """Look at job groups, and cancel them.

    A job group is a file of several tasks that run together, each on a cluster of its own: podway launch FILE.
    """


@command.command(name="status")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@output_option
def status(names: tuple[str, ...], output: str) -> None:
    """Show job groups and their tasks."""
    client = Client()
    found = [client.group(name) for name in names] if names else client.groups()
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
        return
    click.echo("\n\n".join(map(_page, found)) if found else "No existing job groups.")


def _page(group: GroupView) -> str:
    title = f"Job group {group.name}: {group.state}, launched {format_ago(group.created, time.time())}"
    rows = [
        (one.name, one.state, "yes" if one.primary else "no", one.cluster, one.job, one.reason or None)
        for one in group.tasks
    ]
    shown = table(("TASK", "STATUS", "PRIMARY", "CLUSTER", "JOB", "REASON"), rows, drop=("REASON", "PRIMARY", "JOB"))
    return "\n".join(filter(None, (title, group.reason, shown)))


@command.command(name="cancel")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@yes_option
def cancel(names: tuple[str, ...], yes: bool) -> None:
    """Cancel every job of a group; their clusters go."""
    proceed(f"Cancelling all jobs of {', '.join(names)}.", yes=yes)
    client = Client()
    for name in names:
        client.cancel_group(name)
        click.echo(f"Job group {name} is being cancelled.")


def launch_group(spec: GroupSpec, options: LaunchOptions, interaction: Interaction) -> int:
    """Show what each task would run on, ask, launch all, and follow the primary ones; the exit code."""
    client = Client()
    with Screen(err=interaction.json or interaction.dryrun) as screen:
        requests = _previewed(client, screen, spec, options)
        if interaction.dryrun:
            click.echo(msgspec.json.format(msgspec.json.encode(requests)).decode())
            return 0
        clusters = format_count(len(spec.tasks), "cluster")
        proceed(f"Launching job group {spec.name!r}: {clusters}, all up before any task starts.", yes=interaction.yes)
        bodies = tuple(
            GroupTaskBody(
                request=msgspec.structs.replace(request, files=upload(client, screen, one.task)),
                primary=one.primary,
                delay_s=one.delay_s,
            )
            for one, request in zip(spec.tasks, requests, strict=True)
        )
        found = client.launch_group(spec.name, bodies)
        screen.step(f"Job group {spec.name} submitted.")
        if not interaction.detach:
            found = _follow(client, screen, spec, interaction)
        screen.line(_useful_commands(found))
    if interaction.json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
    return 0 if interaction.detach else exit_code(found.state)


def _previewed(client: Client, screen: Screen, spec: GroupSpec, options: LaunchOptions) -> list[LaunchRequest]:
    """The launch of each task's cluster. All are at the provider of the first, where they reach each other."""
    requests: list[LaunchRequest] = []
    provider = options.provider
    for one in spec.tasks:
        show_notes(one.task, one.task.name)
        own = LaunchOptions(
            cluster=f"{spec.name}-{one.task.name}",
            project=options.project,
            provider=provider,
            retry_until_up=options.retry_until_up,
        )
        request = LaunchRequest(task=one.task, options=own)
        preview = client.preview(request)
        provider = provider or preview.order.provider
        for note in preview.notes:
            click.echo(f"Note: {one.task.name}: {note}", err=True)
        screen.line(f"Task {one.task.name}{_role(spec, one)}:")
        screen.line(offers_page(preview))
        requests.append(msgspec.structs.replace(request, options=msgspec.structs.replace(own, provider=provider)))
    return requests


def _role(spec: GroupSpec, one: GroupTask) -> str:
    if all(other.primary for other in spec.tasks):
        return ""
    return " (primary)" if one.primary else f" (ends {one.delay_s:g} s after the primary tasks)"


def _follow(client: Client, screen: Screen, spec: GroupSpec, interaction: Interaction) -> GroupView:
    """The output of each primary task in turn, then the end of the group."""
    shown: set[str] = set()
    try:
        while True:
            found = client.group(spec.name)
            if found.state not in ("STARTING", "RUNNING"):
                screen.wait("")
                if found.reason:
                    screen.line(f"{screen.paint('ERROR:', 'red', bold=True)} {found.reason}")
                return found
            due = [one for one in found.tasks if one.primary and one.job is not None and one.name not in shown]
            if found.state == "RUNNING" and due:
                one = due[0]
                shown.add(one.name)
                assert one.job is not None
                screen.step(f"Task {one.name}, on cluster {one.cluster}")
                printer = ProgressPrinter(screen, one.cluster, one.job, waiting_for_cluster=False)
                end = follow(client, screen, one.cluster, one.job, printer, raw=interaction.raw)
                show_end(screen, one.job, end)
                continue
            waiting = "the other tasks to end" if found.state == "RUNNING" else "all hosts of the group"
            screen.wait(f"Waiting for {waiting}")
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        screen.wait("")
        raise KeyboardInterrupt(
            f"Job group {spec.name} goes on. See it: podway group status {spec.name}   Cancel it: podway group cancel {spec.name}"
        ) from None


def _useful_commands(found: GroupView) -> str:
    rows = [("see its tasks", f"group status {found.name}")]
    rows += [(f"see the output of {one.name}", f"logs {one.cluster}") for one in found.tasks]
    rows.append(("cancel all", f"group cancel {found.name}"))
    width = max(len(what) for what, _ in rows) + 1
    lines = [
        f"{LAST if at == len(rows) - 1 else MORE} To {what + ':':<{width}} podway {how}"
        for at, (what, how) in enumerate(rows)
    ]
    return "\n".join([f"Job group {found.name}: {found.state}", *lines])


def refuse_options(cluster: str | None, one_shot: bool, idle: object) -> None:
    """What a group has no use for."""
    if cluster is not None or one_shot or idle is not None:
        raise UserError(
            "each task of a job group has a cluster of its own, which goes with its job",
            "leave -c, -i and --one-shot out",
        )
