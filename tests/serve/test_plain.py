"""Plain programs, packed slot inputs and matrices side by side: each must change nothing but the time."""

import random

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from podway.model import decoder
from podway.model.decoder import Compute
from podway.model.layout import SERVE_RULES, MeshShape
from podway.model.mesh import make_mesh
from podway.model.shape import Attention, ModelShape
from podway.serve.batcher import Limits, Request
from podway.serve.build import build
from podway.serve.engine import Engine
from podway.serve.quantized import quantize, quantize_head, quantized_compute
from podway.serve.sampling_params import SamplingParams
from podway.serve.slot_inputs import empty_slot_inputs, is_plain, pack, slot_inputs, unpack
from podway.serve.weight_layout import fuse, over_turned_heads, turn, turn_heads, unstack
from tests.serve.tiny import GEMMA, LLAMA, MIXTRAL, OPTIONS, Runner, greedy, run, weights

BIASED = msgspec.structs.replace(LLAMA, attention=Attention(qkv_bias=True))


@pytest.fixture(scope="module")
def engine() -> Engine:
    made = build(LLAMA, jax.tree.map(jnp.copy, weights(LLAMA)), OPTIONS, 60)
    made.compile_all(wanted=[(1, 0), (4, 0), (4, 2)], twins=(False, True))
    made.limits = msgspec.structs.replace(made.limits, rows=(1, 4), blocks=(2,))
    return made


def used(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Grows with each launch: was it the plain twin?"""
    seen: list[bool] = []
    launch = engine.launch
    monkeypatch.setattr(engine, "launch", lambda prepared: seen.append(prepared.plain) or launch(prepared))
    return seen


@pytest.mark.long
def test_plain_steps_give_what_the_decoder_gives(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, runner, chance = used(engine, monkeypatch), Runner(engine), random.Random(2)
    wanted = []
    for number in range(12):
        prompt = [chance.randrange(97) for _ in range(chance.randrange(1, 30))]
        stop = frozenset(chance.sample(range(97), 12 if number % 2 else 0))
        wanted.append((runner.submit(prompt, chance.randrange(1, 14), stop_ids=stop), prompt, stop))
        runner.turn()
    runner.finish()
    assert seen and all(seen)
    for request, prompt, stop in wanted:
        assert request.answer == greedy(LLAMA, prompt, request.limit - request.prompt_len, stop)


def test_one_who_asks_for_more_takes_the_step_out_of_the_plain(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    hot = SamplingParams(temperature=0.8, seed=5)
    alone = run(engine, [4, 5], 9, hot)
    seen, runner = used(engine, monkeypatch), Runner(engine)
    asked, other = runner.submit([1, 2, 3], 30), runner.submit([4, 5], 9, hot)
    runner.finish()
    assert asked.answer == greedy(LLAMA, [1, 2, 3], 30)
    assert other.answer == alone
    assert not seen[0] and seen[-1], "plain again once the other has ended"


def test_fewer_steps_than_the_program_makes(engine: Engine) -> None:
    """With few pages left a step is shorter; the turns past it must change nothing."""
    runner = Runner(engine)
    runner.batcher.pool.take(44)
    made = [runner.submit([number, 7], 20) for number in range(3)]
    shorter = 0
    while runner.turn():
        shorter += runner.flights[-1].step.steps in (2, 3)
    assert [r.answer for r in made] == [greedy(LLAMA, [number, 7], 20) for number in range(3)]
    assert shorter or runner.batcher.preemptions


@pytest.mark.parametrize(
    ("sampling", "plain"),
    [
        (SamplingParams(), True), (SamplingParams(seed=3), True), (SamplingParams(temperature=0.5), False),
        (SamplingParams(logprobs=True), False), (SamplingParams(repetition=1.1), False),
        (SamplingParams(presence=-0.2), False), (SamplingParams(logit_bias=((3, 1.0),)), False),
    ],
)  # fmt: skip
def test_who_is_plain(sampling: SamplingParams, plain: bool) -> None:
    assert is_plain(Request("a", [1], 5, owner=sampling)) is plain
    assert not is_plain(Request("a", [1], 5, owner=sampling, min_tokens=2))


def test_slot_inputs_come_out_of_the_pack_as_they_went_in() -> None:
    limits = Limits(slots=3, max_len=20, page=4, pages=9, block=4, blocks=(2,), rows=(3,), steps=2)
    request = Request("a", [5, 6, 7], 9, stop_ids=frozenset({3, 90}), min_tokens=2)
    request.owner = SamplingParams(temperature=0.3, top_p=0.7, seed=0xFFFFFFFF, logit_bias=((4, -2.5),), logprobs=True)
    request.slot = 2
    inputs = slot_inputs([request], 2, limits)
    back = jax.jit(lambda packed: unpack(packed, empty_slot_inputs(2, limits)))(pack(inputs))
    for before, after in zip(jax.tree.leaves(inputs), jax.tree.leaves(back), strict=True):
        assert before.dtype == after.dtype
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize(
    ("shape", "int8"), [(LLAMA, True), (GEMMA, False), (MIXTRAL, False), (BIASED, False)],
    ids=["llama-int8", "gemma3", "mixtral", "biased"],
)  # fmt: skip
def test_matrices_side_by_side_multiply_the_same(shape: ModelShape, int8: bool) -> None:
    tree = jax.tree.map(jnp.copy, weights(shape))
    compute = Compute(dtype=jnp.float32, rules=SERVE_RULES, kernel="reference")
    if int8:
        tree, compute = quantize(tree, shape), quantized_compute(compute)
    tokens = jnp.asarray([[random.Random(4).randrange(97) for _ in range(20)]])
    forward = jax.jit(lambda tree: decoder.forward(tree, tokens, shape, compute).hidden_BSD)
    expected = forward(tree)
    fused = fuse(unstack(jax.tree.map(jnp.copy, tree), shape.layers))
    assert "qkv" in fused["layers"][0] and "q" not in fused["layers"][0]
    np.testing.assert_allclose(forward(fused), expected, atol=1e-4)
    if int8:
        turned = quantized_compute(Compute(dtype=jnp.float32, rules=SERVE_RULES, kernel="reference"), turned=True)
        single = {**fused, "layers": [dict(layer) for layer in fused["layers"]]}
        for place in (tokens, tokens[:, :1]):
            wanted = decoder.forward(tree, place, shape, compute).hidden_BSD
            other = quantize_head(turn(jax.tree.map(jnp.copy, single), shape))
            got = decoder.forward(other, place, shape, turned).hidden_BSD
            np.testing.assert_allclose(got, wanted, atol=1e-4)
            exact = decoder.logits(tree, got, shape, compute)
            np.testing.assert_allclose(decoder.logits(other, got, shape, turned), exact, atol=0.02 * float(exact.std()))
            assert other["head"].dtype == jnp.int8


@pytest.mark.parametrize(
    ("shape", "int8", "devices"), [(LLAMA, False, 2), (LLAMA, True, 2), (GEMMA, True, 1), (MIXTRAL, False, 4), (BIASED, False, 1)],
    ids=["two devices", "int8 on two devices", "gemma3-int8", "mixtral", "biased"],
)  # fmt: skip
@pytest.mark.usefixtures("nothing_kept")
def test_matrices_of_heads_with_outputs_first_multiply_the_same(shape: ModelShape, int8: bool, devices: int) -> None:
    tree = jax.tree.map(jnp.copy, weights(shape))
    compute = Compute(dtype=jnp.float32, rules=SERVE_RULES, kernel="reference")
    if int8:
        tree, compute = quantize(tree, shape), quantized_compute(compute)
    tokens = jnp.asarray([[random.Random(4).randrange(97) for _ in range(20)]])

    def run(tree: decoder.Tree, compute: Compute) -> jax.Array:
        return jax.jit(lambda tree: decoder.forward(tree, tokens, shape, compute).hidden_BSD)(tree)

    expected = run(tree, compute)
    mesh = make_mesh(MeshShape(tensor=devices), jax.devices()[:devices])
    with jax.set_mesh(mesh):
        turned = turn_heads(tree, shape, mesh)
        assert turned["layers"]["k"].shape == (shape.layers, shape.kv_heads, shape.d_head, shape.d_model)
        assert turned["layers"]["k"].sharding.shard_shape(turned["layers"]["k"].shape)[1] == shape.kv_heads // devices
        np.testing.assert_allclose(run(turned, over_turned_heads(compute)), expected, atol=1e-5)
