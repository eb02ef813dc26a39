"""From logits to the next token of every row, on the device: one program, whatever each request asks for.

Letters: R rows, V vocabulary, Z slots, A stop ids, C biases, J the most alternatives that are reported.

Each slot has its own parameters. In order:
  repetition, presence and frequency penalties; logit bias; stop ids are barred until `min_tokens`; the grammar's mask
  -> temperature 0: the most likely token
  -> else divide by temperature; keep the top k; of those the fewest that reach top p; drop what is below min p of the
     best; draw by adding Gumbel noise.

The noise is a function of the request's seed and of the position in its sequence, so an answer does not depend on what
else is in the batch, and a request that was preempted goes on as it would have. Thresholds of top k and top p are found by
bisection over the bits of the numbers: exact, without sorting the vocabulary. A batch of which nobody asks more than the
most likely token skips everything else.

On several chips the logits come split by the vocabulary, and stay so: what the chips then tell each other is a few numbers of each
row. Thresholds alone would need a sum over the chips for each of their 64 bits, so for them the logits are exchanged once, and
each chip has whole rows (`_pick_by_rows`).

Reported log probabilities are those of the model: before temperature, penalties and masks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from podway.model.layout import SERVE_RULES
from podway.model.mesh import context_mesh, context_spec, per_chip
from podway.serve.sampling_params import BIASES, MAX_ALTERNATIVES, STOP_IDS

Holds = Callable[[list[jax.Array]], list[jax.Array]]  # of each of several thresholds (R,)
PROMPT = 1 << 24  # in `counts`: the token is in the prompt; below it, how often it is in the answer


class SamplingState(NamedTuple):
    """What each slot asks for; the first dimension is the slot."""

    temperature: jax.Array
    top_k: jax.Array  # 0: all
    top_p: jax.Array
    min_p: jax.Array
    presence: jax.Array
    frequency: jax.Array
    repetition: jax.Array
    seed: jax.Array  # uint32
    prompt_len: jax.Array
    limit: jax.Array
    min_tokens: jax.Array
    reports: jax.Array  # bool: log probabilities are wanted
    adapter: jax.Array  # number of its LoRA adapter; 0: none
    stop_ids_ZA: jax.Array  # -1: none
    bias_ids_ZC: jax.Array  # -1: none
    bias_ZC: jax.Array


class Sampled(NamedTuple):
    """The tokens of the rows and, for those that asked, how likely they and their alternatives were."""

    token: jax.Array
    logprob: jax.Array
    top_ids_RJ: jax.Array
    top_logprobs_RJ: jax.Array


def empty_sampling_state(slots: int) -> SamplingState:
    """Greedy, and already at its limit: what an empty slot has."""

    def full(value: Any, dtype: Any, *more: int) -> jax.Array:
        return jnp.full((slots, *more), value, dtype)

    f, i = jnp.float32, jnp.int32
    return SamplingState(
        temperature=full(0, f), top_k=full(0, i), top_p=full(1, f), min_p=full(0, f), presence=full(0, f),
        frequency=full(0, f), repetition=full(1, f), seed=full(0, jnp.uint32), prompt_len=full(0, i), limit=full(0, i),
        min_tokens=full(0, i), reports=full(False, jnp.bool_), adapter=full(0, i), stop_ids_ZA=full(-1, i, STOP_IDS),
        bias_ids_ZC=full(-1, i, BIASES), bias_ZC=full(0, f, BIASES),
    )  # fmt: skip


def sample(
    logits_RV: jax.Array,
    sampling: SamplingState,
    counts_ZV: jax.Array,
    slots_R: jax.Array,
    length_R: jax.Array,
    mask_RU: jax.Array,
    bits: int = 1,
) -> Sampled:
    """The next token of each row. `sampling` are of the rows; `length` says how many tokens each has so far; the mask has a
    bit for each token, lowest first, and all ones where there is no grammar. A pass over the logits settles `bits` bits of a
    threshold: 1, 2 or 4."""
    vocabulary = logits_RV.shape[1]
    young = length_R - sampling.prompt_len < sampling.min_tokens
    changed = (
        (sampling.presence != 0) | (sampling.frequency != 0) | (sampling.repetition != 1) | young
        | (sampling.bias_ids_ZC[:, 0] >= 0)
    )  # fmt: skip
    masked = (mask_RU != jnp.uint32(0xFFFFFFFF)).any()
    plain = ~(changed.any() | masked | (sampling.temperature > 0).any() | sampling.reports.any())

    def simple() -> Sampled:
        none = nothing_sampled(logits_RV.shape[0])
        return none._replace(token=jnp.argmax(logits_RV, axis=-1).astype(jnp.int32))

    def full() -> Sampled:
        def change() -> jax.Array:
            penalised = _penalise(logits_RV, sampling, counts_ZV[slots_R])
            return _bar(_bias(penalised, sampling), sampling, young)

        adjusted = jax.lax.cond(changed.any(), change, lambda: logits_RV)
        adjusted = jax.lax.cond(
            masked, lambda: jnp.where(_unpack(mask_RU, vocabulary), adjusted, -jnp.inf), lambda: adjusted
        )
        best = jnp.argmax(adjusted, axis=-1).astype(jnp.int32)
        drawn = jax.lax.cond(
            (sampling.temperature > 0).any(), lambda: _draw(adjusted, sampling, length_R, bits), lambda: best
        )
        token = jnp.where(sampling.temperature > 0, drawn, best)
        reported = jax.lax.cond(
            sampling.reports.any(),
            lambda: report(logits_RV, token),
            lambda: tuple(nothing_sampled(token.shape[0])[1:]),
        )
        return Sampled(token, *reported)

    sampled: Sampled = jax.lax.cond(plain, simple, full)
    return sampled


def nothing_sampled(rows: int) -> Sampled:
    """No token, and nothing known of it."""
    alternatives = (rows, MAX_ALTERNATIVES)
    return Sampled(
        jnp.full(rows, -1, jnp.int32), jnp.zeros(rows), jnp.full(alternatives, -1, jnp.int32), jnp.zeros(alternatives)
    )


def report(logits_RV: jax.Array, token_R: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log probability of the tokens, and the most likely alternatives with theirs (padded with -1)."""
    logprobs_RV = jax.nn.log_softmax(logits_RV, axis=-1)
    chosen = jnp.take_along_axis(logprobs_RV, token_R[:, None], axis=-1)[:, 0]
    most = min(MAX_ALTERNATIVES, logits_RV.shape[1])
    top, ids = jax.lax.top_k(logprobs_RV, most)
    pad = ((0, 0), (0, MAX_ALTERNATIVES - most))
    return chosen, jnp.pad(ids.astype(jnp.int32), pad, constant_values=-1), jnp.pad(top, pad)


def _penalise(logits_RV: jax.Array, sampling: SamplingState, counts_RV: jax.Array) -> jax.Array:
    used = counts_RV % PROMPT
    repetition = sampling.repetition[:, None]
    tamed = jnp.where(logits_RV > 0, logits_RV / repetition, logits_RV * repetition)
    logits_RV = jnp.where(counts_RV > 0, tamed, logits_RV)
    return logits_RV - sampling.frequency[:, None] * used - sampling.presence[:, None] * (used > 0)


def _bias(logits_RV: jax.Array, sampling: SamplingState) -> jax.Array:
    rows = jnp.arange(logits_RV.shape[0])[:, None]
    ids = jnp.where(sampling.bias_ids_ZC >= 0, sampling.bias_ids_ZC, logits_RV.shape[1])
    return logits_RV.at[rows, ids].add(sampling.bias_ZC, mode="drop")


def _bar(logits_RV: jax.Array, sampling: SamplingState, young_R: jax.Array) -> jax.Array:
    rows = jnp.arange(logits_RV.shape[0])[:, None]
    barred = young_R[:, None] & (sampling.stop_ids_ZA >= 0)
    return logits_RV.at[rows, jnp.where(barred, sampling.stop_ids_ZA, logits_RV.shape[1])].set(-jnp.inf, mode="drop")


def _unpack(mask_RU: jax.Array, vocabulary: int) -> jax.Array:
    bits = (mask_RU[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(mask_RU.shape[0], -1)[:, :vocabulary].astype(bool)


def _draw(logits_RV: jax.Array, sampling: SamplingState, length_R: jax.Array, bits: int) -> jax.Array:
    warm = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    scaled = logits_RV / warm[:, None]
    cut = ((sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)).any()
    return jax.lax.cond(  # type: ignore[no-any-return]
        cut,
        lambda: _pick_by_rows(scaled, sampling, length_R, bits),
        lambda: _with_noise(scaled, sampling, length_R),
    )


def _with_noise(kept_RV: jax.Array, sampling: SamplingState, length_R: jax.Array) -> jax.Array:
    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (kept_RV.shape[1],), jnp.float32)

    return jnp.argmax(kept_RV + jax.vmap(noise)(sampling.seed, length_R), axis=-1).astype(jnp.int32)


def _pick_by_rows(scaled_RV: jax.Array, sampling: SamplingState, length_R: jax.Array, bits: int) -> jax.Array:
    """A token of what top k, top p and min p leave of each row, each row on one chip."""

    def pick(scaled_RV: jax.Array, sampling: SamplingState, length_R: jax.Array) -> jax.Array:
        return _with_noise(_cut(scaled_RV, sampling, bits), sampling, length_R)

    chips, (rows, vocabulary) = context_mesh().tensor, scaled_RV.shape
    if chips == 1 or vocabulary % chips:
        return pick(scaled_RV, sampling, length_R)

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, -rows % chips)] + [(0, 0)] * (x.ndim - 1))

    def on_chip(scaled_RV: jax.Array, sampling: SamplingState, length_R: jax.Array) -> jax.Array:
        own_RV = jax.lax.all_to_all(padded(scaled_RV), "tensor", 0, 1, tiled=True)  # type: ignore[no-untyped-call]
        count = own_RV.shape[0]
        first = jax.lax.axis_index("tensor") * count
        own = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(padded(x), first, count), (sampling, length_R))
        every_R: jax.Array = jax.lax.all_gather(pick(own_RV, *own), "tensor", tiled=True)
        return every_R[:rows]

    split, whole = context_spec((None, "vocab"), scaled_RV.shape, SERVE_RULES), PartitionSpec()  # type: ignore[no-untyped-call]
    token_R: jax.Array = per_chip(on_chip, (split, whole, whole), whole)(scaled_RV, sampling, length_R)
    return token_R


def _cut(scaled_RV: jax.Array, sampling: SamplingState, bits: int) -> jax.Array:
    """-inf for what top k, top p or min p leaves out."""
    order_RV = _sortable(scaled_RV)
    wanted = jnp.where(sampling.top_k > 0, sampling.top_k, scaled_RV.shape[1])

    def enough(thresholds: list[jax.Array]) -> list[jax.Array]:
        return [count >= wanted for count in _sums([order_RV >= one[:, None] for one in thresholds])]

    kept = jnp.where(order_RV >= _largest(enough, wanted.shape[0], bits)[:, None], scaled_RV, -jnp.inf)
    chances = jax.nn.softmax(kept, axis=-1)
    # A sum of many small numbers may stay just below 1: top_p = 1 must keep all of them.
    share = jnp.where(sampling.top_p < 1, sampling.top_p, 0.0)

    def reached(thresholds: list[jax.Array]) -> list[jax.Array]:
        return [total >= share for total in _sums([jnp.where(order_RV >= t[:, None], chances, 0) for t in thresholds])]

    threshold = jnp.where(sampling.top_p < 1, _largest(reached, wanted.shape[0], bits), 0)
    kept = jnp.where(order_RV >= threshold[:, None], kept, -jnp.inf)
    floor = chances.max(axis=-1) * sampling.min_p
    return jnp.where(chances >= floor[:, None], kept, -jnp.inf)


def _sums(arrays_RV: list[jax.Array]) -> list[jax.Array]:
    """Of each row of each array, in one pass over what they are computed from."""
    if len(arrays_RV) == 1:
        return [arrays_RV[0].sum(axis=-1)]
    numbers = [x.astype(jnp.int32) if x.dtype == jnp.bool_ else x for x in arrays_RV]
    none = [jnp.zeros((), x.dtype) for x in numbers]
    return list(jax.lax.reduce(numbers, none, lambda a, b: [x + y for x, y in zip(a, b, strict=True)], (1,)))


def _sortable(x: jax.Array) -> jax.Array:
    """uint32 in the order of the floats."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest(holds: Holds, rows: int, bits: int) -> jax.Array:
    """The largest uint32 of each row for which `holds`, which is true of 0 and false above some number. Each pass settles `bits` bits."""

    def digit(index: jax.Array, found: jax.Array) -> jax.Array:
        place = (32 - bits * (index + 1)).astype(jnp.uint32)
        held = holds([found | (jnp.uint32(tried) << place) for tried in range(1, 1 << bits)])
        return found | (sum(one.astype(jnp.uint32) for one in held) << place)

    found: jax.Array = jax.lax.fori_loop(0, 32 // bits, digit, jnp.zeros(rows, jnp.uint32))
    return found
