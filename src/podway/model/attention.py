"""Causal self-attention over whole sequences: one function, three kernels, and the reference holds the others.

Letters: B batch, S query length, T key length, H heads, G kv_heads, R heads / kv_heads, K d_head.

`attend` sees every query at index s look at the keys at indices t <= s of its own segment, no further back than the
window. Scores are scaled, then soft-capped where the model says so, and made in float32.

  reference  plain jnp, exact everywhere, with all B*H*S*T scores in memory: CPU, and the yardstick of the tests
  splash     the Pallas kernel of jax for TPU: skips blocks above the diagonal and beyond the window
  cudnn      flash attention of cuDNN on NVIDIA GPUs (bfloat16 or float16, no soft cap)

Kernels know nothing of meshes, so under a mesh they run inside `shard_map`: each chip has its own sequences and heads.
With `context` > 1 a chip has a part of the queries and gathers all keys and values of its sequences. With `zigzag` > 1 tokens come
in the order of `zigzag.py`, in which all these chips have the same work; s and t above are still places in the sequence.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash_kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from podway.errors import UserError
from podway.model import zigzag as order
from podway.model.attention_blocks import AUTO, SIZES, Blocks, choose_blocks
from podway.model.layout import Rules, kv_repeats
from podway.model.mesh import context_mesh, context_spec, mesh_axes, per_chip, spec
from podway.model.remat import mark
from podway.model.shape import ModelShape
from podway.model.splash_masks import PlacedMask

Kernel = Literal["reference", "splash", "cudnn"]


class Pattern(NamedTuple):
    """What a kernel must know of the model: fixed when the program is compiled."""

    scale: float
    softcap: float | None
    window: int | None


def pattern_of(shape: ModelShape, window: int | None) -> Pattern:
    return Pattern(shape.score_scale, shape.attention.softcap, window)


def attend(
    q_BSHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    segments_BS: jax.Array | None,
    pattern: Pattern,
    rules: Rules,
    *,
    kernel: Kernel | None = None,
    blocks: Blocks = AUTO,
    zigzag: int = 1,
    interpret: bool = False,
) -> jax.Array:
    """Self-attention of whole sequences, (B, S, H, K); `interpret` runs a Pallas kernel where its chip is missing."""
    heads, kv_heads = q_BSHK.shape[2], k_BTGK.shape[2]
    repeats = kv_repeats(heads, kv_heads, context_mesh().tensor)
    if repeats > 1:
        k_BTGK, v_BTGK = (jnp.repeat(x, repeats, axis=2) for x in (k_BTGK, v_BTGK))
    kernel = kernel or default_kernel(pattern, q_BSHK.dtype)
    if kernel == "reference":
        return mark(reference(q_BSHK, k_BTGK, v_BTGK, segments_BS, pattern, zigzag), "context")

    q_spec = context_spec(("batch", "length", "heads", "head_dim"), q_BSHK.shape, rules)
    kv_spec = context_spec(("batch", "length", "kv_heads", "head_dim"), k_BTGK.shape, rules)
    if kernel == "splash":
        one_chip, mask, mask_spec = _splash(q_BSHK.shape, q_spec, pattern, blocks, zigzag, interpret)
    else:
        one_chip, mask, mask_spec = _cudnn(q_spec, pattern), None, None
    run = per_chip(
        one_chip,
        in_specs=(mask_spec, q_spec, kv_spec, kv_spec, spec(*q_spec[:2]), spec(*kv_spec[:2])),
        out_specs=q_spec,
    )
    out: jax.Array = run(mask, q_BSHK, k_BTGK, v_BTGK, segments_BS, segments_BS)
    return out


def default_kernel(pattern: Pattern, dtype: DTypeLike) -> Kernel:
    """The fastest kernel of this machine that can compute the pattern exactly."""
    platform = jax.default_backend()
    if platform == "tpu":
        return "splash"
    half = dtype in (jnp.bfloat16, jnp.float16)
    return "cudnn" if platform == "gpu" and half and pattern.softcap is None else "reference"


def reference(
    q_BSHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    segments_BS: jax.Array | None,
    pattern: Pattern,
    zigzag: int = 1,
) -> jax.Array:
    """The definition."""
    B, S, H, K = q_BSHK.shape
    G = k_BTGK.shape[2]
    q_BSGRK = q_BSHK.reshape(B, S, G, H // G, K)
    scores = jnp.einsum("bsgrk,btgk->bgrst", q_BSGRK, k_BTGK, preferred_element_type=jnp.float32)
    scores = scores * pattern.scale
    if pattern.softcap is not None:
        scores = pattern.softcap * jnp.tanh(scores / pattern.softcap)
    scores = jnp.where(visible(S, segments_BS, pattern.window, zigzag)[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BTGK.dtype)
    return jnp.einsum("bgrst,btgk->bsgrk", weights, v_BTGK).reshape(B, S, H, K)


def visible(length: int, segments_BS: jax.Array | None, window: int | None, zigzag: int = 1) -> jax.Array:
    """(B or 1, S, T): which keys each query sees."""
    places = jnp.asarray(order.places(length, zigzag))
    behind = places[:, None] - places[None, :]
    seen = behind >= 0
    if window is not None:
        seen &= behind < window
    if segments_BS is None:
        return seen[None]
    return seen & (segments_BS[:, :, None] == segments_BS[:, None, :])


Chip = Callable[..., jax.Array]  # (mask, q, k, v, query segments, key segments) of one chip -> its piece of the result


def _splash(
    q_dims: tuple[int, ...], q_spec: P, pattern: Pattern, blocks: Blocks, zigzag: int, interpret: bool
) -> tuple[Chip, Any, Any]:
    mesh = context_mesh()
    shards = mesh.context if q_spec[1] else 1
    heads = q_dims[2] // (mesh.tensor if q_spec[2] else 1)
    block = choose_blocks(blocks, queries=q_dims[1] // shards, keys=q_dims[1], d_head=q_dims[3], window=pattern.window)
    if block is None or q_dims[1] % shards:
        raise UserError(
            f"attention on a TPU cannot cut a sequence of {q_dims[1]} tokens over context={shards} into blocks",
            f"choose a sequence length that is a multiple of {(blocks.size or SIZES[-1]) * shards}",
        )
    one = PlacedMask(order.places(q_dims[1], zigzag), pattern.window)
    made = splash_kernel.make_splash_mha(
        splash_mask.MultiHeadMask([one] * heads),
        head_shards=1,
        q_seq_shards=shards,
        block_sizes=_block_sizes(*block),
        attn_logits_soft_cap=pattern.softcap,
        residual_checkpoint_name="context",
        interpret=interpret,
    )
    chip_spec = None
    if mesh.chips > 1:
        # Only `context` splits the mask. The mesh of the context may be partly manual, which jax cannot divide shapes by.
        alone = jax.sharding.AbstractMesh((mesh.context,), ("context",))
        chip_spec = made.manual_sharding_spec(jax.sharding.NamedSharding(alone, spec(None, q_spec[1])))
    over = mesh_axes(q_spec[1])
    return partial(_splash_on_chip, scale=pattern.scale, over=over, zigzag=zigzag), made, chip_spec


def _block_sizes(size: int, fused: bool) -> splash_kernel.BlockSizes:
    dq = None if fused else size
    return splash_kernel.BlockSizes(
        block_q=size, block_kv=size, block_kv_compute=size,
        block_q_dkv=size, block_kv_dkv=size, block_kv_dkv_compute=size,
        block_q_dq=dq, block_kv_dq=dq, use_fused_bwd_kernel=fused,
    )  # fmt: skip


def _splash_on_chip(
    kernel: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seg_q: jax.Array | None,
    seg_kv: jax.Array | None,
    *,
    scale: float,
    over: tuple[str, ...],
    zigzag: int,
) -> jax.Array:
    q, k, v = (x.swapaxes(1, 2) for x in (q * jnp.asarray(scale, q.dtype), k, v))  # heads before length
    k, v = _whole(k, over, zigzag), _whole(v, over, zigzag)
    segments = None
    if seg_q is not None and seg_kv is not None:
        segments = splash_kernel.SegmentIds(q=seg_q, kv=_whole(seg_kv[:, None, :, None], over, zigzag)[:, 0, :, 0])
    out: jax.Array = jax.vmap(kernel)(q, k, v, segment_ids=segments)
    return out.swapaxes(1, 2)


def _whole(x_BGTK: jax.Array, over: tuple[str, ...], zigzag: int) -> jax.Array:
    """Keys or values of whole sequences, in the order of the sequence, of the part that each chip of `over` has.

    Gathered along a dimension of its own, so that their gradients are scattered by rows: the compiler reduces others whole.
    """
    if not over:
        return order.restored(x_BGTK.swapaxes(1, 2), zigzag).swapaxes(1, 2)
    B, G, _, K = x_BGTK.shape
    parts = jax.lax.all_gather(x_BGTK, over, axis=0)
    if zigzag > 1:
        early, late = jnp.split(parts, 2, axis=3)
        parts = jnp.concatenate([early, late[::-1]])
    return jnp.moveaxis(parts, 0, 2).reshape(B, G, -1, K)


def _cudnn(q_spec: P, pattern: Pattern) -> Chip:
    if q_spec[1]:
        raise UserError("cuDNN attention cannot split a sequence over chips", "use context=1 on GPUs")
    if pattern.softcap is not None:
        raise UserError("cuDNN attention has no soft cap", "use the reference kernel for this model on GPUs")

    def on_chip(
        _: None, q: jax.Array, k: jax.Array, v: jax.Array, seg_q: jax.Array | None, seg_kv: jax.Array | None
    ) -> jax.Array:
        same = None if seg_q is None or seg_kv is None else seg_q[:, None, :, None] == seg_kv[:, None, None, :]
        window = None if pattern.window is None else (pattern.window - 1, 0)
        # Not marked "context": a policy that keeps it keeps what this kernel made, statistics included (remat.py).
        return jax.nn.dot_product_attention(
            q, k, v, mask=same, scale=pattern.scale, is_causal=True, local_window_size=window, implementation="cudnn"
        )

    return on_chip
