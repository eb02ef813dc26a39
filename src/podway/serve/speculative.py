"""Speculative decoding by n-grams: what followed the last words of a request earlier is tried again.

Letters: R rows, Q queries of a row (its last token and the draft after it), S positions, U words of 32 bits over the vocabulary.

Most of a step's time is reading weights, and a few tokens of one request cost as much as one. So each turn of `speculate`

1. looks for the latest earlier place at which the row's last n tokens stand (the largest n from `NGRAM` down that is found), and
   drafts what followed there (`propose`; where that runs into the end of the text, it goes on in circles);
2. computes the last token and the draft in one pass, and chooses a token after each of them as `decode` would;
3. takes them as long as the draft is what was chosen. The first token that was not drafted is taken too: no turn is for nothing.

The tokens are those of `decode`: the sampler depends on the seed and the position alone, so it chooses the same token whether it
was drafted or not. A row with penalties has no draft, since its logits depend on the tokens before. All of it is on the device:
a step brings each row `turns_R` tokens as without drafts, in fewer passes, and the host need not know of them. Keys and values of
drafts that were not taken are overwritten by the tokens that come there.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from podway.model import decoder
from podway.model.decoder import Tree
from podway.model.layout import SERVE_RULES
from podway.model.mesh import constrain
from podway.serve.programs import (
    QuerySection,
    Setup,
    State,
    StepInputs,
    StepTokens,
    forward,
    live_rows,
    most_likely,
    rows_sampling,
    take_tokens,
    threshold_bits,
)
from podway.serve.sampling import Sampled, SamplingState, nothing_sampled, sample

NGRAM = 4  # the most tokens that are looked for


class _Loop(NamedTuple):
    state: State
    made_R: jax.Array  # tokens of each row so far
    out: Sampled
    counts: jax.Array  # drafts, tokens in them, and tokens of them that were taken


def speculate(
    setup: Setup, tree: Tree, state: State, step: StepInputs, plain: bool = False
) -> tuple[State, Sampled, jax.Array]:
    """`decode` with drafts, and how many there were, how many tokens in them, and how many of those were taken.

    `plain`: every row wants the most likely token and nothing else."""
    slot_R, turns_R = step.rows[0], step.turns_R
    assert turns_R is not None
    rows, most = slot_R.shape[0], setup.limits.turns(slot_R.shape[0])
    sampling = rows_sampling(state, slot_R)

    def goes_on(loop: _Loop) -> jax.Array:
        return (live_rows(loop.state, sampling, slot_R) & (loop.made_R < turns_R)).any()

    def turn(loop: _Loop) -> _Loop:
        state, made_R = loop.state, loop.made_R
        live_R = live_rows(state, sampling, slot_R) & (made_R < turns_R)
        room_R = jnp.minimum(turns_R - made_R, sampling.limit - state.length_Z[slot_R])
        draft_RQ, drafted_R = _drafts(setup, state, sampling, slot_R, live_R, room_R)
        state, logits = _logits(setup, tree, state, slot_R, live_R, draft_RQ, drafted_R, step.table_ZP)
        chosen = _choose(setup, state, sampling, slot_R, logits, None if plain else step.mask_RU)
        out, took_R = loop.out, live_R
        for query in range(draft_RQ.shape[1] + 1):  # one after another, as they would have come: each may be the last
            if query:
                agreed = draft_RQ[:, query - 1] == chosen.token[:, query - 1]
                took_R = took_R & agreed & (query <= drafted_R) & live_rows(state, sampling, slot_R)
            state, token_R = take_tokens(state, sampling, slot_R, took_R, chosen.token[:, query])
            one = jax.tree.map(lambda x, q=query: x[:, q], chosen)._replace(token=token_R)
            place = (jnp.where(took_R, made_R, most), jnp.arange(rows))
            out = jax.tree.map(lambda all, new, at=place: all.at[at].set(new, mode="drop"), out, one)
            made_R = made_R + took_R
        accepted = jnp.maximum(made_R - loop.made_R - 1, 0).sum()
        more = jnp.stack([(drafted_R > 0).sum(), drafted_R.sum(), accepted])
        return _Loop(state, made_R, out, loop.counts + more.astype(jnp.int32))

    nothing = jax.tree.map(lambda a: jnp.broadcast_to(a, (most, *a.shape)), nothing_sampled(rows))
    begin = _Loop(state, jnp.zeros(rows, jnp.int32), nothing, jnp.zeros(3, jnp.int32))
    end = jax.lax.while_loop(goes_on, turn, begin)
    return end.state, end.out, end.counts


def _drafts(
    setup: Setup, state: State, sampling: SamplingState, slot_R: jax.Array, live_R: jax.Array, room_R: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The draft of each row, and how many tokens of it count: no more than there is room for after the token that is sure."""
    draft_RQ, found_R = propose(state.tokens_ZS[slot_R], state.length_Z[slot_R], setup.limits.draft)
    penalised = (sampling.presence != 0) | (sampling.frequency != 0) | (sampling.repetition != 1)
    drafted_R = jnp.where(live_R & found_R & ~penalised, jnp.clip(room_R - 1, 0, setup.limits.draft), 0)
    return draft_RQ, drafted_R


def propose(tokens_RS: jax.Array, length_R: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """What followed the last tokens of each row where they stood before, `size` tokens of it, and whether they did."""
    places = jnp.arange(tokens_RS.shape[1])
    last = length_R[:, None] - 1
    run_RS = jnp.ones(tokens_RS.shape, jnp.bool_)
    after_R = jnp.zeros(length_R.shape, jnp.int32)  # where the draft begins; 0: no place found
    for n in range(1, NGRAM + 1):  # place p ends an equal run of n tokens
        wanted = jnp.take_along_axis(tokens_RS, jnp.maximum(last - (n - 1), 0), axis=1)
        before = jnp.roll(tokens_RS, n - 1, axis=1)
        run_RS = run_RS & (before == wanted) & (places >= n - 1) & (places < last)
        ends = jnp.max(jnp.where(run_RS, places + 1, 0), axis=1).astype(jnp.int32)
        after_R = jnp.where(ends > 0, ends, after_R)
    period_R = jnp.maximum(length_R - after_R, 1)
    at_RQ = after_R[:, None] + jnp.arange(size) % period_R[:, None]
    return jnp.take_along_axis(tokens_RS, at_RQ, axis=1), after_R > 0


def _logits(
    setup: Setup,
    tree: Tree,
    state: State,
    slot_R: jax.Array,
    live_R: jax.Array,
    draft_RQ: jax.Array,
    drafted_R: jax.Array,
    table_ZP: jax.Array,
) -> tuple[State, jax.Array]:
    """The last token of each row and its draft through the model: logits (R * Q, V). Drafts lie behind the row's tokens."""
    length_R, queries = state.length_Z[slot_R], draft_RQ.shape[1] + 1
    behind = length_R[:, None] + jnp.arange(queries - 1)
    dummy = state.done_Z.shape[0] - 1
    owner = jnp.where(live_R, slot_R, dummy)
    state = state._replace(tokens_ZS=state.tokens_ZS.at[owner[:, None], behind].set(draft_RQ, mode="drop"))
    query = jnp.arange(queries)
    real_RQ = live_R[:, None] & (query <= drafted_R[:, None])
    at_RQ = jnp.where(real_RQ, length_R[:, None] - 1 + query, 0)
    tokens = StepTokens(
        slot_T=jnp.repeat(slot_R, queries),
        at_T=at_RQ.reshape(-1),
        real_T=real_RQ.reshape(-1),
        sections=[QuerySection(table_ZP[slot_R], length_R - 1, queries)],
    )
    hidden, cache = forward(setup, tree, state, tokens, table_ZP)
    return state._replace(cache=cache), decoder.logits(tree, hidden, setup.shape, setup.compute)


def _choose(
    setup: Setup,
    state: State,
    sampling: SamplingState,
    slot_R: jax.Array,
    logits: jax.Array,
    mask_RU: jax.Array | None,
) -> Sampled:
    """A token after each query, each with the noise of its own position: (R, Q)."""
    rows, queries = slot_R.shape[0], logits.shape[0] // slot_R.shape[0]
    if mask_RU is None:
        sampled = nothing_sampled(rows * queries)._replace(token=most_likely(logits))
    else:
        length = (state.length_Z[slot_R][:, None] + jnp.arange(queries)).reshape(-1)
        logits = constrain(logits, (None, "vocab"), SERVE_RULES)
        each = jax.tree.map(lambda a: jnp.repeat(a, queries, axis=0), (sampling, slot_R, mask_RU))
        sampled = sample(logits, each[0], state.counts_ZV, each[1], length, each[2], threshold_bits(setup.plan))
    folded: Sampled = jax.tree.map(lambda a: a.reshape(rows, queries, *a.shape[1:]), sampled)
    return folded
