"""`podway plan`: which slice and mesh, how fast, for how many dollars, and will it fit. In milliseconds, with no TPU.

Four verbs: `train`, `finetune`, `serve` and `explain`. Each reads what the person wrote, asks podway.plan, and prints a
table and the best plan by part, or one JSON document.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from podway.cli.options import output_option
from podway.cli.plan_report import model_line, serve_page, train_page
from podway.errors import UserError
from podway.model.families import find_model, known_models
from podway.model.layout import MeshShape, parse_mesh
from podway.plan.explain import TOPICS, explain
from podway.plan.finetune import DEFAULT_SEQUENCES, finetune_template
from podway.plan.picking import nothing_serves, slices_named
from podway.plan.plans import Plan, notes_on
from podway.plan.plot import check_path, draw
from podway.plan.quantities import parse_amount, parse_batch, parse_duration, parse_tile, readable
from podway.plan.search import Search, Wish, nothing_fits, search_train
from podway.plan.serve import Load, Precision, search_serve
from podway.plan.t5 import T5_MODELS, search_t5
from podway.plan.training import PROGRAMS, REMAT, Dtype, Optimizer, Training

F = TypeVar("F", bound=Callable[..., Any])
_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "float32": "float32", "bfloat16": "bfloat16"}
_STORED = {"bf16": "bfloat16", "int8": "int8", "fp8": "fp8", "int4": "int4"}


def _complete_models(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    return [name for name in (*known_models(), *T5_MODELS) if name.startswith(typed)]


def _options(*several: Callable[[F], F]) -> Callable[[F], F]:
    """One decorator of several, in the order they are shown."""

    def apply(function: F) -> F:
        for option in reversed(several):
            function = option(function)
        return function

    return apply


_model = click.argument("model", shell_complete=_complete_models)
_showing = _options(
    click.option("--tpu", default="any", show_default=True, help="A slice (v6e-8), a generation (v6e), or any."),
    click.option("--spot", is_flag=True, help="Use spot prices."),
    click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="How many rows to show."),
    click.option("--why", is_flag=True, help="Show every slice that does not work, and why."),
    output_option,
)
_step = _options(
    click.option("--batch", metavar="N|TOKENS", help="Sequences of a step (512), or tokens with a suffix (4M)."),
    click.option(
        "--mesh",
        metavar="AXES",
        help="fsdp=16,tensor=16; one size may be *. Axes: data, fsdp, expert, tensor, context.",
    ),
    click.option(
        "--tile", metavar="X,Y,Z", help="The box of chips that a tensor group fills (see `plan explain tile`)."
    ),
    click.option("--microbatches", type=click.IntRange(min=1), help="Parts that a step's batch is taken in."),
    click.option("--remat", metavar="POLICY", help=f"{', '.join(REMAT)}, or names joined by + (qkv+context)."),
    click.option(
        "--optimizer",
        type=click.Choice(["adamw", "adafactor"]),
        default="adamw",
        show_default=True,
        help="Which optimizer.",
    ),
    click.option("--opt-dtype", type=click.Choice(list(_DTYPES)), default="fp32", help="Of the optimizer's moments."),
    click.option("--param-dtype", type=click.Choice(list(_DTYPES)), default="fp32", help="Of the stored weights."),
    click.option("--slices", type=click.IntRange(min=1), help="Slices joined by the data-centre network."),
    click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw the plans (.png or .svg)."),
)


@click.group(name="plan", no_args_is_help=True)
def command() -> None:
    """Know what a slice will do before paying for it.

    MODEL is a name (llama3.1-8b), a Hugging Face id, or the path of a config.json. Nothing is started and nothing is
    downloaded: figures come from the catalog, the model's parameter table and a model of the chips (docs/planning.md).
    """


@command.command()
@_model
@click.option("--seq", type=click.IntRange(min=1), default=8192, show_default=True, help="Tokens of a sequence.")
@click.option("--tokens", metavar="N", help="Tokens to train on in all: 15T.")
@click.option("--days", metavar="N", help="How long that may take.")
@click.option("--budget", metavar="$", help="What it may cost.")
@_step
@click.option(
    "--program", type=click.Choice(list(PROGRAMS)), default="podway", help="Whose training program is assumed."
)
@_showing
def train(model: str, output: str, top: int, why: bool, tpu: str, plot: Path | None, **asked: Any) -> None:
    """Plan a training run: slice, mesh, microbatches and remat, with memory, speed and cost."""
    if plot is not None:
        check_path(plot)
    candidates = slices_named(tpu)
    wish = _wish(candidates[0].devices if len(candidates) == 1 else None, asked)
    if model.lower() in T5_MODELS:
        shape = T5_MODELS[model.lower()]
        search = search_t5(shape, wish, candidates)
        title, notes = f"{shape.name} (t5x): {shape.params / 1e9:.2f} B parameters", list[str]()
        if not search.plans:
            raise UserError(
                f"{shape.name} does not run so: {search.rejected[-1].slice}: {search.rejected[-1].reason}",
                "use a larger tile, more --microbatches or a smaller --batch",
            )
    else:
        known = find_model(model)
        search = search_train(known, wish, candidates)
        if not search.plans:
            raise nothing_fits(known, search)
        title, notes = model_line(model, known), notes_on(known, search.plans[0])
    _show(title, search, wish, notes, output=output, top=top, why=why, plot=plot)


@command.command()
@_model
@click.option("--seq", type=click.IntRange(min=1), default=2048, show_default=True, help="Tokens of a sequence.")
@click.option("--lora", type=int, metavar="RANK", help="Train adapters of this rank instead of all weights.")
@click.option("--int8-base", is_flag=True, help="Store the frozen weights in int8 (with --lora).")
@click.option("--tokens", metavar="N", help="Tokens to train on in all: 50M.")
@_step
@_showing
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
    candidates, shape = slices_named(tpu), find_model(model)
    template = finetune_template(rank=lora, int8_base=int8_base, **_precision(asked))
    asked["batch"] = asked["batch"] or str(DEFAULT_SEQUENCES)
    wish = _wish(candidates[0].devices if len(candidates) == 1 else None, asked)
    wish = msgspec.structs.replace(wish, template=template)
    search = search_train(shape, wish, candidates)
    if not search.plans:
        raise nothing_fits(shape, search)
    what = f"LoRA of rank {lora}" if lora else "all weights"
    title = f"{model_line(model, shape)}; fine-tuning {what}"
    _show(title, search, wish, notes_on(shape, search.plans[0]), output=output, top=top, why=why, plot=plot)


@command.command()
@_model
@click.option("--in", "prompt", type=int, default=1000, show_default=True, help="Tokens of a prompt.")
@click.option("--out", "answer", type=int, default=250, show_default=True, help="Tokens of an answer.")
@click.option("--rps", type=float, default=1.0, show_default=True, help="Requests a second.")
@click.option("--ttft", metavar="TIME", help="Longest wait for the first token: 500ms.")
@click.option("--tpot", metavar="TIME", help="Longest wait for each further token: 30ms.")
@click.option("--weights", type=click.Choice(["bf16", "int8"]), default="bf16", show_default=True, help="Stored as.")
@click.option(
    "--kv",
    type=click.Choice(["bf16", "int8", "fp8"]),
    default="bf16",
    show_default=True,
    help="The cache is stored as.",
)
@_showing
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
    shape, candidates = find_model(model), slices_named(tpu)
    load = Load(
        prompt=prompt,
        output=answer,
        rate=rps,
        ttft=parse_duration(ttft, "--ttft") if ttft else None,
        tpot=parse_duration(tpot, "--tpot") if tpot else None,
    )
    precision = Precision(weights=_STORED[weights], kv=_STORED[kv])
    plans, rejected = search_serve(shape, load, candidates, precision, spot=spot)
    if not plans:
        raise nothing_serves(model, rejected)
    if output == "json":
        reasons = [{"slice": name, "reason": reason} for name, reason in rejected]
        _print_json({"model": model, "load": load, "plans": plans[:top], "rejected": reasons})
        return
    title = f"{model_line(model, shape)}; {prompt:,} tokens in, {answer:,} out, {rps:g} requests/s"
    click.echo(serve_page(title, plans, rejected, top=top, why=why))


@command.command(name="explain")
@click.argument("topic", required=False, type=str)
def explain_command(topic: str | None) -> None:
    """Explain a word: core, tile, mfu, remat, dcn."""
    if topic is None:
        click.echo("\n".join(f"{name:<8}{line}" for name, (line, _) in TOPICS.items()))
    else:
        click.echo(explain(topic.lower()))


def _precision(asked: dict[str, Any]) -> dict[str, Any]:
    optimizer: Optimizer = asked["optimizer"]
    moments: Dtype = _DTYPES[asked["opt_dtype"]]  # type: ignore[assignment]
    params: Dtype = _DTYPES[asked["param_dtype"]]  # type: ignore[assignment]
    return {"optimizer": optimizer, "moments": moments, "params": params}


def _wish(devices: int | None, asked: dict[str, Any]) -> Wish:
    """What was asked for, from the words it was asked in."""
    seq = asked["seq"]
    tile = parse_tile(asked["tile"]) if asked["tile"] else None
    mesh: MeshShape | None = None
    if asked["mesh"]:
        if devices is None:
            raise UserError("--mesh needs one slice", "name it with --tpu, such as --tpu v6e-8")
        mesh = parse_mesh(asked["mesh"], chips=devices)
    program = PROGRAMS[asked.get("program") or "podway"]
    return Wish(
        seq=seq,
        batch=parse_batch(asked["batch"], seq) if asked["batch"] else None,
        microbatches=asked["microbatches"],
        remat=asked["remat"],
        mesh=mesh,
        tile=tile,
        slices=asked["slices"],
        tokens=parse_amount(asked["tokens"], "--tokens") if asked["tokens"] else None,
        days=parse_amount(asked["days"], "--days") if asked.get("days") else None,
        budget=parse_amount(asked["budget"], "--budget") if asked.get("budget") else None,
        spot=asked["spot"],
        template=Training(seq=seq, batch=1, program=program, **_precision(asked)),
    )


def _show(
    title: str, search: Search, wish: Wish, notes: list[str], *, output: str, top: int, why: bool, plot: Path | None
) -> None:
    if plot is not None:
        draw(search.plans, title, plot)
        click.echo(f"Drawn: {plot}", err=True)
    if output == "json":
        plans = [plan_record(plan, wish) for plan in search.plans[:top]]
        _print_json({"model": title, "plans": plans, "rejected": search.rejected, "notes": notes})
        return
    if wish.tokens is not None:
        title += f"; {readable(wish.tokens)} tokens"
    click.echo(train_page(title, search, wish, top=top, why=why, notes=notes))


def plan_record(plan: Plan, wish: Wish) -> dict[str, Any]:
    """A plan as `-o json` gives it: its fields, and the figures that follow from them."""
    record: dict[str, Any] = msgspec.to_builtins(plan)
    record["slice"] = plan.slice.accelerator_type
    record["topology"] = plan.slice.topology_text
    record["memory"] |= {"total": plan.memory.total, "fits": plan.memory.fits}
    record["time"] |= {"total": plan.time.total, "parts": plan.time.parts, "binds": plan.time.binds}
    record |= {
        "chips": plan.chips,
        "tokens_per_second": plan.tokens_per_second,
        "tflops_per_chip": plan.tflops_per_chip,
        "mfu": plan.mfu,
        "dollars_per_million_tokens": plan.dollars_per_million_tokens,
    }
    if wish.tokens is not None:
        record |= {"hours": plan.hours(wish.tokens), "dollars": plan.dollars(wish.tokens)}
    return record


def _print_json(document: object) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2))
