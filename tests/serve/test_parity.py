"""What the engine says of each token of a text, against what `transformers` recorded, for every family of models."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from podway.model.hf import read_config, shape_from_hf
from podway.model.weights import load_weights
from podway.serve.build import Options, build
from tests.serve.tiny import QUICK, Runner

FIXTURES = Path(__file__).parent.parent / "model" / "fixtures"
FAMILIES = sorted(folder.name for folder in FIXTURES.iterdir() if (folder / "expected.safetensors").exists())
OPTIONS = Options(max_len=40, max_seqs=1, page=4, pages=30, prompt_tokens=16, decode_steps=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_those_of_transformers(family: str) -> None:
    """24 tokens in two pieces, so that the second reads the first from its pages."""
    folder = FIXTURES / family
    shape = shape_from_hf(read_config(folder))
    expected = load_file(folder / "expected.safetensors")
    engine = build(shape, load_weights(folder, shape, dtype=jnp.float32), OPTIONS, 30)
    engine.compile_all(wanted=[(1, 1)], compiler_options=QUICK)
    tokens = expected["tokens"][0].tolist()
    runner = Runner(engine, depth=0)
    runner.submit(tokens, 0, scores_prompt=True)
    runner.finish()
    got = np.concatenate([flight.prompt_scores()[0][0] for flight in runner.flights])
    best = np.concatenate([flight.prompt_scores()[0][1][:, 0] for flight in runner.flights])
    wanted = np.asarray(jax.nn.log_softmax(jnp.asarray(expected["logits"][0], jnp.float32)))
    np.testing.assert_allclose(got[:-1], wanted[np.arange(len(tokens) - 1), tokens[1:]], atol=2e-3)
    assert best.tolist() == wanted.argmax(axis=1).tolist(), "the greedy choice after every prefix"
