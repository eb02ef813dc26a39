"""The matrix products of a model, taken from its parameter table: what one device multiplies, layer by layer.

`layer_products(shape, mesh)` lists those of a layer as one device sees them once fsdp shards are gathered;
`head_product` is the output matrix. `needed_again` says which of them a backward pass computes a second time. The end of
a layer never is: nothing in the layer's own backward pass asks for the sum it ends in (the compiler drops it as dead
code, so full remat costs 7.2 FLOPs a parameter and token in the 32B model, not 8).
"""

from collections.abc import Mapping
from functools import cache
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from podway.model.layout import TRAIN_RULES, MeshShape, shard_dims, shard_shape
from podway.model.params import Param, activations, params
from podway.model.shape import ModelShape
from podway.plan.chips import Device
from podway.plan.training import COMPUTE_BYTES, Training

_EXPERT_TILE = 128  # rows that a grouped product pads each expert to: the default tile of jax's megablox kernel


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

    def seconds(self, tokens: float, device: Device, *, passes: tuple[float, float, float]) -> float:
        """Time of (forward, input gradient, weight gradient) passes."""
        rows = tokens * self.rows
        if self.copies > 1:
            rows = -(-rows // _EXPERT_TILE) * _EXPERT_TILE
        k, n = self.inner, self.columns
        work = 2.0 * rows * k * n / device.matrix_rate
        moved = COMPUTE_BYTES * (rows * k + k * n + rows * n) / device.hbm_bandwidth
        ahead, back, weight = passes
        total = 0.0
        if ahead:
            total += ahead * max(work / device.tile_efficiency(rows, k, n), moved)
        if back:
            total += back * max(work / device.tile_efficiency(rows, n, k), moved)
        if weight:
            total += weight * max(work / device.tile_efficiency(k, rows, n), moved)
        return total * self.copies


_SAVED_AS = {
    "q": "qkv", "k": "qkv", "v": "qkv", "o": "attn_out", "gate": "mlp_in", "up": "mlp_in", "down": "mlp_out",
    "experts_gate": "mlp_in", "experts_up": "mlp_in", "experts_down": "mlp_out",
    "shared_gate": "mlp_in", "shared_up": "mlp_in", "shared_down": "mlp_out",
}  # fmt: skip


def layer_products(shape: ModelShape, mesh: MeshShape) -> tuple[Product, ...]:
    """The products of one layer on one device."""
    return _layer_products(shape, mesh.tensor, mesh.expert)


@cache
def _layer_products(shape: ModelShape, tensor: int, expert: int) -> tuple[Product, ...]:
    mesh = MeshShape(tensor=tensor, expert=expert)
    return tuple(_product(p, shape, mesh) for p in params(shape) if p.inputs and p.name.startswith("layers/"))


@cache
def layer_weights(shape: ModelShape, tensor: int, expert: int) -> float:
    """Elements of a layer's matrices on one device, fsdp gathered."""
    return float(sum(product.weights for product in _layer_products(shape, tensor, expert)))


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
        again -= {"down", "experts_down", "shared_down"}
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
