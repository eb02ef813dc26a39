"""`podway pool VERB`: workers that are kept up, and jobs that each take a free one."""

import time
from collections.abc import Sequence

import click
import msgspec

from podway.cli.confirmation import proceed
from podway.cli.launching import Interaction, offers_page, show_notes
from podway.cli.options import CommandGroup, output_option, yes_option
from podway.cli.pool_jobs import cancel_jobs
from podway.cli.screen import LAST, MORE, Screen
from podway.cli.tables import table
from podway.cli.task_options import task_options
from podway.errors import UserError
from podway.home import home
from podway.launch_options import LaunchOptions, LaunchRequest
from podway.quantities import format_ago, format_count
from podway.server.client import Client
from podway.server.pool_api import PoolView
from podway.server.uploading import upload
from podway.task.environment import Overrides
from podway.task.pools import PoolSize, PoolSpec
from podway.task.read import read_pool
from podway.task.ssh_fleets import SshFleet

WORKERS = ("WORKER", "STATUS", "JOB")
JOBS = ("JOB", "NAME", "USER", "SUBMITTED", "STATUS", "WORKER", "REASON")


@click.group(name="pool", cls=CommandGroup)
def command() -> None:
    """Keep workers up, and run each job on a free one.

    The workers of a pool are clusters that are alike; each runs the setup of the pool's file once. podway launch --pool NAME gives a
    job to the pool.
    """


@command.command(name="apply")
@click.argument("path", metavar="[FILE]", required=False)
@click.option("-p", "--pool", metavar="NAME", help="Name of the pool; that of the file by default.")
@click.option(
    "--workers", type=click.IntRange(min=0), metavar="N", help="How many workers are kept, whatever the file says."
)
@task_options
@click.option("--project", metavar="NAME", help="On a team's server: the project whose members may manage it.")
@yes_option
@output_option
def apply(
    path: str | None,
    pool: str | None,
    workers: int | None,
    overrides: Overrides,
    project: str | None,
    yes: bool,
    output: str,
) -> None:
    """Make the pool of FILE, or change it.

    FILE is a SkyPilot file with a `pool` section, or a dstack file of type fleet. Without FILE, --workers changes how many there are.
    A change of anything but their number replaces the workers, each when its job has ended.
    """
    interaction = Interaction(yes=yes, json=output == "json")
    if path is None:
        if pool is None or workers is None:
            raise UserError("there is no FILE", "give one, or the name and size: podway pool apply -p NAME --workers 4")
        _resize(pool, workers, interaction)
        return
    spec = read_pool(path, None, overrides)
    if spec is None:
        raise UserError(f"{path} describes no pool", "add `pool: {workers: 2}` to it, and remove `run`")
    apply_pool(spec, interaction, project, name=pool, workers=workers)


def apply_pool(
    spec: PoolSpec | SshFleet,
    interaction: Interaction,
    project: str | None,
    *,
    name: str | None = None,
    workers: int | None = None,
) -> None:
    """Show what the pool of a file would be, ask, and make or change it; of a fleet over ssh, write down its machines."""
    if isinstance(spec, SshFleet):
        _write_machines(spec, interaction, name)
        return
    called = name or spec.name
    if called is None:
        raise UserError("the pool has no name", "add `name:` to the file, or give it with -p NAME")
    size = spec.size if workers is None else _resized(spec.size, workers)
    client = Client()
    with Screen(err=interaction.json or interaction.dryrun) as screen:
        show_notes(spec.task)
        request = LaunchRequest(task=spec.task, options=LaunchOptions(project=project))
        preview = client.preview(request)
        known = next((one for one in client.pools() if one.name == called), None)
        for note in preview.notes:
            click.echo(f"Note: {note}", err=True)
        screen.line(f"Pool {called}: {_size(size)}. Each is:")
        screen.line(offers_page(preview))
        if interaction.dryrun:
            click.echo(msgspec.json.format(msgspec.json.encode(preview.request)).decode())
            return
        verb = "Making" if known is None else "Changing"
        proceed(f"{verb} pool {called!r}: {_size(size)}.", yes=interaction.yes)
        files = upload(client, screen, spec.task)
        made = client.apply_pool(called, size, msgspec.structs.replace(request, files=files))
        if known is not None and made.revision != known.revision:
            screen.step("The workers are replaced, each when its job has ended.")
        screen.done(f"Pool {called} is {'made' if known is None else 'changed'}; its workers come up by themselves.")
        screen.line(useful_commands(called))
    if interaction.json:
        click.echo(msgspec.json.format(msgspec.json.encode(made)))


def _resize(name: str, workers: int, interaction: Interaction) -> None:
    client = Client()
    size = _resized(client.pool(name).size, workers)
    proceed(f"Changing pool {name!r}: {_size(size)}.", yes=interaction.yes)
    made = client.apply_pool(name, size)
    if interaction.json:
        click.echo(msgspec.json.format(msgspec.json.encode(made)))
        return
    click.echo(f"Pool {name}: {_size(made.size)}.")


def _resized(size: PoolSize, workers: int) -> PoolSize:
    most = workers if size.max_workers == size.workers else max(size.max_workers, workers)
    return msgspec.structs.replace(size, workers=workers, max_workers=most)


def _size(size: PoolSize) -> str:
    if size.max_workers == size.workers:
        return format_count(size.workers, "worker")
    return f"{size.workers} to {format_count(size.max_workers, 'worker')}, as jobs need them"


def useful_commands(name: str) -> str:
    """Commands to type next."""
    rows = [
        ("run a job on a free worker", f"launch --pool {name} FILE"),
        ("run it ten times", f"launch --pool {name} --num-jobs 10 FILE"),
        ("see workers and jobs", f"pool status {name}"),
        ("end it", f"pool down {name}"),
    ]
    lines = [f"Pool name: {name}"]
    for index, (what, how) in enumerate(rows):
        lines.append(f"{LAST if index == len(rows) - 1 else MORE} To {what + ':':<28} podway {how}")
    return "\n".join(lines)


def _write_machines(spec: SshFleet, interaction: Interaction, name: str | None) -> None:
    """The file of a pool of ssh hosts, where this machine's own server reads it."""
    import yaml  # few commands write YAML

    called = name or spec.name
    for note in spec.notes:
        click.echo(f"Note: {note}", err=True)
    text = f"# Machines of the dstack fleet {called}.\n{yaml.safe_dump(spec.machines, sort_keys=False)}"
    if interaction.dryrun:
        click.echo(text, nl=False)
        return
    if not Client().own_server:
        raise UserError(
            "machines reached over ssh are listed on the server's own machine, and you are logged in to a team's server",
            f"an administrator puts this there, as PODWAY_HOME/ssh/{called}.yaml: podway apply --dryrun prints it",
        )
    path = home() / "ssh" / f"{called}.yaml"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    before = path.read_text() if path.exists() else None
    hosts = spec.machines["hosts"]
    count = format_count(len(hosts) if isinstance(hosts, list) else 0, "machine")
    if before != text:
        proceed(f"{'Writing' if before is None else 'Replacing'} {path} with {count}.", yes=interaction.yes)
        path.write_text(text)
        path.chmod(0o600)
    _check_machines(called)
    click.echo(f"{called} is a pool of {count}. Launch on it with: podway launch --infra ssh/{called} FILE")


def _check_machines(name: str) -> None:
    from podway.providers.ssh.pool import read_pool as read_machines  # only for ssh fleets

    read_machines(home() / "ssh", name)


@command.command(name="list")
@output_option
def list_pools(output: str) -> None:
    """Show pools."""
    found = Client().pools()
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
        return
    click.echo(pools_page(found) if found else "No existing pools.")


def pools_page(found: Sequence[PoolView]) -> str:
    """The table of pools."""
    now = time.time()
    rows = [
        (
            one.name,
            ("" if one.slices == 1 else f"{one.slices}x ") + (" or ".join(one.accelerators) or "cpu"),
            f"{sum(worker.state in ('free', 'busy') for worker in one.workers)}/{len(one.workers)}",
            one.waiting,
            format_ago(one.created, now),
            "being taken down" if one.leaving else one.reason or None,
        )
        for one in found
    ]
    headers = ("NAME", "TPU", "READY", "WAITING JOBS", "CREATED", "REASON")
    return table(headers, rows, right=("READY", "WAITING JOBS"), drop=("REASON", "CREATED", "TPU"))


@command.command(name="status")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@output_option
def status(names: tuple[str, ...], output: str) -> None:
    """Show the workers and the jobs of pools."""
    client = Client()
    found = [client.pool(name) for name in names or [one.name for one in client.pools()]]
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
        return
    click.echo("\n\n".join(map(_page, found)) if found else "No existing pools.")


def _page(pool: PoolView) -> str:
    lines = [f"Pool {pool.name}: {_size(pool.size)}" + (", being taken down" if pool.leaving else "")]
    if pool.reason:
        lines.append(pool.reason)
    rows = [(one.cluster, one.state.upper() + (" (going)" if one.outdated else ""), one.job) for one in pool.workers]
    lines += ["", table(WORKERS, rows) if rows else "No workers."]
    now = time.time()
    jobs = [
        (one.number, one.name, one.user, format_ago(one.submitted, now), one.state, one.cluster, one.reason or None)
        for one in pool.jobs
    ]
    lines += ["", table(JOBS, jobs, drop=("REASON", "USER", "SUBMITTED", "NAME")) if jobs else "No jobs."]
    return "\n".join(lines)


@command.command(name="cancel")
@click.argument("name")
@click.argument("jobs", nargs=-1, type=int, metavar="[JOB]...")
@yes_option
def cancel(name: str, jobs: tuple[int, ...], yes: bool) -> None:
    """Cancel jobs of a pool; all that have not ended, if none is named."""
    cancel_jobs(name, jobs, yes=yes)


@command.command(name="down")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@yes_option
def down(names: tuple[str, ...], yes: bool) -> None:
    """Take down pools: all workers, and the jobs on them."""
    client = Client()
    for name in names:
        _check_known(client, name)
    proceed(f"Taking down {', '.join(names)}, with all workers and their jobs.", yes=yes)
    for name in names:
        client.end_pool(name)
        click.echo(f"Pool {name} is being taken down.")


def _check_known(client: Client, name: str) -> None:
    try:
        client.pool(name)
    except UserError:
        path = home() / "ssh" / f"{name}.yaml"
        if path.exists():
            raise UserError(
                f"{name} is a pool of ssh hosts, a file", f"remove it when nothing runs there: {path}"
            ) from None
        raise
