"""What the compiler reported, as it is recorded in docs/measurements: the estimates and the planner are held to it."""

import msgspec
import pytest
from tools.bench.grid import ALL
from tools.bench.rehearsed import JOBS, jobs, recorded_steps, timed, weighed

from podway.catalog.slices import find_slice
from podway.model.families import find_model
from podway.plan.memory import GIB
from podway.rehearse.fabric import Fabric
from podway.rehearse.program import each
from podway.rehearse.rehearsal import CompileReport
from podway.rehearse.timeline import estimate


def test_mfu_of_the_four_jobs_on_one_slice() -> None:
    compared, found = jobs()
    assert [one.row for one in compared] == ["16b-1", "32b-1", "64b-1", "128b-1"]
    errors = [abs(one.error) for one in compared]
    assert sum(errors) / 4 <= 0.05 and max(errors) <= 0.12
    assert sorted(compared, key=lambda c: c.predicted) == sorted(compared, key=lambda c: c.published)
    for one in compared:
        guess = found[one.row][1]
        low, high = (one.predicted * guess.point / seconds for seconds in (guess.high, guess.low))
        assert low < one.predicted < high


def test_the_estimate_is_of_the_program_and_not_of_its_name() -> None:
    """Slower links, more bytes or more turns make the same program slower: nothing is looked up."""
    report = msgspec.json.decode(JOBS.read_bytes(), type=dict[str, CompileReport])["64b-1"]
    assert report.program is not None
    fabric = Fabric(find_slice("v5litepod-256"))
    before = estimate(report.program, fabric)
    once = [msgspec.structs.replace(op, turns=1) if op.kind == "loop" else op for op in report.program.ops]
    less = estimate(msgspec.structs.replace(report.program, ops=tuple(once)), fabric)
    assert less.point < before.point / 20, "64 layers"
    flat = estimate(report.program, Fabric(find_slice("v6e-256")))
    assert flat.point < before.point / 2, "another chip"


def test_the_recorded_flops_are_those_of_the_model() -> None:
    """Forward, both gradients, and what full remat computes again: all but the last product of each branch."""
    report = msgspec.json.decode(JOBS.read_bytes(), type=dict[str, CompileReport])["32b-1"]
    assert report.program is not None
    counted = sum(times * op.flops for op, times in each(report.program.ops))
    shape, tokens = find_model("32b"), 4 * 2048
    d, heads, ff = shape.d_model, shape.heads * shape.d_head, shape.d_ff
    layer = 4 * d * heads + 2 * d * ff
    again = 3 * d * heads + d * ff  # the matrices that end a branch are not needed
    expected = 2 * tokens * (shape.layers * (3 * layer + again) + 3 * d * shape.vocab)
    assert counted == pytest.approx(expected, rel=0.001)


def test_planned_bytes_are_near_the_compiled_ones() -> None:
    compared = weighed()
    assert len(compared) == len(ALL), "record it again: python -m tools.bench.plan --fresh"
    for one in compared:
        assert abs(one.error) <= 0.10, one
    assert sum(abs(one.error) <= 0.05 for one in compared) >= 0.95 * len(compared)


def test_planned_steps_are_near_the_compiled_ones() -> None:
    compared = timed()
    assert len(compared) >= 75
    assert sum(abs(one.error) <= 0.08 for one in compared) >= 0.95 * len(compared)


def test_the_grid_has_every_axis_and_every_kind_of_step() -> None:
    for axis in ("slices", "fsdp", "tensor", "data", "expert", "context"):
        assert any(cell.sizes.size(axis) > 1 for cell in ALL), axis
    assert {"none", "minimal", "save_context", "full"} <= {cell.remat for cell in ALL}
    assert {find_slice(cell.slice).generation for cell in ALL} >= {"v4", "v5e", "v5p", "v6e", "tpu7x"}
    assert any(cell.offload for cell in ALL) and {cell.slices for cell in ALL} >= {1, 2, 4}
    recorded = recorded_steps()
    assert [row.cell for row in recorded] == list(ALL)
    assert all(row.report.memory is not None and row.report.memory.total > GIB for row in recorded)
