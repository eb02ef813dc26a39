"""`podway top`: what each rank of a job uses now, or used at its end."""

import click
import msgspec

from podway.cli.options import cluster_argument, output_option
from podway.cli.tables import table
from podway.errors import UserError
from podway.quantities import format_bytes
from podway.server.api import JobView
from podway.server.client import Client

HEADERS = ("RANK", "CPU (s)", "MEMORY", "PROCESSES", "STATE")


@click.command(name="top")
@cluster_argument
@click.argument("job", type=click.IntRange(min=1), required=False)
@output_option
def command(cluster: str, job: int | None, output: str) -> None:
    """Show the CPU time and memory of each rank of a job.

    Without JOB: the one that runs, else the latest. Of an ended job, the CPU time and the most memory of one process.
    """
    client = Client()
    chosen = client.job(cluster, job) if job is not None else _latest(client.jobs(cluster), cluster)
    rows: list[tuple[object, ...]] = [
        (end.rank, f"{end.cpu_s:.1f}", format_bytes(end.max_rss), None, _how(end.code, end.signal, end.lost))
        for end in chosen.exits
    ]
    if chosen.state in ("SETTING_UP", "RUNNING", "CANCELLING"):
        rows = [
            (rank.rank, f"{rank.cpu_s:.1f}", format_bytes(rank.rss), rank.processes, chosen.state)
            for rank in client.usage(cluster, chosen.number)
        ]
    if output == "json":
        keys = ("rank", "cpu_s", "memory", "processes", "state")
        click.echo(msgspec.json.format(msgspec.json.encode([dict(zip(keys, row, strict=True)) for row in rows])))
        return
    click.echo(f"Job {chosen.number} of cluster {cluster} ({chosen.state})")
    click.echo(table(HEADERS, rows, right=(0, 1, 2, 3)) if rows else "No process of this job has run.")


def _latest(jobs: list[JobView], cluster: str) -> JobView:
    if not jobs:
        raise UserError(f"cluster {cluster} has no jobs", f"run one: podway exec {cluster} COMMAND")
    running = [job for job in jobs if job.state in ("SETTING_UP", "RUNNING", "CANCELLING")]
    return (running or jobs)[-1]


def _how(code: int | None, signal: int | None, lost: bool) -> str:
    if lost:
        return "lost"
    return f"signal {signal}" if signal is not None else f"exit {code}"
