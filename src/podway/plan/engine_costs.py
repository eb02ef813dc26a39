"""What one step of a serving engine costs: products, weights, keys and values, sums over the tensor group, the host.

A step carries one token of each running request and a chunk of new prompts. Layer after layer, products stream their weights from
HBM (or are bound by the matrix unit where many tokens share them), attention streams the keys and values of everyone, and the
group sums its activations: these follow each other, so their times add up. Between steps the host schedules.

`limit_seconds` is what no engine can beat: nominal HBM bandwidth and peak FLOPs, everything side by side, nothing else.
"""

from functools import cache
from math import prod
from typing import NamedTuple

from podway.catalog.generations import GENERATIONS
from podway.catalog.slices import Slice
from podway.model.flops import attention_flops_per_token
from podway.model.layout import SERVE_RULES, MeshShape, kv_repeats, shard_shape
from podway.model.params import cached_numbers, matrix_count, params
from podway.model.shape import ModelShape, layer_kinds
from podway.plan.chips import Device, device_of
from podway.plan.network import Group, place
from podway.plan.training import BYTES, COMPUTE_BYTES

# What the host takes between two steps; and what paged attention loses at each page it fetches, as a multiple of the time that a
# page of one key/value head of 128 bfloat16 channels takes: few heads on a chip make small pages. Both are calibrated, on the
# two results of vLLM with Llama 3.3 70B on v6e-8, one head a chip (published/calibration.csv).
HOST_SECONDS = 0.0035
PAGE_OVERHEAD = 1.265
_HEAD_BYTES = 2 * 128 * 2  # of a token: keys and values of such a head


class Precision(NamedTuple):
    """How weights and cache are stored; products are bf16, or int8 where weights are and the chip is faster so."""

    weights: str = "bfloat16"
    kv: str = "bfloat16"


class Engine(NamedTuple):
    """One replica: a tensor group of devices that serves a model."""

    shape: ModelShape
    device: Device
    tensor: int
    precision: Precision
    group: Group
    weights: float  # bytes on a device
    expert_bytes: float  # of them, those of experts
    flops_per_token: float  # of products, on a device
    kv_bytes_per_token: float  # on a device
    host_seconds: float = HOST_SECONDS
    page_overhead: float = PAGE_OVERHEAD

    @property
    def rate(self) -> float:
        """FLOP/s of products."""
        return self.device.product_rate(self.precision.weights)

    def parts(self, batch: float, context: float, prompt: float, length: float) -> dict[str, float]:
        """Seconds of a step by resource: `batch` requests that have `context` tokens in cache together, and `prompt` tokens of new
        prompts, each of `length`."""
        tokens = batch + prompt
        flops = tokens * self.flops_per_token
        latent = self.shape.latent
        if latent is not None:  # each head multiplies the whole latent vector of every token in the cache, twice
            width = 2 * latent.kv_rank + latent.d_rope
            flops += 2.0 * context * self.shape.layers * self.shape.heads * width / self.tensor
        scores = prompt * _score_flops(self.shape, max(64, round(length / 64) * 64)) / self.tensor if prompt else 0.0
        products, read = flops / self.rate, self.weights_read(tokens) / self.device.hbm_bandwidth
        small = self.page_overhead * _HEAD_BYTES / (self.kv_bytes_per_token / self.shape.layers)
        cache = (1 + small) * context * self.kv_bytes_per_token / self.device.hbm_bandwidth
        exchange = COMPUTE_BYTES * tokens * self.shape.d_model
        return {
            "matrix unit": max(0.0, products - read) + scores / self.device.matrix_rate,
            "HBM: weights": min(products, read) if products > read else read,
            "HBM: KV cache": cache,
            "ICI": 2 * self.shape.layers * self.group.reduce_seconds(exchange, self.device),
            "host": self.host_seconds,
        }

    def seconds(self, batch: float, context: float, prompt: float = 0.0, length: float = 1.0) -> float:
        """One step."""
        return sum(self.parts(batch, context, prompt, length).values())

    def binds(self, batch: float, context: float, prompt: float, length: float) -> str:
        """What most of a step is spent on."""
        parts = self.parts(batch, context, prompt, length)
        return max(parts, key=lambda name: parts[name])

    def limit_seconds(self, batch: float, context: float, prompt: float = 0.0) -> float:
        """What a step takes at least, on this device and at this precision."""
        facts = GENERATIONS[self.device.generation]
        bandwidth = facts.chip_hbm_bandwidth / facts.devices_per_chip
        tokens = batch + prompt
        peak = max(self.device.peak(self.precision.weights), self.device.peak_bf16)
        read = self.weights_read(tokens) + context * self.kv_bytes_per_token
        return max(read / bandwidth, tokens * self.flops_per_token / peak)

    def weights_read(self, tokens: float) -> float:
        """Bytes of weights that a step touches: of a mixture only the experts that some token is sent to."""
        table = COMPUTE_BYTES * self.shape.vocab * self.shape.d_model / self.tensor
        lookup = 0.0 if self.shape.embedding.tied else table
        experts = self.shape.experts
        if experts is None:
            return self.weights - lookup
        missed = float((1 - experts.per_token / experts.count) ** tokens)  # the part that no token was sent to
        return self.weights - lookup - self.expert_bytes * missed


def engine_of(
    shape: ModelShape, slice: Slice, tensor: int, precision: Precision, weights: float, *, bare: bool = False
) -> Engine:
    """The engine of one replica in a slice; `bare`: a decode loop without a scheduler, over a contiguous cache."""
    group = place(MeshShape(data=slice.devices // tensor, tensor=tensor), slice).tensor
    made = Engine(
        shape, device_of(slice.generation), tensor, precision, group, weights, _expert_bytes(shape, tensor),
        2 * matrix_count(shape) / tensor, kv_bytes_per_token(shape, tensor, precision.kv),
    )  # fmt: skip
    return made._replace(host_seconds=0.0, page_overhead=0.0) if bare else made


def kv_heads_per_device(shape: ModelShape, tensor: int) -> float:
    """Key/value heads on one device; they are repeated where a group has more devices than heads."""
    heads = shape.kv_heads * kv_repeats(shape.heads, shape.kv_heads, tensor)
    return heads / tensor if heads % tensor == 0 else shape.kv_heads


def _cached_per_layer(kind: ModelShape, tensor: int) -> float:
    """Numbers that a token leaves on one device in a layer: a latent vector serves all heads, so every device has it whole."""
    if kind.latent is not None:
        return float(cached_numbers(kind))
    return 2 * kv_heads_per_device(kind, tensor) * kind.d_head


def kv_bytes_per_token(shape: ModelShape, tensor: int, stored: str) -> float:
    """Bytes that one token leaves on one device."""
    return BYTES[stored] * sum(kind.layers * _cached_per_layer(kind, tensor) for kind in layer_kinds(shape))


def cached_share(shape: ModelShape, length: float) -> float:
    """The part of a context that layers keep: a windowed layer forgets the rest."""
    kept = whole = 0.0
    for kind in layer_kinds(shape):
        each = cached_numbers(kind)
        kept += each * sum(min(length, window or length) for window in kind.layer_windows)
        whole += each * length * kind.layers
    return kept / whole


@cache
def _score_flops(shape: ModelShape, length: int) -> float:
    return attention_flops_per_token(shape, length)


@cache
def _expert_bytes(shape: ModelShape, tensor: int) -> float:
    mesh = MeshShape(tensor=tensor)
    return COMPUTE_BYTES * sum(prod(shard_shape(p, mesh, SERVE_RULES)) for p in params(shape) if "experts" in p.axes)
