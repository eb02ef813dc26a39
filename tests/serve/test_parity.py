"""What the engine says and writes, against what `transformers` recorded, for every family of models."""

import json
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from podway.model.hf import read_config, shape_from_hf
from podway.model.weights import load_weights
from podway.serve.build import Options, build
from podway.serve.engine import Engine
from tests.long import every
from tests.serve.tiny import Runner

MODELS = Path(__file__).parent.parent / "model" / "fixtures"
ANSWERS = Path(__file__).parent / "fixtures"
FAMILIES = sorted(folder.name for folder in MODELS.iterdir() if (folder / "expected.safetensors").exists())
OPTIONS = Options(max_len=56, max_seqs=4, page=4, pages=60, prompt_tokens=16, decode_steps=4)


@cache
def engine_of(family: str) -> Engine:
    folder = MODELS / family
    shape = shape_from_hf(read_config(folder))
    engine = build(shape, load_weights(folder, shape, dtype=jnp.float32), OPTIONS, 60)
    engine.limits = msgspec.structs.replace(engine.limits, rows=(4,))  # one program less to compile
    engine.compile_all()
    return engine


@pytest.mark.parametrize("family", every(4, FAMILIES))
def test_scores_equal_those_of_transformers(family: str) -> None:
    """24 tokens in two pieces, so that the second reads the first from its pages."""
    expected = load_file(MODELS / family / "expected.safetensors")
    tokens = expected["tokens"][0].tolist()
    runner = Runner(engine_of(family), depth=0)
    runner.submit(tokens, 0, scores_prompt=True)
    runner.finish()
    got = np.concatenate([flight.prompt_scores()[0][0] for flight in runner.flights])
    best = np.concatenate([flight.prompt_scores()[0][1][:, 0] for flight in runner.flights])
    wanted = np.asarray(jax.nn.log_softmax(jnp.asarray(expected["logits"][0], jnp.float32)))
    np.testing.assert_allclose(got[:-1], wanted[np.arange(len(tokens) - 1), tokens[1:]], atol=2e-3)
    assert best.tolist() == wanted.argmax(axis=1).tolist(), "the greedy choice after every prefix"


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "phi3-long"])  # see make_generate.py
def test_greedy_answers_are_those_of_generate(family: str) -> None:
    """All prompts at once, more than there are slots: in pieces, in steps of several tokens, with stops."""
    cases = json.loads((ANSWERS / f"{family}.json").read_text())
    runner = Runner(engine_of(family))
    made = []
    for case in cases:
        stops = frozenset() if case["stop"] is None else frozenset([case["stop"]])
        made.append(runner.submit(case["prompt"], 20, stop_ids=stops))
    runner.finish()
    assert [request.answer for request in made] == [case["answer"] for case in cases]
    assert {request.finish for request in made} == {"length", "stop"}
