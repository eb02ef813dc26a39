"""The engine against the decoder without a cache, in every mixture of requests."""

import random

import jax
import numpy as np
import pytest

from podway.catalog.slices import find_slice
from podway.errors import UserError
from podway.model.families import find_model
from podway.model.layout import MeshShape
from podway.plan.engine_costs import Precision
from podway.plan.serve import Load, evaluate_serve
from podway.serve.build import Options, budget
from podway.serve.engine import Engine
from podway.serve.sampling_params import SamplingParams
from tests.long import every
from tests.serve import tiny
from tests.serve.tiny import GEMMA, LLAMA, MIXTRAL, Runner, all_logits, engine_for, greedy, run


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_for(LLAMA)


@pytest.mark.parametrize("shape", every(3, [MIXTRAL, LLAMA, GEMMA]), ids=lambda s: s.family)
def test_greedy_equals_the_decoder_without_a_cache(shape) -> None:  # type: ignore[no-untyped-def]
    engine = engine_for(shape, max_seqs=2, prompt_tokens=16)
    prompt = [random.Random(3).randrange(97) for _ in range(21)]
    assert run(engine, prompt, 12) == greedy(shape, prompt, 12)


def test_preempted_requests_go_on_as_if_nothing_had_been() -> None:
    engine = engine_for(LLAMA, pages=18)
    runner = Runner(engine)
    prompts = [[random.Random(i).randrange(97) for _ in range(12)] for i in range(4)]
    hot = [SamplingParams(temperature=1.0, seed=i) if i % 2 else SamplingParams() for i in range(4)]
    made = [runner.submit(p, 40, s) for p, s in zip(prompts, hot, strict=True)]
    runner.finish()
    assert runner.batcher.preemptions
    for request, prompt, sampling in zip(made, prompts, hot, strict=True):
        assert request.answer == run(engine, prompt, 40, sampling)


def test_a_seed_gives_the_same_answer_whatever_else_runs(engine: Engine) -> None:
    sampling = SamplingParams(temperature=0.9, top_k=30, top_p=0.9, seed=77)
    alone = run(engine, [5, 6, 7], 15, sampling)
    runner = Runner(engine)
    for seed in range(3):
        runner.submit([9, seed], 20, SamplingParams(temperature=2.0, seed=seed))
    together = runner.submit([5, 6, 7], 15, sampling)
    runner.finish()
    assert together.answer == alone
    assert run(engine, [5, 6, 7], 15, SamplingParams(temperature=0.9, top_k=30, top_p=0.9, seed=78)) != alone


def test_logprobs_are_those_of_the_model(engine: Engine) -> None:
    runner = Runner(engine, depth=0)
    request = runner.submit([3, 1, 4], 6, SamplingParams(logprobs=True, temperature=1.0, seed=4))
    runner.finish()
    expected = jax.nn.log_softmax(all_logits(LLAMA, request.tokens))
    seen = []
    for flight in runner.flights:
        logprob, ids, tops = flight.logprobs()
        seen += [(logprob[k, 0], ids[k, 0], tops[k, 0]) for k in range(len(flight.tokens()[0]))]
    for number, (logprob, ids, tops) in enumerate(seen):
        row = expected[2 + number]
        np.testing.assert_allclose(logprob, row[request.tokens[3 + number]], atol=1e-4)
        np.testing.assert_allclose(tops, np.sort(row)[::-1][:20], atol=1e-4)
        assert ids[0] == int(row.argmax())


def test_prompt_scores_survive_chunks(engine: Engine) -> None:
    """40 tokens are computed in two pieces beside a request that generates."""
    prompt = [random.Random(9).randrange(97) for _ in range(50)]
    runner = Runner(engine, depth=0)
    runner.submit([1, 2], 30)
    runner.turn()
    request = runner.submit(prompt, 1, scores_prompt=True)
    before = len(runner.flights)
    runner.finish()
    got = []
    for flight in runner.flights[before:]:
        for piece, scores in zip(flight.step.pieces, flight.prompt_scores() if flight.step.pieces else [], strict=True):
            if piece.request is request:
                got += list(scores[0])
    assert len(got) == 50
    expected = jax.nn.log_softmax(all_logits(LLAMA, prompt))
    for place in range(49):
        np.testing.assert_allclose(got[place], expected[place, prompt[place + 1]], atol=1e-4)


def test_layers_written_out_and_the_gpu_kernel_give_the_same() -> None:
    prompt = [random.Random(5).randrange(97) for _ in range(19)]
    engine = engine_for(LLAMA, backend="nvidia", interpret=True, unroll=True, max_seqs=1, prompt_tokens=64, page=8)
    assert run(engine, prompt, 5) == greedy(LLAMA, prompt, 5)


def test_int8_weights_and_cache_stay_close() -> None:
    prompt = [random.Random(6).randrange(97) for _ in range(40)]
    losses = []
    for changes in ({}, {"quantize": "int8"}, {"kv": "int8"}, {"quantize": "int8", "kv": "int8"}):
        runner = Runner(engine_for(LLAMA, max_seqs=1, prompt_tokens=48, programs=[(1, 3)], **changes))
        runner.submit(prompt, 0, scores_prompt=True)
        runner.finish()
        [scores] = runner.flights[0].prompt_scores()
        losses.append(float(-scores[0][:39].mean()))
    exact, *others = losses
    assert all(abs(loss - exact) < 0.02 * exact for loss in others), losses
    assert len(set(losses)) == 4, "each kind of quantization changes something"


def test_warming_up_changes_no_answer(engine: Engine) -> None:
    prompt = [4, 5, 6, 7]
    before = run(engine, prompt, 8)
    engine.warm()
    assert run(engine, prompt, 8) == before == greedy(LLAMA, prompt, 8)


def test_the_budget_counts_the_real_bytes() -> None:
    engine = engine_for(LLAMA)
    shown, count = budget(LLAMA, tiny.OPTIONS, MeshShape(), 0)
    assert count == 60
    assert shown.cache == sum(x.nbytes for x in jax.tree.leaves(engine._state.cache))
    assert shown.weights == sum(x.nbytes for x in jax.tree.leaves(engine._tree))
    assert "the cache holds 236 tokens" in shown.line("none", "auto")


def test_memory_that_is_too_small_is_said_before() -> None:
    from podway.errors import UserError

    with pytest.raises(UserError, match="no room"):
        budget(LLAMA, Options(max_len=64, max_seqs=4, page=4), MeshShape(), 1 << 16)


def test_fp8_of_a_single_head_on_a_tpu_is_refused_before_anything_is_compiled() -> None:
    """jax's kernel cannot tile two rows of 8 bits; the planner says the same."""
    options = Options(max_len=64, max_seqs=4, pages=60, backend="tpu", kv="fp8", dtype="bfloat16")
    budget(LLAMA, options, MeshShape(), 1 << 30)
    with pytest.raises(UserError, match="single head on a chip"):
        budget(LLAMA, options, MeshShape(tensor=2), 1 << 30)
    load, model = Load(rate=1, prompt=100, output=100), find_model("llama3.1-8b")
    found = [evaluate_serve(model, find_slice("v6e-8"), tensor, load, Precision(kv="fp8")) for tensor in (4, 8)]
    assert not isinstance(found[0], str) and isinstance(found[1], str) and "single head" in found[1]
