"""How much quantization changes a trained model: perplexity on text it has not seen, within the bounds that docs/serving.md states.

The model in fixtures/trained is tiny-llama3.2 after 300 steps on nine tenths of examples/data/us-constitution.txt:

    podway train model.name=tiny-llama3.2 data.paths='[examples/data/us-constitution.txt]' data.tokenizer=bytes data.eval_fraction=0.1 \\
      batch.sequences=8 batch.length=128 schedule.steps=300 schedule.warmup=10 optimizer.rate=5e-3 precision.compute=float32 \\
      model.kernel=reference checkpoint.save=false checkpoint.export=true
"""

from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from podway.model.hf import read_config, shape_from_hf
from podway.model.weights import load_weights
from podway.serve.build import Options, build
from tests.long import every
from tests.serve.tiny import Runner

MODEL = Path(__file__).parent / "fixtures" / "trained"
TEXT = Path(__file__).parents[2] / "examples" / "data" / "us-constitution.txt"
WINDOW = 128  # what it was trained with
# The most that perplexity may rise, as a part of it.
BOUNDS = {
    ("int8", "auto"): 0.005,
    ("none", "int8"): 0.002,
    ("none", "fp8"): 0.02,
    ("int8", "int8"): 0.006,
    ("int8", "fp8"): 0.02,
}


@cache
def perplexity(quantize: str, kv: str) -> float:
    """On the last tenth of the text, every window by itself."""
    shape = shape_from_hf(read_config(MODEL))
    options = Options(
        max_len=WINDOW + 2, max_seqs=1, page=16, pages=20, prompt_tokens=WINDOW, decode_steps=1, quantize=quantize, kv=kv  # type: ignore[arg-type]
    )  # fmt: skip
    engine = build(shape, load_weights(MODEL, shape, dtype=jnp.float32), options, 20)
    engine.compile_all(wanted=[(1, WINDOW // 16)])
    text = TEXT.read_bytes()
    text = text[-(len(text) // 10 // WINDOW) * WINDOW :]
    scores = []
    for begin in range(0, len(text), WINDOW):
        runner = Runner(engine)
        runner.submit(list(text[begin : begin + WINDOW]), 0, scores_prompt=True)
        runner.finish()
        scores.append(runner.flights[0].prompt_scores()[0][0][: WINDOW - 1])
    return float(np.exp(-np.mean(scores)))


def test_the_model_has_learned() -> None:
    assert 4 < perplexity("none", "auto") < 6, "256 would be a guess"


@pytest.mark.parametrize(("quantize", "kv"), every(2, BOUNDS))
def test_perplexity_stays_within_the_bound(quantize: str, kv: str) -> None:
    exact, shrunk = perplexity("none", "auto"), perplexity(quantize, kv)
    assert shrunk != exact, "it changes something"
    assert shrunk <= exact * (1 + BOUNDS[quantize, kv])
