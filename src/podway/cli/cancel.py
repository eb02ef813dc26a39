"""`podway cancel`: end jobs, and return when all their processes have ended on every host."""

import click

from podway.cli.confirmation import proceed
from podway.cli.options import cluster_argument, yes_option
from podway.cli.screen import Screen
from podway.control.records import ACTIVE, ENDED
from podway.server.api import JobView
from podway.server.client import Client

WAIT_S = 30.0  # how long one question to the server may take; it is asked again until the job has ended


@click.command(name="cancel")
@cluster_argument
@click.argument("jobs", nargs=-1, type=click.IntRange(min=1))
@click.option("-a", "--all", "every", is_flag=True, help="All jobs that have not ended.")
@yes_option
def command(cluster: str, jobs: tuple[int, ...], every: bool, yes: bool) -> None:
    """Cancel jobs, and wait until all their processes have ended.

    JOBS are numbers as `podway queue` shows them; without any, the latest job that runs.
    """
    if jobs and every:
        raise click.UsageError("Give job numbers or --all, not both.")
    client = Client()
    if not jobs and not every:
        jobs = _latest(client.jobs(cluster))
    numbers: list[int] = []
    if jobs or every:
        what = "all jobs" if every else f"job {', '.join(map(str, jobs))}"
        proceed(f"Cancelling {what} on cluster {cluster}.", yes=yes)
        numbers = client.cancel(cluster, jobs, every=every)
    if not numbers:
        click.echo(f"No job to cancel on cluster {cluster}.")
    with Screen() as screen:
        for number in numbers:
            screen.wait(f"Cancelling job {number}")
            screen.done(_outcome(_ended(client, cluster, number)))


def _latest(jobs: list[JobView]) -> tuple[int, ...]:
    """The latest that is running, or else the latest that is queued."""
    running = [job.number for job in jobs if job.state in ACTIVE]
    waiting = [job.number for job in jobs if job.state not in ENDED]
    return tuple((running or waiting)[-1:])


def _ended(client: Client, cluster: str, number: int) -> JobView:
    while True:
        job = client.job(cluster, number, wait=WAIT_S)
        if job.state in ENDED:
            return job


def _outcome(job: JobView) -> str:
    if job.state == "CANCELLED":
        return f"Job {job.number} was cancelled; all its processes have ended."
    return f"Job {job.number} ended before it could be cancelled (status: {job.state})."
