"""What splitting matrices over a tensor group costs a step: gathers of the stream before products, sums of what they give.

1. `_exchanges` counts them, of a layer and both ways; quantised products gather bytes and sum what the matrix unit gives.
2. Sums are all-reduced, or scattered by SparseCores; groups of four and more exchange in rings of permutes.
3. All of it is waited for, but what v5p's SparseCores run beside the products that make weight gradients.

Counted in programs that libtpu 0.0.51 makes of Podway's step; docs/planning.md compares.
"""

from podway.model.layout import MeshShape
from podway.model.shape import ModelShape
from podway.plan.chips import Device
from podway.plan.fsdp_time import Traffic
from podway.plan.network import Group
from podway.plan.products import layer_products
from podway.plan.training import BYTES, COMPUTE_BYTES, Training

# Generations whose compiler flags make rings of permutes of a tensor group's exchanges (train/flags.py) where the group lies along
# one axis of the torus, on v5e everywhere: each takes one link in one direction. Rings of one layer: forward and backward; what
# attention exchanges in a sequential block stays whole. Counted in programs of libtpu 0.0.51 with tensor=4: Llama 3.2
# 1B on v5e-16 (sequential: 8, 3 and 11 permutes, 3 a ring), the 32B job on v5p-128 and the 16B job on v5e-256 (parallel).
_RINGS_ON = ("v5e", "v5p", "v6e")
_RINGS = {"sequential": 22 / 3, "parallel": 31 / 3}


def tensor_traffic(
    shape: ModelShape, mesh: MeshShape, training: Training, device: Device, group: Group, stream: float, times: int
) -> list[Traffic]:
    """What layers of one kind exchange over their tensor group, `times` in a step; `stream`: bytes of it."""
    both = _seconds(shape, mesh, training, device, group, stream)
    beside = _branches(shape) * group.gather_seconds(stream, device) if _sparsecore_exchanges(training, device) else 0.0
    return [
        Traffic(axis="tensor", direction=way, seconds=times * each, exposed=times * max(0.0, each - beside))
        for way, each in zip(("gather", "reduce"), both, strict=True)
    ]


def summed_bytes(training: Training) -> int:
    """Of an element of a product as a group sums it: what the matrix unit gives of int8 is summed before it is scaled."""
    return 4 if training.compute == "int8" and training.program.name == "podway" else COMPUTE_BYTES


def _sparsecore_exchanges(training: Training, device: Device) -> bool:
    """Whether SparseCores gather and scatter the stream of a tensor group.

    What the backward pass exchanges for itself, once a branch each way, then runs beside the products that make weight gradients. So on
    v5p, whose flags make no rings: of 0.18 s of Llama 3.2 3B with tensor=2, 0.10 s is waited for.
    """
    return device.generation == "v5p" and device.generation in training.program.sparsecore


def _seconds(
    shape: ModelShape, mesh: MeshShape, training: Training, device: Device, group: Group, stream: float
) -> tuple[float, float]:
    """Seconds that a layer gathers the stream over its tensor group, and that it sums."""
    gathers, scatters = _exchanges(shape, training)
    once = group.gather_seconds(stream, device)
    if training.program.gradients != "rings" or _sparsecore_exchanges(training, device):
        return gathers * once, scatters * once
    ringed = device.generation == "v5e" or (device.generation in _RINGS_ON and len(group.rings) == 1)
    if not ringed or mesh.tensor < 4:
        # The compiler makes all-reduces of the sums, and cuts what they give, but where a SparseCore scatters them, as always on tpu7x.
        scattered = device.generation in (*training.program.sparsecore, "tpu7x")
        return gathers * once, scatters * (1 if scattered else 2) * once
    ring = stream * (mesh.tensor - 1) / mesh.tensor / device.link_bandwidth
    if shape.block == "parallel":
        return _RINGS["parallel"] * ring, 0.0
    return _RINGS["sequential"] * ring + 3 * once, (2 + (0 if "attn_out" in training.saved else 1)) * 2 * once


def _branches(shape: ModelShape) -> int:
    return 1 if shape.block == "parallel" else 2


def _exchanges(shape: ModelShape, training: Training) -> tuple[float, float]:
    """How often a layer gathers the stream over a tensor group, and how often it scatters a sum, both ways; of bfloat16.

    Forward: a gather before each branch (one for both of a parallel block), a scatter after it. Backward: the mirror image of forward,
    and the gathers before the branches once more, since the gradients of weights are made of them (6 gathers in the compiled layers of
    Llama 3.2 1B and 3B whether remat is `full`, `save_context`, `save_all_but_mlp`, `minimal` or `none`, 3 in the parallel ones of the 16B
    job; MaxText's programs are taken to keep what they gathered). Computed again: the scatter of attention where the MLP stands on it.
    """
    branches, saved = _branches(shape), training.saved
    again_scatters = 0 if shape.block == "parallel" or "attn_out" in saved else 1
    if shape.block == "sandwich" and "mlp_out" not in saved:
        again_scatters += 1
    if training.program.gradients != "rings":
        again = (0 if "qkv" in saved else 1) + (0 if "mlp_in" in saved else 1)
        return 2 * branches + min(again, branches), 2 + again_scatters + branches
    if training.compute == "bfloat16":
        return 3 * branches, 2 + again_scatters + branches
    # Quantised: gathered in bytes, and the gradients of an input that several matrices share are summed one by one, since each has its own
    # scale (5 sums backward in Qwen2.5 1.5B on v5e-16 with tensor=2). What bfloat16 weight gradients gather beside fp8 products is
    # not waited for.
    entered = sum(product.saved_as in ("qkv", "mlp_in") for product in layer_products(shape, 1, 1))
    sums = (2 + again_scatters + entered) * summed_bytes(training) / COMPUTE_BYTES
    return 3 * branches * BYTES[training.compute] / COMPUTE_BYTES, sums
