"""The cuDNN kernel against the reference, on an NVIDIA GPU: `python tests/model/on_gpu.py`.

A program of its own, because the tests beside it hold jax to CPU devices. It needs jax with CUDA, and msgspec.
"""

import jax
import jax.numpy as jnp
import numpy as np
from msgspec.structs import replace

from podway.model.attention import Pattern, attend, default_kernel
from podway.model.decoder import Compute, forward, init, logits
from podway.model.families import find_model
from podway.model.layout import TRAIN_RULES
from podway.model.remat import remat_policy

PATTERNS = {
    "causal": Pattern(128**-0.5, None, None),
    "window": Pattern(128**-0.5, None, 100),
}


def check_kernel(name: str, d_head: int, packed: bool) -> None:
    """Values and gradients in bfloat16, against the reference in float32."""
    length, pattern = 512, PATTERNS[name]
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, weights = (
        jax.random.normal(key, (2, length, heads, d_head), jnp.bfloat16)
        for key, heads in zip(keys, (8, 2, 2, 8), strict=True)
    )
    segments = (jnp.arange(length) // 200)[None].repeat(2, 0) if packed else None
    assert default_kernel(pattern, q.dtype) == "cudnn"

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, kernel: str) -> jax.Array:
        out = attend(q, k, v, segments, pattern, TRAIN_RULES, kernel=kernel)  # type: ignore[arg-type]
        return jnp.sum(out.astype(jnp.float32) * weights.astype(jnp.float32))

    wide = tuple(x.astype(jnp.float32) for x in (q, k, v))
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(jax.grad(loss, (0, 1, 2)), static_argnums=3)(*wide, "reference")
    found = jax.jit(jax.grad(loss, (0, 1, 2)), static_argnums=3)(q, k, v, "cudnn")
    for a, b in zip(found, exact, strict=True):
        error = float(jnp.abs(a.astype(jnp.float32) - b).max() / jnp.abs(b).max())
        assert error < 0.02, f"{name} d_head={d_head} packed={packed}: gradients differ by {error:.4f} of their range"
    print(f"cudnn {name} d_head={d_head} packed={packed}: equal to the reference")


def check_model(name: str) -> None:
    """Two layers of a real model, forward and backward, with the machine's own kernel and with the reference."""
    shape = replace(find_model(name), layers=2, vocab=1024)
    tree = jax.jit(init, static_argnums=0)(shape, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 256), 0, shape.vocab)

    def loss(tree: dict[str, jax.Array], compute: Compute) -> jax.Array:
        out = logits(tree, forward(tree, tokens, shape, compute).hidden_BSD, shape, compute)
        return -jax.nn.log_softmax(out)[..., 7].mean()

    run = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    own, _ = run(tree, Compute(remat=remat_policy(save=("context",))))
    plain, _ = run(tree, Compute(kernel="reference"))
    np.testing.assert_allclose(own, plain, rtol=2e-3)
    print(f"{name}: loss {float(own):.4f} with its own kernel, {float(plain):.4f} with the reference")


def main() -> None:
    """Every pattern, then whole models."""
    assert jax.default_backend() == "gpu", f"no NVIDIA GPU here: {jax.devices()}"
    for pattern_name in PATTERNS:
        for size in (64, 128):
            for has_segments in (False, True):
                check_kernel(pattern_name, size, has_segments)
    for model in ("llama3.2-1b", "gemma2-2b", "qwen3-30b-a3b"):
        check_model(model)


if __name__ == "__main__":
    main()
