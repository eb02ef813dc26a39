"""Rows that generate, on NVIDIA GPUs: one Pallas (Triton) kernel stores a row's new key and value and attends over its pages.

Letters: N rows, G key/value heads, R heads that share one, M = R padded to the matrix units, K d_head, S splits of the keys.

A step of a few rows is bound by the number of its kernels as well as by memory (2.3 microseconds for the smallest, measured on
an H200), so what `cache.write` and `cache_nvidia.attend` do in four kernels is done here in one, or two where the keys are
split. Each program has the R queries of one row and one key/value head, and walks over its part of the pages with the running
maximum and sum of flash attention. The new token is not read back from its page: the first split has it at hand, stores it,
and begins its sums with it, while all programs read only what stood there before.

The number of the next page is read one turn ahead, so that its keys need not wait for it. Queries, keys and values come in one
array, so that one kernel of the compiler makes them (rotation and all).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from podway.model.attention import Pattern
from podway.model.mesh import abstract_array
from podway.serve.cache_layout import Cache

_FAR = -0.7 * float(np.finfo(np.float32).max)  # finite, so that a split with nothing to see makes no NaN
_LOG2E = 1.4426950408889634
_MIN_TILE = 16  # rows of the smallest matrix product of the tensor cores
_PROGRAMS = 132 * 4  # streaming multiprocessors of an H100 or H200 (NVIDIA data sheet), some programs on each
_MAX_SPLITS = 16
_SPLITS_OF_ONE_KERNEL = 4  # the compiler joins up to so many in one kernel


def attend(
    cache: Cache,
    q_NHK: jax.Array,
    k_NGK: jax.Array,
    v_NGK: jax.Array,
    real_N: jax.Array,
    tables_NP: jax.Array,
    first_page: jax.Array,
    at_N: jax.Array,
    window: jax.Array,
    pattern: Pattern,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(context (N, H, K), pool of keys, pool of values): token `at` of each row is stored, if it is real, and sees all before.

    `first_page` is the layer's first page in the pools."""
    assert cache.v is not None
    N, H, K = q_NHK.shape
    total, G, page, _ = cache.k.shape
    P = tables_NP.shape[1]
    splits = _splits(N * G, P)
    one = pl.BlockSpec((1,), lambda g, n, s: (0,))
    row = pl.BlockSpec((1,), lambda g, n, s: (n,))
    whole = pl.BlockSpec((total, None, page, K), lambda g, n, s: (0, g, 0, 0))
    heads = pl.BlockSpec((None, None, H), lambda g, n, s: (s, n, 0))
    made = jnp.float32 if splits > 1 else q_NHK.dtype
    kernel = functools.partial(
        _kernel, heads=G, shared=H // G, page=page, pages=P, splits=splits, scale=pattern.scale, softcap=pattern.softcap
    )
    out, low, high, k_pool, v_pool = pl.pallas_call(
        kernel,
        grid=(G, N, splits),  # the heads of a page, which lie side by side, at about the same time
        in_specs=[
            one,
            one,
            row,
            row,
            pl.BlockSpec((None, P), lambda g, n, s: (n, 0)),
            pl.BlockSpec((None, H + 2 * G, K), lambda g, n, s: (n, 0, 0)),
            whole,
            whole,
        ],
        out_specs=[pl.BlockSpec((None, None, H, K), lambda g, n, s: (s, n, 0, 0)), heads, heads, whole, whole],
        out_shape=[
            abstract_array((splits, N, H, K), made),
            abstract_array((splits, N, H), jnp.float32),
            abstract_array((splits, N, H), jnp.float32),
            abstract_array(cache.k.shape, cache.k.dtype),
            abstract_array(cache.v.shape, cache.v.dtype),
        ],
        input_output_aliases={6: 3, 7: 4},
        compiler_params=_shape_of_programs(N * G),
        interpret=interpret,
        name="paged_decode",
    )(
        first_page.reshape(1), window.reshape(1), at_N, real_N.astype(jnp.int32), tables_NP,
        jnp.concatenate([q_NHK, k_NGK, v_NGK], axis=1), cache.k, cache.v,
    )  # fmt: skip
    if splits == 1:
        return out[0], k_pool, v_pool
    if splits > _SPLITS_OF_ONE_KERNEL:
        return _join(out, low, high, q_NHK.dtype, interpret), k_pool, v_pool
    share = jnp.exp2(high - high.max(axis=0))
    joined = (out * share[..., None]).sum(axis=0) / (low * share).sum(axis=0)[..., None]
    return joined.astype(q_NHK.dtype), k_pool, v_pool


def _join(out_SNHK: jax.Array, low_SNH: jax.Array, high_SNH: jax.Array, dtype: DTypeLike, interpret: bool) -> jax.Array:
    """(N, H, K) of many splits: the compiler would make four kernels of it."""
    S, N, H, K = out_SNHK.shape
    part = pl.BlockSpec((S, None, None), lambda n, h: (0, n, h))
    joined: jax.Array = pl.pallas_call(
        _join_kernel,
        grid=(N, H),
        in_specs=[pl.BlockSpec((S, None, None, K), lambda n, h: (0, n, h, 0)), part, part],
        out_specs=pl.BlockSpec((None, None, K), lambda n, h: (n, h, 0)),
        out_shape=abstract_array((N, H, K), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="join_splits",
    )(out_SNHK, low_SNH, high_SNH)
    return joined


def _join_kernel(out_ref: Ref, low_ref: Ref, high_ref: Ref, joined_ref: Ref) -> None:
    high = high_ref[...]
    share = jnp.exp2(high - high.max(axis=0))
    joined = (out_ref[...] * share[:, None]).sum(axis=0) / (low_ref[...] * share).sum(axis=0)
    joined_ref[...] = joined.astype(joined_ref.dtype)


def _shape_of_programs(programs: int) -> plgpu.CompilerParams:
    """Many of them: small ones with more loads under way. Few: more warps in each (docs/perf-notes.md)."""
    many = programs > _PROGRAMS
    return plgpu.CompilerParams(num_warps=2 if many else 4, num_stages=3 if many else 2)


def _splits(programs: int, pages: int) -> int:
    wanted = max(1, _PROGRAMS // programs)
    return min(1 << (wanted.bit_length() - 1), _MAX_SPLITS, 1 << (pages.bit_length() - 1))


def _pages_of_split(at: jax.Array, window: jax.Array, page: int, splits: int) -> tuple[jax.Array, jax.Array]:
    """The first page that this split reads, and the one after its last."""
    first = jnp.maximum(at - window + 1, 0) // page
    last = (at + page - 1) // page
    each = (last - first + splits - 1) // splits
    begin = first + pl.program_id(2) * each
    return begin, jnp.minimum(begin + each, last)


def _scored(scores: jax.Array, *, scale: float, softcap: float | None) -> jax.Array:
    """Products of queries and keys as powers of two."""
    scores = scores * scale
    return (softcap * jnp.tanh(scores / softcap) if softcap is not None else scores) * _LOG2E


def _kernel(
    first_ref: Ref,
    window_ref: Ref,
    at_ref: Ref,
    real_ref: Ref,
    table_ref: Ref,
    qkv_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    out_ref: Ref,
    low_ref: Ref,
    high_ref: Ref,
    k_out_ref: Ref,
    v_out_ref: Ref,
    *,
    heads: int,
    shared: int,
    page: int,
    pages: int,
    splits: int,
    scale: float,
    softcap: float | None,
) -> None:
    at, window, base = at_ref[0], window_ref[0], first_ref[0]
    head, d_head = pl.program_id(0), qkv_ref.shape[1]
    tile = max(_MIN_TILE, 1 << (shared - 1).bit_length())
    rows = pl.ds(head * shared, tile)  # this head's queries, and others that are left out
    kept = jnp.arange(tile) < shared
    every = jnp.broadcast_to(kept[:, None], (tile, d_head))
    q = plgpu.load(qkv_ref.at[rows, :], mask=every, other=0.0)
    is_first = pl.program_id(2) == 0

    scored = functools.partial(_scored, scale=scale, softcap=softcap)
    k_new = qkv_ref[heads * shared + head, :].astype(k_ref.dtype)
    v_new = qkv_ref[heads * (shared + 1) + head, :].astype(v_ref.dtype)
    stored = jnp.broadcast_to(is_first & (real_ref[0] > 0), (d_head,))
    number = table_ref[at // page] + base
    plgpu.store(k_out_ref.at[number, at % page, :], k_new, mask=stored)
    plgpu.store(v_out_ref.at[number, at % page, :], v_new, mask=stored)
    own = scored((q.astype(jnp.float32) * k_new.astype(jnp.float32)[None, :]).sum(axis=-1))
    high = jnp.where(is_first, own, _FAR)
    low = jnp.where(is_first, jnp.ones(tile, jnp.float32), 0.0)
    out = jnp.where(is_first, jnp.broadcast_to(v_new.astype(jnp.float32)[None, :], (tile, d_head)), 0.0)

    begin, end = _pages_of_split(at, window, page, splits)
    offset = jax.lax.broadcasted_iota(jnp.int32, (tile, page), 1)

    def body(index: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        number, out, low, high = state
        following = table_ref[jnp.minimum(index + 1, pages - 1)] + base
        k, v = k_ref[number].astype(q.dtype), v_ref[number].astype(q.dtype)
        behind = at - (index * page + offset)
        scores = jnp.where((behind > 0) & (behind < window), scored(plgpu.dot(q, k.T)), _FAR)
        higher = jnp.maximum(high, scores.max(axis=-1))
        shrink = jnp.exp2(high - higher)
        weights = jnp.where(scores > _FAR, jnp.exp2(scores - higher[:, None]), 0.0)
        low = low * shrink + weights.sum(axis=-1)
        out = out * shrink[:, None] + plgpu.dot(weights.astype(q.dtype), v)
        return following, out, low, higher

    start = table_ref[jnp.minimum(begin, pages - 1)] + base
    _, out, low, high = jax.lax.fori_loop(begin, end, body, (start, out, low, high))
    if splits == 1:
        out = out / low[:, None]
    plgpu.store(out_ref.at[rows, :], out.astype(out_ref.dtype), mask=every)
    plgpu.store(low_ref.at[rows], low, mask=kept)
    plgpu.store(high_ref.at[rows], high, mask=kept)
