"""`podway apply -f FILE`: makes or updates a service, or launches a task on a cluster named after it."""

import sys

import click
import msgspec

from podway.cli.applying import apply_service, parse_share
from podway.cli.entrypoint import is_task_file
from podway.cli.launching import Interaction
from podway.cli.options import output_option, yes_option
from podway.cli.pool_jobs import launch_or_give
from podway.cli.schedule import apply_schedule
from podway.cli.task_options import task_options
from podway.cli.volume import apply_volume
from podway.errors import UserError
from podway.launch_options import LaunchOptions
from podway.task.environment import Overrides
from podway.task.read import read_pool, read_task, read_task_text, read_volume


@click.command(name="apply")
@click.option("-f", "--file", "path", metavar="FILE", help="The task file; - reads it from stdin.")
@click.argument("arguments", nargs=-1, metavar="[-- ARGS]...")
@click.option("-c", "--cluster", metavar="NAME", help="Name of the service or cluster; that of the file by default.")
@task_options
@click.option("--dryrun", is_flag=True, help="Print the request (JSON; on Kubernetes YAML) without sending it.")
@click.option("-d", "--detach", is_flag=True, help="Return once it is submitted.")
@click.option("--canary", metavar="SHARE", help="Try a service's new revision with this share of the traffic (10%).")
@click.option("--project", metavar="NAME", help="On a team's server: the project whose members may manage it.")
@yes_option
@output_option
@click.pass_context
def command(
    ctx: click.Context,
    path: str | None,
    arguments: tuple[str, ...],
    overrides: Overrides,
    cluster: str | None,
    dryrun: bool,
    detach: bool,
    canary: str | None,
    project: str | None,
    yes: bool,
    output: str,
) -> None:
    """Make or update the service or volume of a file; launch any other task.

    A task is launched on a cluster named after it. A service that exists is compared with the file: replicas, scaling, probes and
    limits are changed in place, and what changes what runs rolls out as a new revision.

    A file with a schedule is kept, and started at its times: podway schedule list.

    A file of type volume creates the volume, or registers an existing disk. A file with a pool, or of type fleet, makes or changes
    the pool: podway pool.

    ARGS stand for ${{ run.args }} in the file.
    """
    if path is None:
        if not arguments or not is_task_file(arguments[0]):
            raise click.UsageError("Give the task file: podway apply -f FILE", ctx)
        path, arguments = arguments[0], arguments[1:]
    overrides = msgspec.structs.replace(overrides, run_args=arguments)
    text = sys.stdin.buffer.read() if path == "-" else None
    volume = read_volume(path, text, overrides)
    if volume is not None:
        apply_volume(volume, Interaction(yes=yes, dryrun=dryrun, json=output == "json"), project)
        return
    pool = read_pool(path, text, overrides)
    if pool is not None:
        from podway.cli.pool import apply_pool  # few files describe one

        apply_pool(pool, Interaction(yes=yes, dryrun=dryrun, json=output == "json"), project)
        return
    task = read_task(path, overrides=overrides) if text is None else read_task_text(text, overrides=overrides)
    options = LaunchOptions(cluster=cluster or task.name, project=project)
    interaction = Interaction(yes=yes, detach=detach, dryrun=dryrun, json=output == "json")
    share = parse_share(canary)
    if task.schedule:
        apply_schedule(task, options, interaction)
        return
    if task.service is not None:
        ctx.exit(apply_service(task, options, interaction, canary=share))
    if share is not None:
        raise UserError("only a service can have a canary", "apply the file without --canary")
    ctx.exit(launch_or_give(task, options, interaction))
