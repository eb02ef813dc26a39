"""Jobs for a pool: submitted, followed once they have a worker, cancelled."""

import time
from collections.abc import Sequence

import click
import msgspec

from podway.cli.confirmation import proceed
from podway.cli.launching import Interaction, launch, show_notes
from podway.cli.screen import Screen
from podway.cli.watching import ProgressPrinter, exit_code, follow, show_end
from podway.errors import UserError
from podway.launch_options import LaunchOptions, LaunchRequest
from podway.quantities import format_count
from podway.server.client import Client
from podway.server.pool_api import PoolJobView
from podway.server.uploading import upload
from podway.task.task import Task

POLL_S = 0.3


def pool_for(client: Client, task: Task) -> str | None:
    """The pool that a task's file names, of those that exist; a note where none does."""
    if not task.pools:
        return None
    there = {one.name for one in client.pools() if not one.leaving}
    found = next((name for name in task.pools if name in there), None)
    if found is None:
        names = ", ".join(task.pools)
        click.echo(f"Note: fleets: there is no pool {names}; the task gets a cluster of its own", err=True)
    return found


def launch_or_give(task: Task, options: LaunchOptions, interaction: Interaction, then: Sequence[Task] = ()) -> int:
    """Launch a task on a cluster, or give it to the pool that its file names; the exit code."""
    named = None if task.name is None or options.cluster != task.name else options.cluster
    if task.pools and options.cluster in (None, named) and not then and not interaction.dryrun:
        pool = pool_for(Client(), task)
        if pool is not None:
            return launch_on_pool(pool, task, interaction)
    return launch(task, options, interaction, then)


def launch_on_pool(pool: str, task: Task, interaction: Interaction, count: int = 1) -> int:
    """Submit the task, as often as asked, and follow a single one to its end; the exit code."""
    if task.kind != "task":
        raise UserError(f"a {task.kind} does not run on a pool", "launch it by itself")
    if interaction.dryrun:
        raise UserError("a job of a pool makes nothing that could be shown", "leave --dryrun out, or --pool")
    client = Client()
    with Screen(err=interaction.json) as screen:
        show_notes(task)
        if task.setup.strip():
            click.echo("Note: setup: the workers of a pool are set up already; it is not run", err=True)
        request = LaunchRequest(task=task, files=upload(client, screen, task))
        numbers = client.submit_to_pool(pool, request, count)
        named = ", ".join(map(str, numbers[:20])) + (", …" if count > 20 else "")
        screen.step(
            f"{'Job' if count == 1 else 'Jobs'} submitted to pool {pool}, {'ID' if count == 1 else 'IDs'}: {named}"
        )
        code, found = 0, None
        if count == 1 and not interaction.detach:
            found = _follow(client, screen, pool, numbers[0], interaction)
            code = exit_code(found.state)
        else:
            screen.line(f"See them: podway pool status {pool}   Cancel them: podway pool cancel {pool}")
    if interaction.json:
        document = {"pool": pool, "jobs": numbers, "state": found.state if found else None}
        click.echo(msgspec.json.format(msgspec.json.encode(document)))
    return code


def _follow(client: Client, screen: Screen, pool: str, number: int, interaction: Interaction) -> PoolJobView:
    """Wait for a worker, show the log there, and again where a worker is lost."""
    shown: tuple[str, int] | None = None
    try:
        while True:
            job = next((one for one in client.pool(pool).jobs if one.number == number), None)
            if job is None:
                raise UserError(f"job {number} of pool {pool} is no longer known", f"see: podway pool status {pool}")
            here = (job.cluster, job.job) if job.cluster is not None and job.job is not None else None
            if here is not None and here != shown:
                shown = here
                screen.step(f"Job {number} has the worker {here[0]}.")
                printer = ProgressPrinter(screen, *here, waiting_for_cluster=False)
                end = follow(client, screen, *here, printer, raw=interaction.raw)
                show_end(screen, here[1], end)
            elif job.state in ("SUCCEEDED", "CANCELLED") or job.state.startswith("FAILED"):
                screen.wait("")
                if shown is None:
                    screen.line(f"Job {number} ended: {job.state}" + (f": {job.reason}" if job.reason else ""))
                return job
            else:
                screen.wait(f"Waiting for a free worker of {pool}")
                time.sleep(POLL_S)
    except KeyboardInterrupt as error:
        screen.wait("")
        goes_on = f"Job {number} of pool {pool} goes on. See it: podway pool status {pool}"
        raise KeyboardInterrupt(str(error) or goes_on) from None


def cancel_jobs(name: str, jobs: tuple[int, ...], *, yes: bool) -> None:
    """Cancel jobs of a pool, after a question."""
    what = f"jobs {', '.join(map(str, jobs))}" if jobs else "all jobs"
    proceed(f"Cancelling {what} of pool {name}.", yes=yes)
    done = Client().cancel_pool_jobs(name, jobs)
    click.echo(f"Cancelled {format_count(len(done), 'job')}." if done else "There is no job to cancel.")


def end_named_pools(client: Client, names: tuple[str, ...], *, every: bool, yes: bool) -> tuple[str, ...]:
    """Of names that a command for clusters was given: end those that are pools, which would replace their workers; the others."""
    if bool(names) == every:
        return names  # a mistake, which the command tells
    known = [one.name for one in client.pools() if not one.leaving]
    chosen = known if every else [name for name in names if name in known]
    if chosen:
        proceed(f"Taking down {', '.join(chosen)}, with all workers and their jobs.", yes=yes)
    for name in chosen:
        client.end_pool(name)
        click.echo(f"Pool {name} is being taken down.")
    left = tuple(name for name in names if name not in chosen)
    if names and not left:
        raise click.exceptions.Exit(0)
    return left
