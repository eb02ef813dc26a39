"""What splitting weights over chips (fsdp) costs a step: gathers of weights, sums of their gradients, and what hides them.

1. Where the program runs gathers beside products (`Program.beside`), they are waited for where they take longer, and the first of a
   pass is; on v5e each hides beside one product.
2. Gradients are waited for, or run beside the backward pass on SparseCores; or, on v5e, they go round in permutes beside the product
   that makes them (`_ring_waits`), and what of them does not stay in VMEM passes through HBM (`ring_sums`).
3. The output matrix (`head_traffic`) has nothing beside it where rings carry the layers' gradients.

Counted in programs that libtpu 0.0.51 makes of Podway's step; docs/planning.md compares.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from podway.model.layout import MeshShape
from podway.plan.chips import VMEM_BYTES, Device
from podway.plan.network import Group, MeshPlacement
from podway.plan.training import COMPUTE_BYTES, Exchange, Training


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """What one mesh axis moves over ICI in a step, in one direction."""

    axis: str
    direction: str  # gather, reduce, exchange
    seconds: float  # if nothing else happened
    exposed: float  # of which the step waits


class ProductTime(NamedTuple):
    """One matrix of a layer: its elements, and seconds of its product forward and for its own gradient."""

    weights: float
    forward: float
    gradient: float
    grouped: bool = False  # of experts: its gradient is made whole, and waited for
    last: bool = False  # its gradient is among the last of a layer: of queries, keys and values


# Generations whose gathers are pieces of the product before them (the flag `fuse_all_gather`, which libtpu refuses elsewhere): forward each
# hides beside that product alone. Backward there is work enough beside all of them.
_FUSED_GATHERS = ("v5e",)


def fsdp_traffic(
    products: Sequence[ProductTime],
    backward: float,
    mesh: MeshShape,
    training: Training,
    device: Device,
    placement: MeshPlacement,
    times: int,
) -> list[Traffic]:
    """Weights of layers of one kind gathered for the forward and for the backward pass, gradients summed; `times` in a step."""
    if mesh.fsdp == 1:
        return []
    each = training.gathered_bytes
    gathers = [placement.fsdp.gather_seconds(each * one.weights, device) for one in products]
    gather = sum(gathers)
    passes = 1 if training.keeps_gathered else 2
    waits = passes * gather
    # Matrices of experts, nearly all of a layer's bytes, are needed one right after the other: over several axes most of that is waited
    # for (0.19 s of 0.36 for Mixtral 8x7B on v5p-128; all of it is counted).
    experts = any(one.grouped for one in products)
    if _runs_beside("gather", mesh, training, device, axes=not experts):
        # The first matrix of each pass has nothing before it to be gathered beside: the compiled loop waits for it.
        ahead = max(gathers[0], gather - sum(one.forward for one in products))
        if device.generation in _FUSED_GATHERS:
            before = zip(gathers[1:], products, strict=False)
            ahead = gathers[0] + sum(max(0.0, seconds - one.forward) for seconds, one in before)
            ahead = gather if training.keeps_gathered else ahead  # what is kept is no piece of a product
        waits = ahead + (max(gathers[0], gather - backward) if passes == 2 else 0.0)
    found = [Traffic(axis="fsdp", direction="gather", seconds=times * passes * gather, exposed=times * waits)]
    if training.adapters is None:
        size = training.program.gradient_bytes
        seconds = _sum_seconds(training, device, placement, size * times * sum(one.weights for one in products))
        exposed = seconds
        if _runs_beside("reduce", mesh, training, device):
            exposed = max(0.0, seconds - times * backward)
        if _on_sparsecore("reduce", mesh, training, device):
            each_sum = [_sum_seconds(training, device, placement, size * one.weights) for one in products]
            exposed = max(exposed, times * _scatter_waits(products, each_sum))
        if _ringed(training, device, mesh):
            whole = _one_ring(mesh)
            exposed = times * sum(
                _sum_seconds(training, device, placement, size * one.weights)
                if one.grouped
                else placement.fsdp.reduce_seconds(size * one.weights, device)
                if whole and device.rings_of_all and size * one.weights / mesh.fsdp <= _LEAST_PIECE
                else _ring_waits(one, size * one.weights, placement.fsdp, device, whole=whole)
                for one in products
            )
        found.append(Traffic(axis="fsdp", direction="reduce", seconds=seconds, exposed=exposed))
    return found


def _scatter_waits(products: Sequence[ProductTime], sums: Sequence[float]) -> float:
    """What a layer waits for scatters that a SparseCore runs, at least.

    A turn of the loop ends when its exchanges have: those that begin last, of queries, keys and values, have nothing to run beside.
    (0.135 s of 1.6 in the compiled step of Llama 3.1 70B on v6e-64, 0.02 s of 0.17 of 8B.) Gradients of experts are made one after the
    other: each is scattered beside the next product, and the last one is waited for. (0.17 s of 0.54 for Mixtral 8x7B on v5p-128 and
    on v6e-256; 0.44 s of 0.68 for Qwen3 30B-A3B on v5p-64, whose products are shorter.)
    """
    waits = sum(seconds for one, seconds in zip(products, sums, strict=True) if one.last)
    experts = [(seconds, one.gradient) for one, seconds in zip(products, sums, strict=True) if one.grouped]
    waits += sum(max(0.0, seconds - product) for (seconds, _), (_, product) in pairwise(experts))
    return waits + (experts[-1][0] if experts else 0.0)


def _runs_beside(exchange: Exchange, mesh: MeshShape, training: Training, device: Device, *, axes: bool = True) -> bool:
    """Whether the compiled program runs the layers' gathers, or their sums, beside its products. `axes`: over several axes too."""
    program = training.program
    return (device.generation, exchange) in program.beside or _on_sparsecore(
        exchange, mesh, training, device, axes=axes
    )


def _on_sparsecore(
    exchange: Exchange, mesh: MeshShape, training: Training, device: Device, *, axes: bool = True
) -> bool:
    if device.generation not in training.program.sparsecore:
        return False
    if exchange == "reduce":
        return not _ringed(training, device, mesh)
    one_axis = device.rings_of_all and mesh.chips // mesh.slices <= _RING_OF_ALL
    return one_axis or (axes and training.program.sparsecore_axes)


def _ringed(training: Training, device: Device, mesh: MeshShape) -> bool:
    """Whether gradients go round in permutes beside the product that makes them: on v5e, and on v6e round all chips of a small slice."""
    ringed = device.ringed_gradients or (device.rings_of_all and _one_ring(mesh))
    return ringed and training.program.gradients == "rings"


# Bytes of the piece of a gradient that a device keeps, from which on libtpu 0.0.51 makes a ring of it on v6e; smaller ones it all-reduces,
# and nothing runs beside that. (Rings with pieces of 5.3 to 8.4 MB: the MLPs of Llama 3.1 8B on v6e-16, Gemma 2 2B on v6e-8 and Llama 3.2
# 1B with fsdp=4; none with 4.2 MB and less: Llama 3.2 1B on v6e-8, 1B and 3B on v6e-16, attention's matrices of 8B. What
# the compiler goes by is not known: small matrices of Gemma 2 2B, and Llama 3.2 3B with `none`, have rings all the same.)
_LEAST_PIECE = 4 * 2**20
# Chips of a v5e or v6e slice whose devices jax puts in the order of one closed ring (`mesh_utils`): 2x4 and 4x4.
_RING_OF_ALL = 16


def _one_ring(mesh: MeshShape) -> bool:
    """Whether fsdp is all of a slice that small."""
    return mesh.fsdp * mesh.slices == mesh.chips and mesh.fsdp <= _RING_OF_ALL


def _ring_waits(product: ProductTime, moved: float, fsdp: Group, device: Device, *, whole: bool) -> float:
    """What a step waits for the sum of one matrix's gradient, as libtpu 0.0.51 compiles it for v5e.

    Along the first axis the gradient's pieces go both ways round a closed ring, beside the product that makes them. On a line
    they are permuted one after the other with nothing beside, one more than there are chips. The second axis is waited for, and
    so is all of it where two chips are no ring. `whole`: all chips are one ring.
    """
    if whole:
        return max(0.0, moved / 2 / device.link_bandwidth - product.gradient)
    first, *rest = fsdp.rings
    if first.size == 2:
        return fsdp.ring_scatter_seconds(moved, device)
    once = moved / (first.links * device.link_bandwidth)
    waits = max(0.0, once - product.gradient) if first.closed else once * (first.size + 1) / first.size
    left = moved / first.size
    for ring in rest:
        waits += left * (ring.size - 1) / ring.size / (ring.links * device.link_bandwidth)
        left /= ring.size
    return waits


def ring_sums(
    products: Sequence[ProductTime], mesh: MeshShape, training: Training, device: Device, fsdp: Group
) -> float:
    """Seconds of HBM that sums of gradients take which do not stay in VMEM.

    Four pieces go round at once: one sent and one summed, each way. Half of VMEM holds them; what is beyond that is read, added
    and written. (Counted in compiled steps: 3 passes over a matrix with pieces of 42 MB, 0.85 with 21 MB, none with 7 MB.)
    """
    if mesh.fsdp == 1 or training.adapters is not None or not _ringed(training, device, mesh):
        return 0.0
    size, passed = fsdp.size if _one_ring(mesh) else fsdp.rings[0].size, 0.0
    if size == 2:
        return 0.0
    for one in products:
        if one.grouped:
            continue
        moved = training.program.gradient_bytes * one.weights
        beyond = (4 * moved / size - VMEM_BYTES / 2) / (VMEM_BYTES / 2)
        passed += 3 * moved * min(1.0, max(0.0, beyond))
    return passed / device.hbm_bandwidth


def head_traffic(
    weights: int, mesh: MeshShape, training: Training, device: Device, placement: MeshPlacement
) -> list[Traffic]:
    """The output matrix gathered, its gradient summed."""
    if mesh.fsdp == 1:
        return []
    found = []
    head = float(weights) * training.microbatches
    ends = placement.fsdp.gather_seconds(COMPUTE_BYTES * head, device)
    # Where rings carry the layers' gradients, nothing runs beside the output matrix, and its gradient is all-reduced.
    alone = _ringed(training, device, mesh) and (_one_ring(mesh) or placement.fsdp.rings[0].size > 2)
    beside = _on_sparsecore("gather", mesh, training, device) or (
        (device.generation, "gather") in training.program.beside and not alone
    )
    found.append(Traffic(axis="fsdp", direction="gather", seconds=ends, exposed=0.0 if beside else ends))
    if training.adapters is None:
        moved = training.program.gradient_bytes * head
        at_once = alone and _one_ring(mesh)  # over all axes together; elsewhere one after the other
        seconds = (
            placement.fsdp.reduce_seconds(moved, device)
            if at_once
            else (1 + alone) * _sum_seconds(training, device, placement, moved)
        )
        beside = _runs_beside("reduce", mesh, training, device) and not alone
        found.append(Traffic(axis="fsdp", direction="reduce", seconds=seconds, exposed=0.0 if beside else seconds))
    return found


def _sum_seconds(training: Training, device: Device, placement: MeshPlacement, moved: float) -> float:
    """Seconds to sum gradients of split weights."""
    at_once = training.program.gradients == "all-reduce"
    sums = placement.fsdp.reduce_seconds if at_once else placement.fsdp.ring_scatter_seconds
    return sums(moved, device)
