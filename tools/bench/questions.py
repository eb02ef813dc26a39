"""Random questions to the planner: an answer or one clear line, never more than a chip can do, never less than nothing.

`python -m tools.bench.questions` asks 100,000 in parts of 5,000, each part from its own seed, and keeps the result of each in
docs/measurements/plan-questions.json: stopped, it goes on with the parts that are missing (`--again`: with all). One question in a
hundred is asked of growing slices of a generation instead: more chips must not be slower. It prints a table of the parts and ends with
exit code 1 if a question had no right answer. `tests/plan/test_random_questions.py` asks some thousands of the same ones.
"""

import argparse
import random
import sys
import time
from itertools import pairwise
from math import prod
from pathlib import Path

import msgspec

from podway.catalog.slices import Slice, all_slices
from podway.cli.tables import table
from podway.decoding import from_json
from podway.errors import UserError
from podway.model.families import find_planned_model, known_models
from podway.model.layout import MeshShape
from podway.model.planned_families import planned_models
from podway.plan.plans import TrainPlan, evaluate
from podway.plan.search import PlanOptions, search_train
from podway.plan.training import OFFLOADABLE, PROGRAMS, REMAT, Adapters, Training

RECORDED = Path(__file__).parents[2] / "docs" / "measurements" / "plan-questions.json"
PART, PARTS = 5_000, 20
GROWING = 100  # one question in so many is about growing slices
LIMIT_S = 0.1  # of CPU, for one question
MODELS = [*(name for name in known_models() if not name.startswith("tiny")), *planned_models()]
SLICES = [slice for slice in all_slices() if slice.chips <= 1024]
POWERS = [1, 2, 4, 8, 16]


class Part(msgspec.Struct, kw_only=True):
    """What came of the questions of one seed."""

    seed: int
    asked: int = 0
    answered: int = 0
    refused: int = 0  # in one line
    growing: int = 0  # questions about growing slices
    cpu_s: float = 0.0
    slowest_s: float = 0.0  # of CPU, of the questions with one answer
    slow: int = 0  # of those, above LIMIT_S
    wrong: list[str] = []


def question(dice: random.Random) -> tuple[str, MeshShape, Training, int]:
    """(model, mesh, step, number of the slice): half of them make sense."""
    number = dice.randrange(len(SLICES))
    sizes = {axis: dice.choice(POWERS) for axis in ("tensor", "context", "expert", "data") if dice.random() < 0.4}
    inside = prod(sizes.values())
    plain = MeshShape(slices=dice.choice([1, 1, 1, 2, 4]), fsdp=max(1, SLICES[number].devices // inside))
    mesh = msgspec.structs.replace(plain, **sizes)
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


def growing_slices(generation: str) -> list[Slice]:
    """One slice of each of five sizes."""
    sizes = {slice.chips: slice for slice in reversed(SLICES) if slice.generation == generation}
    return [slice for chips, slice in sorted(sizes.items()) if chips in (16, 32, 64, 128, 256)]


def check_growing(model: str, generation: str, *, seq: int, batch: int) -> None:
    """The best plan of a batch that all can share: more chips are not slower, and fit what fewer do."""
    best = []
    for slice in growing_slices(generation):
        plans = search_train(find_planned_model(model), PlanOptions(seq=seq, batch=batch), [slice]).plans
        best.append(plans[0].tokens_per_second if plans else 0.0)
    for before, after in pairwise(best):
        assert after >= before * 0.999, (
            f"{model} on {generation}, {batch}x{seq}: {[round(one) for one in best]} tokens/s"
        )


def ask_part(seed: int) -> Part:
    """The questions of one seed."""
    dice, found = random.Random(seed), Part(seed=seed)
    for number in range(PART):
        began = time.process_time()
        try:
            if number % GROWING == 0:
                found.growing += 1
                generation = dice.choice(["v4", "v5e", "v5p", "v6e", "tpu7x"])
                check_growing(
                    dice.choice(MODELS),
                    generation,
                    seq=dice.choice([2048, 4096, 8192]),
                    batch=dice.choice([512, 1024, 2048]),
                )
            else:
                plan = ask(dice)
                took = time.process_time() - began
                found.slowest_s, found.slow = max(found.slowest_s, took), found.slow + (took > LIMIT_S)
                found.answered, found.refused = found.answered + (plan is not None), found.refused + (plan is None)
                if plan is not None:
                    check(plan)
        except Exception as error:  # whatever it is: it is written down, and the next question asked
            found.wrong.append(f"question {number} of seed {seed}: {type(error).__name__} {error}")
        found.asked += 1
        found.cpu_s += time.process_time() - began
    return found


def shown(parts: list[Part]) -> str:
    """The table."""
    rows = [
        [str(one.seed), f"{one.asked:,}", f"{one.answered:,}", f"{one.refused:,}", str(one.growing), str(len(one.wrong)),
         f"{1e3 * one.slowest_s:.1f} ms", str(one.slow), f"{one.cpu_s:.0f} s"]
        for one in parts
    ]  # fmt: skip
    rows.append(
        ["all", f"{sum(p.asked for p in parts):,}", f"{sum(p.answered for p in parts):,}", f"{sum(p.refused for p in parts):,}",
         str(sum(p.growing for p in parts)), str(sum(len(p.wrong) for p in parts)),
         f"{1e3 * max(p.slowest_s for p in parts):.1f} ms", str(sum(p.slow for p in parts)), f"{sum(p.cpu_s for p in parts):.0f} s"]
    )  # fmt: skip
    headers = ["SEED", "ASKED", "ANSWERED", "REFUSED", "GROWING", "WRONG", "SLOWEST (CPU)", "ABOVE 0.1 S", "CPU"]
    return table(headers, rows, right=range(1, 9))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--again", action="store_true", help="ask all parts again")
    parser.add_argument("--parts", type=int, default=PARTS, help=f"parts of {PART:,} questions [{PARTS}]")
    arguments = parser.parse_args()
    known = [] if arguments.again or not RECORDED.exists() else from_json(RECORDED.read_bytes(), list[Part])
    for seed in range(1, arguments.parts + 1):
        if seed in {one.seed for one in known}:
            continue
        known.append(ask_part(seed))
        RECORDED.write_bytes(msgspec.json.format(msgspec.json.encode(known), indent=1) + b"\n")
        print(f"part {seed} of {arguments.parts}: {len(known[-1].wrong)} wrong", file=sys.stderr, flush=True)
    print(shown(known))
    wrong = [line for one in known for line in one.wrong]
    print("\n".join(wrong[:20]))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
