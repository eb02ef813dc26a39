"""The options that `podway plan` and `podway rehearse` share, and the options that they add up to."""

from collections.abc import Callable
from math import prod
from typing import Any, TypeVar

import click

from podway.cli.options import output_option
from podway.errors import UserError
from podway.model.families import known_models
from podway.model.layout import MeshShape, parse_mesh
from podway.model.planned_families import planned_models
from podway.plan.search import PlanOptions
from podway.plan.t5 import T5_MODELS
from podway.plan.training import OFFLOADABLE, PROGRAMS, REMAT, Compute, Dtype, Optimizer, Training
from podway.quantities import parse_amount, parse_batch, parse_tile

F = TypeVar("F", bound=Callable[..., Any])
DTYPES = {"bf16": "bfloat16", "fp32": "float32", "float32": "float32", "bfloat16": "bfloat16"}


def _complete_models(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    return [name for name in (*known_models(), *planned_models(), *T5_MODELS) if name.startswith(typed)]


def options(*several: Callable[[F], F]) -> Callable[[F], F]:
    """One decorator of several, in the order they are shown."""

    def apply(function: F) -> F:
        for option in reversed(several):
            function = option(function)
        return function

    return apply


model_argument = click.argument("model", shell_complete=_complete_models)
showing_options = options(
    click.option(
        "--tpu", "--tpus", "tpu", default="any", show_default=True, help="A slice (v6e-8), a generation (v6e), or any."
    ),
    click.option("--spot", is_flag=True, help="Use spot prices."),
    click.option(
        "--top", type=click.IntRange(min=1), metavar="N", default=10, show_default=True, help="How many rows to show."
    ),
    click.option("--why", is_flag=True, help="Show every slice that does not work, and why."),
    output_option,
)
step_options = options(
    click.option("--batch", metavar="N|TOKENS", help="Sequences of a step (512), or tokens with a suffix (4M)."),
    click.option(
        "--mesh",
        metavar="AXES",
        help="fsdp=16,tensor=16, of one slice; one size may be *. Axes: data, fsdp, expert, tensor, context (slices).",
    ),
    click.option(
        "--tile", metavar="X,Y,Z", help="The box of chips that a tensor group fills (see `plan explain tile`)."
    ),
    click.option(
        "--microbatches", type=click.IntRange(min=1), metavar="N", help="Parts that a step's batch is taken in."
    ),
    click.option("--remat", metavar="POLICY", help=f"{', '.join(REMAT)}, or names joined by + (qkv+context)."),
    click.option(
        "--offload", metavar="NAMES", help=f"Activations kept in host memory, joined by +: {', '.join(OFFLOADABLE)}."
    ),
    click.option(
        "--compute",
        type=click.Choice(["bf16", "int8", "fp8"]),
        default="bf16",
        show_default=True,
        help="What the matrix products of layers are computed in.",
    ),
    click.option(
        "--optimizer",
        type=click.Choice(["adamw", "adafactor"]),
        default="adamw",
        show_default=True,
        help="Which optimizer.",
    ),
    click.option("--opt-dtype", type=click.Choice(list(DTYPES)), default="fp32", help="Of the optimizer's moments."),
    click.option("--param-dtype", type=click.Choice(list(DTYPES)), default="fp32", help="Of the stored weights."),
    click.option("--slices", type=click.IntRange(min=1), metavar="N", help="Slices joined by the data-centre network."),
    click.option("--state-over-slices", is_flag=True, help="Slices share weights and moments instead of copying them."),
)
program_option = click.option(
    "--program",
    type=click.Choice(list(PROGRAMS)),
    default="podway",
    metavar="NAME",
    help=f"Whose training program is assumed: {', '.join(PROGRAMS)}.",
)
seq_option = click.option(
    "--seq", type=click.IntRange(min=1), metavar="N", default=8192, show_default=True, help="Tokens of a sequence."
)


def precision_of(asked: dict[str, Any]) -> dict[str, Any]:
    """The optimizer, the types that numbers are kept in, and whether slices share them."""
    optimizer: Optimizer = asked["optimizer"]
    moments: Dtype = DTYPES[asked["opt_dtype"]]  # type: ignore[assignment]
    params: Dtype = DTYPES[asked["param_dtype"]]  # type: ignore[assignment]
    compute: Compute = "bfloat16" if asked["compute"] == "bf16" else asked["compute"]
    shared = asked["state_over_slices"]
    return {
        "optimizer": optimizer,
        "moments": moments,
        "params": params,
        "compute": compute,
        "state_over_slices": shared,
    }


def _mesh_of(text: str, devices: int | None, slices: int | None) -> MeshShape:
    """A mesh as it is written: that of one slice, or with `slices=` that of all of them. `devices` are those of a slice."""
    if devices is None:
        raise UserError("--mesh needs one slice", "name it with --tpu, such as --tpu v6e-8")
    if "slices=" not in text:
        if slices is not None and slices > 1 and _product(text) == devices * slices:
            raise UserError(
                f"--mesh {text!r} lies over {slices} slices: axes over several slices are not planned, and podway train has none",
                f"give the mesh of one slice ({devices} devices); slices hold copies of the model",
            )
        return parse_mesh(text, chips=devices)
    written = next(part for part in text.replace(" ", "").split(",") if part.startswith("slices="))
    number = written.removeprefix("slices=")
    many = int(number) if number.isascii() and number.isdigit() else slices or 1
    if slices is not None and many != slices:
        raise UserError(
            f"--mesh {text!r} is for {many} slices, and --slices is {slices}", "give the same number in both"
        )
    return parse_mesh(text, chips=devices * many)


def _product(text: str) -> int:
    sizes = [part.partition("=")[2] for part in text.replace(" ", "").split(",")]
    return prod(int(size) for size in sizes) if all(size.isascii() and size.isdigit() for size in sizes) else 0


def plan_options_of(devices: int | None, asked: dict[str, Any]) -> PlanOptions:
    """What is asked for, from the options of the command line; `devices` are those of the one slice that is named."""
    seq = asked["seq"]
    tile = parse_tile(asked["tile"]) if asked["tile"] else None
    mesh = _mesh_of(asked["mesh"], devices, asked["slices"]) if asked["mesh"] else None
    slices = mesh.slices if mesh is not None and asked["slices"] is None and mesh.slices > 1 else asked["slices"]
    program = PROGRAMS[asked.get("program") or "podway"]
    return PlanOptions(
        seq=seq,
        batch=parse_batch(asked["batch"], seq) if asked["batch"] else None,
        microbatches=asked["microbatches"],
        remat=asked["remat"],
        offload=tuple(asked["offload"].split("+")) if asked["offload"] else None,
        mesh=mesh,
        tile=tile,
        slices=slices,
        tokens=parse_amount(asked["tokens"], "--tokens") if asked.get("tokens") else None,
        days=parse_amount(asked["days"], "--days") if asked.get("days") else None,
        budget=parse_amount(asked["budget"], "--budget") if asked.get("budget") else None,
        spot=bool(asked.get("spot")),
        template=Training(seq=seq, batch=1, program=program, **precision_of(asked)),
    )
