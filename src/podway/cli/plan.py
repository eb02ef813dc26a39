"""`podway plan`: which slice and mesh, how fast, for how many dollars, and will it fit. In milliseconds, with no TPU.

Five verbs: `train`, `finetune`, `serve`, `compare` and `explain`. Each reads what the person wrote, asks podway.plan, and prints a
table and the best plan by part, or one JSON document.
"""

import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from podway.cli.options import CommandGroup, output_option
from podway.cli.plan_options import (
    model_argument,
    plan_options_of,
    precision_of,
    program_option,
    seq_option,
    showing_options,
    step_options,
)
from podway.cli.plan_report import compare_page, model_line, serve_page, train_page
from podway.errors import UserError
from podway.model.families import find_model, find_planned_model
from podway.model.shape import ModelShape
from podway.plan.engine_costs import Precision
from podway.plan.explain import TOPICS, explain
from podway.plan.finetune import DEFAULT_SEQUENCES, finetune_template
from podway.plan.measured import compare as compare_run
from podway.plan.own_rates import use_own_rates
from podway.plan.picking import nothing_serves, one_slice, slices_named
from podway.plan.plans import TrainPlan, notes_on
from podway.plan.plot import check_path, draw
from podway.plan.search import PlanOptions, Search, plan_train
from podway.plan.serve import Load, search_serve, serve_notes
from podway.plan.t5 import T5_MODELS, search_t5
from podway.quantities import format_number, parse_duration

_STORED = {"bf16": "bfloat16", "int8": "int8", "fp8": "fp8", "auto": "auto"}
_plot = click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw the plans (.png or .svg).")


@click.group(name="plan", cls=CommandGroup, no_args_is_help=True)
def command() -> None:
    """Find the slice, mesh and batch for a model, with speed and cost.

    MODEL is a name (llama3.1-8b), a Hugging Face id, or the path of a config.json. Nothing is started and nothing is
    downloaded: figures come from the catalog, the model's parameter table and a model of the chips (docs/planning.md).
    """
    use_own_rates()


@command.command()
@model_argument
@seq_option
@click.option("--tokens", metavar="N", help="Tokens to train on in all: 15T.")
@click.option("--days", metavar="DAYS", help="How long that may take.")
@click.option("--budget", metavar="$", help="What it may cost.")
@step_options
@_plot
@program_option
@click.option(
    "--rehearse",
    "checked",
    type=click.IntRange(min=1),
    metavar="N",
    help="Compile the N best and rank by that. Default: 5 on a terminal where the compiler is installed, for up to 60 s.",
)
@click.option("--no-rehearse", "unchecked", is_flag=True, help="Plan alone, in milliseconds.")
@showing_options
def train(
    model: str,
    output: str,
    top: int,
    why: bool,
    tpu: str,
    plot: Path | None,
    checked: int | None,
    unchecked: bool,
    **asked: Any,
) -> None:
    """Plan a training run: slice, mesh, microbatches and remat, with memory, speed and cost."""
    if plot is not None:
        check_path(plot)
    candidates = slices_named(tpu)
    options = plan_options_of(candidates[0].devices if len(candidates) == 1 else None, asked)
    if model.lower() in T5_MODELS:
        shape = T5_MODELS[model.lower()]
        search = search_t5(shape, options, candidates)
        title, notes = f"{shape.name} (t5x): {shape.params / 1e9:.2f} B parameters", list[str]()
        if checked is not None:
            raise UserError(f"{model} is t5x's, and Podway has no program of it to compile", "leave --rehearse out")
        if not search.plans:
            raise UserError(
                f"{shape.name} does not fit: {search.rejected[-1].slice}: {search.rejected[-1].reason}",
                "use a larger tile, more --microbatches or a smaller --batch",
            )
    else:
        known = find_planned_model(model)
        search, rehearsal = _checked(
            model, known, plan_train(known, options, candidates), options, checked, unchecked, output
        )
        title, notes = model_line(model, known), [*notes_on(known, search.plans[0]), *rehearsal]
    _show(title, search, options, notes, output=output, top=top, why=why, plot=plot)


def _checked(
    model: str,
    shape: ModelShape,
    search: Search,
    options: PlanOptions,
    number: int | None,
    unchecked: bool,
    output: str,
) -> tuple[Search, list[str]]:
    """The search as the compiler ranks it, with a line about that; as it is where nothing is compiled."""
    if unchecked and number is not None:
        raise UserError("--rehearse and --no-rehearse are both given", "give one of them")
    if unchecked or (number is None and (output != "table" or not sys.stdout.isatty())):
        return search, []
    # Reading compiled programs costs an import that a plan alone should not pay for.
    from podway.cli.plan_rehearsed import BEST, LIMIT_S, by_default, check
    from podway.rehearse.running import check_installed

    if number is None:
        if not by_default(shape, search, output):
            return search, []
        found = check(model, shape, search, options, BEST, LIMIT_S)
    else:
        check_installed()
        find_model(model)
        found = check(model, shape, search, options, number)
    return found.search, [found.line]


@command.command()
@model_argument
@click.option(
    "--seq", type=click.IntRange(min=1), metavar="N", default=2048, show_default=True, help="Tokens of a sequence."
)
@click.option("--lora", type=int, metavar="RANK", help="Train adapters of this rank instead of all weights.")
@click.option("--int8-base", is_flag=True, help="Store the frozen weights in int8 (with --lora).")
@click.option("--tokens", metavar="N", help="Tokens to train on in all: 50M.")
@step_options
@_plot
@showing_options
def finetune(
    model: str,
    lora: int | None,
    int8_base: bool,
    output: str,
    top: int,
    why: bool,
    tpu: str,
    plot: Path | None,
    **asked: Any,
) -> None:
    """Plan a fine-tuning run: all weights, LoRA, or LoRA on int8 weights."""
    if plot is not None:
        check_path(plot)
    candidates, shape = slices_named(tpu), find_planned_model(model)
    template = finetune_template(rank=lora, int8_base=int8_base, **precision_of(asked))
    asked["batch"] = asked["batch"] or str(DEFAULT_SEQUENCES)
    options = plan_options_of(candidates[0].devices if len(candidates) == 1 else None, asked)
    options = msgspec.structs.replace(options, template=template)
    search = plan_train(shape, options, candidates)
    what = f"LoRA of rank {lora}" if lora else "all weights"
    title = f"{model_line(model, shape)}; fine-tuning {what}"
    _show(title, search, options, notes_on(shape, search.plans[0]), output=output, top=top, why=why, plot=plot)


@command.command()
@model_argument
@click.option("--in", "prompt", type=int, default=1000, show_default=True, help="Tokens of a prompt.")
@click.option("--out", "answer", type=int, default=250, show_default=True, help="Tokens of an answer.")
@click.option("--rps", type=float, default=1.0, show_default=True, help="Requests a second.")
@click.option("--ttft", metavar="TIME", help="Longest wait for the first token, of 99 in 100 requests: 500ms.")
@click.option("--tpot", metavar="TIME", help="Longest wait for each further token, of 99 in 100 requests: 30ms.")
@click.option(
    "--weights",
    type=click.Choice(["bf16", "int8", "auto"]),
    default="bf16",
    show_default=True,
    help="Stored as; auto: what is cheapest.",
)
@click.option(
    "--kv",
    type=click.Choice(["bf16", "int8", "fp8", "auto"]),
    default="bf16",
    show_default=True,
    help="The cache is stored as; auto: what is cheapest.",
)
@showing_options
def serve(
    model: str,
    prompt: int,
    answer: int,
    rps: float,
    ttft: str | None,
    tpot: str | None,
    weights: str,
    kv: str,
    tpu: str,
    spot: bool,
    top: int,
    why: bool,
    output: str,
) -> None:
    """Plan serving: what fits, time to the first token and between tokens, replicas, cost."""
    shape, candidates = find_planned_model(model), slices_named(tpu)
    load = Load(
        prompt=prompt,
        output=answer,
        rate=rps,
        ttft=parse_duration(ttft, "--ttft") if ttft else None,
        tpot=parse_duration(tpot, "--tpot") if tpot else None,
    )
    precision = Precision(weights=_STORED[weights], kv=_STORED[kv])
    plans, rejected = search_serve(shape, load, candidates, precision, spot=spot, simulate_best=True)
    if not plans:
        raise nothing_serves(model, rejected)
    if output == "json":
        reasons = [{"slice": name, "reason": reason} for name, reason in rejected]
        notes = serve_notes(shape, precision)
        _print_json({"model": model, "load": load, "plans": plans[:top], "rejected": reasons, "notes": notes})
        return
    title = f"{model_line(model, shape)}; {prompt:,} tokens in, {answer:,} out, {rps:g} requests/s"
    click.echo(serve_page(title, plans, rejected, top=top, why=why))
    for note in serve_notes(shape, precision):
        click.echo(f"note: {note}")


@command.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--tpu", "--tpus", "tpu", required=True, help="The slice that the run ran on: v6e-16.")
@click.option(
    "--slices", type=click.IntRange(min=1), metavar="N", default=1, show_default=True, help="How many of them."
)
@output_option
def compare(folder: Path, tpu: str, slices: int, output: str) -> None:
    """Set a measured run beside its plan, by kind of work.

    FOLDER is the output of a `podway train`; with a profile in it, kinds of work are measured too.
    """
    plan, run, rows = compare_run(folder, one_slice(tpu), slices)
    if output == "json":
        parts = {row.part: {"planned": row.planned, "measured": row.measured} for row in rows}
        _print_json({"slice": plan.slice.accelerator_type, "mesh": str(plan.mesh), "steps": run.steps, "parts": parts,
                     "uncertainty": plan.uncertainty})  # fmt: skip
        return
    click.echo(compare_page(plan, run, rows))


@command.command(name="explain")
@click.argument("topic", required=False, type=str)
def explain_command(topic: str | None) -> None:
    """Explain a word: core, tile, mfu, remat, dcn."""
    if topic is None:
        click.echo("\n".join(f"{name:<8}{line}" for name, (line, _) in TOPICS.items()))
    else:
        click.echo(explain(topic.lower()))


def _show(
    title: str,
    search: Search,
    options: PlanOptions,
    notes: list[str],
    *,
    output: str,
    top: int,
    why: bool,
    plot: Path | None,
) -> None:
    if plot is not None:
        draw(search.plans, title, plot)
        click.echo(f"Drawn: {plot}", err=True)
    if output == "json":
        plans = [plan_record(plan, options) for plan in search.plans[:top]]
        _print_json({"model": title, "plans": plans, "rejected": search.rejected, "notes": notes})
        return
    if options.tokens is not None:
        title += f"; {format_number(options.tokens)} tokens"
    click.echo(train_page(title, search, options, top=top, why=why, notes=notes))


def plan_record(plan: TrainPlan, options: PlanOptions) -> dict[str, Any]:
    """A plan as `-o json` gives it: its fields, and the figures that follow from them."""
    record: dict[str, Any] = msgspec.to_builtins(plan)
    record["slice"] = plan.slice.accelerator_type
    record["topology"] = plan.slice.topology_text
    record["memory"] |= {"total": plan.memory.total, "fits": plan.memory.fits, "verdict": plan.memory.verdict}
    record["time"] |= {"total": plan.time.total, "parts": plan.time.parts, "binds": plan.time.binds}
    record |= {
        "chips": plan.chips,
        "seconds": plan.seconds,
        "tokens_per_second": plan.tokens_per_second,
        "tflops_per_chip": plan.tflops_per_chip,
        "mfu": plan.mfu,
        "uncertainty": msgspec.to_builtins(plan.uncertainty),
        "dollars_per_million_tokens": plan.dollars_per_million_tokens,
    }
    if options.tokens is not None:
        record |= {"hours": plan.hours(options.tokens), "dollars": plan.dollars(options.tokens)}
    return record


def _print_json(document: object) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2))
