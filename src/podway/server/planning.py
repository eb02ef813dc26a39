"""Plans and rehearsals for Python programs: computed on this machine, with no server and no TPU."""

import msgspec

from podway.model.families import find_planned_model
from podway.model.layout import parse_mesh
from podway.plan.picking import slices_named
from podway.plan.plans import TrainPlan
from podway.plan.search import PlanOptions, plan_train
from podway.rehearse.fabric import Fabric
from podway.rehearse.rehearsal import CompileReport, rehearse_training
from podway.rehearse.running import rehearse
from podway.rehearse.timeline import Estimate, estimate


class RehearsalResult(msgspec.Struct, frozen=True, kw_only=True):
    """The compiler's report of a step, and the step time that follows from it."""

    report: CompileReport
    estimate: Estimate | None  # seconds of a step; None where it did not compile

    @property
    def fits(self) -> bool:
        """Whether it compiles and fits in HBM."""
        return self.report.memory is not None and self.report.memory.fits


def plan_training(model: str, tpu: str, mesh: str | None, options: PlanOptions) -> list[TrainPlan]:
    """Plans, best first; a UserError where nothing fits."""
    candidates = slices_named(tpu)
    if mesh is not None:
        devices = candidates[0].devices * (options.slices or 1) if len(candidates) == 1 else None
        options = msgspec.structs.replace(options, mesh=parse_mesh(mesh, chips=devices))
    return list(plan_train(find_planned_model(model), options, candidates).plans)


def rehearse_plan(model: str, plan: TrainPlan, *, full: bool) -> RehearsalResult:
    """Compile a plan's step with the TPU compiler."""
    wanted = rehearse_training(model, plan.slice, plan.mesh, plan.training, fast=not full)
    report = rehearse([wanted], jobs=1)[0]
    found = estimate(report.program, Fabric(plan.slice)) if report.program else None
    return RehearsalResult(report=report, estimate=found)
