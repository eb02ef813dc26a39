"""Named remat policies: which of a layer's named tensors the backward pass finds (`model/remat.py` has the names; no jax).

From most memory and least work to the reverse. `full` keeps the layer's input alone; each policy after it in the table
keeps more. A policy that ends in `_offloaded` keeps the same tensors in host memory.
"""

from podway.errors import UserError
from podway.task.fields import did_you_mean
from podway.train.config import RematConfig

TENSORS = ("residual", "qkv", "context", "attn_out", "mlp_in", "mlp_out")

POLICIES: dict[str, tuple[str, ...]] = {
    "full": (),
    "save_context": ("context",),  # attention is not run again
    "save_attention": ("qkv", "context"),
    "save_all_but_mlp": ("qkv", "context", "attn_out"),
    "minimal": ("qkv", "context", "attn_out", "mlp_in"),  # every product of a matrix that something else needs
}


def kept_tensors(config: RematConfig) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """(on the device, in host memory); None: keep everything and compute nothing again."""
    if config.policy == "custom":
        for name in (*config.save, *config.offload):
            if name not in TENSORS:
                raise UserError(f"remat: no tensor is named {name!r}", did_you_mean(name, TENSORS))
        return config.save, config.offload
    if config.save or config.offload:
        raise UserError(
            f"remat.save and remat.offload do not go with the policy {config.policy!r}", "use remat.policy=custom"
        )
    if config.policy == "none":
        return None
    base = config.policy.removesuffix("_offloaded")
    if base not in POLICIES:
        known = ["none", *POLICIES, *(f"{name}_offloaded" for name in POLICIES if POLICIES[name]), "custom"]
        raise UserError(f"unknown remat policy {config.policy!r}", did_you_mean(config.policy, known))
    return ((), POLICIES[base]) if config.policy.endswith("_offloaded") else (POLICIES[base], ())
