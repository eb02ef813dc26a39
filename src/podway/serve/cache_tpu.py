"""Attention over pages on TPUs: jax's ragged paged attention, which takes blocks of any number of queries.

Letters: N blocks, Q queries in a block, T = N * Q, H heads, G key/value heads, K d_head padded to the lanes of the chip.

The kernel's page has keys and values of a head side by side: (page, 2 G, K). It reads `num_kv_pages_per_block` pages at a
time into VMEM; what fits depends on the chip, so block sizes are given explicitly (the kernel's own table asks the default
device, which is a CPU when programs are compiled ahead of time).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from podway.model.attention import Pattern

_KV_TOKENS = 512  # read at once: 2 buffers x 512 x 2 x 8 heads x 128 x 2 bytes = 4 MiB, a quarter of a v5e's VMEM
_QUERIES = 32  # 32 queries x 4 heads fill the 128 rows of the matrix unit
_VMEM = 64 * 1024 * 1024  # a limit for the compiler, below the 128 MiB of v5e and v6e


def write(pool: jax.Array, rows_T: jax.Array, k_TGK: jax.Array, v_TGK: jax.Array) -> jax.Array:
    """Keys and values of tokens into rows page * size + offset of the pool; rows past its end are left out."""
    both = _padded(jnp.stack([k_TGK, v_TGK], axis=2), pool.shape[3])
    both = both.reshape(both.shape[0], -1, pool.shape[3])
    flat = pool.reshape(-1, *pool.shape[2:])
    flat = flat.at[rows_T].set(both.astype(pool.dtype), mode="drop", unique_indices=True)
    return flat.reshape(pool.shape)


def attend(
    pool: jax.Array,
    q_NQHK: jax.Array,
    tables_NP: jax.Array,
    start_N: jax.Array,
    pattern: Pattern,
    windowed: jax.Array,
    kernel: Callable[..., jax.Array] = ragged_paged_attention,
) -> jax.Array:
    """See `cache.attend`; the tables have the layer's pages. Each block is a sequence of its own to the kernel."""
    N, Q, H, K = q_NQHK.shape
    page = pool.shape[1]
    q = _padded(q_NQHK.reshape(N * Q, H, K), pool.shape[3])
    ends = jnp.arange(N + 1, dtype=jnp.int32) * Q
    count = jnp.full((1,), N, jnp.int32)
    blocks = {} if kernel is not ragged_paged_attention else {
        "num_kv_pages_per_block": min(max(1, _KV_TOKENS // page), tables_NP.shape[1]),
        "num_queries_per_block": min(_QUERIES, N * Q),
        "vmem_limit_bytes": _VMEM,
    }  # fmt: skip
    scales = {"k_scale": 1.0, "v_scale": 1.0} if pool.dtype != q.dtype else {}

    def run(window: int | None) -> jax.Array:
        return kernel(
            q, pool, start_N + Q, tables_NP, ends, count, sm_scale=pattern.scale, sliding_window=window,
            soft_cap=pattern.softcap, **blocks, **scales,
        )  # fmt: skip

    # The window is fixed when the kernel is compiled; a model with both kinds of layer has both kernels.
    out = (
        run(None) if pattern.window is None else jax.lax.cond(windowed, lambda: run(pattern.window), lambda: run(None))
    )
    return out.reshape(N, Q, H, -1)[..., :K]


def _padded(x: jax.Array, width: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
