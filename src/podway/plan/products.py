"""The matrix products of a model, taken from its parameter table: what one device multiplies, layer by layer.

`layer_products(shape, tensor, expert)` lists those of a layer as one device sees them once fsdp shards are gathered;
`head_product` is the output matrix. `needed_again` says which of them a backward pass computes a second time. The end of
a layer never is: nothing in the layer's own backward pass asks for the sum it ends in (the compiler drops it as dead
code, so full remat costs 7.2 FLOPs a parameter and token in the 32B model, not 8).
"""

from collections.abc import Mapping
from functools import cache
from math import ceil, prod
from types import MappingProxyType
from typing import NamedTuple

from podway.model.expert_tiles import CORES, Pass, Tiles, cycles
from podway.model.layout import TRAIN_RULES, MeshShape, shard_dims, shard_shape
from podway.model.params import Param, activations, params
from podway.model.shape import ModelShape
from podway.plan.chips import SUBLANES, Device
from podway.plan.training import COMPUTE_BYTES, PODWAY, Program, Training


class _Tiling(NamedTuple):
    """How libtpu 0.0.51 cuts grouped products (`ragged_dot`): rows of a tile; steps of its other sides; elements of the rows' and
    the matrix's tiles together, forward and for the input gradient; elements of a tile of the weight gradient."""

    rows: int
    step: int
    forward: int
    weight: int
    widest: int = 1 << 20  # columns of a tile at most


# As seen in Mixtral's programs. v5p: (128, 4096, 256), (128, 7936, 128), weight gradients (128, 3968, 128). v6e: (256, 4096, 4352),
# (256, 14336, 1280), weight gradients (256, 4096, 1536), (256, 14336, 256). tpu7x: (256, 4096, 1024), (256, 11776, 256), weight
# gradients (256, 4096, 256), (256, 5888, 256). v5e has v5p's; generations that were not compiled take them too.
_TILINGS = {
    "v5p": _Tiling(128, 128, 2_050_000, 512_000),
    "v6e": _Tiling(256, 256, 22_050_000, 6_400_000, widest=4352),
    "tpu7x": _Tiling(256, 256, 6_100_000, 1_515_000),
}


class Product(NamedTuple):
    """A matrix of a layer and how many rows meet it: `rows` is a fraction of the device's tokens."""

    name: str
    inner: int
    columns: int
    rows: float = 1.0
    copies: int = 1  # experts on this device, each with its share of the rows
    saved_as: str = ""  # the activation that makes computing it again needless

    @property
    def weights(self) -> int:
        """Elements that this device multiplies by, fsdp gathered."""
        return self.inner * self.columns * self.copies

    def flops(self, tokens: float) -> float:
        """FLOPs of one pass."""
        return 2.0 * tokens * self.rows * self.inner * self.columns * self.copies

    def seconds(
        self, tokens: float, device: Device, *, passes: tuple[float, float, float], training: Training | None = None
    ) -> float:
        """Time of (forward, input gradient, weight gradient) passes."""
        each = self.pass_seconds(tokens, device, training)
        return passes[0] * each[0] + passes[1] * each[1] + passes[2] * each[2]

    def _cast(self, rows: float, place: int) -> float:
        """Elements that are cast for (the product, its input's gradient, its weights') where operands are quantised once: the input, if
        no product before has it; the gradient of the result, for each of the other two by other scales. Weights are cast before
        they are gathered."""
        if place == 0:
            return 0.0 if self.name in _SHARED_INPUTS else rows * self.inner
        return rows * self.columns

    def pass_seconds(
        self, tokens: float, device: Device, training: Training | None = None
    ) -> tuple[float, float, float]:
        """Time of the forward pass, of the input's gradient and of the weights'."""
        rows = tokens * self.rows
        program = training.program if training else None
        # Also where a device has one expert alone: the rows of its neighbours' experts are there, and skipped.
        routed = self.name.startswith("experts")
        if routed and program and program.expert_capacity is not None:
            rows = ceil(rows * program.expert_capacity / SUBLANES) * SUBLANES
        grouped = routed and (program is None or program.expert_capacity is None)
        k, n = self.inner, self.columns
        compute = training.compute if training else "bfloat16"
        kinds = (compute, compute, training.weight_gradient if training else compute)
        shapes = ((rows, k, n), (rows, n, k), (k, rows, n))
        moved = COMPUTE_BYTES * (rows * k + k * n + rows * n) / device.hbm_bandwidth
        found = []
        for place, (kind, dims) in enumerate(zip(kinds, shapes, strict=True)):
            if grouped:
                sides = (n, k) if place == 1 else (k, n)
                work = _grouped_seconds(rows, sides, self.copies, program or PODWAY, _PASSES[place], device, kind)
            else:
                work = 2.0 * rows * k * n / device.tile_efficiency(*dims) / device.product_rate(kind)
            cast = self._cast(rows, place) if program and program.quantises_once else dims[1] * (dims[0] + dims[2])
            found.append(self.copies * (max(work, moved) + _quantising(cast, kind, device)))
        return found[0], found[1], found[2]


_SHARED_INPUTS = ("k", "v", "up", "experts_up", "shared_up")  # of q and of gate: quantised there
_PASSES: tuple[Pass, Pass, Pass] = ("forward", "input gradient", "weight gradient")


def _grouped_seconds(
    rows: float, sides: tuple[int, int], groups: int, program: Program, which: Pass, device: Device, kind: str
) -> float:
    """One group of a grouped product: the FLOPs of its tiles at the rate of products; in Podway's program, as in a rehearsal of it, no
    less than the cycles of their kernel."""
    core = CORES.get(device.generation) if program.tuned_experts else None
    tile = program.expert_tile
    if core is not None:
        # The trainer's flags give a kernel as much VMEM as tiles were compiled with.
        tiles = Tiles(tile, device.generation, core.vmem)
        tile = tiles.choose(which, rows=ceil(rows * groups), inner=sides[0], columns=sides[1], groups=groups)
    tile = tile or _tile(device.generation, sides, weight=which == "weight gradient")
    work = 2.0 * _padded(rows, sides, groups, tile) / device.product_rate(kind)
    if core is None:
        return work
    found = cycles(device.generation, which, tile, ceil(rows * groups), *sides, groups)
    return max(work, found / groups / device.clock / device.cores)


@cache
def _tile(generation: str, sides: tuple[int, int], *, weight: bool) -> tuple[int, int, int]:
    """The tile that the compiler chooses: all of the inner side if it can be held, and then as many columns as can."""
    found = _TILINGS.get(generation, _TILINGS["v5p"])
    inner, columns = sides
    room, rows = (found.weight, 0) if weight else (found.forward, found.rows)
    deepest = room // (rows + found.step) // found.step * found.step
    inside = min(inner, max(found.step, deepest))
    across = max(found.step, (room // inside - rows) // found.step * found.step)
    return found.rows, inside, min(across, found.widest, -(-columns // found.step) * found.step)


def _padded(rows: float, sides: tuple[int, int], groups: int, tile: tuple[int, int, int]) -> float:
    """Multiplications of one group of a grouped product, as its tiles compute them: a tile of rows that two groups share is
    visited twice, and the last tile of the inner side and of the columns is computed whole."""
    inner, columns = sides
    down, inside, across = tile
    visited = (ceil(rows * groups / down) + groups - 1) * down / groups
    return visited * ceil(inner / inside) * inside * ceil(columns / across) * across


def _quantising(cast: float, kind: str, device: Device) -> float:
    """Seconds to cast so many elements: read in bfloat16 and written in a byte, with their largest values read before."""
    if kind == "bfloat16" or device.product_rate(kind) == device.matrix_rate:
        return 0.0
    return (2 * COMPUTE_BYTES + 1) * cast / device.hbm_bandwidth


def dispatch_seconds(shape: ModelShape, training: Training, device: Device, tokens: float) -> float:
    """The two products with one-hot matrices that bring tokens to their experts and back, forward, where tokens are dropped.

    Each of the rows of all experts (capacity x experts of a token, for each sequence) is a sum over the sequence's tokens.
    """
    capacity = training.program.expert_capacity
    if shape.experts is None or capacity is None:
        return 0.0
    rows = capacity * shape.experts.per_token * training.seq
    return 2 * 2.0 * tokens * rows * shape.d_model / device.matrix_rate


_SAVED_AS = {
    "q": "qkv", "k": "qkv", "v": "qkv", "q_down": "qkv", "q_up": "qkv", "kv_down": "qkv", "kv_up": "qkv", "o": "attn_out",
    "gate": "mlp_in", "up": "mlp_in", "down": "mlp_out",
    "experts_gate": "mlp_in", "experts_up": "mlp_in", "experts_down": "mlp_out",
    "shared_gate": "mlp_in", "shared_up": "mlp_in", "shared_down": "mlp_out",
}  # fmt: skip


@cache
def layer_products(shape: ModelShape, tensor: int, expert: int) -> tuple[Product, ...]:
    """The products of one layer on one device, of a shape whose layers are all alike (`layer_kinds`)."""
    mesh = MeshShape(tensor=tensor, expert=expert)
    return tuple(_product(p, shape, mesh) for p in params(shape) if p.inputs and p.name.startswith("layers/"))


@cache
def layer_weights(shape: ModelShape, tensor: int, expert: int) -> float:
    """Elements of a layer's matrices on one device, fsdp gathered."""
    return float(sum(product.weights for product in layer_products(shape, tensor, expert)))


@cache
def largest_matrix(shape: ModelShape, tensor: int, expert: int) -> float:
    """Elements of the largest of them."""
    return float(max(product.weights for product in layer_products(shape, tensor, expert)))


def _product(param: Param, shape: ModelShape, mesh: MeshShape) -> Product:
    name = param.name.removeprefix("layers/")
    dims = shard_shape(param, mesh, TRAIN_RULES)[param.stacked :]
    inner, columns = prod(dims[: param.inputs]), prod(dims[param.inputs :])
    saved_as = _SAVED_AS.get(name, "")
    if shape.experts is None or "experts" not in param.axes:
        return Product(name, inner, columns, saved_as=saved_as)
    # The tokens of all devices of the expert group come to each of them; its experts see their share.
    held = shard_shape(param, mesh, TRAIN_RULES)[1]
    split = shape.experts.count // held
    share = shape.experts.per_token * split / shape.experts.count
    return Product(name, inner, columns, rows=share, copies=held, saved_as=saved_as)


@cache
def head_product(shape: ModelShape, tensor: int) -> Product:
    """Hidden to logits."""
    split = tensor if shape.vocab % tensor == 0 else 1
    return Product("head", shape.d_model, shape.vocab // split)


def needed_again(shape: ModelShape, training: Training) -> frozenset[str]:
    """Names of the products of a layer that its backward pass computes again."""
    saved = set(training.saved)
    again = {name for name, kept_as in _SAVED_AS.items() if kept_as not in saved}
    if shape.block != "sandwich":  # a norm after the MLP asks for what it normalised
        again -= {"down", "shared_down"}
        # What experts answer is not asked for where the router's weight is multiplied in before (model/grouped.py); elsewhere the
        # gradient of that weight is a product with it.
        if training.program.tuned_experts:
            again -= {"experts_down"}
    if shape.block == "parallel":
        again -= {"o"}
    return frozenset(again)


@cache
def widths(shape: ModelShape, tensor: int, expert: int) -> Mapping[str, float]:
    """Numbers that a token has in each named tensor of a layer, on one device."""
    mesh, found = MeshShape(tensor=tensor, expert=expert), dict[str, float]()
    for made in activations(shape):
        size = prod(shard_dims(made.axes, made.dims, mesh, TRAIN_RULES))
        found[made.name] = found.get(made.name, 0.0) + size
    return MappingProxyType(found)
