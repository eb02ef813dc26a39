"""Rehearsals as people read them, and as `-o json` gives them."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from podway.cli.plan_report import format_span, uncertainty_lines
from podway.cli.tables import table
from podway.plan.chips import device_of
from podway.plan.memory import GIB
from podway.plan.plans import TrainPlan
from podway.plan.uncertainty import Uncertainty, uncertainty_of
from podway.quantities import format_number, format_seconds
from podway.rehearse.program import asynchronous
from podway.rehearse.rehearsal import CompileReport, Rehearsal
from podway.rehearse.timeline import Estimate

PARTS = {
    "matrix": "products",
    "kernel": "attention and other kernels",
    "memory": "HBM",
    "collective": "collectives the chip waits for",
    "waiting": "ends of asynchronous transfers",
    "slices": "waiting for the slowest slice",
}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A rehearsal, its report, and what follows from it."""

    rehearsal: Rehearsal
    report: CompileReport
    estimate: Estimate | None = None
    plan: TrainPlan | None = None  # of the same step, where it was planned
    fixes: tuple[str, ...] = ()  # what would make it fit

    @property
    def tokens_per_second(self) -> float | None:
        """Of the whole job."""
        return self.plan.training.tokens / self.estimate.point if self.plan and self.estimate else None

    def mfu(self, seconds: float) -> float | None:
        """Of a step that takes so long."""
        if self.plan is None:
            return None
        device = device_of(self.plan.slice.generation)
        peak = device.peak(self.plan.training.compute) * device.per_chip * self.plan.chips
        mfu = self.plan.model_flops / seconds / peak
        return mfu if mfu <= 1 else None  # `notes` says so

    @property
    def uncertainty(self) -> Uncertainty | None:
        """How far the estimate may be off, as far as published steps tell."""
        if self.plan is None or self.estimate is None:
            return None
        step, offloads = self.plan, bool(self.plan.training.offload)
        generation = step.slice.generation
        return uncertainty_of(self.estimate.point, generation, step.kind, slices=step.slices, offloads=offloads)

    @property
    def notes(self) -> tuple[str, ...]:
        """Of the estimate; an estimate above what the chips can do is a mistake of ours, and is said instead of shown."""
        if self.estimate is None:
            return ()
        if self.plan is None or self.mfu(self.estimate.point) is not None:
            return self.estimate.notes
        return (*self.estimate.notes, "internal error: this estimate is above the peak of its chips; please report it")


def page(outcome: Outcome, *, top: int) -> str:
    """Everything about one rehearsal."""
    report = outcome.report
    lines = [_title(outcome)]
    if report.memory is None:
        return "\n".join([*lines, f"  it does not compile: {report.failed}"])
    lines.append(f"  HBM a device   {report.memory.line}{_planned_bytes(outcome)}")
    if outcome.estimate is not None and report.memory.fits:
        lines += _times(outcome, outcome.estimate)
    lines.append(f"  asynchronous   {collectives_text(report)}")
    lines += ["", _buffers(report)]
    if outcome.fixes:
        lines += ["", "What would make it fit:", *(f"  {fix}" for fix in outcome.fixes)]
    if outcome.estimate is not None and report.memory.fits:
        lines += ["", top_table(outcome.estimate, top)]
        lines += [f"  note: {note}" for note in outcome.notes]
    return "\n".join(lines)


def _title(outcome: Outcome) -> str:
    report, rehearsal = outcome.report, outcome.rehearsal
    tpu = rehearsal.tpu
    how = f"libtpu {report.libtpu}, jax {report.jax}" if report.libtpu else "not compiled"
    stage = "schedule and buffers only" if report.program and not report.program.complete else "compiled to the end"
    step = (
        f", {outcome.plan.mesh}, {outcome.plan.training.batch:,} x {outcome.plan.training.seq:,}"
        if outcome.plan
        else ""
    )
    return f"{rehearsal.title} ({tpu.topology_text}){step}: {how}, {stage}, {report.compile_seconds:.0f} s"


def _planned_bytes(outcome: Outcome) -> str:
    return f" (planned {outcome.plan.memory.total / GIB:.2f})" if outcome.plan else ""


def _times(outcome: Outcome, estimate: Estimate) -> list[str]:
    planned = f" (planned {format_seconds(outcome.plan.time.total)})" if outcome.plan else ""
    lines = [f"  step           {format_seconds(estimate.point)}{planned}"]
    rate, mfu, found = outcome.tokens_per_second, outcome.mfu(estimate.point), outcome.uncertainty
    if found is not None:
        lines += uncertainty_lines(found)
    if rate is not None and mfu is not None:
        lines.append(f"  speed          {format_number(rate)} tokens/s, MFU {100 * mfu:.1f}%")
    parts = [f"{PARTS[kind]} {format_seconds(s)}" for kind, s in sorted(estimate.parts.items(), key=lambda p: -p[1])]
    return [*lines, f"  spent on       {', '.join(parts)}"]


def collectives_text(report: CompileReport) -> str:
    """`all-gather 10 of 13, all-reduce 0 of 10`."""
    if report.program is None:
        return "unknown"
    counted = asynchronous(report.program)
    return ", ".join(f"{kind} {a} of {a + s}" for kind, (a, s) in counted.items()) or "no collectives"


def _buffers(report: CompileReport) -> str:
    assert report.memory is not None
    rows = [
        [
            f"  {buffer.name}",
            buffer.shape,
            f"{buffer.bytes / GIB:.2f}",
            "made by the step" if buffer.made else "comes in",
        ]
        for buffer in report.memory.buffers[:8]
    ]
    return table(["LARGEST AT THE FULLEST MOMENT", "SHAPE A DEVICE", "GIB", ""], rows, right=(2,))


def top_table(estimate: Estimate, top: int) -> str:
    """The instructions that most of a step goes to."""
    rows = [
        [f"  {one.what or one.name}", one.shape, one.kind, f"{one.times:,}", format_seconds(one.seconds),
         f"{100 * one.seconds / estimate.point:.1f}%"]
        for one in estimate.top[:top]
    ]  # fmt: skip
    return table(["MOST OF THE TIME", "SHAPE", "KIND", "TIMES", "A STEP", ""], rows, right=(3, 4, 5))


def short_table(outcomes: Sequence[Outcome]) -> str:
    """A row for each of several rehearsals."""
    if all(outcome.plan is None for outcome in outcomes):
        parts = [[o.rehearsal.slice, o.rehearsal.part, _compiled(o), f"{o.report.compile_seconds:.0f} s", collectives_text(o.report)]
                 for o in outcomes]  # fmt: skip
        return table(["SLICE", "PROGRAM", "HBM A DEVICE", "COMPILED IN", "ASYNCHRONOUS"], parts, right=(3,))
    rows: list[list[object]] = []
    for outcome in outcomes:
        plan, estimate = outcome.plan, outcome.estimate
        fits = outcome.report.memory is not None and outcome.report.memory.fits
        found = outcome.uncertainty
        span = f" ({format_span(found.low, found.high)})" if found else ""
        rows.append(
            [
                outcome.rehearsal.slice,
                plan and plan.mesh,
                plan and plan.training.remat,
                plan and plan.training.microbatches,
                plan and f"{plan.memory.total / GIB:.2f}",
                _compiled(outcome),
                plan and format_seconds(plan.time.total),
                f"{format_seconds(estimate.point)}{span}" if estimate and fits else None,
                collectives_text(outcome.report),
            ]
        )
    headers = ["SLICE", "MESH", "REMAT", "MB", "GIB PLANNED", "COMPILED", "STEP PLANNED", "REHEARSED", "ASYNCHRONOUS"]
    return table(headers, rows, right=(3, 4, 6))


def _compiled(outcome: Outcome) -> str:
    report = outcome.report
    return report.memory.line if report.memory else f"does not compile: {report.failed[:80]}"


def record(outcome: Outcome) -> dict[str, Any]:
    """As `-o json` gives it: all but the program itself."""
    report, estimate = outcome.report, outcome.estimate
    found: dict[str, Any] = {
        "rehearsal": msgspec.to_builtins(outcome.rehearsal),
        "versions": {"jax": report.jax, "libtpu": report.libtpu},
        "program": report.name,
        "compile_seconds": report.compile_seconds,
        "complete": bool(report.program and report.program.complete),
        "failed": report.failed or None,
        "memory": None,
        "collectives": None,
        "estimate": msgspec.to_builtins(estimate) if estimate else None,
        "fixes": list(outcome.fixes),
    }
    if report.memory is not None:
        memory = report.memory
        found["memory"] = {**msgspec.to_builtins(memory), "total": memory.total, "fits": memory.fits}
    if report.program is not None:
        counted: Mapping[str, tuple[int, int]] = asynchronous(report.program)
        found["collectives"] = {kind: {"asynchronous": a, "waited_for": s} for kind, (a, s) in counted.items()}
    if outcome.plan is not None:
        found["planned"] = {"bytes": outcome.plan.memory.total, "seconds": outcome.plan.time.total}
        if estimate is not None:
            found["tokens_per_second"], found["mfu"] = outcome.tokens_per_second, outcome.mfu(estimate.point)
            found["uncertainty"] = msgspec.to_builtins(outcome.uncertainty)
    return found
