"""Does the planner put the plans of a slice in the order in which the compiler puts them?

For each question (a model, a slice, a length, a batch) the planner's first five plans are compiled; both orders, the planner's and that
of the estimates from the compiled programs, are compared:

1. *Equal*: no pair of the five is the other way round in the compiler's order. Two plans whose compiled steps are within TIE of each
   other are a tie, in either order: the planner's steps are themselves that far from the compiler's. The table also says how many
   are equal without ties.
2. *Pairs*: of all recorded steps, those of the grid too, any two of the same model, slice, length and attention kernel, whatever their
   mesh, remat and batch are: which one takes less for each token.
3. Kendall's and Spearman's rank correlation, in which ties count as they stand.
4. Regret: how much longer the planner's first plan takes than the fastest of the five, both rehearsed.

`python -m tools.bench.ranking` compiles what is not recorded yet (half a minute or more for each plan); the table is written by
`make bench-plan`. A plan stays recorded when the planner changes its mind: what is compared is the order of the same five.
"""

import gzip
import sys
from itertools import combinations
from typing import NamedTuple

import msgspec
from tools.bench.grid import Cell, as_trained
from tools.bench.rehearsed import MEASUREMENTS, CompiledStep, recorded_steps, rehearsal_of, without_buffers

from podway.catalog.slices import find_slice
from podway.cli.tables import table
from podway.decoding import from_json
from podway.model.families import find_model
from podway.plan.evidence_training import median
from podway.plan.plans import TrainPlan, evaluate
from podway.plan.search import PlanOptions, search_train
from podway.rehearse.fabric import Fabric
from podway.rehearse.running import rehearse
from podway.rehearse.timeline import estimate

RECORDED = MEASUREMENTS / "rehearsed-ranking.json.gz"
FIRST = 5
TIE = 0.03  # the median distance of a planned step from the compiled one is 2.4% (`rehearsed.timed`)


class Question(NamedTuple):
    """What the planner is asked."""

    model: str
    slice: str
    seq: int
    batch: int


QUESTIONS = (
    Question("llama3.2-3b", "v5litepod-16", 4096, 64),
    Question("llama3.1-8b", "v6e-16", 8192, 32),
    Question("qwen3-8b", "v5p-32", 4096, 64),
    Question("llama3.2-3b", "v4-16", 4096, 32),
    Question("llama3.2-1b", "v6e-8", 4096, 64),
    Question("qwen2.5-7b", "v6e-32", 4096, 64),
    Question("qwen3-8b", "v5litepod-64", 4096, 128),
    Question("llama3.2-3b", "v5p-16", 4096, 64),
    Question("gemma2-2b", "v5litepod-8", 4096, 16),
    Question("llama3.1-8b", "v4-64", 4096, 128),
    Question("16b", "v5litepod-256", 2048, 2048),
    Question("llama3.2-1b", "tpu7x-8", 4096, 128),
    Question("qwen3-30b-a3b", "v5p-64", 4096, 128),
)


class Order(NamedTuple):
    """The plans of one question as both see them."""

    question: Question
    planned: list[float]  # seconds, in the planner's order
    rehearsed: list[float]
    refused: int  # that do not fit after all

    def pairs(self, tie: float) -> tuple[int, int]:
        """Pairs in the same order, or as near as that; all pairs."""
        every = list(combinations(self.rehearsed, 2))
        return sum(first <= second * (1 + tie) for first, second in every), len(every)

    def is_equal(self, tie: float = TIE) -> bool:
        """Whether all five are in the same order."""
        same, every = self.pairs(tie)
        return same == every

    @property
    def kendall(self) -> float:
        """Pairs in the same order less pairs in the other, of all."""
        pairs = list(combinations(range(len(self.planned)), 2))
        signs = [(self.planned[a] - self.planned[b]) * (self.rehearsed[a] - self.rehearsed[b]) for a, b in pairs]
        return sum((sign > 0) - (sign < 0) for sign in signs) / len(pairs) if pairs else 1.0

    @property
    def spearman(self) -> float:
        """Correlation of the ranks."""
        n = len(self.planned)
        there = sorted(range(n), key=lambda i: self.rehearsed[i])
        apart = sum((i - there.index(i)) ** 2 for i in range(n))
        return 1 - 6 * apart / (n * (n * n - 1)) if n > 1 else 1.0

    @property
    def regret(self) -> float:
        """How much longer the planner's first takes than the fastest, as rehearsed."""
        return self.rehearsed[0] / min(self.rehearsed) - 1


def plans_of(question: Question) -> list[Cell]:
    """The planner's first plans, as steps that can be compiled."""
    options = PlanOptions(seq=question.seq, batch=question.batch)
    found = search_train(find_model(question.model), options, [find_slice(question.slice)]).plans[:FIRST]
    return [_cell(question, plan) for plan in found]


def _cell(question: Question, plan: TrainPlan) -> Cell:
    training = plan.training
    cell = Cell(
        model=question.model, slice=question.slice, mesh=str(plan.mesh), batch=training.batch, seq=training.seq,
        remat=training.remat, microbatches=training.microbatches, offload=training.offload,
    )  # fmt: skip
    return as_trained(cell)


def _asked(cell: Cell) -> Question:
    return Question(cell.model, cell.slice, cell.seq, cell.batch)


def recorded() -> list[CompiledStep]:
    """The plans that were compiled."""
    return from_json(gzip.decompress(RECORDED.read_bytes()), list[CompiledStep]) if RECORDED.exists() else []


def record(*, again: bool = False) -> list[str]:
    """Compile the first plans of each question that has none, written down after each; lines about what did not compile."""
    rows, failed = [] if again else recorded(), []
    asked = {_asked(row.cell) for row in rows}
    for question in QUESTIONS:
        if question in asked:
            continue
        for cell in plans_of(question):
            (report,) = rehearse([rehearsal_of(cell)], jobs=1)
            if report.program is None:
                failed.append(f"{cell.name}: {report.failed}")
                continue
            rows.append(CompiledStep(cell=cell, report=without_buffers(report)))
            print(cell.name, file=sys.stderr, flush=True)
        RECORDED.write_bytes(gzip.compress(msgspec.json.encode(rows), mtime=0))
    return failed


def orders() -> list[Order]:
    """Every question that was recorded."""
    found = []
    rows = recorded()
    for question in QUESTIONS:
        ours = [row for row in rows if _asked(row.cell) == question]
        seconds = sorted(both for both in map(_seconds, ours) if both is not None)
        if seconds:
            refused = len(ours) - len(seconds)
            found.append(Order(question, [a for a, _ in seconds], [b for _, b in seconds], refused))
    return found


def _seconds(row: CompiledStep) -> tuple[float, float] | None:
    """A step as it is planned and as it is rehearsed; None where it does not fit, or its program was not kept."""
    if row.report.program is None or row.report.memory is None or not row.report.memory.fits:
        return None
    slice = find_slice(row.cell.slice)
    plan = evaluate(find_model(row.cell.model), slice, row.cell.sizes, row.cell.training)
    return plan.time.total, estimate(row.report.program, Fabric(slice)).point


def recorded_pairs() -> tuple[int, int]:
    """Pairs of recorded steps of the same model, slice and length that are in the same order, or a tie; all pairs."""
    groups: dict[tuple[object, ...], list[tuple[float, float]]] = {}
    for row in {row.cell: row for row in (*recorded_steps(), *recorded())}.values():
        cell, seconds = row.cell, _seconds(row)
        if seconds is not None:
            key = (cell.model, cell.slice, cell.slices, cell.seq, cell.block, cell.fused, cell.sparsecore)
            tokens = cell.batch * cell.seq
            groups.setdefault(key, []).append((seconds[0] / tokens, seconds[1] / tokens))
    same = every = 0
    for steps in groups.values():
        for (_, first), (_, second) in combinations(sorted(steps), 2):
            same += first <= second * (1 + TIE)
            every += 1
    return same, every


def section(checks: list[tuple[str, bool]]) -> str:
    """The table of the report, and the bounds that the planner is held to."""
    found = orders()
    rows = [
        [f"{one.question.model} {one.question.slice} {one.question.batch}x{one.question.seq}", str(len(one.planned)),
         str(one.refused), "yes" if one.is_equal(0) else "tie" if one.is_equal() else "no", f"{one.kendall:+.2f}",
         f"{one.spearman:+.2f}", f"{100 * one.regret:.1f}%", f"{100 * (max(one.rehearsed) / min(one.rehearsed) - 1):.0f}%"]
        for one in found
    ]  # fmt: skip
    regrets = [one.regret for one in found]
    equal = sum(one.is_equal() for one in found)
    same, every = (sum(counts) for counts in zip(*(one.pairs(TIE) for one in found), strict=True))
    strictly = sum(one.pairs(0)[0] for one in found)
    near, of_grid = recorded_pairs()
    checks += [
        (
            f"first five plans in the compiler's order: {equal} of {len(found)} questions >= 90%",
            equal >= 0.9 * len(found),
        ),
        (
            f"recorded steps of the same model and slice in the compiler's order: {near} of {of_grid} pairs >= 95%",
            near >= 0.95 * of_grid,
        ),
        (
            f"the planner's first plan, rehearsed: at most 10% slower than the best of five ({100 * max(regrets):.1f}%)",
            max(regrets) <= 0.10,
        ),
    ]
    tail = (
        f"equal, compiled steps within {100 * TIE:.0f}% of each other being a tie: {equal} of {len(found)} questions "
        f"({sum(one.is_equal(0) for one in found)} without ties), {same} of {every} pairs ({strictly} without ties); "
        f"of all recorded steps of the same model, slice and length {near} of {of_grid} pairs\n"
        f"mean Kendall {sum(one.kendall for one in found) / len(found):+.2f}, mean Spearman "
        f"{sum(one.spearman for one in found) / len(found):+.2f}; regret: median {100 * median(regrets):.1f}%, largest "
        f"{100 * max(regrets):.1f}%; the planner's first is the compiler's first in {sum(r == 0 for r in regrets)} of {len(found)}"
    )
    headers = ["QUESTION", "PLANS", "DO NOT FIT", "EQUAL", "KENDALL", "SPEARMAN", "REGRET", "SPREAD"]
    return table(headers, rows, right=(1, 2, 4, 5, 6, 7)) + "\n" + tail


if __name__ == "__main__":
    for line in record():
        print(line, file=sys.stderr)
