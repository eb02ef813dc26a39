"""`podway logs` (and `podway attach`): the output of a job, live or afterwards."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import click

from podway.cli.error_lines import show_error
from podway.cli.options import cluster_argument
from podway.cli.screen import Screen
from podway.cli.watching import NOT_FOUND, exit_code, follow, show_end
from podway.errors import UserError
from podway.quantities import format_count
from podway.server.client import Client, LogKeywords

PHASES = ("setup", "run")


@click.command(name="logs")
@cluster_argument
@click.argument("job", type=click.IntRange(min=1), required=False)
@click.option("--follow/--no-follow", "keep", default=True, help="Follow until the job ends.  [default: follow]")
@click.option(
    "--tail", type=click.IntRange(min=0), metavar="N", default=0, help="Only the last N lines so far; 0: all."
)
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Only this host's output.")
@click.option("--raw", is_flag=True, help="Show lines that several hosts print alike once per host.")
@click.option(
    "--spread", is_flag=True, help="Behind a line shown once, the range of figures that differ between hosts."
)
@click.option("--timestamps", is_flag=True, help="Prefix each line with its time (UTC).")
@click.option("--status", is_flag=True, help="Show only the job's status, also as the exit code.")
@click.option("-s", "--sync-down", metavar="DIR", help="Save every host's output to files in DIR instead.")
@click.pass_context
def command(
    ctx: click.Context,
    cluster: str,
    job: int | None,
    keep: bool,
    tail: int,
    rank: int | None,
    raw: bool,
    spread: bool,
    timestamps: bool,
    status: bool,
    sync_down: str | None,
) -> None:
    """Show the output of a job, and follow it until it ends.

    JOB is a number as `podway queue` shows it; without it, the latest job
    (not a command of `podway run`, unless there is nothing else). Of a service, JOB is the number of a replica.
    Ctrl-C stops watching, never the job.

    Followed to its end, or with --status, exits with 0 if the job succeeded, 100 if it failed, 101 if it has not ended, 102
    if there is no such job, 103 if it was cancelled.
    """
    client = Client()
    try:
        found = client.job(cluster, job)
    except UserError as error:
        if error.status != 404:
            raise
        from podway.cli.service import show_logs  # a cluster's logs do without them
        from podway.cli.services import existing_services

        if any(one.name == cluster for one in existing_services(client)):
            show_logs(client, cluster, job, LogKeywords(follow=keep, tail=tail, timestamps=timestamps))
            return
        show_error(error.what, error.hint)
        ctx.exit(NOT_FOUND)
    if status:
        click.echo(f"Job {found.number}: {found.state}")
        ctx.exit(exit_code(found.state))
    number = found.number
    with Screen() as screen:
        if sync_down is not None:
            _save(client, screen, cluster, number, Path(sync_down).expanduser())
            return
        screen.wait(f"Waiting for output of job {number} on {cluster}")
        shown = LogKeywords(follow=keep, tail=tail, rank=rank, raw=raw, spread=spread, timestamps=timestamps)
        end = follow(client, screen, cluster, number, **shown)
        if keep:
            ctx.exit(show_end(screen, number, end))


def _save(client: Client, screen: Screen, cluster: str, number: int, into: Path) -> None:
    """One file for each rank and phase with output."""
    ranks = client.cluster(cluster).order.hosts
    attempts = range(1, client.job(cluster, number).attempt + 1)
    place, files = into / f"{cluster}-{number}", 0
    with _writing(place):
        place.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        for phase in (f"{phase}-{n}" if n > 1 else phase for n in attempts for phase in PHASES):
            screen.wait(f"Saving {phase} of rank {rank}")
            files += _save_one(client.output(cluster, number, rank, phase), place / f"rank-{rank}.{phase}.log")
    screen.done(f"Saved {format_count(files, 'file')} in {place}")


def _save_one(pieces: Iterator[bytes], path: Path) -> bool:
    """Write the pieces to a file, renamed into place when complete; whether there were any."""
    piece = next(pieces, None)
    if piece is None:
        return False
    part = path.with_suffix(".part")
    with _writing(part):
        file = part.open("wb")
    with file:
        while piece is not None:
            with _writing(part):
                file.write(piece)
            piece = next(pieces, None)
    part.replace(path)
    return True


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", "use another directory, or free some space") from None
