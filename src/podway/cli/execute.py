"""`podway exec`: one more job on a cluster that is up."""

import click

from podway.cli.entrypoint import read_entrypoint
from podway.cli.launching import Interaction, submit
from podway.cli.options import cluster_argument, output_option
from podway.cli.task_options import task_options
from podway.task.environment import Overrides


@click.command(name="exec")
@cluster_argument
@click.argument("entrypoint", nargs=-1, metavar="ENTRYPOINT...")
@click.option("-c", "--cluster", "named", metavar="CLUSTER", help="The cluster, if it is not the first word.")
@task_options
@click.option("-d", "--detach-run", is_flag=True, help="Return once the job is submitted.")
@click.option("--raw", is_flag=True, help="Show lines that several hosts print alike once per host.")
@output_option
@click.pass_context
def command(
    ctx: click.Context,
    cluster: str,
    entrypoint: tuple[str, ...],
    named: str | None,
    overrides: Overrides,
    detach_run: bool,
    raw: bool,
    output: str,
) -> None:
    """Run a task on a cluster that is up, without its setup.

    ENTRYPOINT is a task file or a bash command. The workdir is synced; file_mounts and setup are those of the last launch.
    Quote a command that has options of its own, or put it after --.

    Exits with 0 if the job succeeded, 100 if it failed, 103 if it was cancelled.
    """
    if named is not None:
        cluster, entrypoint = named, (cluster, *entrypoint)
    if not entrypoint:
        raise click.MissingParameter(ctx=ctx, param=ctx.command.params[1], param_type="argument")
    interaction = Interaction(detach=detach_run, raw=raw, json=output == "json")
    ctx.exit(submit(cluster, read_entrypoint(entrypoint, overrides), interaction))
