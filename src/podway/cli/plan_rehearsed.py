"""`podway plan train`, checked by the compiler: the best plans are compiled, and all are ranked again by what that says.

1. With `--rehearse N` always; without it on a terminal where the compiler is installed, for at most LIMIT_S seconds. What is piped,
   written as JSON or asked through the API is planned alone, so that a program is answered in milliseconds as ever.
2. The best plans are compiled side by side. One that needs more HBM than there is goes to the rejected ones; the others
   get the compiler's bytes and the time that is estimated from the program. What was not compiled is planned to take as much
   longer as those that were (plans of one model on one generation are off by much the same). Whatever stands among the best then
   is compiled too, so that in the end the order of the best is the compiler's, as far as the time allows.
3. Answers are kept by the content of the program (PODWAY_HOME/cache/rehearse), so asking again takes seconds.
"""

import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from statistics import median
from typing import NamedTuple

import msgspec

from podway.catalog.slices import Slice
from podway.cli import rehearse as compiler
from podway.cli.rehearse_report import Outcome
from podway.cli.screen import Screen
from podway.errors import UserError
from podway.model.layout import MeshShape
from podway.model.shape import PLANNED_ONLY, ModelShape
from podway.plan.plans import Rehearsed, TrainPlan
from podway.plan.search import PlanOptions, Rejected, Search, policy_text, ranked
from podway.plan.training import Training
from podway.rehearse.rehearsal import CompileReport, rehearse_training

BEST = 5  # plans that are compiled by default, and whose order is the compiler's
LIMIT_S = 60.0  # and how long that may take
_ROUNDS = 3


Configuration = tuple[Slice, MeshShape, Training]


class CheckedSearch(NamedTuple):
    """A search, ranked by the compiler as far as it got; each outcome; a line that says so."""

    search: Search
    outcomes: tuple[Outcome, ...]
    line: str


def by_default(shape: ModelShape, search: Search, output: str) -> bool:
    """Whether plans are compiled without being asked for: for a person who watches, where Podway has the program and the compiler."""
    training = search.plans[0].training
    program = training.program.name == "podway" and (training.compute == "bfloat16" or shape.experts is None)
    watched = output == "table" and sys.stdout.isatty() and sys.stderr.isatty()
    return watched and program and shape.family not in PLANNED_ONLY and bool(find_spec("libtpu") and find_spec("jax"))


def check(
    model: str, shape: ModelShape, search: Search, options: PlanOptions, number: int, limit_s: float | None = None
) -> CheckedSearch:
    """Compile the best `number` plans, and whatever comes among them then."""
    began, found = time.monotonic(), dict[Configuration, Outcome]()
    rest, rejected, late = list(search.plans), list(search.rejected), 0
    one_kind = len({plan.slice.accelerator_type for plan in search.plans}) == 1
    with Screen(err=True) as screen:
        for _ in range(_ROUNDS):
            batch = [plan for plan in rest[:number] if _configuration(plan) not in found]
            left = None if limit_s is None else limit_s - (time.monotonic() - began)
            if not batch or (left is not None and left <= 0):
                break
            for plan, outcome in zip(batch, _compiled(model, shape, batch, screen, left), strict=True):
                found[_configuration(plan)] = outcome
                late += outcome.report.memory is None
                _replace(rest, rejected, plan, outcome)
            rest = ranked(_as_slow(rest), options, one_kind=one_kind)
    if not rest:
        raise UserError(
            f"none of the {len(found)} plans fits: {rejected[-1].reason}",
            "plan more of them: --rehearse N, or --no-rehearse",
        )
    checked = Search(plans=tuple(rest), rejected=tuple(rejected))
    return CheckedSearch(
        checked, tuple(found.values()), _line(checked, number, len(found), late, time.monotonic() - began)
    )


def _configuration(plan: TrainPlan) -> Configuration:
    return plan.slice, plan.mesh, plan.training


def _as_slow(plans: list[TrainPlan]) -> list[TrainPlan]:
    """The plans that were not compiled, as much slower than planned as those of their generation that were; never faster."""
    ratios: dict[str, list[float]] = {}
    for plan in plans:
        if plan.rehearsed is not None:
            ratios.setdefault(plan.slice.generation, []).append(plan.rehearsed.seconds / plan.time.total)
    slower = {generation: max(1.0, median(found)) for generation, found in ratios.items()}
    return [
        plan
        if plan.rehearsed is not None
        else msgspec.structs.replace(plan, slower=slower.get(plan.slice.generation, 1.0))
        for plan in plans
    ]


def _compiled(
    model: str, shape: ModelShape, plans: Sequence[TrainPlan], screen: Screen, left: float | None
) -> list[Outcome]:
    wanted = [rehearse_training(model, plan.slice, plan.mesh, plan.training, fast=True) for plan in plans]
    reports: list[CompileReport] = compiler.ask(wanted, screen, jobs=None, fresh=False, limit_s=left)
    return [
        compiler.outcome_of(one, report, shape, plan.slice, plan.mesh, plan.training)
        for one, report, plan in zip(wanted, reports, plans, strict=True)
    ]


def _replace(rest: list[TrainPlan], rejected: list[Rejected], plan: TrainPlan, outcome: Outcome) -> None:
    """A plan with what the compiler says of it, in place of the plan alone; out of the list where it does not fit."""
    memory, estimate = outcome.report.memory, outcome.estimate
    if memory is None:
        return  # it did not compile, or not in time: the plan stands
    place = rest.index(plan)
    if not memory.fits:
        del rest[place]
        reason = f"compiled: {memory.line} ({plan.mesh}, {policy_text(plan.training)})"
        excess = float(memory.total - memory.limit)
        rejected.append(Rejected(slice=plan.slice.accelerator_type, slices=plan.slices, reason=reason, excess=excess))
    elif estimate is not None and outcome.mfu(estimate.point) is not None:
        rest[place] = msgspec.structs.replace(plan, rehearsed=Rehearsed(seconds=estimate.point, bytes=memory.total))


def _line(search: Search, number: int, compiled: int, late: int, seconds: float) -> str:
    known = sum(plan.rehearsed is not None for plan in search.plans)
    first = search.plans[:number]
    text = f"ranked again by rehearsal: {compiled - late} compiled in {seconds:.0f} s (--no-rehearse leaves it out); "
    text += f"the {known} marked * are as the compiler has them, the others are planned"
    slower = sorted({round(plan.slower, 2) for plan in search.plans if plan.rehearsed is None and plan.slower > 1.005})
    if slower:
        text += f" (times {' and '.join(map(str, slower))}, as those that are compiled came out)"
    if all(plan.rehearsed is not None for plan in first):
        text += f"; the order of the first {len(first)} is the compiler's"
    return f"{text}; {late} did not compile in time" if late else text
