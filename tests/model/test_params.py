from math import prod

import pytest

from podway.model.families import find_model, known_models
from podway.model.flops import flops_per_token, forward_flops_per_token
from podway.model.params import activations, count, kv_count, matrix_count, nest, params
from podway.model.remat import NAMES


@pytest.mark.parametrize("name", known_models())
def test_the_table_is_sound(name: str) -> None:
    table = params(find_model(name))
    assert len({param.name for param in table}) == len({param.hf for param in table}) == len(table)
    for param in table:
        assert len(param.axes) == len(param.dims)
        assert prod(param.hf_dims) * prod(param.dims[: param.stacked]) == param.size
        assert (param.init in ("input", "output")) == bool(param.inputs)


@pytest.mark.parametrize("name", known_models())
def test_activations_have_the_names_that_policies_know(name: str) -> None:
    assert {activation.name for activation in activations(find_model(name))} == set(NAMES)


def test_the_tree() -> None:
    assert nest({"embed": 1, "layers/q": 2, "layers/k": 3}) == {"embed": 1, "layers": {"q": 2, "k": 3}}


def test_the_cache_of_llama3() -> None:
    """128 KiB for each token of Llama 3 8B in bfloat16."""
    assert 2 * kv_count(find_model("llama3-8b")) == 128 * 1024


# TFLOP a step and chip of the published jobs, with their batch for each chip and 2048 tokens.
@pytest.mark.parametrize(
    ("name", "batch", "teraflops"), [("16b", 6, 1279.0), ("32b", 4, 1652.6), ("64b", 2, 1644.3), ("128b", 1, 1640.2)]
)
def test_flops_of_the_jobs_of_2023(name: str, batch: int, teraflops: float) -> None:
    step = flops_per_token(find_model(name), 2048, "full-2023") * batch * 2048
    assert step / 1e12 == pytest.approx(teraflops, abs=0.05)


def test_flops_of_llama3_by_hand() -> None:
    """Six operations for each weight but the lookup table's, and half of the square of attention."""
    shape, seq = find_model("llama3-8b"), 8192
    weights = count(shape) - 128_256 * 4096 - 65 * 4096
    assert matrix_count(shape) == weights
    attention = 12 * 32 * (32 * 128) * seq / 2
    assert flops_per_token(shape, seq) == pytest.approx(6 * weights + attention)
    assert flops_per_token(shape, seq, "full") == pytest.approx(6 * weights + 2 * attention)


def test_a_window_costs_its_band() -> None:
    """Gemma 2 at 8192 tokens: half of the layers see a band of 4096, S*W - W*W/2 pairs of S*S/2."""
    shape, seq, window = find_model("gemma2-2b"), 8192, 4096
    pairs = 13 * (seq * window - window**2 / 2) + 13 * seq**2 / 2
    attention = 4 * shape.heads * shape.d_head * pairs / seq
    assert forward_flops_per_token(shape, seq) == pytest.approx(2 * matrix_count(shape) + attention)


def test_idle_experts_cost_nothing() -> None:
    shape = find_model("mixtral-8x7b")
    assert forward_flops_per_token(shape, 1) == pytest.approx(2 * 12.7e9, rel=0.02)
