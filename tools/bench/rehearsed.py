"""What the compiler reported, recorded: the published 16B-128B jobs, and a grid of steps (`grid.py`) for the planner's bytes and times.

Compiling takes minutes and libtpu, so `make bench-plan` reads what was recorded in docs/measurements, with the versions it was
recorded with; `python -m tools.bench.plan --fresh` asks the compiler again. An estimate is always computed again from the recorded
program: no step time is recorded.
"""

import gzip
from pathlib import Path

import msgspec
from tools.bench.grid import ALL, Cell

from podway.catalog.slices import find_slice
from podway.decoding import from_json
from podway.model.families import find_model
from podway.model.flops import flops_per_token
from podway.model.layout import MeshShape
from podway.plan.evidence import Comparison, job_plan
from podway.plan.memory import GIB
from podway.plan.plans import evaluate
from podway.plan.published_rows import is_calibration, rows_of
from podway.plan.training import MAXTEXT_2023
from podway.rehearse.fabric import Fabric
from podway.rehearse.rehearsal import CompileReport, Rehearsal, rehearse_training
from podway.rehearse.running import rehearse
from podway.rehearse.timeline import Estimate, estimate

MEASUREMENTS = Path(__file__).parents[2] / "docs" / "measurements"
JOBS, STEPS = MEASUREMENTS / "rehearsed-jobs.json", MEASUREMENTS / "rehearsed-steps.json.gz"


class CompiledStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step of the grid, and its program: what it takes is estimated from it each time. No program: only its bytes were kept."""

    cell: Cell
    report: CompileReport


def record_steps(*, again: bool = True) -> list[str]:
    """Compile the grid step by step and keep the programs, written down after each; lines about what did not compile."""
    known = {} if again else {row.cell: row for row in recorded_steps()}
    failed = []
    for cell in (cell for cell in ALL if cell not in known):
        (report,) = rehearse([rehearsal_of(cell)], jobs=1, fresh=again)
        if report.memory is None:
            failed.append(f"{cell.name}: {report.failed}")
            continue
        known[cell] = CompiledStep(cell=cell, report=without_buffers(report))
        write_steps([known[cell] for cell in ALL if cell in known])
    return failed


def write_steps(rows: list[CompiledStep]) -> None:
    """Keep these, and nothing else."""
    STEPS.write_bytes(gzip.compress(msgspec.json.encode(rows), mtime=0))


def without_buffers(report: CompileReport) -> CompileReport:
    """What is recorded of a report: not the names of what is alive at its peak."""
    memory = report.memory and msgspec.structs.replace(report.memory, buffers=())
    return msgspec.structs.replace(report, memory=memory)


def recorded_steps() -> list[CompiledStep]:
    """The steps of the grid that were compiled."""
    return from_json(gzip.decompress(STEPS.read_bytes()), list[CompiledStep]) if STEPS.exists() else []


def timed() -> list[Comparison]:
    """Seconds of a step: estimated of the compiled program, and planned. A program that does not fit is not scheduled to the end."""
    found = []
    for row in recorded_steps():
        if row.report.program is None or row.report.memory is None or not row.report.memory.fits:
            continue
        slice = find_slice(row.cell.slice)
        plan = evaluate(find_model(row.cell.model), slice, row.cell.sizes, row.cell.training)
        found.append(
            Comparison(row.cell.name, estimate(row.report.program, Fabric(slice)).point, plan.time.total, False)
        )
    return found


def record_jobs() -> list[str]:
    """Compile the four jobs and record the reports; lines about those that failed."""
    rows = [row for row in rows_of("v5e_jobs") if row["slices"] == "1"]
    wanted = []
    for row in rows:
        plan = job_plan(row)
        wanted.append(rehearse_training(row["model"], plan.slice, _untiled(plan.mesh), plan.training, fast=True))
    report = rehearse(wanted, fresh=True)
    JOBS.write_bytes(msgspec.json.encode({row["row"]: one for row, one in zip(rows, report, strict=True)}) + b"\n")
    return [f"{one.title}: {of.failed}" for one, of in zip(wanted, report, strict=True) if of.failed]


def rehearsal_of(cell: Cell) -> Rehearsal:
    """What is compiled for a step of the grid."""
    slice = find_slice(cell.slice)
    placed = evaluate(
        find_model(cell.model), slice, cell.sizes, cell.training
    ).mesh  # tensor groups where the planner puts them
    return rehearse_training(cell.model, slice, placed, cell.training, fast=True)


def _untiled(mesh: MeshShape) -> MeshShape:
    """The published jobs left the order of devices to jax."""
    return msgspec.structs.replace(mesh, tile=None)


def jobs() -> tuple[list[Comparison], dict[str, tuple[CompileReport, Estimate]]]:
    """MFU in percent of the four jobs on one slice: published, and as estimated of the recorded programs."""
    recorded = from_json(JOBS.read_bytes(), dict[str, CompileReport])
    compared, found = [], {}
    for row in rows_of("v5e_jobs"):
        report = recorded.get(row["row"])
        if report is None or report.program is None:
            continue
        slice, seq = find_slice(row["slice"]), int(row["seq"])
        guess = estimate(report.program, Fabric(slice))
        flops = flops_per_token(find_model(row["model"]), seq, MAXTEXT_2023.convention)
        work = flops * seq * int(row["sequences_per_chip"]) / slice.generation_facts.peak_bf16
        calibration = is_calibration("v5e_jobs", row["row"])
        compared.append(Comparison(row["row"], float(row["mfu_percent"]), 100 * work / guess.point, calibration))
        found[row["row"]] = (report, guess)
    return compared, found


def weighed() -> list[Comparison]:
    """GiB of a device over the grid: compiled, and planned."""
    found = []
    for row in recorded_steps():
        assert row.report.memory is not None
        cell = row.cell
        plan = evaluate(find_model(cell.model), find_slice(cell.slice), cell.sizes, cell.training)
        found.append(Comparison(cell.name, row.report.memory.total / GIB, plan.memory.total / GIB, False))
    return found


def versions() -> str:
    """`jax 0.10.2, libtpu 0.0.51` of what was recorded."""
    return ", ".join(sorted({f"jax {row.report.jax}, libtpu {row.report.libtpu}" for row in recorded_steps()}))
