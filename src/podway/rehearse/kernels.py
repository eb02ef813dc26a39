"""The Pallas kernels of a program: the compiler gives no cycles for a custom call.

Attention kernels (jax's splash and flash, forward, dq and dkv) are read as the scores that their mask leaves; the cycles of a
block of scores are in `plan.chips`, with their source. Every other kernel is priced by what it moves through HBM, and named in
the notes of a rehearsal, because that is a floor and not an estimate.
"""

import re
from typing import Literal

from podway.rehearse.hlo import Computation, Instruction, Shape
from podway.rehearse.program import Attention

Part = Literal["forward", "dq", "dkv"]
# Products of a block of scores in the two backward kernels: dq makes scores, their gradient and dq; dkv makes scores,
# their gradient, dv and dk.
_SHARE: dict[Part, float] = {"dq": 3 / 7, "dkv": 4 / 7}
_PARTS: tuple[tuple[str, Part], ...] = (
    (r"splash_m[hq]a_fwd", "forward"),
    (r"splash_m[hq]a_dq", "dq"),
    (r"splash_m[hq]a_dkv", "dkv"),
    (r"flash_mha_bwd_dq", "dq"),
    (r"flash_mha_bwd_dkv", "dkv"),
    (r"flash_attention", "forward"),
)


def is_kernel(one: Instruction) -> bool:
    """Whether an instruction runs a program of its own on the chip."""
    return one.opcode == "custom-call" and one.target == "tpu_custom_call"


def attention_part(one: Instruction) -> Part | None:
    """Which part of attention a kernel is; None: something else."""
    return next((part for pattern, part in _PARTS if re.search(pattern, one.name)), None)


def attention_of(here: Computation, one: Instruction) -> Attention | None:
    """The attention that a kernel computes; None for any other kernel."""
    part = attention_part(one)
    operands = [here[name].shapes[0] for name in one.operands if here.get(name) and here[name].shapes]
    wide = [shape for shape in operands if shape.dtype in ("bf16", "f32", "f16") and len(shape.dims) >= 3]
    if part is None or len(wide) < 2:
        return None
    queries, keys = wide[0], wide[1]
    d_head = queries.dims[-1]
    scores = float(queries.elements // d_head * keys.dims[-2]) * _seen(operands, one)
    if part == "forward":
        return Attention(forward=1.0, backward=0.0, scores=scores, d_head=d_head)
    alone = not any(attention_part(other) == "dq" for other in here if is_kernel(other))
    share = 1.0 if alone and part == "dkv" else _SHARE[part]
    return Attention(forward=0.0, backward=share, scores=scores, d_head=d_head)


def _seen(operands: list[Shape], one: Instruction) -> float:
    """The part of the square of scores that is computed.

    Splash is given a table of its blocks, (heads, rows, columns). A window makes the table narrower than the square; a
    causal mask leaves it square, and half of it empty.
    """
    if not one.name.startswith("splash"):
        return 1.0
    table = next((shape for shape in operands if shape.dtype in ("s8", "s32") and len(shape.dims) == 3), None)
    if table is None:
        return 1.0
    few, many = sorted(table.dims[-2:])
    return (many + 1) / 2 / many if few == many else few / many
