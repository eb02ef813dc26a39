"""The T5 trials on v4: what fits, what is faster, and why."""

import pytest

from podway.catalog.slices import find_slice
from podway.errors import UserError
from podway.plan.evidence import t5_plan
from podway.plan.published_rows import rows_of
from podway.plan.search import PlanOptions
from podway.plan.t5 import T5_68B, T5X, XXL, evaluate_t5, search_t5, t5_mesh
from podway.plan.t5 import rows_of as rows_on_a_tile
from podway.plan.training import Training

V4 = find_slice("v4-512")


def run(batch: int, microbatches: int, tile: tuple[int, ...] = (4, 2, 2)) -> float:
    training = Training(
        seq=512, batch=batch, microbatches=microbatches, remat="none", optimizer="adafactor", program=T5X
    )
    return evaluate_t5(XXL, V4, training, tile).tokens_per_second


def test_sizes() -> None:
    assert XXL.params == pytest.approx(11.135e9, rel=0.001)
    assert T5_68B.params == pytest.approx(68e9, rel=0.01)


@pytest.mark.parametrize("row", [r for r in rows_of("t5_v4") if r["tokens_per_second"]], ids=lambda row: row["row"])
def test_every_row_ran_or_did_not_as_planned(row: dict[str, str]) -> None:
    assert t5_plan(row).memory.fits == (row["tokens_per_second"] != "OOM")


def test_a_tile_that_closes_a_ring_is_faster() -> None:
    assert run(896, 4, (4, 2, 2)) > run(896, 4, (2, 2, 4)) == run(896, 4, (2, 4, 2))


def test_microbatches_that_do_not_divide_are_padded() -> None:
    mesh = t5_mesh(V4, (4, 2, 2))
    whole, ragged = (Training(seq=512, batch=batch, microbatches=4, remat="none", program=T5X) for batch in (896, 928))
    assert (rows_on_a_tile(whole, mesh), rows_on_a_tile(ragged, mesh)) == (14, 15)
    assert run(928, 4) < run(896, 4)


def test_more_microbatches_share_the_final_sum() -> None:
    assert run(896, 4) < run(1792, 8) < run(5376, 24)


def test_search_finds_a_tile_that_closes_a_ring() -> None:
    plans = search_t5(XXL, PlanOptions(seq=512, batch=896), [V4]).plans
    assert all(plan.memory.fits for plan in plans)
    sixteen = [plan.mesh.tile for plan in plans if plan.mesh.tensor == 16]
    assert len(sixteen) > 3 and (sixteen[0] or (0,))[0] == 4


def test_what_t5x_cannot_do_is_refused() -> None:
    with pytest.raises(UserError, match="planned as t5x runs it"):
        search_t5(XXL, PlanOptions(seq=512, slices=2), [V4])
    with pytest.raises(UserError, match="core is always 1"):
        search_t5(XXL, PlanOptions(seq=512, batch=896, tile=(4, 2, 1, 2)), [V4])
    search = search_t5(XXL, PlanOptions(seq=512, batch=896, microbatches=4, tile=(2, 2, 2)), [V4])
    assert not search.plans and search.rejected[0].reason.startswith("OOM by")
