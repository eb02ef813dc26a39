"""Random questions to the planner: an answer or one clear line, never more than a chip can do, never less than nothing.

Some hundreds here, 100,000 in `make soak`, with the time that each takes.
"""

import random
import time
from itertools import pairwise

import pytest

from podway.catalog.slices import all_slices
from podway.errors import UserError
from podway.model.families import find_planned_model, known_models
from podway.model.layout import MeshShape
from podway.model.planned_families import planned_models
from podway.plan.plans import TrainPlan, evaluate
from podway.plan.search import PlanOptions, search_train
from podway.plan.training import OFFLOADABLE, PROGRAMS, REMAT, Adapters, Training

MODELS = [*(name for name in known_models() if not name.startswith("tiny")), *planned_models()]
SLICES = [slice for slice in all_slices() if slice.chips <= 1024]
POWERS = [1, 2, 4, 8, 16]


def question(dice: random.Random) -> tuple[str, MeshShape, Training, int]:
    """(model, mesh, step, number of the slice): half of them make sense."""
    number = dice.randrange(len(SLICES))
    devices = SLICES[number].devices
    sizes = {axis: dice.choice(POWERS) for axis in ("tensor", "context", "expert", "data") if dice.random() < 0.4}
    inside = 1
    for size in sizes.values():
        inside *= size
    mesh = MeshShape(slices=dice.choice([1, 1, 1, 2, 4]), fsdp=max(1, devices // inside), **sizes)
    groups = mesh.slices * mesh.data * mesh.fsdp * mesh.expert
    parts = dice.choice([1, 1, 2, 4, 7])
    training = Training(
        seq=dice.choice([128, 1000, 2048, 4096, 8192, 32_768, 131_072]),
        batch=groups * parts * dice.choice([1, 1, 2, 5]) if dice.random() < 0.8 else dice.randrange(1, 5000),
        microbatches=parts,
        remat=dice.choice([*REMAT, "qkv+context"]),
        offload=tuple(dice.sample(OFFLOADABLE, 2)) if dice.random() < 0.2 else (),
        compute="bfloat16" if dice.random() < 0.8 else dice.choice(["int8", "fp8"]),
        optimizer=dice.choice(["adamw", "adafactor"]),
        params=dice.choice(["float32", "bfloat16"]),
        adapters=None,
        program=dice.choice(list(PROGRAMS.values())),
    )
    if dice.random() < 0.15 and training.compute == "bfloat16":
        training = Training(seq=training.seq, batch=training.batch, microbatches=parts, adapters=Adapters(rank=16))
    return dice.choice(MODELS), mesh, training, number


def ask(dice: random.Random) -> TrainPlan | None:
    """One question: its plan, or None where it is refused in one line."""
    try:
        model, mesh, training, number = question(dice)
        return evaluate(find_planned_model(model), SLICES[number], mesh, training)
    except UserError as error:
        assert error.what and "\n" not in error.what and error.hint
        return None


def check(plan: TrainPlan) -> None:
    """What must hold of every plan."""
    assert 0 < plan.mfu <= 1
    assert plan.time.total > 0 and all(seconds >= 0 for seconds in plan.time.parts.values())
    assert all(size >= 0 for size in plan.memory.parts.values()) and plan.memory.host >= 0
    assert plan.memory.total > 0 and plan.tokens_per_second > 0
    found = plan.uncertainty
    assert 0 < found.low < plan.time.total < found.high


def test_random_questions() -> None:
    dice = random.Random(20261116)
    answered = [plan for plan in (ask(dice) for _ in range(3000)) if plan is not None]
    assert len(answered) > 500
    for plan in answered:
        check(plan)


@pytest.mark.soak
def test_a_hundred_thousand_random_questions() -> None:
    dice, slowest = random.Random(1), 0.0
    for _ in range(100_000):
        began = time.process_time()
        plan = ask(dice)
        slowest = max(slowest, time.process_time() - began)
        if plan is not None:
            check(plan)
    print(f"the slowest question took {1e3 * slowest:.1f} ms of CPU")


@pytest.mark.parametrize("model", ["llama3.1-8b", "mixtral-8x7b", "llama3.1-70b"])
@pytest.mark.parametrize("generation", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_more_chips_of_a_kind_are_never_slower(model: str, generation: str) -> None:
    """The best plan of a batch that all can share; where a larger slice fits nothing, a smaller one fits nothing either."""
    sizes = sorted({slice.chips: slice for slice in reversed(SLICES) if slice.generation == generation}.items())
    best = []
    for slice in (slice for chips, slice in sizes if chips in (16, 32, 64, 128, 256)):
        plans = search_train(find_planned_model(model), PlanOptions(seq=4096, batch=1024), [slice]).plans
        best.append(plans[0].tokens_per_second if plans else 0.0)
    assert all(after >= before * 0.999 for before, after in pairwise(best))
