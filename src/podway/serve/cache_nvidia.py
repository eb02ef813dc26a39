"""Attention over pages on NVIDIA GPUs: one Pallas (Triton) kernel for rows that generate and for blocks of a prompt.

Letters: N blocks, Q queries in a block, G key/value heads, R heads that share one, M = Q * R rows of a tile, K d_head,
S splits of the keys.

Each program has the M rows of one block and one key/value head, and walks over its part of the block's pages with the
running maximum and sum of flash attention. A block of a prompt fills the matrix units by itself. A row that generates is
one token with R heads (or a few, with a draft), bound by memory: its keys are split over S programs so that a small batch
fills the chip too, and the parts are put together afterwards.
"""

import functools
from math import log2

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
    rows = Q * (H // G)
    tile = max(_MIN_TILE, 1 << (rows - 1).bit_length())
    q = q_NQHK.reshape(N, Q, G, H // G, K).swapaxes(1, 2).reshape(N, G, rows, K)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, tile - rows), (0, 0)))
    splits = _splits(N * G, tables_NP.shape[1]) if Q <= _FEW_QUERIES else 1

    whole = pl.BlockSpec((total, None, page, K), lambda n, g, s: (0, g, 0, 0))
    scales = [] if cache.k_scale is None else [cache.k_scale, cache.v_scale]
    scale_spec = pl.BlockSpec((total, None, page), lambda n, g, s: (0, g, 0))
    part = pl.BlockSpec((None, None, None, tile), lambda n, g, s: (s, n, g, 0))
    kernel = functools.partial(
        _kernel,
        queries=Q,
        shared=H // G,
        page=page,
        splits=splits,
        scale=pattern.scale,
        softcap=pattern.softcap,
        scaled=bool(scales),
    )
    out, low, high = pl.pallas_call(
        kernel,
        grid=(N, G, splits),
        in_specs=[
            pl.BlockSpec((1,), lambda n, g, s: (n,)),
            pl.BlockSpec((1,), lambda n, g, s: (0,)),
            pl.BlockSpec((None, tables_NP.shape[1]), lambda n, g, s: (n, 0)),
            pl.BlockSpec((None, None, tile, K), lambda n, g, s: (n, g, 0, 0)),
            whole,
            whole,
            *[scale_spec for _ in scales],
        ],
        out_specs=[pl.BlockSpec((None, None, None, tile, K), lambda n, g, s: (s, n, g, 0, 0)), part, part],
        out_shape=[
            abstract_array((splits, N, G, tile, K), jnp.float32),
            abstract_array((splits, N, G, tile), jnp.float32),
            abstract_array((splits, N, G, tile), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4 if tile < 128 else 8, num_stages=3),
        interpret=interpret,
        name="paged_attention",
    )(start_N, window[None], tables_NP, q, cache.k, cache.v, *scales)
    out, low, high = (x[:, :, :, :rows] for x in (out, low, high))
    share = jnp.exp2(high - high.max(axis=0))
    joined = (out * share[..., None]).sum(axis=0) / (low * share).sum(axis=0)[..., None]
    joined = joined.reshape(N, G, Q, H // G, K).swapaxes(1, 2)
    result: jax.Array = joined.reshape(N, Q, H, K).astype(q_NQHK.dtype)
    return result


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
) -> None:
    k_scale_ref, v_scale_ref = refs[:2] if scaled else (None, None)
    out_ref, low_ref, high_ref = refs[-3:]
    start, window = start_ref[0], window_ref[0]
    q = q_ref[...]
    tile, d_head = q.shape
    row = jax.lax.broadcasted_iota(jnp.int32, (tile, page), 0)
    seen_to = start + jnp.minimum(row // shared, queries - 1)
    offset = jax.lax.broadcasted_iota(jnp.int32, (tile, page), 1)

    first = jnp.maximum(start - window + 1, 0) // page
    last = (start + queries + page - 1) // page
    each = (last - first + splits - 1) // splits
    begin = first + pl.program_id(2) * each
    end = jnp.minimum(begin + each, last)

    def body(index: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        out, low, high = state
        number = table_ref[index]
        k = k_ref[number].astype(q.dtype)
        scores = plgpu.dot(q, k.T) * scale
        if k_scale_ref is not None:
            scores = scores * k_scale_ref[number][None, :]
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        behind = seen_to - (index * page + offset)
        scores = jnp.where((behind >= 0) & (behind < window), scores * _LOG2E, _FAR)
        higher = jnp.maximum(high, scores.max(axis=-1))
        shrink = jnp.exp2(high - higher)
        weights = jnp.where(scores > _FAR, jnp.exp2(scores - higher[:, None]), 0.0)
        low = low * shrink + weights.sum(axis=-1)
        if v_scale_ref is not None:
            weights = weights * v_scale_ref[number][None, :]
        v = v_ref[number].astype(q.dtype)
        out = out * shrink[:, None] + plgpu.dot(weights.astype(q.dtype), v)
        return out, low, higher

    nothing = (
        jnp.zeros((tile, d_head), jnp.float32), jnp.zeros(tile, jnp.float32), jnp.full((tile,), _FAR, jnp.float32)
    )  # fmt: skip
    out, low, high = jax.lax.fori_loop(begin, end, body, nothing)
    out_ref[...] = out
    low_ref[...] = low
    high_ref[...] = high
