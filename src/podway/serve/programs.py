"""The programs of the engine: pure functions from one state of the device to the next.

Letters: Z slots + 1 (the last is a dummy for padding), R rows, N blocks, Q queries in a block, T tokens of a step,
D d_model, V vocabulary, S positions, P pages in a table, U words of 32 bits over the vocabulary.

  fill_slots  puts requests into slots (their tokens so far and their sampling parameters)
  mixed       one step with prompts: T = R + N * Q tokens, first the rows' last tokens, then the blocks of prompts. Rows
              get a token; so do prompts that end here. With `Limits.prompt_rows` rows, T = N * Q: rows are ends of prompts
  decode      up to `Limits.turns` steps of R rows in one dispatch; ends when all rows have (`speculative.py`: the same with drafts)

Both steps run the same forward pass and choose tokens alike; they differ in which tokens go in. Each has a plain twin for
steps of which every row wants just the most likely token. On NVIDIA the host waits at every condition and every turn of a
loop whose length it does not know (measured on an H200: 0.5 ms a token), so the twins have neither.

What is fixed when a program is compiled is one `Setup`; what the host sends with each step is one `StepInputs`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from podway.model import decoder
from podway.model.attention import pattern_of
from podway.model.decoder import Compute, Layer, Tree
from podway.model.layout import SERVE_RULES
from podway.model.mesh import constrain, context_spec, per_chip
from podway.model.shape import ModelShape
from podway.serve import cache as pages
from podway.serve import cache_layout
from podway.serve.adapters import AdapterSizes, adapted
from podway.serve.batcher import Limits
from podway.serve.cache_layout import Cache, Plan
from podway.serve.sampling import PROMPT, Sampled, SamplingState, empty_sampling_state, nothing_sampled, report, sample
from podway.serve.slot_inputs import SlotInputs


@dataclass(frozen=True)
class Setup:
    """What a program is compiled for: the model, the sizes, the cache's layout, and how to compute."""

    shape: ModelShape
    limits: Limits
    plan: Plan
    compute: Compute
    adapters: AdapterSizes | None = None  # room for LoRA adapters


class StepInputs(NamedTuple):
    """What the host sends with a step. A plain step has no mask; one with prompts has blocks, and one without has turns."""

    rows: jax.Array  # (3, R): slot, where its last token comes out, whether that token is an input of its own
    blocks: jax.Array | None  # (3, N): slot, first position, tokens
    table_ZP: jax.Array
    mask_RU: jax.Array | None = None  # a bit for each token that the grammar allows
    scoring: jax.Array | None = None  # bool: log probabilities of prompts are wanted
    turns_R: jax.Array | None = None  # tokens for each row, at most `Limits.turns`


class State(NamedTuple):
    """Everything that changes on the device."""

    cache: Cache
    tokens_ZS: jax.Array  # prompt and answer
    length_Z: jax.Array
    done_Z: jax.Array
    counts_ZV: jax.Array  # see sampling.PROMPT
    sampling: SamplingState


class Scores(NamedTuple):
    """How likely each token of the prompts in a step made the one after it, and what else was."""

    logprob_NQ: jax.Array
    top_ids_NQJ: jax.Array
    top_logprobs_NQJ: jax.Array


def empty_state(setup: Setup) -> State:
    """Nobody in any slot."""
    shape, limits, plan = setup.shape, setup.limits, setup.plan
    slots = limits.slots + 1
    return State(
        cache=jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), cache_layout.abstract(plan)),
        tokens_ZS=jnp.zeros((slots, limits.max_len + 1), jnp.int32),
        length_Z=jnp.ones(slots, jnp.int32),
        done_Z=jnp.ones(slots, jnp.bool_),
        counts_ZV=jnp.zeros((slots, shape.vocab), jnp.int32),
        sampling=empty_sampling_state(slots),
    )


def fill_slots(state: State, new: SlotInputs) -> State:
    """Requests into their slots. Unused rows of the input name the dummy slot."""
    places = jnp.arange(new.tokens.shape[1])[None, :]
    present = places < new.length[:, None]
    in_prompt = places < new.sampling.prompt_len[:, None]
    vocabulary = state.counts_ZV.shape[1]
    ids = jnp.where(present, new.tokens, vocabulary)
    rows = jnp.arange(ids.shape[0])[:, None]
    none = jnp.zeros((ids.shape[0], vocabulary), jnp.int32)
    prompt = none.at[rows, jnp.where(in_prompt, ids, vocabulary)].max(PROMPT, mode="drop")
    answer = none.at[rows, jnp.where(in_prompt, vocabulary, ids)].add(1, mode="drop")
    pairs = zip(state.sampling, new.sampling, strict=True)
    return State(
        cache=state.cache,
        tokens_ZS=state.tokens_ZS.at[new.slot].set(new.tokens),
        length_Z=state.length_Z.at[new.slot].set(new.length),
        done_Z=state.done_Z.at[new.slot].set(new.slot == state.done_Z.shape[0] - 1),
        counts_ZV=state.counts_ZV.at[new.slot].set(prompt + answer),
        sampling=SamplingState(*(old.at[new.slot].set(value) for old, value in pairs)),
    )


def mixed(setup: Setup, tree: Tree, state: State, step: StepInputs) -> tuple[State, Sampled, Scores]:
    """One token for each row, and the prompts' blocks."""
    assert step.blocks is not None and step.mask_RU is not None and step.scoring is not None
    state, sampling, live_R, hidden_TD, logits_RV = _mixed_logits(setup, tree, state, step)
    state, sampled = _choose(setup, state, sampling, step.rows[0], live_R, logits_RV, step.mask_RU)
    slot_N, start_N, count_N = step.blocks
    at_NQ, real_NQ = _places(setup.limits, start_N, count_N)
    following_NQ = state.tokens_ZS[slot_N[:, None], jnp.where(real_NQ, at_NQ + 1, 0)]
    scores = _score(setup, tree, hidden_TD[-following_NQ.size :], following_NQ, step.scoring)
    return state, jax.tree.map(lambda x: x[None], sampled), scores


def plain_mixed(setup: Setup, tree: Tree, state: State, step: StepInputs) -> tuple[State, Sampled, None]:
    """The same for rows that want the most likely token and prompts that want no scores."""
    state, sampling, live_R, _, logits_RV = _mixed_logits(setup, tree, state, step)
    state, token_R = take_tokens(state, sampling, step.rows[0], live_R, most_likely(logits_RV))
    sampled = nothing_sampled(step.rows.shape[1])._replace(token=token_R)
    return state, jax.tree.map(lambda x: x[None], sampled), None


def _places(limits: Limits, start_N: jax.Array, count_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where the tokens of the blocks stand in their prompts (0 for padding), and which are real."""
    within = jnp.arange(limits.block)
    real_NQ = within[None, :] < count_N[:, None]
    return jnp.where(real_NQ, start_N[:, None] + within, 0), real_NQ


def _mixed_logits(
    setup: Setup, tree: Tree, state: State, step: StepInputs
) -> tuple[State, SamplingState, jax.Array, jax.Array, jax.Array]:
    """The step's tokens through the model: (state, sampling of the rows, which rows are live, hidden, logits of the rows)."""
    assert step.blocks is not None
    block, table_ZP = setup.limits.block, step.table_ZP
    slot_R, index_R, own_R = step.rows
    slot_N, start_N, count_N = step.blocks
    sampling = rows_sampling(state, slot_R)
    live_R = live_rows(state, sampling, slot_R)
    at_R = state.length_Z[slot_R] - 1
    at_NQ, real_NQ = _places(setup.limits, start_N, count_N)
    tokens = StepTokens(
        slot_T=jnp.repeat(slot_N, block),
        at_T=at_NQ.reshape(-1),
        real_T=real_NQ.reshape(-1),
        sections=[QuerySection(table_ZP[slot_N], start_N, block)],
    )
    if slot_R.shape[0] != setup.limits.prompt_rows:
        tokens = StepTokens(
            slot_T=jnp.concatenate([slot_R, tokens.slot_T]),
            at_T=jnp.concatenate([at_R, tokens.at_T]),
            real_T=jnp.concatenate([live_R & (own_R > 0), tokens.real_T]),
            sections=[QuerySection(table_ZP[slot_R], at_R, 1), *tokens.sections],
        )
    hidden_TD, cache = forward(setup, tree, state, tokens, table_ZP)
    logits_RV = decoder.logits(tree, hidden_TD[index_R], setup.shape, setup.compute)
    return state._replace(cache=cache), sampling, live_R, hidden_TD, logits_RV


def decode(setup: Setup, tree: Tree, state: State, step: StepInputs) -> tuple[State, Sampled, None]:
    """`turns_R` tokens for the rows, or fewer where one ends (-1 from there on)."""
    slot_R, turns_R, mask_RU = step.rows[0], step.turns_R, step.mask_RU
    assert turns_R is not None and mask_RU is not None
    sampling = rows_sampling(state, slot_R)

    def goes_on(loop: tuple[jax.Array, State, Sampled]) -> jax.Array:
        number, state, _ = loop
        return (live_rows(state, sampling, slot_R) & (number < turns_R)).any()

    def turn(loop: tuple[jax.Array, State, Sampled]) -> tuple[jax.Array, State, Sampled]:
        number, state, out = loop
        live_R = live_rows(state, sampling, slot_R) & (number < turns_R)
        state, logits_RV = _decode_logits(setup, tree, state, slot_R, live_R, step.table_ZP)
        state, sampled = _choose(setup, state, sampling, slot_R, live_R, logits_RV, mask_RU)
        return number + 1, state, jax.tree.map(lambda all, one: all.at[number].set(one), out, sampled)

    most = setup.limits.turns(slot_R.shape[0])
    out = jax.tree.map(lambda a: jnp.broadcast_to(a, (most, *a.shape)), nothing_sampled(slot_R.shape[0]))
    _, state, out = jax.lax.while_loop(goes_on, turn, (jnp.int32(0), state, out))
    return state, out, None


def plain_decode(setup: Setup, tree: Tree, state: State, step: StepInputs) -> tuple[State, Sampled, None]:
    """The same for rows that want the most likely token. It always makes all turns: those past `turns_R` change nothing."""
    slot_R, turns_R, most = step.rows[0], step.turns_R, setup.limits.turns(step.rows.shape[1])
    assert turns_R is not None
    sampling = rows_sampling(state, slot_R)

    def turn(number: jax.Array, loop: tuple[State, jax.Array]) -> tuple[State, jax.Array]:
        state, out = loop
        live_R = live_rows(state, sampling, slot_R) & (number < turns_R)
        state, logits_RV = _decode_logits(setup, tree, state, slot_R, live_R, step.table_ZP)
        state, token_R = take_tokens(state, sampling, slot_R, live_R, most_likely(logits_RV))
        return state, out.at[number].set(token_R)

    nothing = jax.tree.map(lambda a: jnp.broadcast_to(a, (most, *a.shape)), nothing_sampled(slot_R.shape[0]))
    state, tokens = jax.lax.fori_loop(0, most, turn, (state, nothing.token))
    return state, nothing._replace(token=tokens), None


def rows_sampling(state: State, slot_R: jax.Array) -> SamplingState:
    sampling: SamplingState = jax.tree.map(lambda a: a[slot_R], state.sampling)
    return sampling


def live_rows(state: State, sampling: SamplingState, slot_R: jax.Array) -> jax.Array:
    """Which rows go on."""
    open_R: jax.Array = ~state.done_Z[slot_R] & (state.length_Z[slot_R] < sampling.limit)
    return open_R


def _decode_logits(
    setup: Setup, tree: Tree, state: State, slot_R: jax.Array, live_R: jax.Array, table_ZP: jax.Array
) -> tuple[State, jax.Array]:
    """The rows' last tokens through the model."""
    at_R = state.length_Z[slot_R] - 1
    tokens = StepTokens(slot_R, at_R, live_R, [QuerySection(table_ZP[slot_R], at_R, 1)])
    hidden_RD, cache = forward(setup, tree, state, tokens, table_ZP)
    return state._replace(cache=cache), decoder.logits(tree, hidden_RD, setup.shape, setup.compute)


class QuerySection(NamedTuple):
    """Tokens that attention sees as blocks of equal size, and the pages and first position of each block."""

    tables_NP: jax.Array
    start_N: jax.Array
    queries: int  # of a block


class StepTokens(NamedTuple):
    """The tokens of a step: of which slots, at which positions, which are not padding; cut into sections for attention."""

    slot_T: jax.Array
    at_T: jax.Array
    real_T: jax.Array
    sections: list[QuerySection]


Where = tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]  # cells of the tokens; tables and starts of the sections


def forward(setup: Setup, tree: Tree, state: State, tokens: StepTokens, table_ZP: jax.Array) -> tuple[jax.Array, Cache]:
    """These tokens through all layers: (T, D) and the cache with their keys and values."""
    shape, plan, compute = setup.shape, setup.plan, setup.compute
    if setup.adapters is not None:
        compute = adapted(compute, shape, state.sampling.adapter[tokens.slot_T], setup.adapters, plan)
    page_T = table_ZP[tokens.slot_T, tokens.at_T // plan.page]
    cells_T = jnp.where(tokens.real_T, page_T * plan.page + tokens.at_T % plan.page, -1)
    pattern = pattern_of(shape, shape.attention.window)
    sizes = [section.queries for section in tokens.sections]
    where: Where = (cells_T, [(section.tables_NP, section.start_N) for section in tokens.sections])

    def on_chip(
        cache: Cache, layer: Layer, where: Where, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, Cache]:
        cells, blocks = where
        local = plan._replace(heads=k.shape[1])
        out, begin, left = [], 0, list(zip(blocks, sizes, strict=True))
        # On accelerators one kernel stores and attends for rows that generate.
        rows_alone = len(left) == 1 or plan.backend != "reference"
        if rows_alone and sizes[0] == 1:
            (tables, start), _ = left.pop(0)
            begin = tables.shape[0]
            row = (q[:begin], k[:begin], v[:begin], cells[:begin])
            number, windowed = layer
            seen, cache = pages.write_and_attend(local, cache, number, *row, tables, start, pattern, windowed)
            out.append(seen)
        if left:
            cache = pages.write(local, cache, layer.number, k[begin:], v[begin:], cells[begin:])
        for (tables, start), queries in left:
            size = tables.shape[0] * queries
            block = q[begin : begin + size].reshape(-1, queries, *q.shape[1:])
            seen = pages.attend(local, cache, layer.number, block, tables, start, pattern, layer.windowed)
            out.append(seen.reshape(size, *q.shape[1:]))
            begin += size
        return jnp.concatenate(out), cache

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, layer: Layer, cache: Cache) -> tuple[jax.Array, Cache]:
        head = context_spec((None, "heads", None), q.shape[1:], compute.rules)
        kv = context_spec((None, "kv_heads", None), k.shape[1:], compute.rules)
        split = cache_layout.by_head(plan, cache, lambda axes, leaf: context_spec(axes, leaf.shape, compute.rules))
        whole = PartitionSpec()  # type: ignore[no-untyped-call]
        run = per_chip(on_chip, in_specs=(split, whole, whole, head, kv, kv), out_specs=(head, split))
        out, cache = run(cache, layer, where, q[0], k[0], v[0])
        return out[None], cache

    tokens_T = state.tokens_ZS[tokens.slot_T, tokens.at_T]
    x = decoder.embed(tree, tokens_T[None], shape, compute)
    x, cache, _ = decoder.run_layers(tree, x, tokens.at_T[None], shape, compute, attend, state.cache)
    return decoder.finish(tree, x, shape)[0], cache


def _choose(
    setup: Setup,
    state: State,
    sampling: SamplingState,
    slot_R: jax.Array,
    live_R: jax.Array,
    logits_RV: jax.Array,
    mask_RU: jax.Array,
) -> tuple[State, Sampled]:
    """The rows' next tokens, into their slots; -1 for rows that have ended."""
    logits_RV = constrain(logits_RV, (None, "vocab"), SERVE_RULES)
    sampled = sample(
        logits_RV, sampling, state.counts_ZV, slot_R, state.length_Z[slot_R], mask_RU, threshold_bits(setup.plan)
    )
    state, token_R = take_tokens(state, sampling, slot_R, live_R, sampled.token)
    return state, sampled._replace(token=token_R)


def threshold_bits(plan: Plan) -> int:
    """`bits` of `sample`: a TPU compares with three thresholds in the time that the logits take to arrive."""
    return 2 if plan.backend == "tpu" else 1


def most_likely(logits_RV: jax.Array) -> jax.Array:
    logits_RV = constrain(logits_RV, (None, "vocab"), SERVE_RULES)
    return jnp.argmax(logits_RV, axis=-1).astype(jnp.int32)


def take_tokens(
    state: State, sampling: SamplingState, slot_R: jax.Array, live_R: jax.Array, token_R: jax.Array
) -> tuple[State, jax.Array]:
    """The chosen tokens into their slots, and which rows end with them; -1 for rows that had ended before."""
    length_R = state.length_Z[slot_R]
    token = jnp.where(live_R, token_R, -1)
    answered = length_R + 1 - sampling.prompt_len
    stops = (token[:, None] == sampling.stop_ids_ZA).any(axis=1) & (answered >= sampling.min_tokens) & live_R
    dummy = state.done_Z.shape[0] - 1
    slot = jnp.where(live_R, slot_R, dummy)
    state = state._replace(
        tokens_ZS=state.tokens_ZS.at[slot, jnp.where(live_R, length_R, 0)].set(token),
        length_Z=state.length_Z.at[slot_R].add(live_R.astype(jnp.int32)),
        done_Z=state.done_Z.at[slot].set(stops | ~live_R),
        counts_ZV=state.counts_ZV.at[slot, jnp.where(live_R, token, state.counts_ZV.shape[1])].add(1, mode="drop"),
    )
    return state, token


def _score(setup: Setup, tree: Tree, hidden: jax.Array, following_NQ: jax.Array, wanted: jax.Array) -> Scores:
    """Log probabilities of the tokens that follow, block by block: all logits at once would fill the memory."""
    N, Q = following_NQ.shape

    def one(block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        return report(decoder.logits(tree, block[0], setup.shape, setup.compute), block[1])

    def compute_all() -> tuple[jax.Array, ...]:
        return jax.lax.map(one, (hidden.reshape(N, Q, -1), following_NQ))  # type: ignore[no-any-return]

    like = jax.eval_shape(compute_all)
    scores = jax.lax.cond(wanted, compute_all, lambda: tuple(jnp.zeros(a.shape, a.dtype) for a in like))
    return Scores(*scores)
