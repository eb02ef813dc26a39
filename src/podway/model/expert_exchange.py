"""Rows of tokens that travel to the chips that hold their experts, and answers that travel back.

Letters: B batch, S length, N tokens on this chip (B * S), J experts per token, M = N * J assignments, P chips of an expert group,
H experts on each of them, C rows that one chip sends to another in a round, R = P * C rows that a chip receives, D d_model.

1. Each chip sorts its assignments by expert, so that those for one chip lie together.
2. A round: the next C of them for every chip are exchanged with their weights (an all-to-all); the chip sorts what it received by
   expert, multiplies each run by its expert's matrices, undoes the sorting, and sends the weighted answers back the same way.
3. Rounds go on until no chip has anything left, so nothing is dropped, and buffers hold a round and not the worst case. With C a
   little above the mean (`capacity`), one round is enough unless experts are used very unevenly.

How many rounds there are is not known when the program is compiled, so the backward pass is written here: it takes the same rounds
and computes each again. With `drop` there is one round, and what does not fit in it is not answered.
"""

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from podway.model.expert_dispatch import FURTHER_ROUNDS
from podway.model.grouped import ExpertMlp, Matrices, mlp_of_groups, picked

T = TypeVar("T")


class Exchange(NamedTuple):
    """What is fixed when the program is compiled."""

    axis: str  # of the mesh: the expert group
    chips: int
    experts: int  # of the layer
    capacity: float  # rows that a chip sends to another in a round, over the mean
    drop: bool
    mlp: ExpertMlp
    everyone: tuple[str, ...]  # all axes of the mesh: all chips take the same number of rounds

    def rows(self, assignments: int) -> int:
        """C, in whole tiles of 8 rows."""
        return min(-(-assignments // 8) * 8, -(-ceil(self.capacity * assignments / self.chips) // 8) * 8)


class _Sorted(NamedTuple):
    order_M: jax.Array  # assignments by expert
    chip_M: jax.Array  # of each assignment
    rank_M: jax.Array  # among those for the same chip
    starts_P: jax.Array  # of a chip's assignments in `order_M`
    counts_PH: jax.Array


def exchanged(how: Exchange, x: jax.Array, chosen: jax.Array, weights: jax.Array, matrices: Matrices) -> jax.Array:
    """The weighted answers (B, S, D) of each token's experts, with tokens and experts split over `how.axis`."""
    if how.drop:
        return _round(how, _sort(how, chosen), 0, x, weights, matrices)
    return _rounds(how, x, chosen, weights, matrices)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounds(how: Exchange, x: jax.Array, chosen: jax.Array, weights: jax.Array, matrices: Matrices) -> jax.Array:
    plan = _sort(how, chosen)

    def one(k: jax.Array | int) -> jax.Array:
        return _round(how, plan, k, x, weights, matrices)

    return _over_rounds(one, _needed(how, plan))


def _forward(how: Exchange, *given: Any) -> tuple[jax.Array, Any]:
    return _rounds(how, *given), given


def _backward(how: Exchange, given: Any, d_out: jax.Array) -> tuple[Any, ...]:
    x, chosen, weights, matrices = given
    plan = _sort(how, chosen)

    def one(k: jax.Array | int) -> tuple[jax.Array, jax.Array, Matrices]:
        _, pull = jax.vjp(partial(_round, how, plan, k), x, weights, matrices)
        d_x, d_weights, d_matrices = pull(d_out)
        return d_x, d_weights, d_matrices

    d_x, d_weights, d_matrices = _over_rounds(one, _needed(how, plan))
    return d_x, None, d_weights, d_matrices


_rounds.defvjp(_forward, _backward)


def _over_rounds(one: Callable[[jax.Array | int], T], rounds: jax.Array) -> T:
    """The sum of `one(k)` over all rounds. The first, which is mostly the only one, is no part of a loop that would add it to zeros."""

    def more(state: tuple[jax.Array, T]) -> tuple[jax.Array, T]:
        k, sums = state
        return k + 1, jax.tree.map(jnp.add, sums, one(k))

    first = one(0)
    with jax.named_scope(FURTHER_ROUNDS):
        _, sums = lax.while_loop(lambda state: state[0] < rounds, more, (jnp.int32(1), first))
    return sums


def _sort(how: Exchange, chosen: jax.Array) -> _Sorted:
    chosen_M = chosen.reshape(-1)
    held = how.experts // how.chips
    order_M = jnp.argsort(chosen_M, stable=True)
    counts_PH = jnp.bincount(chosen_M, length=how.experts).astype(jnp.int32).reshape(how.chips, held)
    totals_P = counts_PH.sum(axis=1)
    starts_P = jnp.cumsum(totals_P) - totals_P
    chip_M = chosen_M // held
    return _Sorted(order_M, chip_M, jnp.argsort(order_M) - starts_P[chip_M], starts_P, counts_PH)


def _needed(how: Exchange, plan: _Sorted) -> jax.Array:
    rows = how.rows(plan.order_M.shape[0])
    needed: jax.Array = lax.pmax(-(-plan.counts_PH.sum(axis=1).max() // rows), how.everyone)  # type: ignore[no-untyped-call]
    return needed


def _round(
    how: Exchange, plan: _Sorted, k: jax.Array | int, x: jax.Array, weights: jax.Array, matrices: Matrices
) -> jax.Array:
    """What the experts answer to the assignments of round `k`; zero for all others."""
    J, M = weights.shape[-1], plan.order_M.shape[0]
    C = how.rows(M)
    first = k * C
    place_C = jnp.arange(C, dtype=jnp.int32)
    pick_PC = plan.order_M[jnp.minimum(plan.starts_P[:, None] + first + place_C, M - 1)]
    filled_PC = first + place_C < plan.counts_PH.sum(axis=1)[:, None]
    now_M = (plan.rank_M >= first) & (plan.rank_M < first + C)
    slot_M = plan.chip_M * C + jnp.clip(plan.rank_M - first, 0, C - 1)

    x_ND = x.reshape(-1, x.shape[-1])
    sent_RD = picked(x_ND, pick_PC.reshape(-1) // J, slot_M.reshape(-1, J), now_M.reshape(-1, J))
    weight_R = picked(weights.reshape(-1), pick_PC.reshape(-1), slot_M[:, None], now_M[:, None])
    ends_PH = jnp.cumsum(plan.counts_PH, axis=1)
    counts_PH = jnp.clip(ends_PH, first, first + C) - jnp.clip(ends_PH - plan.counts_PH, first, first + C)
    rows_RD, weight_R, counts_PH = (_swapped(a, how) for a in (sent_RD, weight_R, counts_PH))
    answers_RD = _swapped(_answers(rows_RD, weight_R, counts_PH, C, matrices, how.mlp), how)

    mine_MD = picked(answers_RD, slot_M, pick_PC.reshape(-1, 1), filled_PC.reshape(-1, 1))
    mine_MD = jnp.where(now_M[:, None], mine_MD, 0)
    return mine_MD.reshape(-1, J, x.shape[-1]).sum(axis=1).reshape(x.shape)


def _swapped(x: jax.Array, how: Exchange) -> jax.Array:
    """The part for each chip, for the part from each chip."""
    swapped: jax.Array = lax.all_to_all(x, how.axis, split_axis=0, concat_axis=0, tiled=True)  # type: ignore[no-untyped-call]
    return swapped


def _answers(
    rows_RD: jax.Array, weight_R: jax.Array, counts_PH: jax.Array, each: int, matrices: Matrices, mlp: ExpertMlp
) -> jax.Array:
    """What this chip's experts answer to the rows that came, `each` from every chip, sorted by expert; zero for empty rows."""
    held = counts_PH.shape[1]
    expert_PC = (jnp.arange(each)[None, :, None] >= jnp.cumsum(counts_PH, axis=1)[:, None, :]).sum(axis=-1)
    expert_R = expert_PC.reshape(-1)  # `held` where a row is empty: those come last
    order_R = jnp.argsort(expert_R, stable=True)
    back_R = jnp.argsort(order_R)
    grouped_RD, sorted_R = (picked(a, order_R, back_R[:, None]) for a in (rows_RD, weight_R))
    answers_RD = mlp_of_groups(grouped_RD, sorted_R, counts_PH.sum(axis=0), matrices, mlp)
    return jnp.where((expert_R < held)[:, None], picked(answers_RD, back_R, order_R[:, None]), 0)
