"""Floating-point operations of a model, by the conventions that published figures use (no jax).

A matrix product counts 2 operations for each parameter and token, forward; backward is twice forward. Norms, softmax,
the embedding lookup, the optimizer and recomputation count nothing. What differs is attention:

  causal     half of the square, a window counted as the band it is. MaxText since 2025-07 (and 2023-11..2024-05);
             the v5p and tpu7x recipes.
  full       the whole square. MaxText 2024-05..2025-07; the v6e recipes.
  full-2023  the whole square, and every parameter (norms, a lookup table of its own) as if it were a matrix. MaxText
             before 2023-11; the 16B-128B table.

A utilisation (MFU) without its convention means little: on a long sequence they differ by tens of percent.
"""

from typing import Literal

from podway.model.params import active_count, matrix_count
from podway.model.shape import ModelShape, layer_kinds

Convention = Literal["causal", "full", "full-2023"]


def forward_flops_per_token(shape: ModelShape, seq: int, convention: Convention = "causal") -> float:
    """Mean over the tokens of a sequence of `seq`, forward pass only."""
    weights = active_count(shape) if convention == "full-2023" else matrix_count(shape)
    return 2.0 * weights + attention_flops_per_token(shape, seq, convention)


def flops_per_token(shape: ModelShape, seq: int, convention: Convention = "causal") -> float:
    """Training: forward and backward, three times the forward pass."""
    return 3.0 * forward_flops_per_token(shape, seq, convention)


def attention_flops_per_token(shape: ModelShape, seq: int, convention: Convention = "causal") -> float:
    """Scores and their product with the values, forward, over all layers: 4 operations for each pair and channel."""
    total = 0.0
    for kind in layer_kinds(shape):
        chunked = kind.attention.chunked
        seen = sum(_seen(seq, window, causal=convention == "causal", chunked=chunked) for window in kind.layer_windows)
        total += 2.0 * kind.heads * (kind.d_head + kind.d_value) * seen
    return total


def _seen(seq: int, window: int | None, *, causal: bool, chunked: bool) -> float:
    """How many tokens a token looks at, on average."""
    width = min(seq, window or seq)
    if not causal:
        return float(width)
    return width / 2 if chunked else width - width**2 / (2 * seq)
