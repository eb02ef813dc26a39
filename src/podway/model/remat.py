"""Which tensors of a layer are kept for the backward pass, by name.

The decoder marks tensors with the names of `params.activations`; a policy says which of them stay (on the chip or in
host memory). All others are computed again. The layer's input always stays, since the scan carries it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast

import jax
from jax.ad_checkpoint import checkpoint_name

from podway.errors import UserError

Name = Literal["residual", "qkv", "context", "attn_out", "mlp_in", "mlp_out"]
NAMES: tuple[Name, ...] = ("residual", "qkv", "context", "attn_out", "mlp_in", "mlp_out")

Policy = Callable[..., Any]  # what jax.checkpoint takes


def mark(x: jax.Array, name: Name) -> jax.Array:
    """`x`, known to remat policies by this name."""
    return cast(jax.Array, checkpoint_name(x, name))  # type: ignore[no-untyped-call]


def remat_policy(save: tuple[str, ...] = (), offload: tuple[str, ...] = ()) -> Policy:
    """Keep these named tensors on the chip, and those in host memory; nothing named is full rematerialisation."""
    for name in (*save, *offload):
        if name not in NAMES:
            raise UserError(f"no tensor is named {name!r}", "names: " + ", ".join(NAMES))
    policies = jax.checkpoint_policies
    if offload:
        named = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=save,
            names_which_can_be_offloaded=offload,
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        named = policies.save_only_these_names(*save)
    return partial(_policy, named=named, context="context" in save, away="context" in offload)


def _policy(primitive: Any, *args: Any, named: Policy, context: bool, away: bool, **params: Any) -> Any:
    # The backward pass of cuDNN's kernel needs its row statistics beside its result, and only the primitive has both:
    # keeping the result alone would run the kernel twice.
    if context and primitive.name.startswith("dot_product_attention_fwd"):
        return True
    # The TPU kernel's row statistics have the same name as its result (four dimensions). They are a sixty-fourth of it, and libtpu 0.0.51
    # fails to compile their way to host memory where a chip has one sequence.
    if away and params.get("name") == "context" and len(args[0].shape) == 3 and args[0].shape[0] == 1:
        return True
    return named(primitive, *args, **params)
