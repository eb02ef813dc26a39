"""`podway apply -f FILE`: a launch, for dstack users. The run's name is the cluster's name."""

import sys

import click
import msgspec

from podway.cli.launching import Interaction, launch
from podway.cli.options import cluster_option, output_option, yes_option
from podway.cli.task_options import task_options
from podway.launch_options import LaunchOptions
from podway.task.environment import Overrides
from podway.task.read import read_task, read_task_text


@click.command(name="apply")
@click.option("-f", "--file", "path", required=True, metavar="FILE", help="The task file; - reads it from stdin.")
@click.argument("arguments", nargs=-1, metavar="[-- ARGS]...")
@cluster_option
@task_options
@click.option("--dryrun", is_flag=True, help="Print the request as JSON without sending it.")
@click.option("-d", "--detach", is_flag=True, help="Return once the job is submitted.")
@yes_option
@output_option
@click.pass_context
def command(
    ctx: click.Context,
    path: str,
    arguments: tuple[str, ...],
    overrides: Overrides,
    cluster: str | None,
    dryrun: bool,
    detach: bool,
    yes: bool,
    output: str,
) -> None:
    """Launch a task file on a cluster named after it (as in dstack).

    ARGS stand for ${{ run.args }} in the file.
    """
    overrides = msgspec.structs.replace(overrides, run_args=arguments)
    if path == "-":
        task = read_task_text(sys.stdin.buffer.read(), overrides=overrides)
    else:
        task = read_task(path, overrides=overrides)
    options = LaunchOptions(cluster=cluster or task.name)
    ctx.exit(launch(task, options, Interaction(yes=yes, detach=detach, dryrun=dryrun, json=output == "json")))
