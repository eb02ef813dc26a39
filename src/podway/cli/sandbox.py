"""`podway sandbox`: a pretend TPU cloud on this machine, to try Podway, gcloud or own scripts on.

`up` starts it and leaves it running; `env` prints what makes clients use it; the rest look at it or make things happen in it.
It keeps its files in PODWAY_HOME/sandbox.
"""

import json
import os
import shlex
import signal
import time
from pathlib import Path
from typing import Any

import click

from podway.cli.options import CommandGroup, output_option
from podway.cli.tables import table
from podway.errors import UserError
from podway.extras import require
from podway.home import home
from podway.sandbox.running import END_S, Running, SandboxError, environment_names, find_sandbox, start_sandbox

KINDS = ("error", "delay", "slow", "drop", "lost", "lro")
UNLIMITED = "unlimited"


def _amount(ctx: click.Context, parameter: click.Parameter, value: str) -> int | None:
    """A number that is not negative; None for `unlimited`."""
    if value == UNLIMITED:
        return None
    if not value.isdecimal():
        raise click.BadParameter(f"{value!r} is neither a number nor {UNLIMITED!r}.")
    return int(value)


zone_option = click.option("--zone", help="Only in this zone.")
worker_option = click.option(
    "--worker", "workers", type=click.IntRange(0), metavar="N", multiple=True, help="Only this worker; may be repeated."
)


@click.group(name="sandbox", cls=CommandGroup)
def command() -> None:
    """A pretend TPU cloud on this machine.

    \b
      podway sandbox up
      eval "$(podway sandbox env)"
      podway launch --infra gcp --tpus v6e-16 'hostname'
      gcloud compute tpus tpu-vm list
      podway sandbox down
    """


@command.command()
@click.option(
    "--hosts",
    type=click.Choice(["auto", "netns", "loopback", "none"]),
    default="auto",
    show_default=True,
    help="What workers are: confined machines (root only), sshds on loopback, nothing.",
)
@click.option(
    "--speed",
    type=click.FloatRange(0, min_open=True),
    metavar="N",
    default=60.0,
    show_default=True,
    help="How much faster than in a real cloud things happen.",
)
@click.option(
    "--port", type=click.IntRange(0, 65535), metavar="PORT", default=0, help="For HTTP.  [default: any free one]"
)
@click.option("--project", default="sandbox", show_default=True, help="The project that clients are told to use.")
@click.option("--zone", default="us-east5-b", show_default=True, help="The zone that clients are told to use.")
@click.option(
    "--share",
    type=click.Path(exists=True, file_okay=False, resolve_path=True),
    multiple=True,
    help="A directory of this machine that workers may read, at the same place; may be repeated.",
)
def up(hosts: str, speed: float, port: int, project: str, zone: str, share: tuple[str, ...]) -> None:
    """Start it, if it does not run."""
    require("sandbox", "podway sandbox")
    running = find_sandbox(_place())
    if running is None:
        options = ["--hosts", hosts, "--speed", str(speed), "--port", str(port), "--project", project, "--zone", zone]
        options += [word for path in share for word in ("--share", path)]
        try:
            running, _ = start_sandbox(_place(), *options)
        except SandboxError as error:
            raise UserError(f"the sandbox did not start: {error}", f"see {_place() / 'sandbox.log'}") from None
    click.echo(f"The sandbox runs at {running.rest} (gRPC {running.grpc}), its workers are: {running.machines}.")
    if running.note:
        click.echo(f"Note: {running.note}.")
    click.echo('Use it in this shell:  eval "$(podway sandbox env)"')


@command.command()
def down() -> None:
    """End it, and everything in it."""
    running = find_sandbox(_place())
    if running is None:
        click.echo("No sandbox runs.")
        return
    os.kill(running.pid, signal.SIGTERM)
    deadline = time.monotonic() + END_S
    while find_sandbox(_place()) is not None:
        if time.monotonic() > deadline:
            raise UserError(f"the sandbox (pid {running.pid}) does not end", f"end it yourself: kill -9 {running.pid}")
        time.sleep(0.05)
    click.echo("The sandbox is gone.")
    if os.environ.get("PODWAY_GCP_ENDPOINT") == running.rest:
        click.echo('This shell still has its settings. Undo them:  eval "$(podway sandbox env --unset)"')


@command.command()
@click.option("--unset", is_flag=True, help="Print the line that undoes it; the sandbox may be gone by then.")
def env(unset: bool) -> None:
    """Print the lines that make this shell's gcloud, Podway and scripts use it."""
    if unset:
        click.echo(f"unset {' '.join(environment_names())}")
        return
    running = _running()
    for name, value in running.environment(_place()).items():
        click.echo(f"export {name}={shlex.quote(value)}")


@command.command()
@output_option
def status(output: str) -> None:
    """Show what is in it."""
    about, books = _ask("GET"), _ask("GET", "ledger")
    if output == "json":
        click.echo(json.dumps({**about, **books}, indent=2))
        return
    states = {**about["nodes"], **about["queued"]}
    rows = [
        (
            one["kind"],
            *_short(one["name"]),
            one["accelerator"],
            one["tier"],
            states.get(one["name"]),
            _dollars(one["cost_usd"]),
        )
        for one in books["living"]
    ]
    click.echo(table(("KIND", "NAME", "ZONE", "ACCELERATOR", "TIER", "STATE", "COST"), rows, right=("COST",)))
    click.echo(
        f"All together cost {_dollars(books['cost_usd'])} so far and now {_dollars(books['hourly_usd'])} an hour."
    )


@command.command()
@output_option
def ledger(output: str) -> None:
    """Show everything that ever was in it, and what it would have cost."""
    books = _ask("GET", "ledger")
    if output == "json":
        click.echo(json.dumps(books, indent=2))
        return
    rows = [
        (
            one["kind"],
            *_short(one["name"]),
            one["made"][:19],
            (one["gone"] or "")[:19] or None,
            _dollars(one["cost_usd"]),
        )
        for one in sorted([*books["gone"], *books["living"]], key=lambda one: one["made"])
    ]
    click.echo(table(("KIND", "NAME", "ZONE", "MADE", "GONE", "COST"), rows, right=("COST",)))


@command.command()
@click.argument("name")
@zone_option
def preempt(name: str, zone: str | None) -> None:
    """Preempt the spot node or queued resource NAME."""
    queued = any(one.endswith(f"/{name}") for one in _ask("GET")["queued"])
    done = _ask("POST", "preempt", {"queued" if queued else "node": name, **_given(zone=zone)})
    for one in done["preempted"]:
        click.echo(f"{one} was preempted.")


@command.command()
@click.argument("node")
@zone_option
@worker_option
def maintenance(node: str, zone: str | None, workers: tuple[int, ...]) -> None:
    """Take NODE down for maintenance; its workers reboot."""
    _ask("POST", "maintenance", {"node": node, "workers": list(workers), **_given(zone=zone)})
    click.echo(f"{node} is under maintenance.")


@command.command()
@click.argument("node")
@zone_option
@worker_option
@click.option("--end", is_flag=True, help="Connect them again.")
def partition(node: str, zone: str | None, workers: tuple[int, ...], end: bool) -> None:
    """Cut workers of NODE off the network."""
    body = {"node": node, "on": not end, **_given(zone=zone), **({"workers": list(workers)} if workers else {})}
    done = _ask("POST", "partition", body)
    which = ", ".join(str(worker) for worker in done["workers"])
    click.echo(f"Workers {which} of {node} are {'back' if end else 'cut off'}.")


@command.command()
@click.argument("chips", callback=_amount)
@zone_option
@click.option("--generation", help="Only of this generation: v6e.")
@click.option("--tier", type=click.Choice(["spot", "on-demand", "best-effort"]), help="Only for this tier.")
def stock(chips: int | None, zone: str | None, generation: str | None, tier: str | None) -> None:
    """Set how many CHIPS a zone has (`unlimited`: no limit)."""
    _ask("POST", "stock", {"chips": chips, **_given(zone=zone, generation=generation, tier=tier)})


@command.command()
@click.argument("limit", callback=_amount)
@zone_option
@click.option("--quota", "name", help="Only this quota, by its full name.")
def quota(limit: int | None, zone: str | None, name: str | None) -> None:
    """Set how much a project may have (`unlimited`: no limit)."""
    _ask("POST", "quota", {"limit": limit, **_given(zone=zone, quota=name)})


@command.command()
@click.argument("name")
@click.argument("chips", type=click.IntRange(1))
@click.option("--generation", required=True, help="Of this generation: v6e.")
@click.option("--zone", help="In this zone.  [default: the sandbox's]")
def reserve(name: str, chips: int, generation: str, zone: str | None) -> None:
    """Reserve CHIPS under NAME, for nodes that ask for a reservation."""
    body = {"name": name, "chips": chips, "generation": generation, "zone": zone or _running().zone}
    click.echo(_ask("POST", "reservations", body)["name"])


@command.command()
@click.argument("name")
@click.option("--no-access", is_flag=True, help="One that you may not use.")
def project(name: str, no_access: bool) -> None:
    """Let another project exist; any other name is refused as Google Cloud does it."""
    click.echo(_ask("POST", "projects", {"name": name, "access": not no_access})["name"])


@command.command()
@click.argument("kind", type=click.Choice(KINDS), metavar="KIND")
@click.option("--service", help="tpu, compute or storage; a pattern.")
@click.option("--method", help="CreateNode, Create*, objects.get; a pattern.")
@click.option("--zone", help="A pattern.")
@click.option("--name", help="The id of what the request is about; a pattern.")
@click.option("--status", help="Of error and lro: UNAVAILABLE, PERMISSION_DENIED and so on.")
@click.option("--message", help="Of error and lro.")
@click.option("--seconds", type=click.FloatRange(0), metavar="SECONDS", help="Of delay and slow.")
@click.option("--nth", type=click.IntRange(1), metavar="N", help="Only the n-th such request.")
@click.option("--times", type=click.IntRange(1), metavar="N", help="Only so often.")
@click.option("--probability", type=click.FloatRange(0, 1), metavar="P", help="Each with this probability.")
@click.option("--seed", type=int, help="Random seed.")
def fault(kind: str, **options: Any) -> None:
    """Inject faults into requests.

    KIND is error (refused), delay (waits first), slow (answers late), drop (connection closed, nothing done), lost (done, but
    the answer is lost) or lro (accepted, but the operation fails).
    """
    click.echo(_ask("POST", "faults", {"kind": kind, **_given(**options)})["id"])


@command.command()
@click.option("--clear", is_flag=True, help="Lift them all.")
def faults(clear: bool) -> None:
    """Show the faults in force."""
    if clear:
        _ask("DELETE", "faults")
    rows = [
        (one["id"], one["kind"], one["service"], one["method"], one["zone"], one["name"], one["seen"], one["struck"])
        for one in _ask("GET", "faults")["faults"]
    ]
    headers = ("ID", "KIND", "SERVICE", "METHOD", "ZONE", "NAME", "SEEN", "STRUCK")
    click.echo(table(headers, rows, right=("SEEN", "STRUCK")))


def _place() -> Path:
    return home() / "sandbox"


def _running() -> Running:
    found = find_sandbox(_place())
    if found is None:
        raise UserError("no sandbox runs", "start one: podway sandbox up")
    return found


def _ask(method: str, name: str = "", body: dict[str, Any] | None = None) -> Any:
    running = _running()
    try:
        return running.command(method, name, body)
    except SandboxError as error:
        raise UserError(f"the sandbox refuses: {error}", "see what is in it: podway sandbox status") from None
    except OSError as error:
        raise UserError(f"the sandbox does not answer: {error}", f"see {_place() / 'sandbox.log'}") from None


def _given(**options: Any) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


def _short(name: str) -> tuple[str, str | None]:
    """The id and the zone of a full name."""
    parts = name.split("/")
    return parts[-1], parts[3] if len(parts) > 4 and parts[2] in ("locations", "zones") else None


def _dollars(amount: float | None) -> str | None:
    return None if amount is None else f"${amount:.2f}"
