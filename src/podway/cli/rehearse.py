"""`podway rehearse`: compile the very step that would run, with the real TPU compiler, on this machine with no TPU.

`train` and `serve` take a model and a slice; a task file takes both from the task. A training rehearsal compiles the mesh,
batch and remat that are given, and where something is left open what the planner would choose. The work is done by processes
of `podway.rehearse.worker`; this file asks and prints.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from podway.catalog.slices import Slice
from podway.cli.options import CommandGroup, output_option
from podway.cli.plan_options import model_argument, options, plan_options_of, program_option, seq_option, step_options
from podway.cli.rehearse_report import Outcome, page, record, short_table
from podway.cli.rehearse_task import Served, what_runs
from podway.cli.screen import Screen
from podway.errors import UserError
from podway.model.families import find_model
from podway.model.layout import MeshShape
from podway.model.shape import ModelShape
from podway.plan.own_rates import use_own_rates
from podway.plan.picking import one_slice, slices_named
from podway.plan.plans import TrainPlan, evaluate
from podway.plan.search import PlanOptions, search_train
from podway.plan.training import Training
from podway.rehearse.advice import what_would_fit
from podway.rehearse.batches import largest
from podway.rehearse.fabric import Fabric
from podway.rehearse.rehearsal import CompileReport, Rehearsal, rehearse_training
from podway.rehearse.running import at_once, check_installed, engine_parts, rehearse
from podway.rehearse.timeline import estimate

_how = options(
    click.option(
        "--full", is_flag=True, help="Compile to the end: minutes in place of seconds, for the compiler's own cycles."
    ),
    click.option("--fresh", is_flag=True, help="Ask the compiler again even if the answer is known."),
    click.option(
        "--jobs", type=click.IntRange(min=1), metavar="N", help="Compilers at once; by default what the memory allows."
    ),
    click.option(
        "--top",
        type=click.IntRange(min=1),
        metavar="N",
        default=10,
        show_default=True,
        help="How many instructions to show.",
    ),
    output_option,
)


class _OrTask(CommandGroup):
    """A group whose first word may also be a task file."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """`podway rehearse task.yaml` is `podway rehearse task task.yaml`."""
        if args and args[0] not in self.commands and (args[0].endswith((".yaml", ".yml")) or Path(args[0]).is_file()):
            args = ["task", *args]
        return super().resolve_command(ctx, args)


@click.group(name="rehearse", cls=_OrTask, no_args_is_help=True)
def command() -> None:
    """Compile the real step for a slice on this machine, without a TPU.

    \b
    podway rehearse train llama3.1-8b --tpu v6e-16 --seq 8192
    podway rehearse serve llama3.1-8b --tpu v6e-8
    podway rehearse task.yaml

    Says how much HBM a chip needs, what fills it, which collectives run beside other work, and how long a step takes,
    with its interval. Needs the extra podway[rehearse].
    """
    use_own_rates()


@command.command()
@model_argument
@seq_option
@click.option(
    "--tpu",
    "--tpus",
    "tpu",
    required=True,
    help="A slice (v6e-16), or a generation: then the slice that the planner ranks first.",
)
@step_options
@program_option
@click.option("--largest-batch", is_flag=True, help="Find the largest batch that fits, and rehearse that.")
@_how
def train(model: str, tpu: str, largest_batch: bool, **asked: Any) -> None:
    """Rehearse a training step: the one given, or the one the planner would choose."""
    check_installed()
    shape, candidates = find_model(model), slices_named(tpu)
    options = plan_options_of(candidates[0].devices if len(candidates) == 1 else None, asked)
    slice, mesh, training = choose(shape, options, candidates)
    with Screen(err=True) as screen:
        if largest_batch:
            training = _largest(model, slice, mesh, training, screen, asked)
        wanted = rehearse_training(model, slice, mesh, training, fast=not asked["full"])
        report = ask([wanted], screen, jobs=asked["jobs"], fresh=asked["fresh"])[0]
    show([outcome_of(wanted, report, shape, slice, mesh, training)], asked["output"], asked["top"])


def choose(shape: ModelShape, options: PlanOptions, candidates: Sequence[Slice]) -> tuple[Slice, MeshShape, Training]:
    """What to compile: the planner's best, or what was asked for where the planner says that it does not fit."""
    if options.template is not None and options.template.program.name == "maxtext-2023":
        # The only step of it that there is to compile (`rehearse_training`).
        options = msgspec.structs.replace(
            options, remat=options.remat or "full", microbatches=options.microbatches or 1
        )
    search = search_train(shape, options, candidates)
    if search.plans:
        best = search.plans[0]
        return best.slice, best.mesh, best.training
    if len(candidates) > 1:
        raise UserError(
            f"the planner finds no slice of {len(candidates)} for it",
            "name one slice with --tpu, and it is compiled as it is asked for",
        )
    slice, slices = candidates[0], options.slices or 1
    mesh = options.mesh or MeshShape(slices=slices, fsdp=slice.devices)
    mesh = msgspec.structs.replace(mesh, slices=slices, tile=options.tile or mesh.tile)
    base = options.template or Training(seq=options.seq, batch=1)
    groups = mesh.slices * mesh.data * mesh.fsdp * mesh.expert
    training = msgspec.structs.replace(
        base,
        seq=options.seq,
        batch=options.batch or groups,
        microbatches=options.microbatches or 1,
        remat=options.remat or "full",
    )
    return slice, mesh, training


def _largest(
    model: str, slice: Slice, mesh: MeshShape, training: Training, screen: Screen, asked: dict[str, Any]
) -> Training:
    """The same step with the largest batch that the compiler lets fit."""
    groups = mesh.slices * mesh.data * mesh.fsdp * mesh.expert * training.microbatches

    def with_rows(rows: int) -> Training:
        return msgspec.structs.replace(training, batch=rows * groups)

    def fits(rows: int) -> bool:
        wanted = rehearse_training(model, slice, mesh, with_rows(rows), fast=True)
        report = ask([wanted], screen, jobs=1, fresh=asked["fresh"])[0]
        if report.memory is None:
            raise UserError(
                f"{rows * groups} sequences do not compile: {report.failed}", "change the mesh or the batch"
            )
        screen.line(f"  {rows * groups:,} sequences: {report.memory.line}")
        return report.memory.fits

    found = largest(fits, max(1, training.batch // groups))
    if not found:
        raise UserError(
            f"not even {groups} sequences fit {slice.accelerator_type}", "use a larger slice, --remat full or adapters"
        )
    return with_rows(found)


@command.command()
@model_argument
@click.option("--tpu", "--tpus", "tpu", required=True, help="A slice: v6e-8.")
@click.option("--tp", type=click.IntRange(min=1), metavar="N", help="Chips of a replica; by default all of the slice.")
@click.option("--max-len", type=click.IntRange(min=1), metavar="N", help="Tokens of prompt and answer together.")
@click.option("--max-seqs", type=click.IntRange(min=1), metavar="N", help="Requests that run at once.")
@click.option("--quantize", type=click.Choice(["none", "int8"]), default="none", help="Weights.")
@click.option("--kv", type=click.Choice(["auto", "int8", "fp8"]), default="auto", help="Keys and values.")
@click.option("--part", help="One program of the engine only: 'decode 64 rows'.")
@_how
def serve(model: str, tpu: str, tp: int | None, part: str | None, **asked: Any) -> None:
    """Rehearse the programs of a serving engine."""
    check_installed()
    kept = {name: asked[name] for name in ("max_len", "max_seqs", "quantize", "kv") if asked[name] is not None}
    rehearse_serving(model, one_slice(tpu), tp, kept, part, asked)


def rehearse_serving(
    model: str, slice: Slice, tensor: int | None, kept: dict[str, Any], part: str | None, asked: dict[str, Any]
) -> None:
    """Every program of an engine, or one of them."""
    find_model(model)
    whole = Rehearsal(
        what="serve", model=model, slice=slice.accelerator_type, topology=slice.topology_text, options=kept,
        tensor=tensor, fast=not asked["full"],
    )  # fmt: skip
    names = [part] if part else engine_parts(whole)
    wanted = [msgspec.structs.replace(whole, part=name) for name in names]
    with Screen(err=True) as screen:
        report = ask(wanted, screen, jobs=asked["jobs"], fresh=asked["fresh"])
    # No step time: how long the attention kernel takes depends on how full the cache is (`podway plan serve` says).
    outcomes = [Outcome(rehearsal=one, report=of) for one, of in zip(wanted, report, strict=True)]
    show(outcomes, asked["output"], asked["top"])


@command.command(hidden=True)
@click.argument("file")
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="A variable of the task.")
@click.option("--tpu", "--tpus", "tpu", help="Another slice than the task's.")
@_how
def task(file: str, env: tuple[str, ...], tpu: str | None, **asked: Any) -> None:
    """Rehearse what a task file would run."""
    check_installed()
    slice, found = what_runs(file, env, tpu, fast=not asked["full"])
    if isinstance(found, Served):
        rehearse_serving(found.model, slice, found.tensor, found.options, None, asked)
        return
    shape = find_model(found.rehearsal.model)
    with Screen(err=True) as screen:
        report = ask([found.rehearsal], screen, jobs=asked["jobs"], fresh=asked["fresh"])[0]
    show([outcome_of(found.rehearsal, report, shape, slice, found.mesh, found.training)], asked["output"], asked["top"])


def outcome_of(
    wanted: Rehearsal, report: CompileReport, shape: ModelShape, slice: Slice, mesh: MeshShape, training: Training
) -> Outcome:
    """A training step as the compiler reports it, beside its plan."""
    try:
        plan: TrainPlan | None = evaluate(shape, slice, mesh, training)
    except UserError:
        plan = None
    fixes: list[str] = []
    if report.memory is not None and not report.memory.fits:
        fixes = what_would_fit(shape, slice, mesh, training, report.memory)
    found = estimate(report.program, Fabric(slice), top=40) if report.program else None
    return Outcome(rehearsal=wanted, report=report, estimate=found, plan=plan, fixes=tuple(fixes))


def ask(
    wanted: Sequence[Rehearsal], screen: Screen, *, jobs: int | None, fresh: bool, limit_s: float | None = None
) -> list[CompileReport]:
    """What the compiler says, with what it is at shown meanwhile."""
    stages = ["waiting"] * len(wanted)
    began = time.monotonic()

    def progress(number: int, stage: str) -> None:
        stages[number] = stage
        done = sum(one in ("known", "reading") for one in stages)
        counted = f" ({done} of {len(wanted)} done)" if len(wanted) > 1 else ""
        text = f"{wanted[number].title}: {stage}, {time.monotonic() - began:.0f} s{counted}"
        screen.wait(text)
        if not screen.live:
            screen.line(text)

    try:
        several = jobs or min(at_once(), len(wanted))
        return rehearse(wanted, jobs=several, fresh=fresh, progress=progress, limit_s=limit_s)
    finally:
        screen.wait("")


def show(outcomes: Sequence[Outcome], output: str, top: int) -> None:
    """Pages for people, one document for programs; exit code 1 where something does not fit or does not compile."""
    if output == "json":
        document = [record(one) for one in outcomes]
        click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2))
    elif len(outcomes) == 1:
        click.echo(page(outcomes[0], top=top))
    else:
        click.echo(short_table(outcomes))
    if not all(one.report.memory is not None and one.report.memory.fits for one in outcomes):
        raise click.exceptions.Exit(1)
