"""`podway queue`: the jobs of one cluster, or of every cluster."""

import time

import click
import msgspec

from podway.cli.choosing import matching
from podway.cli.options import cluster_names_argument, output_option
from podway.cli.tables import table
from podway.control.records import ENDED, JobState
from podway.quantities import format_ago, format_duration
from podway.server.api import JobView
from podway.server.client import Client

HEADERS = ("ID", "NAME", "USER", "SUBMITTED", "STARTED", "DURATION", "RESOURCES", "STATUS")


@click.command(name="queue")
@cluster_names_argument
@click.option("-s", "--skip-finished", is_flag=True, help="Only jobs that run or wait.")
@output_option
def command(names: tuple[str, ...], skip_finished: bool, output: str) -> None:
    """Show the jobs of clusters.

    CLUSTER may be a name or a pattern such as 'exp-*'; without it, the jobs of all clusters are shown. A name may also be that of a
    deleted cluster, or of a one-shot run that has ended.
    """
    client = Client()
    clusters = client.clusters()
    if names:
        live = {cluster.name for cluster in clusters}
        deleted = [name for name in names if name not in live and not set(name) & set("*?[")]
        found = matching(clusters, [name for name in names if name not in deleted]) if len(deleted) < len(names) else []
        clusters = [*found, *(client.cluster(name) for name in deleted)]
    jobs = {cluster.name: client.jobs(cluster.name) for cluster in clusters}
    if skip_finished:
        jobs = {name: [job for job in some if job.state not in ENDED] for name, some in jobs.items()}
    if output == "json":
        every = [job for some in jobs.values() for job in some]
        click.echo(msgspec.json.format(msgspec.json.encode(every)))
        return
    if not clusters:
        click.echo("No existing clusters.")
        return
    parts = [f"Job queue of cluster {name}\n{page(some, time.time())}" for name, some in jobs.items()]
    click.echo("\n\n".join(parts))


def _state(job: JobView) -> str:
    if job.after is not None and job.state == JobState.PENDING:
        return f"{job.state} (after {job.after})"
    return job.state if job.attempt == 1 else f"{job.state} (attempt {job.attempt})"


def page(jobs: list[JobView], now: float) -> str:
    """The table, latest job first, as users expect of a queue's history; priorities where a job has one."""
    if not jobs:
        return "No jobs."
    ranked = any(job.priority for job in jobs)
    rows = [
        (
            job.number,
            job.name,
            job.user,
            format_ago(job.submitted, now),
            format_ago(job.started, now),
            format_duration((job.ended or now) - job.started) if job.started else None,
            *([job.priority] if ranked else []),
            job.resources if job.exclusive else "bypasses the queue",
            _state(job),
        )
        for job in reversed(jobs)
    ]
    headers = [*HEADERS[:-2], *(["PRIORITY"] if ranked else []), *HEADERS[-2:]]
    return table(headers, rows, drop=("USER", "RESOURCES", "STARTED", "SUBMITTED", "NAME"))
