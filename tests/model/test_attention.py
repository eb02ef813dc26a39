"""Kernels against the reference, and the reference against its definition, written out."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podway.errors import UserError
from podway.model.attention import Kernel, Pattern, attend, default_kernel, reference
from podway.model.attention_blocks import AUTO, Blocks, choose_blocks
from podway.model.layout import TRAIN_RULES, parse_mesh
from podway.model.mesh import make_mesh
from podway.model.zigzag import spread

PLAIN = Pattern(scale=0.125, softcap=None, window=None)
BAND = Pattern(scale=0.1, softcap=2.0, window=100)


def inputs(length: int, heads: int = 4, kv_heads: int = 2, d_head: int = 64) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = [(2, length, heads, d_head)] + [(2, length, kv_heads, d_head)] * 2
    return tuple(jax.random.normal(key, size) for key, size in zip(keys, sizes, strict=True))


def segments(length: int) -> jax.Array:
    return jnp.stack([jnp.arange(length) // (length // 2 + 7), jnp.arange(length) // (length // 3)])


def by_hand(q: Any, k: Any, v: Any, seg: Any, pattern: Pattern) -> np.ndarray:
    """Query by query, with loops."""
    q, k, v, seg = (np.asarray(x, np.float64) for x in (q, k, v, seg))
    out = np.zeros_like(q)
    for b, s, h in np.ndindex(*q.shape[:3]):
        g = h * k.shape[2] // q.shape[2]
        first = 0 if pattern.window is None else max(0, s - pattern.window + 1)
        seen = [t for t in range(first, s + 1) if seg[b, t] == seg[b, s]]
        scores = np.array([q[b, s, h] @ k[b, t, g] for t in seen]) * pattern.scale
        if pattern.softcap is not None:
            scores = pattern.softcap * np.tanh(scores / pattern.softcap)
        weights = np.exp(scores - scores.max())
        out[b, s, h] = (weights / weights.sum()) @ v[b, seen, g]
    return out


@pytest.mark.parametrize("pattern", [Pattern(0.25, None, None), Pattern(0.3, 1.5, 5)])
def test_the_reference_is_its_definition(pattern: Pattern) -> None:
    q, k, v = inputs(20, d_head=8)
    found = reference(q, k, v, segments(20), pattern)
    np.testing.assert_allclose(found, by_hand(q, k, v, segments(20), pattern), atol=2e-6)


def loss_and_gradients(
    kernel: Kernel, pattern: Pattern, seg: jax.Array | None, blocks: Blocks = AUTO, chips: int = 1
) -> Any:
    q, k, v = inputs(256)
    weights = spread(jax.random.normal(jax.random.key(7), q.shape), chips)
    seg = None if seg is None else spread(seg, chips)

    def loss(*qkv: jax.Array) -> jax.Array:
        q, k, v = (spread(x, chips) for x in qkv)
        out = attend(q, k, v, seg, pattern, TRAIN_RULES, kernel=kernel, blocks=blocks, zigzag=chips, interpret=True)
        return jnp.sum(out * weights)

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v)


@pytest.mark.parametrize(
    ("pattern", "packed", "mesh"),
    [(PLAIN, False, None), (BAND, True, None), (BAND, True, "context=2,tensor=4"), (PLAIN, True, "data=2,tensor=4")],
)
def test_splash_equals_the_reference(
    pattern: Pattern, packed: bool, mesh: str | None, eight_devices: list[jax.Device]
) -> None:
    """Values and gradients; tensor=4 with two key heads repeats them, context=2 cuts the queries, in zigzag order."""
    seg = segments(256) if packed else None
    expected = loss_and_gradients("reference", pattern, seg)
    if mesh is None:
        found = loss_and_gradients("splash", pattern, seg)
    else:
        sizes = parse_mesh(mesh, chips=8)
        with jax.set_mesh(make_mesh(sizes, eight_devices)):
            found = loss_and_gradients("splash", pattern, seg, chips=sizes.context)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("pattern", "blocks"), [(BAND, Blocks(128, fused=True)), (PLAIN, Blocks(generation="v6e"))], ids=["two", "chosen"]
)
def test_one_backward_kernel_equals_two(pattern: Pattern, blocks: Blocks) -> None:
    """A window in blocks that are asked for, and what a v6e would choose."""
    chosen = choose_blocks(blocks, queries=256, keys=256, d_head=64, window=pattern.window)
    assert chosen is not None and chosen.fused
    seg = segments(256)
    expected = loss_and_gradients("reference", pattern, seg)
    found = loss_and_gradients("splash", pattern, seg, blocks)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5, rtol=1e-5)


def test_a_length_that_splash_cannot_cut() -> None:
    q, k, v = inputs(200)
    with pytest.raises(UserError, match="200 tokens") as error:
        attend(q, k, v, None, PLAIN, TRAIN_RULES, kernel="splash", interpret=True)
    assert "multiple of 128" in error.value.hint


def test_cudnn_says_what_it_cannot() -> None:
    q, k, v = inputs(128)
    with pytest.raises(UserError, match="soft cap"):
        attend(q, k, v, None, BAND, TRAIN_RULES, kernel="cudnn")


def test_a_cpu_uses_the_reference() -> None:
    assert default_kernel(PLAIN, jnp.bfloat16) == "reference"


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs an NVIDIA GPU")
def test_cudnn_equals_the_reference() -> None:
    program = Path(__file__).with_name("on_gpu.py")
    environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    subprocess.run([sys.executable, program], check=True, env=environment, timeout=300)
