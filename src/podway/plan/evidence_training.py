"""Published training results beside the planner: each row's plan, the rate its products must have had, and how the calibrated rates
do on models they were not fitted on.

`published/training.csv` gives each row's model, slice, mesh, batch, remat, offload and precision, and the trainer that was measured
(`Program`). Steps are compared in seconds, so that conventions of counting FLOPs do not matter. A generation's rate of matrix
products is the mean over its dense models of what their rows ask for (each model counts once).
"""

from collections.abc import Callable, Iterable
from functools import cache
from math import exp, log
from typing import NamedTuple

import msgspec

from podway.catalog.slices import find_slice
from podway.model.flops import Convention, flops_per_token
from podway.model.layout import parse_mesh
from podway.plan.chips import Device, device_of
from podway.plan.network import place
from podway.plan.plans import TrainPlan, evaluate
from podway.plan.published_models import published_model
from podway.plan.published_rows import Row, is_calibration, rows_of
from podway.plan.steptime import step_time
from podway.plan.training import PROGRAMS, Training


class Judged(NamedTuple):
    """A published step beside its plan, and beside what the planner says without having seen this model."""

    row: str
    model: str
    generation: str
    kind: str  # dense, mixture, quantised
    calibration: bool
    published: float  # seconds
    predicted: float
    unseen: float  # by a rate fitted on the other models alone
    others: int  # how many those are

    @property
    def error(self) -> float:
        """Of the speed, relative to what was published: above 0 is too optimistic."""
        return self.published / self.predicted - 1

    @property
    def unseen_error(self) -> float:
        """The same without this model."""
        return self.published / self.unseen - 1


def training_plan(row: Row) -> TrainPlan:
    """The plan of a row of training.csv."""
    slice, program = find_slice(row["slice"]), PROGRAMS[row["program"]]
    if row["capacity"]:
        program = msgspec.structs.replace(program, expert_capacity=float(row["capacity"]))
    mesh = msgspec.structs.replace(parse_mesh(row["mesh"], chips=slice.devices), slices=int(row["slices"]))
    training = Training(
        seq=int(row["seq"]),
        batch=int(row["batch"]),
        remat=row["remat"],
        offload=tuple(name for name in row["offload"].split("+") if name),
        compute=row["compute"],  # type: ignore[arg-type]
        params=row["params"],  # type: ignore[arg-type]
        moments=row["moments"],  # type: ignore[arg-type]
        program=program,
    )
    return evaluate(published_model(row["model"]), slice, mesh, training)


def published_seconds(row: Row) -> float:
    """Seconds of a step: as published, or from TFLOP/s by the row's own convention."""
    if row["step_seconds"]:
        return float(row["step_seconds"])
    counted: Convention = "full-2023" if row["program"] == "maxtext-2023" else row["convention"]  # type: ignore[assignment]
    tokens = int(row["seq"]) * int(row["batch"])
    chips = find_slice(row["slice"]).chips * int(row["slices"])
    flops = flops_per_token(published_model(row["model"]), int(row["seq"]), counted) * tokens
    return flops / (float(row["tflops_per_chip"]) * 1e12 * chips)


def kind_of(row: Row) -> str:
    """What a row is evidence for."""
    if row["compute"] != "bfloat16":
        return "quantised"
    return "mixture" if published_model(row["model"]).experts else "dense"


def seconds_on(row: Row, device: Device) -> float:
    """Seconds of a row's step on a device whose constants are given."""
    plan = training_plan(row)
    where = place(plan.mesh, find_slice(row["slice"]))
    return step_time(published_model(row["model"]), plan.mesh, plan.training, device, where).total


@cache
def needed_rate(name: str) -> float:
    """The part of peak at which a row's step takes as long as it did."""
    row = next(one for one in rows_of("training") if one["row"] == name)
    generation = find_slice(row["slice"]).generation
    return fit_rate(lambda device: seconds_on(row, device), generation, published_seconds(row))


def fit_rate(seconds: Callable[[Device], float], generation: str, target: float) -> float:
    """The matrix efficiency at which a step takes as long as it did."""
    low, high = 0.3, 1.2
    for _ in range(30):
        middle = (low + high) / 2
        slower = seconds(msgspec.structs.replace(device_of(generation), matrix_efficiency=middle)) > target
        low, high = (middle, high) if slower else (low, middle)
    return low


def fitted_rate(generation: str, *, without: str = "") -> float | None:
    """A generation's rate from its calibration rows, but those of one model; None where there is no other."""
    means = list(_rates(generation, without).values())
    return exp(sum(means) / len(means)) if means else None


def _rates(generation: str, without: str) -> dict[str, float]:
    """The rate that each model of a generation asks for, as a logarithm."""
    by_model: dict[str, list[float]] = {}
    for row in rows_of("training"):
        ours = find_slice(row["slice"]).generation == generation and row["model"] != without
        if ours and is_calibration("training", row["row"]):
            by_model.setdefault(row["model"], []).append(log(needed_rate(row["row"])))
    return {model: sum(values) / len(values) for model, values in by_model.items()}


@cache
def judged_training() -> tuple[Judged, ...]:
    """Every row of training.csv."""
    found = []
    for row in rows_of("training"):
        generation, published = find_slice(row["slice"]).generation, published_seconds(row)
        # The only model of its generation: nothing published is left, so the compiler's own estimate stands in.
        rate = fitted_rate(generation, without=row["model"]) or COMPILER_RATES[generation]
        unseen = seconds_on(row, msgspec.structs.replace(device_of(generation), matrix_efficiency=rate))
        predicted = training_plan(row).time.total
        kept = is_calibration("training", row["row"])
        others = len(_rates(generation, row["model"]))
        found.append(
            Judged(row["row"], row["model"], generation, kind_of(row), kept, published, predicted, unseen, others)
        )
    return tuple(found)


# The part of peak that libtpu 0.0.51's own cycles give large bf16 products (4 to 12 LLM shapes, three passes, by FLOPs).
COMPILER_RATES = {"v4": 0.93, "v5e": 0.93, "v5p": 0.92, "v6e": 0.90, "tpu7x": 0.83}


def median(values: Iterable[float]) -> float:
    """The middle of them."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
