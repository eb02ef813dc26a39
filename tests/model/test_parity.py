"""Logits equal those of `transformers`, for every family and mechanism; fixtures/make_fixtures.py made the expected."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from podway.model.decoder import Compute, forward, logits
from podway.model.families import find_model
from podway.model.weights import load_weights

FIXTURES = sorted(path.parent for path in Path(__file__).parent.glob("fixtures/*/expected.safetensors"))
COMPUTE = Compute(dtype=jnp.float32, longest=24)  # the rows of the fixtures


def test_every_family_has_a_fixture() -> None:
    families = {find_model(str(folder)).family for folder in FIXTURES}
    known = {"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "mixtral", "qwen2-moe", "qwen3-moe", "phi3"}
    assert families == known


@pytest.mark.parametrize("folder", FIXTURES, ids=lambda folder: folder.name)
def test_logits_equal_those_of_transformers(folder: Path) -> None:
    shape = find_model(str(folder))
    tree = load_weights(folder, shape)
    expected = load_file(folder / "expected.safetensors")

    def run(tree: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        return logits(tree, forward(tree, tokens, shape, COMPUTE).hidden_BSD, shape, COMPUTE)

    found = jax.jit(run)(tree, expected["tokens"])
    np.testing.assert_allclose(found, expected["logits"], atol=1e-4, rtol=0)
