"""Cross-entropy that never has all logits in memory, with its gradient made in the forward pass.

Letters: B batch, S length, C chunks of the length, D d_model, V vocab.

The logits of one chunk of tokens are made, turned into the loss and at once into the gradients of the hidden states and
of the output matrix, and dropped. The backward pass only multiplies those by the incoming gradient. So the logits are
made once (not again in the backward pass, as checkpointing would), and at most one chunk of them exists.

    loss = sum over tokens of weight * (log Z - logit[target] + z * (log Z)^2)
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from podway.model.layout import Rules
from podway.model.mesh import constrain, context_mesh

# The logits of one chunk take this share of a device's memory. Every chunk reads and writes the gradient of the output
# matrix once, so few large chunks are fast: on an H200 with a vocabulary of 128k, 1,000 tokens a chunk spend a quarter of
# the loss on that, 8,000 a thirtieth.
LOGITS_SHARE = 1 / 32
SOME_MEMORY = 16e9  # where a device's memory is not known

Pair = tuple[jax.Array, jax.Array]
Triple = tuple[jax.Array, jax.Array, jax.Array]


class Head(NamedTuple):
    """What turns hidden states into logits, beside the matrix; fixed when the program is compiled."""

    tied: bool = False  # the matrix is (V, D) and not (D, V)
    scale: float = 1.0
    softcap: float | None = None
    z: float = 0.0
    chunks: int = 1
    kept: DTypeLike = jnp.float32  # the type that a chunk of logits has in memory


def choose_chunks(
    batch: int, length: int, vocab: int, memory: float | None, asked: int = 0, kept: DTypeLike = jnp.float32
) -> int:
    """The fewest equal parts of a sequence whose logits, on one device, take no more than LOGITS_SHARE of it."""
    mesh = context_mesh()
    per_device = length // mesh.context
    if asked:
        return next(n for n in range(min(asked, per_device), 0, -1) if per_device % n == 0)
    one_token = jnp.dtype(kept).itemsize * -(-batch // mesh.expert) * vocab // mesh.tensor
    room = (memory or SOME_MEMORY) * LOGITS_SHARE
    fits = (n for n in range(1, per_device + 1) if per_device % n == 0 and per_device // n * one_token <= room)
    return next(fits, per_device)


def cross_entropy(
    hidden_BSD: jax.Array,
    matrix: jax.Array,
    targets_BS: jax.Array,
    weights_BS: jax.Array,
    head: Head,
    rules: Rules,
) -> tuple[jax.Array, jax.Array]:
    """(loss with the z term, cross-entropy alone), both summed over tokens; only the first has a gradient."""
    return _cross_entropy(head, rules, hidden_BSD, matrix, targets_BS, weights_BS)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cross_entropy(
    head: Head, rules: Rules, hidden: jax.Array, matrix: jax.Array, targets: jax.Array, weights: jax.Array
) -> Pair:
    def chunk(sums: Pair, part: Triple) -> tuple[Pair, None]:
        x, t, w = part
        lost, entropy, _ = _losses(_logits(x, matrix, head, rules), t, w, head)
        return (sums[0] + lost.sum(), sums[1] + entropy.sum()), None

    zero = jnp.zeros((), jnp.float32)
    parts = _cut(hidden, head.chunks, rules), _cut(targets, head.chunks, rules), _cut(weights, head.chunks, rules)
    sums, _ = jax.lax.scan(chunk, (zero, zero), parts)
    return sums


def _forward(
    head: Head, rules: Rules, hidden: jax.Array, matrix: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[Pair, Pair]:
    """The loss, and its gradients for a cotangent of 1."""

    def chunk(carry: Triple, part: Triple) -> tuple[Triple, jax.Array]:
        loss, entropy, d_matrix = carry
        x, t, w = part
        raw = _logits(x, matrix, head, rules)
        lost, plain, d_logits = _losses(raw, t, w, head)
        d_logits = d_logits.astype(x.dtype)
        d_x = jnp.einsum("...v,vd->...d" if head.tied else "...v,dv->...d", d_logits, matrix)
        summed = "bcsv,bcsd->vd" if head.tied else "bcsd,bcsv->dv"
        operands = (d_logits, x) if head.tied else (x, d_logits)
        d_matrix = d_matrix + jnp.einsum(summed, *operands, preferred_element_type=jnp.float32)
        return (loss + lost.sum(), entropy + plain.sum(), d_matrix), d_x

    parts = _cut(hidden, head.chunks, rules), _cut(targets, head.chunks, rules), _cut(weights, head.chunks, rules)
    zero = jnp.zeros((), jnp.float32)
    start = (zero, zero, jnp.zeros(matrix.shape, jnp.float32))
    (loss, entropy, d_matrix), d_hidden = jax.lax.scan(chunk, start, parts)
    return (loss, entropy), (_joined(d_hidden, hidden.shape, rules), d_matrix.astype(matrix.dtype))


def _backward(head: Head, rules: Rules, saved: Pair, cotangents: Pair) -> tuple[jax.Array, jax.Array, None, None]:
    d_hidden, d_matrix = saved
    by = cotangents[0]
    return by.astype(d_hidden.dtype) * d_hidden, by.astype(d_matrix.dtype) * d_matrix, None, None


_cross_entropy.defvjp(_forward, _backward)


def _logits(x: jax.Array, matrix: jax.Array, head: Head, rules: Rules) -> jax.Array:
    """Logits of a chunk (B, shards, tokens, V) before the soft cap, in float32 once they are read."""
    how = "bcsd,vd->bcsv" if head.tied else "bcsd,dv->bcsv"
    raw = jnp.einsum(how, x, matrix, preferred_element_type=head.kept).astype(jnp.float32) * head.scale
    return constrain(raw, ("batch", "length", None, "vocab"), rules)


def _losses(
    raw: jax.Array, targets: jax.Array, weights: jax.Array, head: Head
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For each token the loss and the plain cross-entropy, and the gradient of the loss for the matrix product."""
    capped = raw if head.softcap is None else head.softcap * jnp.tanh(raw / head.softcap)
    log_z = jax.nn.logsumexp(capped, axis=-1)
    # A comparison fuses into its neighbours, and is local where the vocabulary is split; a gather is neither.
    is_target = jax.lax.broadcasted_iota(targets.dtype, capped.shape, capped.ndim - 1) == targets[..., None]
    entropy = weights * (log_z - jnp.where(is_target, capped, 0).sum(axis=-1))
    loss = entropy + weights * head.z * jnp.square(log_z)
    chances = jnp.exp(capped - log_z[..., None]) * (1 + 2 * head.z * log_z)[..., None]
    d_logits = weights[..., None] * (chances - is_target)
    if head.softcap is not None:
        d_logits = d_logits * (1 - jnp.square(capped / head.softcap))
    return loss, entropy, d_logits * head.scale


def _cut(x: jax.Array, chunks: int, rules: Rules) -> jax.Array:
    """(B, S, ...) to (chunks, B, shards, tokens, ...): every chunk has tokens of every device that splits the length."""
    shards = context_mesh().context
    B, S = x.shape[:2]
    parts = x.reshape(B, shards, chunks, S // shards // chunks, *x.shape[2:])
    parts = constrain(parts, ("batch", "length", *(None,) * (parts.ndim - 2)), rules)
    return jnp.moveaxis(parts, 2, 0)


def _joined(parts: jax.Array, shape: tuple[int, ...], rules: Rules) -> jax.Array:
    whole = jnp.moveaxis(parts, 0, 2).reshape(shape)
    return constrain(whole, ("batch", "length", "act_embed"), rules)
