"""The largest batch that fits, and what would make a step fit."""

from hypothesis import example, given
from hypothesis import strategies as st

from podway.catalog.slices import find_slice
from podway.model.families import find_model
from podway.model.layout import MeshShape
from podway.plan.memory import GIB, train_memory
from podway.plan.training import Training
from podway.rehearse.advice import what_would_fit
from podway.rehearse.batches import largest
from podway.rehearse.memory import Hbm


@given(limit=st.integers(0, 5000), guess=st.integers(1, 6000), most=st.integers(1, 4000))
@example(limit=0, guess=1, most=1)
@example(limit=4000, guess=1, most=4000)
def test_the_largest_is_found_in_few_questions(limit: int, guess: int, most: int) -> None:
    asked: list[int] = []

    def fits(n: int) -> bool:
        assert 1 <= n <= most
        asked.append(n)
        return n <= limit

    assert largest(fits, guess, most) == min(limit, most)
    assert len(asked) == len(set(asked)), "the compiler is never asked the same twice"
    assert len(asked) <= 2 * most.bit_length() + 2


def test_advice_is_what_the_planner_says_fits() -> None:
    shape, slice, mesh = find_model("llama3.1-8b"), find_slice("v6e-16"), MeshShape(fsdp=16)
    training = Training(seq=8192, batch=128, remat="minimal")
    limit = int(31.24 * GIB)
    planned = train_memory(shape, mesh, training, limit)
    assert not planned.fits
    found = Hbm(arguments=int(planned.total) // 2, temporary=int(planned.total) // 2, limit=limit)
    lines = what_would_fit(shape, slice, mesh, training, found)
    assert lines[0].startswith("--remat full --microbatches 2: about 2")
    assert all(line.endswith("of 31.24 GiB") for line in lines)
    worse = Hbm(arguments=found.arguments, temporary=found.temporary * 30, limit=limit)
    assert len(what_would_fit(shape, slice, mesh, training, worse)) < len(lines) or not lines
