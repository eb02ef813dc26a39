"""`make bench-aot`: training steps and serving programs compiled for TPU slices on a machine that has none.

1. Every row of the table is a rehearsal (podway.rehearse): the very program that `podway train` or `podway serve` would run.
2. Rows that were measured are kept in docs/measurements/aot.json and not measured again, so that the command can be stopped and
   goes on where it was; `--fresh` starts over. `--fast` asks for memory and schedule only (seconds a row); without it rows are
   compiled to the end (minutes), those that a fast run left open too.
3. docs/aot.md is written after every row.

A row that does not fit is a result like any other.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
from tools.bench.report import machine, table, write_section

from podway.catalog.slices import find_slice
from podway.decoding import from_json
from podway.model.families import find_model
from podway.plan.memory import GIB
from podway.plan.search import PlanOptions, plan_train
from podway.plan.training import Dtype, Training
from podway.rehearse.fabric import Fabric
from podway.rehearse.program import asynchronous
from podway.rehearse.rehearsal import CompileReport, Rehearsal, rehearse_training
from podway.rehearse.running import engine_parts, rehearse
from podway.rehearse.timeline import estimate

ROOT = Path(__file__).parents[2]
PAGE, KEPT = ROOT / "docs" / "aot.md", ROOT / "docs" / "measurements" / "aot.json"


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is kept of a rehearsal."""

    name: str
    slice: str
    mesh: str
    gib: float | None = None  # None: it does not compile
    limit: float = 0.0
    collectives: dict[str, tuple[int, int]] = {}  # kind: asynchronous, waited for
    step: tuple[float, float, float] | None = None  # low, point, high
    schedule_seconds: float | None = None
    compile_seconds: float | None = None  # None: only as far as its schedule
    peak_bytes: int = 0
    failed: str = ""
    versions: str = ""


def _train(model: str, slice: str, mesh: str, batch: int, length: int, *more: str) -> Rehearsal:
    """Everything computed again; `more`: further settings."""
    settings = (f"mesh.shape={mesh}", f"batch.sequences={batch}", f"batch.length={length}", "remat.policy=full")
    return Rehearsal(model=model, slice=slice, settings=(*settings, *more))


def planned_rehearsal(model: str, slice: str, batch: int, length: int, weights: Dtype = "float32") -> Rehearsal:
    """What `podway plan train` proposes first."""
    tpu = find_slice(slice)
    asked = PlanOptions(seq=length, batch=batch, template=Training(seq=length, batch=batch, params=weights))
    best = plan_train(find_model(model), asked, [tpu]).plans[0]
    return rehearse_training(model, tpu, best.mesh, best.training, fast=False)


# Jobs whose mesh, remat and microbatches the planner chooses: those of MaxText's recipes and of published steps, and a long context.
PLANNED = (
    ("Llama 3.1 8B", "llama3.1-8b", "v6e-16", 48, 8192),
    ("Llama 3.1 8B", "llama3.1-8b", "v6e-64", 320, 8192),
    ("Llama 3.1 8B", "llama3.1-8b", "v5p-128", 256, 8192),
    ("Llama 3.1 8B", "llama3.1-8b", "v5p-64", 32, 131072),
    ("Llama 3.1 70B", "llama3.1-70b", "v6e-64", 128, 8192),
    ("Llama 3.1 70B", "llama3.1-70b", "v6e-256", 1280, 8192),
    ("Mixtral 8x7B", "mixtral-8x7b", "v5p-128", 256, 4096),
    ("Mixtral 8x7B", "mixtral-8x7b", "v6e-256", 3072, 4096),
    ("Qwen3 30B-A3B", "qwen3-30b-a3b", "v5p-64", 128, 4096),
)
AotRow = tuple[str, Rehearsal]  # a row's name, which with its slice is its key, and what to compile


def training_rows() -> list[AotRow]:
    """The four published jobs with their own batch, Llama 3.1 with everything computed again, and what the planner proposes."""
    found = [
        ("16B, the published job", _train("16b", "v5litepod-256", "fsdp=256", 1536, 2048)),
        ("32B, the published job", _train("32b", "v5litepod-256", "fsdp=256", 1024, 2048)),
        ("64B, the published job", _train("64b", "v5litepod-256", "fsdp=256", 512, 2048)),
        ("128B, the published job", _train("128b", "v5litepod-256", "fsdp=16,tensor=16", 256, 2048)),
    ]
    for slice, mesh, batch in (
        ("v6e-16", "fsdp=16", 32),
        ("v6e-64", "fsdp=64", 128),
        ("v5p-16", "fsdp=8", 16),
        ("v5p-128", "fsdp=64", 128),
    ):
        found.append((f"Llama 3.1 8B, {batch} x 8192", _train("llama3.1-8b", slice, mesh, batch, 8192)))
    for slice, mesh, batch, length in (
        ("v6e-16", "fsdp=16", 16, 4096), ("v6e-64", "fsdp=64", 64, 4096), ("v5p-16", "fsdp=8", 8, 4096), ("v5p-128", "fsdp=64", 64, 8192),
    ):  # fmt: skip
        found.append((f"Llama 3.1 70B, {batch} x {length}", _train("llama3.1-70b", slice, mesh, batch, length)))
    found.append(
        (
            "Llama 3.1 8B, 48 x 8192, int8",
            _train("llama3.1-8b", "v6e-16", "fsdp=16", 48, 8192, "precision.products=int8"),
        )
    )
    found += [
        (f"{name}, {batch} x {length}, planned", planned_rehearsal(model, slice, batch, length))
        for name, model, slice, batch, length in PLANNED
    ]
    return found


# Engines: a model on a slice; a replica takes all of it.
ENGINES = (("llama3.1-8b", "v5litepod-8"), ("llama3.1-8b", "v6e-8"), ("llama3.1-70b", "v6e-16"))
# Of these, the smallest step, a full one and the one with the most memory; options of the engine are in the row's name.
FEW_PARTS = ("decode 1 rows", "decode 128 rows", "mixed 32 rows, 2048 prompt tokens")
FEW: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("llama3.1-8b", "v6e-1", {}),
    ("llama3.1-8b", "v6e-1", {"quantize": "int8"}),
    ("llama3.1-8b", "v6e-4", {}),
    ("llama3.1-8b", "v6e-4", {"quantize": "int8"}),
    ("llama3.1-8b", "v6e-4", {"kv": "fp8"}),
    ("qwen3-30b-a3b", "v6e-4", {}),
    ("qwen3-30b-a3b", "v6e-8", {}),
    ("gemma2-9b", "v6e-1", {}),
    ("gemma3-27b", "v6e-4", {}),
)


def serving_rows() -> list[AotRow]:
    """Every program of each engine, and some of others."""
    found = []
    for model, slice in ENGINES:
        engine = Rehearsal(what="serve", model=model, slice=slice)
        for part in engine_parts(engine):
            found.append((f"{model} serving, {part}", msgspec.structs.replace(engine, part=part)))
    for model, slice, options in FEW:
        said = "".join(f", {key} {value}" for key, value in options.items())
        for part in FEW_PARTS:
            asked = Rehearsal(what="serve", model=model, slice=slice, options=dict(options), part=part)
            found.append((f"{model} serving{said}, {part}", asked))
    return found


def row_of(name: str, asked: Rehearsal, report: CompileReport, before: Row | None) -> Row:
    """What is kept of an answer; a schedule that was timed before stays."""
    mesh = asked.setting("mesh.shape") or f"tensor={asked.tensor or find_slice(asked.slice).devices}"
    complete = report.program is not None and report.program.complete
    row = Row(
        name=name,
        slice=asked.slice,
        mesh=mesh,
        failed=report.failed,
        versions=f"jax {report.jax}, libtpu {report.libtpu}",
        peak_bytes=report.peak_bytes,
        compile_seconds=report.compile_seconds if complete else None,
        schedule_seconds=(before.schedule_seconds if before else None) if complete else report.compile_seconds,
    )
    if report.memory is None or report.program is None:
        return row
    guess = estimate(report.program, Fabric(asked.tpu))
    timed = asked.what == "train" and report.memory.fits  # a decode step depends on how full the cache is
    return msgspec.structs.replace(
        row,
        gib=round(report.memory.total / GIB, 2),
        limit=round(report.memory.limit / GIB, 2),
        collectives=asynchronous(report.program),
        step=(guess.low, guess.point, guess.high) if timed else None,
    )


def is_answered(row: Row | None, *, fast: bool) -> bool:
    """Whether a row needs no compiler; one that does not fit is answered by its schedule."""
    if row is None or row.gib is None:
        return False
    return fast or row.compile_seconds is not None or row.gib > row.limit


def read_kept() -> dict[str, Row]:
    """Rows that were measured, by name."""
    return from_json(KEPT.read_bytes(), dict[str, Row]) if KEPT.exists() else {}


def write_kept(rows: dict[str, Row]) -> None:
    """The rows and the page."""
    part = KEPT.with_suffix(".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")
    part.rename(KEPT)
    write_section("bench-aot", page_of(rows.values()), PAGE)


def page_of(rows: Iterable[Row]) -> str:
    """Two tables: training, serving."""
    trained = [row for row in rows if "serving" not in row.name]
    served = [row for row in rows if "serving" in row.name]
    parts = [f"Measured on {machine()}; {', '.join(sorted({row.versions for row in rows}))}.", ""]
    headers = ["step", "slice", "mesh", "GiB a chip", "usable", "fits", "asynchronous", "step s (low to high)"]
    headers += ["schedule s", "compiled s"]
    parts += ["### Training", "", table(headers, [_cells(row) for row in trained]), ""]
    parts += [
        "### Serving",
        "",
        table([*headers[:7], *headers[8:]], [_cells(row)[:7] + _cells(row)[8:] for row in served]),
    ]
    return "\n".join(parts)


def _cells(row: Row) -> list[str]:
    slice = find_slice(row.slice)
    where = f"{row.slice} ({slice.topology_text}{', wrapped' if all(slice.wrap) else ''})"
    head = [row.name, where, row.mesh]
    times = [_seconds(row.schedule_seconds), _seconds(row.compile_seconds)]
    if row.gib is None:
        return [*head, "-", "-", "does not compile", row.failed[:120], "-", *times]
    told = ", ".join(f"{kind} {a} of {a + s}" for kind, (a, s) in row.collectives.items()) or "no collectives"
    step = f"{row.step[1]:.2f} ({row.step[0]:.2f} to {row.step[2]:.2f})" if row.step else "-"
    fits = "yes" if row.gib <= row.limit else "no"
    return [*head, f"{row.gib:.2f}", f"{row.limit:.2f}", fits, told, step, *times]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def main() -> int:
    """Exit code 1 where a row does not compile; one that does not fit is an answer."""
    parser = argparse.ArgumentParser(
        description="Compile training steps and serving programs for TPU slices, without a TPU."
    )
    parser.add_argument("--fast", action="store_true", help="memory and schedule only: seconds a row")
    parser.add_argument("--fresh", action="store_true", help="measure every row again")
    parser.add_argument("--only", default="", help="rows whose name or slice holds this text")
    parser.add_argument("--training", action="store_true", help="no serving programs")
    options = parser.parse_args()
    every = not (options.only or options.training)
    rows = {} if options.fresh and every else read_kept()  # what is not asked for stays on the page
    wanted = training_rows() + ([] if options.training else serving_rows())
    order = [f"{name} on {asked.slice}" for name, asked in wanted]
    failed = False
    for label, (name, asked) in zip(order, wanted, strict=True):
        known = is_answered(rows.get(label), fast=options.fast) and not options.fresh
        if options.only not in label or known:
            continue
        asked = msgspec.structs.replace(asked, fast=options.fast)
        report = rehearse([asked], jobs=1, fresh=True)[0]
        rows[label] = row_of(name, asked, report, rows.get(label))
        print(" | ".join(_cells(rows[label])), flush=True)
        failed |= rows[label].gib is None
        write_kept(_ordered(rows, order))
    write_kept(_ordered(rows, order))
    return int(failed)


def _ordered(rows: dict[str, Row], order: list[str]) -> dict[str, Row]:
    """The rows of this run in its order, then all others as they were."""
    return {key: rows[key] for key in dict.fromkeys([*order, *rows]) if key in rows}


if __name__ == "__main__":
    sys.exit(main())
