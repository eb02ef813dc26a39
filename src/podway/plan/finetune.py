"""Fine-tuning: all weights, LoRA on bfloat16 weights, or LoRA on int8 weights.

The same search as for pre-training, with a small batch and, for LoRA, a frozen base: no gradient and no optimizer state
but those of the adapters, and a backward pass that skips the gradients of matrices. Activations are what they were.
"""

from typing import Literal

from podway.errors import UserError
from podway.plan.training import Adapters, Compute, Dtype, Optimizer, Training

DEFAULT_SEQUENCES = 64


def finetune_template(
    *,
    rank: int | None,
    int8_base: bool,
    optimizer: Optimizer = "adamw",
    moments: Dtype = "float32",
    params: Dtype = "float32",
    compute: Compute = "bfloat16",
    state_over_slices: bool = False,
) -> Training:
    """What is trained, and how."""
    if int8_base and rank is None:
        raise UserError("int8 weights cannot be trained", "add --lora RANK: adapters are trained beside an int8 base")
    base: Literal["bfloat16", "int8"] = "int8" if int8_base else "bfloat16"
    adapters = None if rank is None else Adapters(rank=rank, base=base)
    return Training(
        seq=1, batch=1, optimizer=optimizer, moments=moments, params=params, compute=compute, adapters=adapters,
        state_over_slices=state_over_slices,
    )  # fmt: skip
