"""The pool of pages on the device, and attention over it: one definition, a kernel for each kind of chip.

Letters: T tokens of a step, N blocks of queries, Q queries in a block, H heads, G key/value heads, K d_head, P pages in a
request's table, L layers.

One pool holds the pages of all layers, so that it is carried through the scan over the layers and updated in place: page p
of layer l is page l * pages + p of the pool. A step writes the keys and values of its tokens, then each block of queries
reads the pages of its own request:

    query i of a block sees the keys at positions <= start + i of its request, no further back than the window.

A row that generates is a block of one query; a piece of a prompt is blocks of `Limits.block`. Padding at the end of a block
sees keys that nobody wrote, and its results are not used.

  reference  plain jnp over gathered pages: CPU, and what the kernels are held to
  nvidia     a Pallas kernel (`cache_nvidia.py`), and another for rows that generate, which writes too
             (`decode_nvidia.py`)
  tpu        jax's ragged paged attention (`cache_tpu.py`), and a Pallas kernel for rows that generate, which writes too
             (`decode_tpu.py`)

Keys and values may be stored in int8, each with a scale for every token and head, or in float8 without one.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from podway.model.attention import Pattern
from podway.serve import cache_nvidia, cache_tpu, decode_nvidia, decode_tpu
from podway.serve.cache_layout import Cache, Plan

NO_WINDOW = 1 << 30
_GATHER = 1 << 24  # numbers that the reference gathers at a time


def write(plan: Plan, cache: Cache, layer: jax.Array, k_TGK: jax.Array, v_TGK: jax.Array, cells_T: jax.Array) -> Cache:
    """Keys and values of the step's tokens; cell page * size + offset of each, negative for padding."""
    total = plan.layers * plan.pages * plan.page
    tokens, heads = k_TGK.shape[:2]
    inside = cells_T >= 0
    cells = jnp.where(inside, cells_T + layer * (plan.pages * plan.page), 0)
    if plan.backend == "tpu":
        rows = jnp.where(inside, cells, total + jnp.arange(tokens))
        return Cache(cache_tpu.write(cache.k, rows, k_TGK, v_TGK), None, None, None)
    # Rows of one flat array, so that the scatter is along its first dimension and needs no transposed copy. Those of
    # padding lie past its end, each at a place of its own: the scatter may then assume that no two are the same.
    rows_TG = (cells[:, None] // plan.page * heads + jnp.arange(heads)) * plan.page + cells[:, None] % plan.page
    beyond = total * heads + jnp.arange(tokens * heads).reshape(tokens, heads)
    rows_TG = jnp.where(inside[:, None], rows_TG, beyond)

    def put(pool: jax.Array, new: jax.Array) -> jax.Array:
        flat = pool.reshape(total * heads, *pool.shape[3:])
        new = new.reshape(tokens * heads, *new.shape[2:]).astype(pool.dtype)
        return flat.at[rows_TG.reshape(-1)].set(new, mode="drop", unique_indices=True).reshape(pool.shape)

    assert cache.v is not None
    if cache.k_scale is None or cache.v_scale is None:
        return Cache(put(cache.k, k_TGK), put(cache.v, v_TGK), None, None)
    (k, k_scale), (v, v_scale) = quantize(k_TGK), quantize(v_TGK)
    return Cache(put(cache.k, k), put(cache.v, v), put(cache.k_scale, k_scale), put(cache.v_scale, v_scale))


def quantize(x_TGK: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int8, and the scale of each token and head."""
    wide = x_TGK.astype(jnp.float32)
    scale = jnp.maximum(jnp.abs(wide).max(axis=-1), 1e-8) / 127
    return jnp.round(wide / scale[..., None]).astype(jnp.int8), scale


def attend(
    plan: Plan,
    cache: Cache,
    layer: jax.Array,
    q_NQHK: jax.Array,
    tables_NP: jax.Array,
    start_N: jax.Array,
    pattern: Pattern,
    windowed: jax.Array,
) -> jax.Array:
    """(N, Q, H, K): each block of queries over the pages of its request. `windowed` says if the pattern's window holds."""
    tables = tables_NP + layer * plan.pages
    if plan.backend == "tpu":
        return cache_tpu.attend(cache.k, q_NQHK, tables, start_N, pattern, windowed)
    window = jnp.where(windowed, pattern.window or NO_WINDOW, NO_WINDOW).astype(jnp.int32)
    if plan.backend == "nvidia":
        return cache_nvidia.attend(cache, q_NQHK, tables, start_N, window, pattern, plan.interpret)
    return _reference(cache, q_NQHK, tables, start_N, window, pattern)


def write_and_attend(
    plan: Plan,
    cache: Cache,
    layer: jax.Array,
    q_NHK: jax.Array,
    k_NGK: jax.Array,
    v_NGK: jax.Array,
    cells_N: jax.Array,
    tables_NP: jax.Array,
    at_N: jax.Array,
    pattern: Pattern,
    windowed: jax.Array,
) -> tuple[jax.Array, Cache]:
    """`write` and `attend` for rows that generate, one query each."""
    window = jnp.where(windowed, pattern.window or NO_WINDOW, NO_WINDOW).astype(jnp.int32)
    first = jnp.asarray(layer * plan.pages, jnp.int32)
    if plan.backend == "tpu":
        out, pool = decode_tpu.attend(
            cache.k, q_NHK, k_NGK, v_NGK, cells_N >= 0, tables_NP, first, at_N, window, pattern, plan.interpret
        )
        return out, Cache(pool, None, None, None)
    if plan.backend == "nvidia" and cache.k_scale is None:
        out, k, v = decode_nvidia.attend(
            cache, q_NHK, k_NGK, v_NGK, cells_N >= 0, tables_NP, first, at_N, window, pattern, plan.interpret
        )
        return out, Cache(k, v, None, None)
    cache = write(plan, cache, layer, k_NGK, v_NGK, cells_N)
    return attend(plan, cache, layer, q_NHK[:, None], tables_NP, at_N, pattern, windowed)[:, 0], cache


def _reference(
    cache: Cache, q_NQHK: jax.Array, tables_NP: jax.Array, start_N: jax.Array, window: jax.Array, pattern: Pattern
) -> jax.Array:
    _, heads, page, d_head = cache.k.shape
    Q, H = q_NQHK.shape[1:3]

    def gather(pool: jax.Array, scale: jax.Array | None, table: jax.Array, dtype: DTypeLike) -> jax.Array:
        got = pool[table].swapaxes(0, 1).reshape(heads, -1, d_head)
        if scale is None:
            return got.astype(dtype)
        return (got * scale[table].swapaxes(0, 1).reshape(heads, -1, 1)).astype(dtype)

    def one(block: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q_QHK, table, start = block
        assert cache.v is not None
        k_GTK = gather(cache.k, cache.k_scale, table, q_QHK.dtype)
        v_GTK = gather(cache.v, cache.v_scale, table, q_QHK.dtype)
        q_QGRK = q_QHK.reshape(Q, heads, H // heads, d_head)
        scores = jnp.einsum("qgrk,gtk->grqt", q_QGRK, k_GTK, preferred_element_type=jnp.float32) * pattern.scale
        if pattern.softcap is not None:
            scores = pattern.softcap * jnp.tanh(scores / pattern.softcap)
        behind = start + jnp.arange(Q)[:, None] - jnp.arange(k_GTK.shape[1])[None, :]
        scores = jnp.where((behind >= 0) & (behind < window), scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(v_GTK.dtype)
        return jnp.einsum("grqt,gtk->qgrk", weights, v_GTK).reshape(Q, H, d_head)

    together = max(1, _GATHER // (tables_NP.shape[1] * page * heads * d_head))
    out: jax.Array = jax.lax.map(one, (q_NQHK, tables_NP, start_N), batch_size=min(together, q_NQHK.shape[0]))
    return out
