"""A run that was measured, beside its plan: the folder that `podway train` writes (`settings.yaml`, `metrics.jsonl`, `profile/`).

1. `read_run(folder)` gives the settings of a run and the time of its steps: the median after those that compile and warm up.
2. `compare` sets it, and what its profile says (`podway.profile_trace`), beside the plan of the same step. `needed_rate_of` is the
   rate of products at which the plan would have taken as long as the run: what `podway calibrate` keeps.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from podway.catalog.slices import Slice
from podway.errors import UserError
from podway.model.families import find_model
from podway.plan.chips import Device
from podway.plan.evidence_training import fit_rate, median
from podway.plan.network import place
from podway.plan.plans import TrainPlan, evaluate
from podway.plan.steptime import step_time
from podway.plan.task_needs import flat_settings, training_of
from podway.profile_trace import CLASSES, classes_of

WARM_UP = 3  # steps: compiling, and the asynchronous ones after it


class MeasuredRun(NamedTuple):
    """A run's settings, the seconds of its steady steps, and how many there were."""

    settings: Mapping[str, str]
    seconds: float
    steps: int


class Compared(NamedTuple):
    """A part of a step: planned, and measured where a profile tells."""

    part: str
    planned: float | None
    measured: float | None


def read_run(folder: Path) -> MeasuredRun:
    """The run in a folder; a UserError where it is none or too short."""
    settings, metrics = folder / "settings.yaml", folder / "metrics.jsonl"
    if not settings.is_file() or not metrics.is_file():
        raise UserError(
            f"{folder} holds no run: settings.yaml and metrics.jsonl are missing",
            "name the `output` of a `podway train`",
        )
    seconds = []
    for number, line in enumerate(metrics.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        try:
            value = json.loads(line).get("seconds")
        except (ValueError, AttributeError):
            raise UserError(
                f"{metrics} line {number} is not a step", "it must be the file that podway train wrote"
            ) from None
        if isinstance(value, int | float) and value > 0:
            seconds.append(float(value))
    steady = seconds[WARM_UP:]
    if not steady:
        raise UserError(
            f"{metrics} has {len(seconds)} steps", f"a comparison needs more than {WARM_UP}: the first ones compile"
        )
    return MeasuredRun(flat_settings(settings), median(steady), len(steady))


def plan_of(run: MeasuredRun, slice: Slice, slices: int) -> TrainPlan:
    """The plan of the step that ran."""
    name = run.settings.get("model.name")
    if name is None:
        raise UserError("the run's settings name no model", "it must be the output of a `podway train`")
    mesh, training = training_of(run.settings, slice.devices * slices, slices)
    return evaluate(find_model(name), slice, mesh, training)


def compare(folder: Path, slice: Slice, slices: int = 1) -> tuple[TrainPlan, MeasuredRun, list[Compared]]:
    """A run beside its plan, by class and in all."""
    run = read_run(folder)
    plan = plan_of(run, slice, slices)
    time, measured = plan.time, classes_of(folder) or {}
    planned = {
        "products": time.matrix,
        "attention": time.attention,
        "collectives": time.ici + time.dcn + time.straggler,
        "other": time.hbm + time.relayout + time.host,
        "waiting": 0.0,
    }
    if measured:
        measured["waiting"] = max(0.0, run.seconds - sum(measured.values()))
    rows = [Compared(name, planned[name], measured.get(name)) for name in (*CLASSES, "waiting")]
    return plan, run, [*rows, Compared("step", time.total, run.seconds)]


def needed_rate_of(plan: TrainPlan, run: MeasuredRun) -> float:
    """The part of peak that products must have reached for the step to take as long as it did."""
    shape, where = find_model(run.settings["model.name"]), place(plan.mesh, plan.slice)

    def seconds(device: Device) -> float:
        return step_time(shape, plan.mesh, plan.training, device, where).total

    return fit_rate(seconds, plan.slice.generation, run.seconds)
