"""Does the planner put the plans of a slice in the order in which the compiler puts them?

For each question (a model, a slice, a length) the planner's first five plans are compiled; both orders, the planner's and that of the
estimates from the compiled programs, are compared by Kendall's and Spearman's rank correlation, and by regret: how much longer the
planner's first plan takes than the fastest of the five, both rehearsed. `python -m tools.bench.ranking` compiles what is not
recorded yet (half a minute or more for each plan); the table is written by `make bench-plan`. A plan stays recorded when the planner
changes its mind: what is compared is the order of the same five.
"""

import gzip
import sys
from itertools import combinations
from typing import NamedTuple

import msgspec
from tools.bench.grid import Cell
from tools.bench.rehearsed import MEASUREMENTS, CompiledStep, rehearsal_of, without_buffers

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


class Question(NamedTuple):
    """What the planner is asked."""

    model: str
    slice: str
    seq: int
    batch: int


QUESTIONS = (
    Question("16b", "v5litepod-256", 2048, 2048),
    Question("llama3.2-1b", "tpu7x-8", 4096, 128),
    Question("llama3.2-3b", "v5litepod-16", 4096, 64),
)


class Order(NamedTuple):
    """The plans of one question as both see them."""

    question: Question
    planned: list[float]  # seconds, in the planner's order
    rehearsed: list[float]
    refused: int  # that do not fit after all

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
    return Cell(
        model=question.model, slice=question.slice, mesh=str(plan.mesh), batch=training.batch, seq=training.seq,
        remat=training.remat, microbatches=training.microbatches, offload=training.offload,
    )  # fmt: skip


def recorded() -> list[CompiledStep]:
    """The plans that were compiled."""
    return from_json(gzip.decompress(RECORDED.read_bytes()), list[CompiledStep]) if RECORDED.exists() else []


def record(*, again: bool = False) -> list[str]:
    """Compile the first plans of each question that has none, written down after each; lines about what did not compile."""
    rows, failed = [] if again else recorded(), []
    asked = {(row.cell.model, row.cell.slice, row.cell.seq) for row in rows}
    for question in QUESTIONS:
        if (question.model, question.slice, question.seq) in asked:
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
        ours = [row for row in rows if (row.cell.model, row.cell.slice, row.cell.seq) == question[:3]]
        slice = find_slice(question.slice)
        seconds, refused = [], 0
        for row in ours:
            assert row.report.program is not None
            if row.report.memory is not None and not row.report.memory.fits:
                refused += 1
                continue
            plan = evaluate(find_model(question.model), slice, row.cell.sizes, row.cell.training)
            seconds.append((plan.time.total, estimate(row.report.program, Fabric(slice)).point))
        seconds.sort()
        if seconds:
            found.append(Order(question, [a for a, _ in seconds], [b for _, b in seconds], refused))
    return found


def section(checks: list[tuple[str, bool]]) -> str:
    """The table of the report, and the bounds that the planner is held to."""
    found = orders()
    rows = [
        [f"{one.question.model} {one.question.slice} {one.question.batch}x{one.question.seq}", str(len(one.planned)),
         str(one.refused), f"{one.kendall:+.2f}", f"{one.spearman:+.2f}", f"{100 * one.regret:.1f}%",
         f"{100 * (max(one.rehearsed) / min(one.rehearsed) - 1):.0f}%"]
        for one in found
    ]  # fmt: skip
    regrets = [one.regret for one in found]
    checks.append(
        (
            f"the planner's first plan, rehearsed: at most 10% slower than the best of five ({100 * max(regrets):.1f}%)",
            max(regrets) <= 0.10,
        )
    )
    tail = (
        f"mean Kendall {sum(one.kendall for one in found) / len(found):+.2f}, mean Spearman "
        f"{sum(one.spearman for one in found) / len(found):+.2f}; regret: median {100 * median(regrets):.1f}%, largest "
        f"{100 * max(regrets):.1f}%; the planner's first is the compiler's first in {sum(r == 0 for r in regrets)} of {len(found)}"
    )
    headers = ["QUESTION", "PLANS", "DO NOT FIT", "KENDALL", "SPEARMAN", "REGRET", "SPREAD"]
    return table(headers, rows, right=(1, 2, 3, 4, 5, 6)) + "\n" + tail


if __name__ == "__main__":
    for line in record():
        print(line, file=sys.stderr)
