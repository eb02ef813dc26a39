"""Published results, what the planner says to each of them, and the fit of the calibrated constants.

`published/*.csv` holds the results with their sources; `calibration.csv` names the rows that constants were fitted on,
`judging.csv` those that judge them. A prediction is always computed from the row's configuration: nothing here looks a
result up. `make bench-plan` prints all of it, and the tests hold the constants to their fit.
"""

from functools import partial
from math import log2
from typing import NamedTuple

from podway.catalog.slices import find_slice
from podway.model.families import find_model
from podway.model.flops import flops_per_token
from podway.model.layout import MeshShape
from podway.plan.chips import Device
from podway.plan.engine_costs import Precision, engine_of
from podway.plan.evidence_training import fit_rate, fitted_rate
from podway.plan.memory import GIB
from podway.plan.network import place
from podway.plan.plans import TrainPlan, evaluate
from podway.plan.published_rows import Row, is_calibration, row_of, rows_of
from podway.plan.serve import Load, replica_rate, step_of, weights_per_device
from podway.plan.steptime import step_time
from podway.plan.t5 import T5_MODELS, T5X, evaluate_t5, t5_mesh, t5_time
from podway.plan.training import MAXTEXT_2023, PROGRAMS, Adapters, Training


class Comparison(NamedTuple):
    """A figure beside its prediction."""

    row: str
    published: float
    predicted: float
    calibration: bool

    @property
    def error(self) -> float:
        """Relative to what was published."""
        return self.predicted / self.published - 1


def job_plan(row: Row) -> TrainPlan:
    """A row of the 16B-128B table."""
    shape, slice = find_model(row["model"]), find_slice(row["slice"])
    slices, tensor = int(row["slices"]), int(row["tensor"])
    mesh = MeshShape(slices=slices, fsdp=slice.chips // tensor, tensor=tensor)
    batch = int(row["sequences_per_chip"]) * slice.chips * slices
    return evaluate(shape, slice, mesh, Training(seq=int(row["seq"]), batch=batch, program=MAXTEXT_2023))


def compiled_hbm() -> list[Comparison]:
    """GiB of a device beside what the TPU compiler allocates for the same program.

    No constant is fitted on these, but the terms of `memory.py` were chosen with them in view: see docs/planning.md.
    """
    compared = []
    for row in rows_of("compiled_hbm"):
        slice, tensor, parts = find_slice(row["slice"]), int(row["tensor"]), int(row["microbatches"])
        mesh = MeshShape(fsdp=slice.chips // tensor, tensor=tensor)
        training = Training(
            seq=int(row["seq"]),
            batch=int(row["sequences_per_group"]) * mesh.fsdp * parts,
            microbatches=parts,
            remat=row["remat"],
            optimizer="adafactor" if row["optimizer"] == "adafactor" else "adamw",
            adapters=Adapters(rank=int(row["lora_rank"])) if row["lora_rank"] else None,
            program=PROGRAMS[row["program"]],
        )
        memory = evaluate(find_model(row["model"]), slice, mesh, training).memory
        compared.append(Comparison(row["row"], float(row["gib"]), memory.total / GIB, False))
    return compared


def jobs() -> list[Comparison]:
    """MFU in percent of the 24 cells."""
    return [
        Comparison(
            row["row"], float(row["mfu_percent"]), 100 * job_plan(row).mfu, is_calibration("v5e_jobs", row["row"])
        )
        for row in rows_of("v5e_jobs")
    ]


def t5_training(row: Row) -> Training:
    """The step of a row of the T5 table."""
    return Training(
        seq=int(row["seq"]),
        batch=int(row["batch"]),
        microbatches=max(1, int(row["microbatches"])),
        remat="none",
        optimizer="adafactor",
        program=T5X,
    )


def t5_tile(row: Row) -> tuple[int, ...]:
    """The tile of a row of the T5 table."""
    return tuple(int(side) for side in row["tile"].split("x"))


def t5_plan(row: Row) -> TrainPlan:
    """A row of the T5 table."""
    return evaluate_t5(T5_MODELS[row["model"]], find_slice(row["slice"]), t5_training(row), t5_tile(row))


def t5_ran() -> list[Comparison]:
    """Tokens per second of the T5 rows that ran."""
    return [
        Comparison(
            row["row"],
            float(row["tokens_per_second"]),
            t5_plan(row).tokens_per_second,
            is_calibration("t5_v4", row["row"]),
        )
        for row in rows_of("t5_v4")
        if row["tokens_per_second"] not in ("", "OOM")
    ]


def spearman(pairs: list[Comparison]) -> float:
    """Rank correlation of published and predicted, ties at their mean rank."""
    first, second = _ranks([p.published for p in pairs]), _ranks([p.predicted for p in pairs])
    mean = (len(pairs) + 1) / 2
    covariance = sum((a - mean) * (b - mean) for a, b in zip(first, second, strict=True))
    spread = sum((a - mean) ** 2 for a in first) * sum((b - mean) ** 2 for b in second)
    return float(covariance / spread**0.5)


def _ranks(values: list[float]) -> list[float]:
    order = sorted(values)
    return [order.index(value) + (order.count(value) + 1) / 2 for value in values]


def serving() -> list[Comparison]:
    """The cost of an engine's steps beside engines: milliseconds a token, or requests a second."""
    compared = []
    for row in rows_of("serving"):
        shape, slice, tensor = find_model(row["model"]), find_slice(row["slice"]), int(row["tensor"])
        load = Load(prompt=int(row["prompt"]), output=int(row["output"]), rate=1.0)
        precision = Precision(weights=row["weights"], kv=row["kv"])
        calibration = is_calibration("serving", row["row"])
        if row["tpot_ms"]:
            bare = row["engine"] == "decode loop"
            step = step_of(shape, slice, tensor, load, precision, float(row["batch"]), bare=bare)
            compared.append(Comparison(row["row"], float(row["tpot_ms"]), 1e3 * step, calibration))
        else:
            rate = replica_rate(shape, slice, tensor, load, precision)
            compared.append(Comparison(row["row"], float(row["requests_per_second"]), rate, calibration))
    return compared


def serving_limit(row: Row) -> float:
    """Milliseconds a token that no engine can beat in the setting of a row."""
    shape, tensor, batch = find_model(row["model"]), int(row["tensor"]), float(row["batch"])
    weights = weights_per_device(shape, tensor, row["weights"])
    engine = engine_of(shape, find_slice(row["slice"]), tensor, Precision(row["weights"], row["kv"]), weights)
    return 1e3 * engine.limit_seconds(batch, batch * (int(row["prompt"]) + int(row["output"]) / 2))


def fitted() -> dict[tuple[str, str], float]:
    """The calibrated constants as their rows give them: (constant, generation) -> value."""
    found: dict[tuple[str, str], float] = {}
    for one in rows_of("calibration"):
        key, row = (one["constant"], one["generation"]), row_of(one["table"], one["row"])
        if one["table"] == "serving":
            found |= _engine_constants()
        elif one["table"] == "training":
            found[key] = fitted_rate(one["generation"]) or 0.0
        elif one["constant"] in ("matrix_efficiency", "t5x_matrix_efficiency"):
            found[key] = fit_rate(partial(_seconds, row), one["generation"], _published(row))
        else:
            plan = job_plan(row)
            alone = plan.time.total - plan.time.straggler
            found[key] = (_published(row) / alone - 1) / log2(plan.slices)
    return found


def _engine_constants() -> dict[tuple[str, str], float]:
    """Seconds of the host and what a page costs, from the two rows that ask for both: a step is linear in them."""
    asked = []
    for one in (row for row in rows_of("serving") if is_calibration("serving", row["row"])):
        load = Load(prompt=int(one["prompt"]), output=int(one["output"]), rate=1.0)
        shape, slice, batch = find_model(one["model"]), find_slice(one["slice"]), float(one["batch"])
        weights = weights_per_device(shape, int(one["tensor"]), one["weights"])
        engine = engine_of(shape, slice, int(one["tensor"]), Precision(one["weights"], one["kv"]), weights, bare=True)
        sizes = (batch, batch * (load.prompt + load.output / 2), batch * load.prompt / load.output, load.prompt)
        alone = engine.seconds(*sizes)
        page = engine._replace(page_overhead=1.0).seconds(*sizes) - alone
        asked.append((float(one["tpot_ms"]) / 1e3 - alone, page))
    (first, light), (second, heavy) = asked
    overhead = (second - first) / (heavy - light)
    return {("page_overhead", "vllm"): overhead, ("host_seconds", "vllm"): first - overhead * light}


def _published(row: Row) -> float:
    """Seconds of a step, as published."""
    if "mfu_percent" in row:
        shape, slice = find_model(row["model"]), find_slice(row["slice"])
        tokens = int(row["seq"]) * int(row["sequences_per_chip"])
        flops = flops_per_token(shape, int(row["seq"]), MAXTEXT_2023.convention) * tokens
        return flops / (float(row["mfu_percent"]) / 100 * slice.generation_facts.peak_bf16)
    return int(row["batch"]) * int(row["seq"]) / float(row["tokens_per_second"])


def _seconds(row: Row, device: Device) -> float:
    """Seconds of a step of a row, on a device whose constants are given."""
    slice = find_slice(row["slice"])
    if "mfu_percent" in row:
        plan = job_plan(row)
        return step_time(find_model(row["model"]), plan.mesh, plan.training, device, place(plan.mesh, slice)).total
    mesh = t5_mesh(slice, t5_tile(row))
    return t5_time(T5_MODELS[row["model"]], mesh, t5_training(row), device, place(mesh, slice)).total
