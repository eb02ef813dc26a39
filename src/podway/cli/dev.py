"""`podway dev`: a slice to work on: launched, prepared once, attached to."""

import click
import msgspec

from podway.cli.ide_links import LINKS
from podway.cli.launching import Interaction, launch
from podway.cli.options import cluster_option, yes_option
from podway.cli.sizing import read_sized
from podway.cli.task_options import task_options
from podway.launch_options import LaunchOptions
from podway.quantities import parse_duration
from podway.task.environment import Overrides
from podway.task.read import read_task
from podway.task.task import DevEnvironment, Task

NAME = "dev"


@click.command(name="dev")
@click.option("-f", "--file", "path", metavar="FILE", help="A dev environment, or a task whose setup prepares one.")
@cluster_option
@task_options
@click.option("--ide", type=click.Choice(list(LINKS)), help="Print a link that opens this editor.")
@click.option("--jupyter", is_flag=True, help="Start JupyterLab on the first host and forward its port.")
@click.option("--inactivity", metavar="DURATION", help="Stop it this long (2h) after the last connection and job.")
@click.option("-d", "--detach", is_flag=True, help="Return once it is launched.")
@yes_option
@click.pass_context
def command(
    ctx: click.Context,
    path: str | None,
    overrides: Overrides,
    cluster: str | None,
    ide: str | None,
    jupyter: bool,
    inactivity: str | None,
    detach: bool,
    yes: bool,
) -> None:
    """Work on a slice: launch it, prepare it once, forward its ports.

    FILE is a dstack dev environment (its `init` commands run once), or any task file, of which only the setup is done.
    Without it, the slice alone: podway dev --gpus tpu-v6e-8. Typed again, it attaches to what is there.
    Ctrl-C detaches; the cluster keeps running.
    """
    task = read_sized((), overrides, None)[0] if path is None else read_task(path, overrides=overrides)
    idle = None if inactivity is None else int(parse_duration(inactivity, "--inactivity"))
    task = as_environment(task, ide, idle)
    options = LaunchOptions(cluster=cluster or task.name)
    ctx.exit(launch(task, options, Interaction(yes=yes, detach=detach, jupyter=jupyter)))


def as_environment(task: Task, ide: str | None, inactivity_s: int | None) -> Task:
    """The task as a dev environment: what it would run is left to the person."""
    dev = task.dev or DevEnvironment()
    dev = msgspec.structs.replace(
        dev, ide=ide or dev.ide, inactivity_s=dev.inactivity_s if inactivity_s is None else inactivity_s
    )
    run = task.run if task.dev is not None else ""
    return msgspec.structs.replace(task, kind="dev-environment", dev=dev, run=run, service=None, name=task.name or NAME)
