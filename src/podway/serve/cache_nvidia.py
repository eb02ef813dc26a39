"""Attention over pages on NVIDIA GPUs: one Pallas (Triton) kernel for blocks of a prompt and for rows with drafts.

Letters: N blocks, Q queries in a block, G key/value heads, R heads that share one, M = Q * R rows of a tile, K d_head,
S splits of the keys.

Each program has the M rows of one block and one key/value head, and walks over its part of the block's pages with the
running maximum and sum of flash attention: first the pages that every query of the block sees whole, then those with a
mask. A block of a prompt fills the matrix units by itself; the last blocks, which see the most, begin first. A row that
generates is one token with R heads (or a few, with a draft), bound by memory: its keys are split over S programs so that a
small batch fills the chip too, and the parts are put together afterwards.
"""

import functools
from collections.abc import Callable
from math import log2
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from podway.model.attention import Pattern
from podway.model.mesh import abstract_array
from podway.serve.cache_layout import Cache

_FAR = -0.7 * float(np.finfo(np.float32).max)  # finite, so that a split with nothing to see makes no NaN
_LOG2E = log2(2.718281828459045)
_MIN_TILE = 16  # rows of the smallest matrix product of the tensor cores
_PROGRAMS = 132 * 4  # streaming multiprocessors of an H100 or H200 (NVIDIA data sheet), some programs on each
_MAX_SPLITS = 32
_FEW_QUERIES = 16  # of a row with its draft; more than that is a prompt


def attend(
    cache: Cache,
    q_NQHK: jax.Array,
    tables_NP: jax.Array,
    start_N: jax.Array,
    window: jax.Array,
    pattern: Pattern,
    interpret: bool,
) -> jax.Array:
    """See `cache.attend`; the tables have the layer's pages."""
    N, Q, H, K = q_NQHK.shape
    total, G, page, _ = cache.k.shape
    R, P = H // G, tables_NP.shape[1]
    rows = Q * R
    tile = max(_MIN_TILE, 1 << (rows - 1).bit_length())
    q = q_NQHK.reshape(N, Q, G, R, K)
    whole_tile = tile == rows and not R & (R - 1)  # then the kernel takes its rows out of the array by itself
    if not whole_tile:
        q = jnp.pad(q.swapaxes(1, 2).reshape(N, G, rows, K), ((0, 0), (0, 0), (0, tile - rows), (0, 0)))
    splits = _splits(N * G, P) if Q <= _FEW_QUERIES else 1
    made = jnp.float32 if splits > 1 else q_NQHK.dtype

    def spec(dims: tuple[int | None, ...], at: Callable[..., tuple[Any, ...]]) -> pl.BlockSpec:
        """Of block n, head g and split s; blocks from the last to the first, the heads of each together."""
        return pl.BlockSpec(dims, lambda g, n, s: at(N - 1 - n, g, s))

    scales = [] if cache.k_scale is None else [cache.k_scale, cache.v_scale]
    whole = spec((total, None, page, K), lambda n, g, s: (0, g, 0, 0))
    q_spec, out_spec = (
        (spec((None, Q, None, R, K), lambda n, g, s: (n, 0, g, 0, 0)),
         spec((None, None, Q, None, R, K), lambda n, g, s: (s, n, 0, g, 0, 0)))
        if whole_tile
        else (spec((None, None, tile, K), lambda n, g, s: (n, g, 0, 0)),
              spec((None, None, None, tile, K), lambda n, g, s: (s, n, g, 0, 0)))
    )  # fmt: skip
    part = spec((None, None, None, tile), lambda n, g, s: (s, n, g, 0))
    kernel = functools.partial(
        _kernel, queries=Q, shared=R, page=page, splits=splits, scale=pattern.scale, softcap=pattern.softcap,
        scaled=bool(scales), windowed=pattern.window is not None,
    )  # fmt: skip
    out, low, high = pl.pallas_call(
        kernel,
        grid=(G, N, splits),
        in_specs=[
            spec((1,), lambda n, g, s: (n,)),
            spec((1,), lambda n, g, s: (0,)),
            spec((None, P), lambda n, g, s: (n, 0)),
            q_spec,
            whole,
            whole,
            *[spec((total, None, page), lambda n, g, s: (0, g, 0)) for _ in scales],
        ],
        out_specs=[out_spec, part, part],
        out_shape=[
            abstract_array((splits, *q.shape), made),
            abstract_array((splits, N, G, tile), jnp.float32),
            abstract_array((splits, N, G, tile), jnp.float32),
        ],
        compiler_params=_shape_of_programs(N * G, tile),
        interpret=interpret,
        name="paged_attention",
    )(start_N, window[None], tables_NP, q, cache.k, cache.v, *scales)
    joined = out[0] if splits == 1 else _joined(out, low, high)
    if not whole_tile:
        joined = joined[:, :, :rows].reshape(N, G, Q, R, K).swapaxes(1, 2)
    result: jax.Array = joined.reshape(N, Q, H, K).astype(q_NQHK.dtype)
    return result


def _joined(out: jax.Array, low_SNGM: jax.Array, high_SNGM: jax.Array) -> jax.Array:
    """The splits put together; `out` is (S, N, G, M, K), or (S, N, Q, G, R, K) where the kernel takes its rows by itself."""
    share = jnp.exp2(high_SNGM - high_SNGM.max(axis=0))
    share = share / (low_SNGM * share).sum(axis=0)
    if out.ndim == 6:
        S, N, Q, G, R, _ = out.shape
        share = share.reshape(S, N, G, Q, R).swapaxes(2, 3)
    return (out * share[..., None]).sum(axis=0)


def _shape_of_programs(programs: int, tile: int) -> plgpu.CompilerParams:
    """Many programs of a whole tile: two of 4 warps run beside each other. Few: 8 warps in each (docs/perf-notes.md)."""
    many = programs > _PROGRAMS
    return plgpu.CompilerParams(num_warps=4 if tile < 128 or many else 8, num_stages=2 if many else 3)


def _splits(programs: int, pages: int) -> int:
    wanted = max(1, _PROGRAMS // programs)
    return min(1 << (wanted.bit_length() - 1), _MAX_SPLITS, 1 << (pages.bit_length() - 1))


def _kernel(
    start_ref: Ref,
    window_ref: Ref,
    table_ref: Ref,
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    *refs: Ref,
    queries: int,
    shared: int,
    page: int,
    splits: int,
    scale: float,
    softcap: float | None,
    scaled: bool,
    windowed: bool,
) -> None:
    k_scale_ref, v_scale_ref = refs[:2] if scaled else (None, None)
    out_ref, low_ref, high_ref = refs[-3:]
    start, window = start_ref[0], window_ref[0]
    d_head = q_ref.shape[-1]
    tile = low_ref.shape[-1]
    q = q_ref[...].reshape(tile, d_head)
    row = jax.lax.broadcasted_iota(jnp.int32, (tile, page), 0)
    seen_to = start + jnp.minimum(row // shared, queries - 1)
    offset = jax.lax.broadcasted_iota(jnp.int32, (tile, page), 1)
    factor = scale * _LOG2E if softcap is None else _LOG2E

    first = jnp.maximum(start - window + 1, 0) // page
    last = (start + queries + page - 1) // page
    each = (last - first + splits - 1) // splits
    begin = first + pl.program_id(2) * each
    end = jnp.minimum(begin + each, last)
    # Pages up to here are seen whole by every query; with a window there may be none.
    plain = begin if windowed else jnp.maximum(begin, jnp.minimum((start + 1) // page, end))

    def body(masked: bool, index: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        out, low, high = state
        number = table_ref[index]
        scores = plgpu.dot(q, k_ref[number].astype(q.dtype).T)
        if k_scale_ref is not None:
            scores = scores * k_scale_ref[number][None, :]
        if softcap is not None:
            scores = softcap * jnp.tanh(scores * (scale / softcap))
        if masked:
            behind = seen_to - (index * page + offset)
            scores = jnp.where((behind >= 0) & (behind < window), scores, _FAR)
        higher = jnp.maximum(high, scores.max(axis=-1) * factor)
        shrink = jnp.exp2(high - higher)
        weights = jnp.exp2(scores * factor - higher[:, None])
        if masked:  # where a row has seen nothing yet
            weights = jnp.where(scores > _FAR, weights, 0.0)
        low = low * shrink + weights.sum(axis=-1)
        if v_scale_ref is not None:
            weights = weights * v_scale_ref[number][None, :]
        out = out * shrink[:, None] + plgpu.dot(weights.astype(q.dtype), v_ref[number].astype(q.dtype))
        return out, low, higher

    state = (
        jnp.zeros((tile, d_head), jnp.float32), jnp.zeros(tile, jnp.float32), jnp.full((tile,), _FAR, jnp.float32)
    )  # fmt: skip
    if not windowed:
        state = jax.lax.fori_loop(begin, plain, functools.partial(body, False), state)
    out, low, high = jax.lax.fori_loop(plain, end, functools.partial(body, True), state)
    if splits == 1:
        out = out / low[:, None]
    out_ref[...] = out.astype(out_ref.dtype).reshape(out_ref.shape)
    low_ref[...] = low
    high_ref[...] = high
