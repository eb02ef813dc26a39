"""Chunked cross-entropy equals the plain one, value and gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from podway.model.layout import TRAIN_RULES
from podway.train.devices import device_memory
from podway.train.loss import LOGITS_SHARE, Head, choose_chunks, cross_entropy

B, S, D, V = 2, 24, 16, 50


@pytest.mark.parametrize(
    "head",
    [
        Head(),
        Head(chunks=4),
        Head(tied=True, chunks=3, scale=0.25),
        Head(chunks=2, softcap=5.0, z=1e-2),
        Head(tied=True, chunks=24, softcap=2.0, z=0.1, scale=2.0),
    ],
)
def test_equals_the_plain_loss(head: Head) -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (B, S, D))
    matrix = jax.random.normal(keys[1], (V, D) if head.tied else (D, V))
    targets = jax.random.randint(keys[2], (B, S), 0, V)
    weights = jax.random.uniform(keys[3], (B, S)) * (jnp.arange(S) % 5 > 0)

    def plain(hidden: jax.Array, matrix: jax.Array) -> jax.Array:
        logits = hidden @ (matrix.T if head.tied else matrix) * head.scale
        if head.softcap is not None:
            logits = head.softcap * jnp.tanh(logits / head.softcap)
        log_z = jax.nn.logsumexp(logits, -1)
        chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return (weights * (log_z - chosen + head.z * log_z**2)).sum() * 3.0  # a cotangent that is not 1

    def ours(hidden: jax.Array, matrix: jax.Array) -> jax.Array:
        return cross_entropy(hidden, matrix, targets, weights, head, TRAIN_RULES)[0] * 3.0

    value, gradients = jax.jit(jax.value_and_grad(ours, (0, 1)))(hidden, matrix)
    expected, plainly = jax.value_and_grad(plain, (0, 1))(hidden, matrix)
    assert value == pytest.approx(float(expected), rel=1e-5)
    for mine, theirs in zip(gradients, plainly, strict=True):
        assert jnp.max(jnp.abs(mine - theirs)) < 1e-4 * jnp.max(jnp.abs(theirs))
    without_gradient = jax.jit(ours)(hidden, matrix)  # the path of an evaluation
    assert without_gradient == pytest.approx(float(expected), rel=1e-5)


def test_logits_kept_in_half_the_bytes_are_near() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    hidden, matrix = jax.random.normal(keys[0], (B, S, D)), jax.random.normal(keys[1], (D, V))
    targets = jax.random.randint(keys[2], (B, S), 0, V)

    def gradients(kept: Any) -> tuple[jax.Array, Any]:
        run = lambda h, m: cross_entropy(h, m, targets, jnp.ones((B, S)), Head(chunks=2, kept=kept), TRAIN_RULES)[0]  # noqa: E731
        return jax.jit(jax.value_and_grad(run, (0, 1)))(hidden, matrix)

    (value, mine), (exact, theirs) = gradients(jnp.bfloat16), gradients(jnp.float32)
    assert value != exact and value == pytest.approx(float(exact), rel=2e-3)
    for a, b in zip(mine, theirs, strict=True):
        assert jnp.max(jnp.abs(a - b)) < 0.02 * jnp.max(jnp.abs(b))


def test_the_entropy_is_told_without_the_z_term() -> None:
    hidden, matrix = jnp.ones((1, 2, 4)), jnp.eye(4, 8)
    targets, weights = jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2))
    total, entropy = cross_entropy(hidden, matrix, targets, weights, Head(z=0.5), TRAIN_RULES)
    plain, _ = cross_entropy(hidden, matrix, targets, weights, Head(), TRAIN_RULES)
    assert entropy == plain and total > entropy


def test_no_array_of_all_logits_exists() -> None:
    """The largest array of the program has the vocabulary once for a chunk, not for the batch."""
    text = str(
        jax.make_jaxpr(
            jax.grad(
                lambda h, m: cross_entropy(
                    h, m, jnp.zeros((B, S), jnp.int32), jnp.ones((B, S)), Head(chunks=6), TRAIN_RULES
                )[0]
            )
        )(jnp.ones((B, S, D)), jnp.ones((D, V)))
    )
    assert f"{B},1,{S // 6},{V}]" in text
    assert f"{S},{V}]" not in text


def test_chunks_follow_the_memory() -> None:
    room = 4 * 1000 * 256 / LOGITS_SHARE  # for the logits of 256 tokens
    assert choose_chunks(1, 1024, 1000, room) == 4
    assert choose_chunks(2, 1024, 1000, room) == 8
    assert choose_chunks(1, 128, 1000, room) == 1
    assert choose_chunks(1, 30, 1000, room, asked=7) == 6  # the nearest that divides
    assert choose_chunks(8, 4096, 128_256, device_memory("NVIDIA H200")) == 4
    assert choose_chunks(16, 4096, 128_256, device_memory("NVIDIA H200"), kept=jnp.bfloat16) == 4
