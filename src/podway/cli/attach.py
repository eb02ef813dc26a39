"""`podway attach`: back to a cluster: its ports on this machine, and the log of its job."""

import click

from podway.cli.attaching import attach
from podway.cli.options import cluster_argument, yes_option
from podway.cli.screen import Screen
from podway.cli.watching import follow, show_end
from podway.control.records import ENDED
from podway.errors import UserError
from podway.server.api import JobView
from podway.server.client import Client


@click.command(name="attach")
@cluster_argument
@click.argument("job", type=click.IntRange(min=1), required=False)
@yes_option
@click.pass_context
def command(ctx: click.Context, cluster: str, job: int | None, yes: bool) -> None:
    """Forward the ports of a cluster to this machine, and follow the log of its job.

    JOB is a number as `podway queue` shows it; without it, the latest job, or the dev environment's own.
    Ctrl-C detaches; the job and the cluster keep running.
    """
    client = Client()
    found = client.job(cluster, job) if job is not None else _own_job(client, cluster)
    with Screen() as screen:
        if found is not None and found.kind != "dev-environment" and not found.ports and found.state in ENDED:
            ctx.exit(show_end(screen, found.number, follow(client, screen, cluster, found.number)))
        ctx.exit(attach(client, screen, cluster, found, ask=not yes))


def _own_job(client: Client, cluster: str) -> JobView | None:
    """What a person comes back to: the dev environment, or else the latest job; none on a cluster that was only launched."""
    jobs = client.jobs(cluster)
    environments = [one for one in jobs if one.kind == "dev-environment"]
    try:
        return environments[-1] if environments else client.job(cluster)
    except UserError as error:
        if error.status != 404:
            raise
        client.cluster(cluster)  # there is none of that name: say so
        return None
