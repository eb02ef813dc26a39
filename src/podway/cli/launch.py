"""`podway launch`: from a task file or a command to its output on every host."""

import click

from podway.cli.applying import apply_service
from podway.cli.entrypoint import read_group
from podway.cli.launching import Interaction
from podway.cli.options import cluster_option, output_option, yes_option
from podway.cli.pool_jobs import launch_on_pool, launch_or_give
from podway.cli.sizing import read_sized
from podway.cli.task_options import task_options
from podway.errors import UserError
from podway.launch_options import LaunchOptions
from podway.quantities import parse_duration
from podway.task.environment import Overrides
from podway.task.task import Autostop


@click.command(name="launch")
@click.argument("entrypoint", nargs=-1)
@cluster_option
@task_options
@click.option("--dryrun", is_flag=True, help="Print the request (JSON; on Kubernetes YAML) without sending it.")
@click.option("-d", "--detach-run", is_flag=True, help="Return once the job is submitted.")
@click.option(
    "-i",
    "--idle-minutes-to-autostop",
    "idle_minutes",
    type=click.FloatRange(min=0),
    metavar="MINUTES",
    help="Stop the cluster after this many idle minutes.",
)
@click.option(
    "--down", is_flag=True, help="Delete the cluster when its jobs have ended (with -i: after that idle time)."
)
@click.option("-r", "--retry-until-up", is_flag=True, help="Keep trying all locations until one has capacity.")
@click.option(
    "--valid-until",
    metavar="DURATION",
    help="Queue for capacity in all allowed zones at once; give up after this long (6h).",
)
@click.option(
    "--project", metavar="NAME", help="On a team's server: the project whose members may manage a new cluster."
)
@click.option("-p", "--pool", metavar="NAME", help="Run on a free worker of this pool (podway pool).")
@click.option(
    "--num-jobs",
    type=click.IntRange(1, 10_000),
    metavar="N",
    help="With --pool: run the task this often; each has its $SKYPILOT_JOB_RANK.",
)
@click.option("--model", metavar="NAME", help="With --tpus auto: the model, if the task does not name it.")
@click.option(
    "--one-shot",
    is_flag=True,
    help="On Kubernetes: a JobSet that runs the task and ends. With --dryrun: prints YAML for kubectl apply.",
)
@click.option(
    "--push",
    metavar="REPOSITORY",
    help="With --one-shot: put the workdir into the image at /workdir, pushed to this repository of a registry.",
)
@click.option("--no-setup", is_flag=True, help="Skip the task's setup commands.")
@click.option("--raw", is_flag=True, help="Show lines that several hosts print alike once per host.")
@yes_option
@output_option
@click.pass_context
def command(
    ctx: click.Context,
    entrypoint: tuple[str, ...],
    overrides: Overrides,
    cluster: str | None,
    dryrun: bool,
    detach_run: bool,
    idle_minutes: float | None,
    down: bool,
    retry_until_up: bool,
    valid_until: str | None,
    project: str | None,
    pool: str | None,
    num_jobs: int | None,
    model: str | None,
    one_shot: bool,
    push: str | None,
    no_setup: bool,
    raw: bool,
    yes: bool,
    output: str,
) -> None:
    """Run a task on a cluster, creating it if needed.

    ENTRYPOINT is a task file (SkyPilot's or dstack's) or a bash command; without it, only the cluster is created. A service file
    makes a service, as `podway apply` does. The tasks of a pipeline (several in one file) run one after the other, to the first that
    fails; those of a job group (execution: parallel) together, each on a cluster of its own.
    Quote a command that has options of its own, or put it after --.

    Exits with 0 if the job succeeded, 100 if it failed, 103 if it was cancelled.
    Ctrl-C stops watching, never the job.
    """
    options = LaunchOptions(
        cluster=cluster,
        project=project,
        autostop=autostop_policy(idle_minutes, down),
        setup=not no_setup,
        retry_until_up=retry_until_up,
        valid_until_s=None if valid_until is None else parse_duration(valid_until, "--valid-until"),
        one_shot=one_shot,
    )
    interaction = Interaction(yes=yes, detach=detach_run, dryrun=dryrun, raw=raw, json=output == "json")
    if (group := read_group(entrypoint, overrides)) is not None:
        from podway.cli.group import launch_group, refuse_options  # few files are one

        refuse_options(cluster, one_shot, idle_minutes)
        ctx.exit(launch_group(group, options, interaction))
    task, *then = read_sized(entrypoint, overrides, model)
    if task.service is not None:
        if autostop_policy(idle_minutes, down) is not None or no_setup or valid_until is not None:
            raise UserError(
                "a service has no autostop, no idle time and always runs its setup",
                "make it with: podway apply -f FILE",
            )
        ctx.exit(apply_service(task, options, interaction))
    if push is not None:
        from podway.cli.image import with_image_of_workdir  # few launches build an image

        if not one_shot:
            raise UserError(
                "--push makes the image of a run that nothing is synced to", "add --one-shot, or leave it out"
            )
        task = with_image_of_workdir(task, push, push=not dryrun)
    if pool is not None:
        if then or cluster is not None:
            raise UserError("a job of a pool is one task, on whichever worker is free", "leave -c out, or --pool")
        ctx.exit(launch_on_pool(pool, task, interaction, num_jobs or 1))
    if num_jobs is not None:
        raise UserError("--num-jobs is for --pool", "add --pool NAME, or leave it out")
    ctx.exit(launch_or_give(task, options, interaction, then))


def autostop_policy(idle_minutes: float | None, down: bool) -> Autostop | None:
    """--down alone means: as soon as the last job has ended."""
    if idle_minutes is None and not down:
        return None
    return Autostop(idle_minutes=idle_minutes or 0.0, down=down)
