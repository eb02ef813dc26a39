"""The training step of MaxText in October 2023, which the published 16B-128B results were measured with.

Written from its description (docs/planning.md), so that what the compiler says of it can be compared with what was
published. It differs from Podway's own step (podway.train.step) in what the planner's `MAXTEXT_2023` names:

1. The compiler alone decides about collectives: every array only has a sharding. Gradients of split weights then come
   out all-reduced whole, in float32.
2. Weights are cast where they are used, one layer at a time.
3. Attention is jax's flash kernel without causal skipping, in blocks of 512; keys and values that several heads share are
   repeated for it.
4. The logits of all tokens exist at once.
5. Everything but a layer's input is computed again, in one microbatch, with AdamW: `rehearse_training` refuses other
   steps.

Letters: B batch, S length, H heads, K d_head.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention

from podway.model import decoder
from podway.model.decoder import Compute, Layer, Tree, Weights
from podway.model.layout import TRAIN_RULES
from podway.model.mesh import context_spec, named_sharding, per_chip
from podway.model.params import Param
from podway.model.remat import remat_policy
from podway.model.shape import ModelShape
from podway.train.config import OptimizerConfig
from podway.train.optimizer import Optimizer, global_norm, make_optimizer

_BLOCK = 512  # all of the kernel's block sizes
_RATE, _CLIP = 1e-3, 1.0


def lower(shape: ModelShape, mesh: jax.sharding.Mesh, batch: int, seq: int) -> jax.stages.Lowered:
    """The step lowered for the devices of a mesh; call it inside `jax.set_mesh(mesh)`."""
    optimizer = make_optimizer(OptimizerConfig(), lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree))
    weights = decoder.abstract(shape, jnp.float32, mesh, TRAIN_RULES)
    moments = _moments(optimizer, weights)
    where = named_sharding(mesh, ("batch", "length"), (batch, seq), TRAIN_RULES)
    tokens = {
        name: jax.ShapeDtypeStruct((batch, seq), jnp.int32, sharding=where)  # type: ignore[no-untyped-call]
        for name in ("inputs", "targets")
    }

    def step(weights: Tree, moments: Tree, tokens: dict[str, jax.Array]) -> tuple[Tree, Tree, jax.Array]:
        loss, gradients = jax.value_and_grad(_loss)(weights, tokens, shape)
        by = jnp.minimum(1.0, _CLIP / jnp.maximum(global_norm(gradients), 1e-12))
        gradients = jax.tree.map(lambda g: g * by, gradients)
        weights, moments = optimizer.update(gradients, moments, weights, jnp.float32(_RATE))
        return weights, moments, loss

    placed = jax.tree.map(lambda leaf: leaf.sharding, (weights, moments))
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=(*placed, None)).lower(weights, moments, tokens)


def _moments(optimizer: Optimizer, weights: Tree) -> Tree:
    """AdamW's state, each moment where its weight lies."""
    made = jax.eval_shape(optimizer.init, weights)
    placed: Tree = made._replace(
        mean=jax.tree.map(lambda leaf: leaf, weights), square=jax.tree.map(lambda leaf: leaf, weights)
    )
    return placed


def _loss(weights: Tree, tokens: dict[str, jax.Array], shape: ModelShape) -> jax.Array:
    compute = Compute(gather=_stored, project=_project, remat=remat_policy((), ()), rules=TRAIN_RULES)
    positions = decoder.positions_in(None, tokens["inputs"].shape[1])
    x = decoder.embed(weights, tokens["inputs"], shape, compute)
    x, _, _ = decoder.run_layers(weights, x, positions, shape, compute, _attend, None)
    hidden = decoder.finish(weights, x, shape)
    table = weights["embed"].astype(hidden.dtype)
    logits = jnp.einsum("bsd,vd->bsv", hidden, table, preferred_element_type=jnp.float32) * shape.embedding.logit_scale
    chosen = jax.nn.one_hot(tokens["targets"], shape.vocab, dtype=logits.dtype)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.sum(logits * chosen, axis=-1))


def _stored(param: Param, array: jax.Array) -> jax.Array:
    """As it is stored: `_project` casts, so that the gradient of a matrix leaves its product in float32."""
    return array


def _project(name: str, x: jax.Array, weights: Weights, inputs: int) -> jax.Array:
    return _product(inputs, x, weights[name])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(inputs: int, x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tensordot(x, w.astype(x.dtype), axes=inputs)


def _product_forward(inputs: int, x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(inputs, x, w), (x, w)


def _product_backward(inputs: int, kept: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = kept
    rows, columns = x.ndim - inputs, w.ndim - inputs
    back = (tuple(range(g.ndim - columns, g.ndim)), tuple(range(inputs, w.ndim)))
    d_x = jnp.tensordot(g, w.astype(g.dtype), axes=back)
    summed = tuple(range(rows))
    return d_x, jnp.tensordot(x, g, axes=(summed, summed), preferred_element_type=jnp.float32)


_product.defvjp(_product_forward, _product_backward)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, layer: Layer, carry: object) -> tuple[jax.Array, object]:
    blocks = BlockSizes(
        block_q=_BLOCK, block_k_major=_BLOCK, block_k=_BLOCK, block_b=1,
        block_q_major_dkv=_BLOCK, block_k_major_dkv=_BLOCK, block_k_dkv=_BLOCK, block_q_dkv=_BLOCK,
        block_k_major_dq=_BLOCK, block_k_dq=_BLOCK, block_q_dq=_BLOCK,
    )  # fmt: skip

    def on_chip(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))  # heads before length
        out: jax.Array = flash_attention(q, k, v, causal=False, sm_scale=q.shape[-1] ** -0.5, block_sizes=blocks)
        return out.swapaxes(1, 2)

    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    spec = context_spec(("batch", "length", "heads", "head_dim"), q.shape, TRAIN_RULES)
    return per_chip(on_chip, in_specs=(spec, spec, spec), out_specs=spec)(q, k, v), carry
