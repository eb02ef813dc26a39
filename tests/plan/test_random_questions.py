"""Random questions to the planner (`tools/bench/questions.py`): some thousands here, 100,000 in `make soak`."""

import random

import pytest
from tools.bench.questions import PART, PARTS, ask, ask_part, check, check_growing


def test_random_questions() -> None:
    dice = random.Random(20261116)
    answered = [plan for plan in (ask(dice) for _ in range(3000)) if plan is not None]
    assert len(answered) > 500
    for plan in answered:
        check(plan)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, PARTS + 1))
def test_a_hundred_thousand_random_questions(seed: int) -> None:
    found = ask_part(seed)
    assert found.asked == PART and not found.wrong, found.wrong[:5]


@pytest.mark.parametrize("model", ["llama3.1-8b", "mixtral-8x7b", "llama3.1-70b"])
@pytest.mark.parametrize("generation", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_more_chips_of_a_kind_are_never_slower(model: str, generation: str) -> None:
    """The best plan of a batch that all can share; where a larger slice fits nothing, a smaller one fits nothing either."""
    check_growing(model, generation, seq=4096, batch=1024)
