"""`podway calibrate`: keep measured runs, so that plans are made by what your own chips did."""

from pathlib import Path

import click

from podway.cli.tables import table
from podway.errors import UserError
from podway.plan.measured import needed_rate_of, plan_of, read_run
from podway.plan.own_rates import OwnRun, forget_runs, keep_run, own_runs
from podway.plan.picking import one_slice
from podway.quantities import format_seconds


@click.command(name="calibrate")
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@click.option("--tpu", "--tpus", "tpu", help="The slice that the run ran on: v6e-16.")
@click.option(
    "--slices", type=click.IntRange(min=1), metavar="N", default=1, show_default=True, help="How many of them."
)
@click.option("--forget", metavar="GENERATION", help="Forget the runs of a generation, or all.")
def command(folder: Path | None, tpu: str | None, slices: int, forget: str | None) -> None:
    """Keep measured runs, and plan by them.

    FOLDER is the output of a `podway train`. Its step time says what rate matrix products reach on your chips; from then on
    `podway plan` and `podway rehearse` use the mean of your runs for that generation, and say so. Without FOLDER: show what is kept.
    """
    if forget is not None:
        number = forget_runs(forget)
        click.echo(f"{number} {'run' if number == 1 else 'runs'} forgotten.")
        return
    if folder is not None:
        _add(folder, tpu, slices)
    runs = own_runs()
    if not runs:
        click.echo("No runs are kept: plans use published results. Add one with `podway calibrate FOLDER --tpu SLICE`.")
        return
    rows = [
        [run.generation, run.model, run.slice if run.slices == 1 else f"{run.slices} x {run.slice}", format_seconds(run.seconds),
         format_seconds(run.planned), f"{100 * (run.planned / run.seconds - 1):+.1f}%", f"{run.rate:.3f}", run.folder]
        for run in runs
    ]  # fmt: skip
    headers = ["GENERATION", "MODEL", "SLICE", "STEP", "PLANNED", "ERROR", "RATE", "FOLDER"]
    click.echo(table(headers, rows, right=(3, 4, 5, 6)))


def _add(folder: Path, tpu: str | None, slices: int) -> None:
    if tpu is None:
        raise UserError("which slice did it run on?", "name it with --tpu, such as --tpu v6e-16")
    slice, run = one_slice(tpu), read_run(folder)
    plan = plan_of(run, slice, slices)
    keep_run(
        OwnRun(
            generation=slice.generation,
            model=run.settings["model.name"],
            slice=slice.accelerator_type,
            slices=slices,
            seconds=run.seconds,
            planned=plan.time.total,
            rate=needed_rate_of(plan, run),
            folder=str(folder.absolute()),
        )
    )
