"""Steps of prompts alone have programs without rows: the answers are those of an engine that has none."""

from pathlib import Path

import jax.numpy as jnp
import msgspec
import pytest

from podway.model.hf import read_config, shape_from_hf
from podway.model.weights import load_weights
from podway.serve.build import Options, build
from tests.long import every
from tests.serve.tiny import Runner

MODEL = Path(__file__).parent.parent / "model" / "fixtures" / "llama3"


def answers(slots: int, count: int) -> tuple[list[list[int]], set[int]]:
    """What each request is answered, and how many rows the steps with prompts took."""
    shape = shape_from_hf(read_config(MODEL))
    options = Options(max_len=56, max_seqs=slots, page=4, pages=600, prompt_tokens=64, decode_steps=2)
    engine = build(shape, load_weights(MODEL, shape, dtype=jnp.float32), options, 600)
    engine.limits = msgspec.structs.replace(engine.limits, rows=(slots,), blocks=(4,))
    engine.compile_all()
    runner = Runner(engine)
    made = [runner.submit([1 + (7 * number + place) % 90 for place in range(3 + number)], 6) for number in range(count)]
    runner.finish()
    used = {flight.step.row_bucket for flight in runner.flights if flight.step.pieces}
    return [request.answer for request in made], used


@pytest.mark.parametrize("count", every(2, [12, 1]))
def test_prompts_alone_are_answered_as_with_rows(count: int) -> None:
    expected, _ = answers(4, count)
    found, used = answers(40, count)
    assert found == expected
    assert 32 in used, "the first prompts come alone"
    assert count == 1 or 40 in used, "later ones come with rows"
