"""The sampler against definitions written out in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podway.model.layout import MeshShape
from podway.model.mesh import make_mesh, spec
from podway.serve.sampling import PROMPT, Sampled, SamplingState, _cut, empty_sampling_state, sample

ROWS, V = 4, 40
_sample = jax.jit(sample)
_cut_jit = jax.jit(_cut, static_argnums=2)


def draw(
    logits: np.ndarray, counts: np.ndarray | None = None, mask: np.ndarray | None = None, length=5, **sampling
) -> Sampled:  # type: ignore[no-untyped-def]
    rows = logits.shape[0]
    base = empty_sampling_state(rows)
    changed = {k: jnp.asarray(v, getattr(base, k).dtype) * jnp.ones_like(getattr(base, k)) for k, v in sampling.items()}
    counts = np.zeros((rows, V), np.int32) if counts is None else counts
    words = np.full((rows, 2), 0xFFFFFFFF, np.uint32) if mask is None else mask
    return _sample(
        jnp.asarray(logits, jnp.float32), base._replace(**changed), jnp.asarray(counts), jnp.arange(rows),
        jnp.full(rows, length, jnp.int32), jnp.asarray(words),
    )  # fmt: skip


def logits(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(ROWS, V)).astype(np.float32) * 3


def test_temperature_0_is_the_most_likely() -> None:
    x = logits()
    out = draw(x)
    assert out.token.tolist() == x.argmax(axis=1).tolist()
    assert (out.top_ids_RJ == -1).all()


def test_draws_follow_the_softmax() -> None:
    x = np.tile(np.log(np.array([0.5, 0.3, 0.2] + [1e-9] * (V - 3), np.float32)), (2000, 1))
    out = draw(x, temperature=1.0, seed=np.arange(2000))
    shares = np.bincount(np.asarray(out.token), minlength=V)[:3] / 2000
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.2], atol=0.04)


def test_the_noise_depends_on_seed_and_position_only() -> None:
    x = logits()
    one = draw(x, temperature=1.5, seed=np.array([1, 2, 3, 4])).token
    other = draw(x[[3, 2, 1, 0]], temperature=1.5, seed=np.array([4, 3, 2, 1])).token
    assert one.tolist() == other.tolist()[::-1]
    flat = np.zeros((ROWS, V), np.float32)
    assert draw(flat, temperature=1.0, length=5).token.tolist() != draw(flat, temperature=1.0, length=6).token.tolist()


def kept_by_definition(row: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    order = np.argsort(-row, kind="stable")
    kept = [i for i in order if top_k == 0 or row[i] >= row[order[min(top_k, V) - 1]]]
    chances = np.exp(row[kept].astype(np.float64) - row.max())
    chances /= chances.sum()
    if top_p < 1:
        reach = np.cumsum(chances)
        enough = int(np.argmax(reach >= top_p)) if (reach >= top_p).any() else len(kept) - 1
        kept, chances = kept[: enough + 1], chances[: enough + 1]
    return {i for i, c in zip(kept, chances, strict=True) if c >= min_p * chances.max()}


@settings(max_examples=60)
@given(
    st.integers(0, 10_000), st.integers(0, 45), st.sampled_from([1.0, 0.1, 0.37, 0.62, 0.9, 0.99]),
    st.sampled_from([0.0, 0.05, 0.3]), st.sampled_from([1, 2]),
)  # fmt: skip
def test_top_k_top_p_and_min_p_keep_what_they_say(seed: int, top_k: int, top_p: float, min_p: float, bits: int) -> None:
    x = logits(seed)
    sampling: SamplingState = empty_sampling_state(ROWS)._replace(
        top_k=jnp.full(ROWS, top_k, jnp.int32), top_p=jnp.full(ROWS, top_p), min_p=jnp.full(ROWS, min_p)
    )
    cut = np.asarray(_cut_jit(jnp.asarray(x), sampling, bits))
    for row in range(ROWS):
        assert set(np.flatnonzero(np.isfinite(cut[row]))) == kept_by_definition(x[row], top_k, top_p, min_p)


def test_top_p_of_1_keeps_everything() -> None:
    x = np.random.default_rng(0).normal(size=(1, V)).astype(np.float32)
    sampling = empty_sampling_state(1)._replace(top_k=jnp.zeros(1, jnp.int32), min_p=jnp.zeros(1))
    assert np.isfinite(np.asarray(_cut_jit(jnp.asarray(x), sampling, 1))).all()


def test_penalties() -> None:
    x = np.zeros((1, V), np.float32)
    x[0, :4] = [5.0, 4.9, 4.8, 4.0]
    counts = np.zeros((1, V), np.int32)
    counts[0, 0], counts[0, 1], counts[0, 2] = 3, 1, PROMPT
    assert draw(x, counts).token[0] == 0
    assert draw(x, counts, presence=0.3).token[0] == 2  # 4.7, 4.6, 4.8: only the answer counts
    assert draw(x, counts, frequency=0.2).token[0] == 2  # 4.4, 4.7, 4.8
    assert draw(x, counts, repetition=1.3).token[0] == 3  # the prompt counts too: 3.85, 3.77, 3.69, 4.0


def test_repetition_makes_a_negative_logit_lower() -> None:
    x = np.full((1, V), -5.0, np.float32)
    x[0, :2] = [-1.0, -1.1]
    counts = np.zeros((1, V), np.int32)
    counts[0, 0] = PROMPT
    assert draw(x, counts, repetition=1.2).token[0] == 1


def test_bias_bars_and_prefers() -> None:
    x = logits()
    best = x.argmax(axis=1)
    ids = np.full((ROWS, 300), -1)
    ids[:, 0] = best
    bias = np.zeros((ROWS, 300))
    bias[:, 0] = -100
    out = draw(x, bias_ids_ZC=ids, bias_ZC=bias)
    assert (np.asarray(out.token) != best).all()
    ids[:, 0] = 7
    bias[:, 0] = 100
    assert draw(x, bias_ids_ZC=ids, bias_ZC=bias).token.tolist() == [7] * ROWS


def test_stop_ids_are_barred_until_min_tokens() -> None:
    x = logits()
    stops = np.full((ROWS, 16), -1)
    stops[:, 0] = x.argmax(axis=1)
    second = np.argsort(-x, axis=1)[:, 1]
    assert draw(x, stop_ids_ZA=stops, prompt_len=4, min_tokens=2).token.tolist() == second.tolist()
    assert draw(x, stop_ids_ZA=stops, prompt_len=3, min_tokens=2).token.tolist() == stops[:, 0].tolist()


def test_a_grammar_masks_greedy_and_drawn_tokens() -> None:
    allowed = {3, 35}
    words = np.zeros((ROWS, 2), np.uint32)
    for token in allowed:
        words[:, token // 32] |= np.uint32(1 << (token % 32))
    x = logits()
    best = [3 if row[3] > row[35] else 35 for row in x]
    assert draw(x, mask=words).token.tolist() == best
    hot = draw(x, mask=words, temperature=5.0, seed=np.arange(ROWS)).token.tolist()
    assert set(hot) <= allowed


def test_reported_logprobs_are_the_models_own() -> None:
    x = logits()
    out = draw(x, reports=True, temperature=0.3, top_k=2, frequency=1.0)
    expected = np.asarray(jax.nn.log_softmax(jnp.asarray(x)))
    for row in range(ROWS):
        assert out.logprob[row] == pytest.approx(expected[row, int(out.token[row])], abs=1e-5)
        np.testing.assert_allclose(out.top_logprobs_RJ[row], np.sort(expected[row])[::-1][:20], atol=1e-5)


@pytest.mark.usefixtures("nothing_kept")
@pytest.mark.parametrize("rows", [1, 4, 6], ids=["fewer than the devices", "as many", "some left over"])
def test_logits_that_lie_on_four_devices_are_sampled_as_on_one(rows: int) -> None:
    """Everything at once: penalties, bias, barred stop ids, a mask, thresholds, draws and what is reported."""
    chance, tokens = np.random.default_rng(rows), 64
    base = empty_sampling_state(rows)
    sampling = base._replace(
        temperature=jnp.where(jnp.arange(rows) % 3 == 2, 0.0, 0.9), top_k=jnp.full(rows, 30, jnp.int32),
        top_p=jnp.full(rows, 0.8), presence=jnp.full(rows, 0.4), repetition=jnp.full(rows, 1.2), seed=jnp.arange(rows, dtype=jnp.uint32),
        min_tokens=jnp.full(rows, 99, jnp.int32), stop_ids_ZA=base.stop_ids_ZA.at[:, 0].set(3), reports=jnp.ones(rows, jnp.bool_),
        bias_ids_ZC=base.bias_ids_ZC.at[:, :2].set(jnp.asarray([5, 63])), bias_ZC=base.bias_ZC.at[:, :2].set(jnp.asarray([2.0, -3.0])),
    )  # fmt: skip
    logits = jnp.asarray(chance.normal(size=(rows, tokens)) * 3, jnp.float32)
    counts = jnp.asarray(chance.integers(0, 3, (rows, tokens)), jnp.int32)
    mask = jnp.asarray(chance.integers(0, 1 << 32, (rows, 2), np.uint32) | np.uint32(1))
    given = (sampling, counts, jnp.arange(rows), jnp.full(rows, 5, jnp.int32), mask)
    expected = _sample(logits, *given)
    mesh = make_mesh(MeshShape(tensor=4), jax.devices()[:4])
    with jax.set_mesh(mesh):
        split = jax.sharding.NamedSharding(mesh, spec(None, "tensor"))
        got = jax.jit(sample, static_argnames="bits")(jax.device_put(logits, split), *given, bits=2)
    for name, one, other in zip(Sampled._fields, expected, got, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, err_msg=name)
