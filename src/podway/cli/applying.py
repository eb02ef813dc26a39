"""Applying a service file, from the file to replicas that answer.

1. files go up, and the server is asked what it would do: make the service, change it in place, or roll to a new revision;
2. the properties, the differences and the offers are shown, and the user confirms at a terminal;
3. the service is applied: from here on everything goes on without this command;
4. its events are shown until it is as the file says, or has failed.
"""

import time

import click
import msgspec

from podway.cli.confirmation import proceed
from podway.cli.launching import Interaction, offers_page, show_notes
from podway.cli.screen import LAST, MORE, Screen
from podway.cli.tables import table
from podway.errors import UserError
from podway.launch_options import LaunchOptions, LaunchRequest
from podway.quantities import format_count
from podway.server.client import Client
from podway.server.service_api import ServicePreviewReply, ServiceView
from podway.server.uploading import upload
from podway.task.task import Scaling, ServiceSpec, Task

POLL_S = 0.3
FAILED_CODE = 100
_LONGEST_VALUE = 60


def apply_service(task: Task, options: LaunchOptions, interaction: Interaction, *, canary: float | None = None) -> int:
    """Run the whole; the exit code."""
    assert task.service is not None
    client = Client()
    with Screen(err=interaction.json or interaction.dryrun) as screen:
        show_notes(task)
        request = LaunchRequest(task=task, options=options)
        if not interaction.dryrun:
            request = msgspec.structs.replace(request, files=upload(client, screen, task))
        shown = client.preview_service(request)
        _show(screen, task.service, shown)
        if interaction.dryrun:
            plan = {name: one.request for name, one in shown.groups.items()} if shown.groups else {}
            if not shown.groups and shown.launch is not None:
                plan = shown.launch.request
            click.echo(msgspec.json.format(msgspec.json.encode(plan)))
            return 0
        if shown.change != "none" or canary is not None:
            proceed(_question(shown, canary), yes=interaction.yes)
        reply = client.apply_service(request, canary=canary)
        screen.step(_doing(reply.change, shown.name, canary))
        code = 0 if interaction.detach else follow_service(client, screen, shown.name)
        found = client.service(shown.name)
        screen.line(summary(found))
    if interaction.json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
    return code


def _show(screen: Screen, spec: ServiceSpec, shown: ServicePreviewReply) -> None:
    previews = list(shown.groups.values()) or [one for one in (shown.launch,) if one is not None]
    for note in dict.fromkeys(note for one in previews for note in one.notes):
        click.echo(f"Note: {note}", err=True)
    if shown.change == "create":
        screen.line(_properties(shown.name, spec))
    elif shown.differences:
        rows = [
            (one.path, _short(one.old), _short(one.new), "new revision" if one.rolls else "in place")
            for one in shown.differences
        ]
        screen.line(f"Service {shown.name} exists. The file says otherwise:")
        screen.line(table(("PROPERTY", "NOW", "FILE", "CHANGED"), rows))
    else:
        screen.line(f"Service {shown.name} is as the file says.")
    for name, one in shown.groups.items():
        screen.line(f"Offers for group {name}:")
        screen.line(offers_page(one))
    if shown.launch is not None and not shown.groups:
        screen.line(offers_page(shown.launch))


def _replicas_text(scaling: Scaling) -> str:
    if scaling.max_replicas == scaling.min_replicas:
        return str(scaling.min_replicas)
    return f"{scaling.min_replicas}..{scaling.max_replicas}, by {scaling.metric}"


def _properties(name: str, spec: ServiceSpec) -> str:
    replicas = _replicas_text(spec.scaling)
    if spec.groups:
        parts = (f"{one.name}: {_replicas_text(one.scaling)}{' (router)' if one.router else ''}" for one in spec.groups)
        replicas = "; ".join(parts)
    probes = ", ".join(f"{one.method} {one.path}" for one in spec.probes) or f"a connection to port {spec.port}"
    rows = [
        ("Service", name),
        ("Model", spec.model.name if spec.model else None),
        ("Port", spec.port),
        ("Replicas", replicas),
        ("Ready when", probes),
        ("Token required", "yes" if spec.auth else "no"),
    ]
    if spec.tls is not None:
        until = time.strftime("%Y-%m-%d", time.gmtime(spec.tls.expires))
        rows.append(("HTTPS only", f"a certificate for {', '.join(spec.tls.names) or 'no name'}, until {until}"))
    return "\n".join(f" {title:<15} {'-' if value is None else value}" for title, value in rows) + "\n"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_VALUE else f"{line[:_LONGEST_VALUE]}…"


def _question(shown: ServicePreviewReply, canary: float | None) -> str:
    if canary is not None:
        return f"Trying a canary of {shown.name} with {canary:.0%} of the traffic."
    if shown.change == "create":
        return f"Making service {shown.name}."
    how = "in place" if shown.change == "in-place" else "by a rolling update"
    return f"Updating service {shown.name} {how}."


def _doing(change: str, name: str, canary: float | None) -> str:
    if canary is not None:
        return f"Trying a canary of {name}."
    return {
        "create": f"Making service {name}.",
        "roll": f"Rolling service {name} to its new revision.",
        "in-place": f"Service {name} is updated in place.",
    }.get(change, f"Service {name} is unchanged.")


def follow_service(client: Client, screen: Screen, name: str) -> int:
    """Show what happens until the service is as it should be; the exit code. Ctrl-C stops watching, never the service."""
    last = max((event.id for event in client.service_events(name)[:-12]), default=0)
    begun = time.time() - 1.0
    try:
        while True:
            found = client.service(name)
            for event in client.service_events(name, last):
                last = event.id
                if event.time >= begun:
                    screen.line(f"{MORE} {event.text}")
            if found.state in ("FAILED", "GONE", "SHUTTING_DOWN"):
                screen.line(
                    f"{screen.paint('ERROR:', 'red', bold=True)} service {name} is {found.state}: {found.reason}"
                )
                return FAILED_CODE
            if is_settled(found):
                return 0
            if found.stalled:
                screen.line(f"{screen.paint('ERROR:', 'red', bold=True)} {found.reason}")
                return FAILED_CODE
            screen.wait(_waiting(found))
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        screen.wait("")
        raise KeyboardInterrupt(f"Service {name} goes on. See it: podway service status {name}") from None


def is_settled(found: ServiceView) -> bool:
    """Whether all replicas that are wanted take traffic, and no others are there."""
    if found.state == "NO_REPLICA":
        return True
    current = [one for one in found.replicas if one.revision == found.revision and one.state == "READY"]
    others = [one for one in found.replicas if one.revision not in (found.revision, found.canary)]
    canaries = [one for one in found.replicas if one.revision == found.canary and one.state == "READY"]
    if found.canary is not None and not canaries:
        return False
    if found.groups:
        enough = all(one.ready_replicas >= one.target_replicas for one in found.groups)
        return enough and not others and found.state == "READY"
    return len(current) >= max(1, found.target_replicas) and not others


def _waiting(found: ServiceView) -> str:
    ready = sum(one.state == "READY" and one.revision == found.revision for one in found.replicas)
    why = next((f": {one.reason}" for one in found.replicas if one.reason and one.state == "STARTING"), "")
    return f"Waiting for replicas of {found.name} ({ready}/{max(1, found.target_replicas)} ready){why}"


def summary(found: ServiceView) -> str:
    """What to do with it now."""
    lines = [""]
    if found.state == "READY":
        ready = sum(one.state == "READY" for one in found.replicas)
        lines.append(f"Service {found.name} is READY ({format_count(ready, 'replica')}).")
    if found.url and found.state in ("READY", "NO_REPLICA"):
        lines.append(f"It is reached at {found.url}")
        if found.model:
            base = found.url.removesuffix(found.path)
            lines.append(f"Model {found.model} is served at {base}/v1")
    commands = [
        ("see its replicas", f"service status {found.name}"),
        ("follow its output", f"service logs {found.name}"),
        ("change its replicas", f"service scale {found.name} N"),
        ("end it", f"service down {found.name}"),
    ]
    lines.append(f"Service name: {found.name}")
    for index, (what, how) in enumerate(commands):
        branch = LAST if index == len(commands) - 1 else MORE
        lines.append(f"{branch} To {what + ':':<20} podway {how}")
    return "\n".join(lines)


def parse_share(text: str | None) -> float | None:
    """`10%` or `0.1`."""
    if text is None:
        return None
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise UserError(f"--canary {text} is not a share of the traffic", "give one between 1% and 99%, such as 10%")
    return share
