"""How a model serves on a slice: what fits, how fast tokens come, how many replicas a load needs, what they cost.

1. A replica is a tensor group of devices. Weights are split over it by the serving rules; what they and the engine's
   scratch leave of 90% of HBM holds keys and values.
2. A step of the engine carries one token of each running request and a chunk of the prompts of new ones, as many as come
   in while the others run. Two chains run side by side: HBM streams the weights once and the keys and values of
   everyone; products and the sums over the group follow each other. The longer chain is the step.
3. Running requests settle where they leave as fast as they come: requests = rate x output tokens x step (Little's law).
   A replica can take what the largest batch in its KV cache can, and is planned to be used at 80% of that.
4. Engines reach part of this roofline; `ENGINE_EFFICIENCY` says how much, with its source. Both figures are given.
"""

from collections.abc import Sequence
from functools import cache
from math import ceil, log2, prod

import msgspec

from podway.catalog.prices import price_of
from podway.catalog.slices import Slice
from podway.errors import UserError
from podway.model.flops import attention_flops_per_token
from podway.model.layout import SERVE_RULES, MeshShape, kv_repeats, shard_shape
from podway.model.params import count, matrix_count, params
from podway.model.shape import ModelShape
from podway.plan.chips import Device, device_of
from podway.plan.memory import GIB
from podway.plan.network import place
from podway.plan.plans import HOUR
from podway.plan.training import BYTES, COMPUTE_BYTES
from podway.quantities import format_seconds

HBM_FOR_SERVING = 0.9  # the engine's memory_fraction (podway.serve.build)
SLOTS, PROMPT_TOKENS, MAX_LENGTH = 256, 2048, 8192  # its defaults: requests at once, prompt tokens of a step, context
# Part of this roofline that engines reach end to end: vLLM on v6e 0.50-0.59 in the three results of
# published/serving.csv (a bare decode loop in JAX reaches 0.85-0.95). Their mean.
ENGINE_EFFICIENCY = 0.554
USED = 0.8  # of a replica's capacity, so that bursts do not queue


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What comes in, and what is promised."""

    prompt: int  # tokens in
    output: int  # tokens out
    rate: float  # requests a second
    ttft: float | None = None  # seconds until the first token, at most
    tpot: float | None = None  # seconds for each further one, at most

    def __post_init__(self) -> None:
        for name in ("prompt", "output"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} tokens: {getattr(self, name)}", "a request has at least 1 token in and 1 out")
        for name in ("rate", "ttft", "tpot"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"{name} is {value:g}", f"{name} must be above 0")


class Precision(msgspec.Struct, frozen=True, kw_only=True):
    """How weights and cache are stored; products are bf16, or int8 where weights are and the chip is faster so."""

    weights: str = "bfloat16"
    kv: str = "bfloat16"


class ServePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One way to serve a load."""

    slice: Slice
    tensor: int  # devices of a replica
    per_slice: int  # replicas in a slice
    weights_bytes: float  # per device
    kv_bytes_per_token: float  # per device
    kv_tokens: int  # that a replica can hold
    hbm_limit: int
    batch: float  # requests that run at once, at the planned rate
    ttft: float
    tpot: float
    tpot_limit: float  # by the roofline alone
    capacity: float  # requests a second of one replica at most
    replicas: int
    slices: int
    output_tokens_per_second: float  # of all replicas, if used to capacity
    dollars_per_hour: float | None
    dollars_per_million: float | None  # output tokens, at the load
    binds: str


@cache
def weights_per_device(shape: ModelShape, tensor: int, stored: str) -> float:
    """Bytes of weights on one device, as the engine lays them out: int8 is for the matrices of layers, not of experts."""
    mesh, total = MeshShape(tensor=tensor), 0.0
    # Key/value heads that do not divide over the group are repeated until they do (podway.serve.build.spread).
    repeats = kv_repeats(shape.heads, shape.kv_heads, tensor)
    for param in params(msgspec.structs.replace(shape, kv_heads=shape.kv_heads * repeats)):
        shrinks = param.inputs and param.name.startswith("layers/") and "router" not in param.name
        each = BYTES[stored] if shrinks and "experts" not in param.axes else COMPUTE_BYTES
        total += each * prod(shard_shape(param, mesh, SERVE_RULES))
    return total


@cache
def scratch_per_device(shape: ModelShape, tensor: int) -> float:
    """Bytes that the engine sets aside for its slots and for a step's logits and activations (podway.serve.build)."""
    lines = 4 * shape.vocab / tensor + 4 * min(shape.max_position, MAX_LENGTH) + 4096
    widest = max(shape.d_ff, shape.heads * shape.d_head, shape.d_model)
    return (SLOTS + 1) * lines + 12 * SLOTS * shape.vocab / tensor + 24.0 * (SLOTS + PROMPT_TOKENS) * widest


def kv_heads_per_device(shape: ModelShape, tensor: int) -> float:
    """Key/value heads on one device; they are repeated where a group has more devices than heads."""
    heads = shape.kv_heads * kv_repeats(shape.heads, shape.kv_heads, tensor)
    return heads / tensor if heads % tensor == 0 else shape.kv_heads


def kv_bytes_per_token(shape: ModelShape, tensor: int, stored: str) -> float:
    """Bytes that one token leaves on one device."""
    return 2 * kv_heads_per_device(shape, tensor) * shape.d_head * shape.layers * BYTES[stored]


def cached_share(shape: ModelShape, length: float) -> float:
    """The part of a context that layers keep: a windowed layer forgets the rest."""
    return sum(min(length, window or length) for window in shape.layer_windows) / (length * shape.layers)


def evaluate_serve(
    shape: ModelShape, slice: Slice, tensor: int, load: Load, precision: Precision, *, spot: bool = False
) -> ServePlan | str:
    """One way to serve, or the reason why it does not work."""
    device = device_of(slice.generation)
    weights = weights_per_device(shape, tensor, precision.weights)
    room = device.hbm_limit * HBM_FOR_SERVING - weights - scratch_per_device(shape, tensor)
    per_token = kv_bytes_per_token(shape, tensor, precision.kv)
    tokens = int(room / per_token) if room > 0 else 0
    longest = load.prompt + load.output
    held = longest * cached_share(shape, longest)
    if tokens < held:
        short = (held * per_token - room) / GIB
        part = "weights" if weights > held * per_token else "the KV cache of one request"
        return f"OOM by {short:.1f} GiB a chip, mostly {part} (tensor={tensor})"
    largest = min(SLOTS, int(tokens / held))
    engine = _Engine(shape, device, tensor, load, precision, slice)
    capacity = _rate(engine, largest) * ENGINE_EFFICIENCY
    copies = slice.devices // tensor
    replicas = max(1, ceil(load.rate / (capacity * USED)))
    each = load.rate / replicas
    batch = _settled(engine, each / ENGINE_EFFICIENCY, largest)
    step = engine.step_seconds(batch)
    prefill = engine.prefill_seconds(load.prompt)
    ttft = (prefill + step) / ENGINE_EFFICIENCY
    tpot = step / ENGINE_EFFICIENCY
    for name, value, most in (("TTFT", ttft, load.ttft), ("TPOT", tpot, load.tpot)):
        if most is not None and value > most:
            return f"{name} of {format_seconds(value)} is above {format_seconds(most)} (tensor={tensor})"
    slices = ceil(replicas / copies)
    hourly = price_of(slice, spot=spot)
    total = None if hourly is None else hourly * slices
    return ServePlan(
        slice=slice,
        tensor=tensor,
        per_slice=copies,
        weights_bytes=weights,
        kv_bytes_per_token=per_token,
        kv_tokens=tokens,
        hbm_limit=device.hbm_limit,
        batch=batch,
        ttft=ttft,
        tpot=tpot,
        tpot_limit=step,
        capacity=capacity,
        replicas=replicas,
        slices=slices,
        output_tokens_per_second=capacity * load.output * copies * slices,
        dollars_per_hour=total,
        dollars_per_million=None if total is None else total / HOUR / (load.rate * load.output) * 1e6,
        binds=engine.binds(batch),
    )


class _Engine:
    """The roofline of one replica under a load."""

    def __init__(
        self, shape: ModelShape, device: Device, tensor: int, load: Load, precision: Precision, slice: Slice
    ) -> None:
        self.shape, self.device, self.tensor, self.load, self.precision = shape, device, tensor, load, precision
        mesh = MeshShape(data=slice.devices // tensor, tensor=tensor)
        self.group = place(mesh, slice).tensor
        fast = precision.weights == "int8" and device.peak_int8 > device.peak_bf16
        self.rate = device.matrix_rate * (device.peak_int8 / device.peak_bf16 if fast else 1.0)
        middle = load.prompt + load.output / 2  # what a running request has seen, on average
        kept = middle * cached_share(shape, middle)
        self.kv_per_request = kept * kv_bytes_per_token(shape, tensor, precision.kv)
        self.chunk_per_request = load.prompt / load.output  # prompt tokens that come with each output token

    def parts(self, batch: float) -> tuple[float, float, float, float]:
        """Products, weights, keys and values, exchanges: seconds of a step."""
        tokens = batch * (1 + self.chunk_per_request)
        scores = attention_flops_per_token(self.shape, self.load.prompt) / self.tensor
        flops = tokens * 2 * matrix_count(self.shape) / self.tensor + batch * self.chunk_per_request * scores
        exchange = 2 * self.shape.layers * self._sum_seconds(COMPUTE_BYTES * tokens * self.shape.d_model)
        return (
            flops / self.rate,
            self._weights_read(tokens) / self.device.hbm_bandwidth,
            batch * self.kv_per_request / self.device.hbm_bandwidth,
            exchange,
        )

    def step_seconds(self, batch: float) -> float:
        """One step with this many requests running."""
        products, weights, cache, exchange = self.parts(batch)
        return max(products + exchange, weights + cache)

    def binds(self, batch: float) -> str:
        """What most of a step is costs on."""
        names = ("matrix unit", "HBM: weights", "HBM: KV cache", "ICI")
        return max(zip(self.parts(batch), names, strict=True))[1]

    def prefill_seconds(self, prompt: int) -> float:
        """A prompt alone."""
        scores = attention_flops_per_token(self.shape, prompt)
        flops = prompt * (2 * matrix_count(self.shape) + scores) / self.tensor
        exchange = 2 * self.shape.layers * self._sum_seconds(COMPUTE_BYTES * prompt * self.shape.d_model)
        read = self._weights_read(prompt) / self.device.hbm_bandwidth
        return max(flops / self.rate + exchange, read)

    def _sum_seconds(self, size: float) -> float:
        return self.group.reduce_seconds(size, self.device)

    def _weights_read(self, tokens: float) -> float:
        """Bytes of weights that a step touches: of a mixture only the experts that some token is sent to."""
        whole = weights_per_device(self.shape, self.tensor, self.precision.weights)
        table = COMPUTE_BYTES * self.shape.vocab * self.shape.d_model / self.tensor
        lookup = 0.0 if self.shape.embedding.tied else table
        experts = self.shape.experts
        if experts is None:
            return whole - lookup
        mesh = MeshShape(tensor=self.tensor)
        held = COMPUTE_BYTES * sum(
            prod(shard_shape(p, mesh, SERVE_RULES)) for p in params(self.shape) if "experts" in p.axes
        )
        missed = float((1 - experts.per_token / experts.count) ** tokens)  # the part that no token was sent to
        return whole - lookup - held * missed


def step_of(shape: ModelShape, slice: Slice, tensor: int, load: Load, precision: Precision, batch: float) -> float:
    """Seconds of a decode step of a fixed batch that no new request joins, by the roofline."""
    engine = _Engine(shape, device_of(slice.generation), tensor, load, precision, slice)
    engine.chunk_per_request = 0.0
    return engine.step_seconds(batch)


def replica_rate(shape: ModelShape, slice: Slice, tensor: int, load: Load, precision: Precision) -> float:
    """Requests a second of a replica whose KV cache is full, by the roofline."""
    device = device_of(slice.generation)
    room = device.hbm_limit * HBM_FOR_SERVING - weights_per_device(shape, tensor, precision.weights)
    room -= scratch_per_device(shape, tensor)
    longest = load.prompt + load.output
    held = longest * cached_share(shape, longest) * kv_bytes_per_token(shape, tensor, precision.kv)
    return _rate(_Engine(shape, device, tensor, load, precision, slice), min(SLOTS, max(1, int(room / held))))


def _rate(engine: _Engine, batch: float) -> float:
    """Requests a second that leave a batch of this size."""
    return batch / (engine.load.output * engine.step_seconds(batch))


def _settled(engine: _Engine, rate: float, largest: int) -> float:
    """The batch at which requests leave as fast as they come."""
    low, high = 0.0, float(largest)
    for _ in range(ceil(log2(SLOTS)) + 6):
        middle = (low + high) / 2
        low, high = (middle, high) if _rate(engine, max(middle, 1e-6)) < rate else (low, middle)
    return max(1.0, high)


def search_serve(
    shape: ModelShape, load: Load, candidates: Sequence[Slice], precision: Precision, *, spot: bool = False
) -> tuple[list[ServePlan], list[tuple[str, str]]]:
    """Plans by cost of the load (unknown prices last), and the slices that do not work with the reason."""
    distinct = {s.accelerator_type: s for s in reversed(candidates)}
    plans: list[ServePlan] = []
    rejected: list[tuple[str, str]] = []
    least = float(count(shape) * BYTES[precision.weights])
    for slice in reversed(distinct.values()):
        device = device_of(slice.generation)
        if least > slice.devices * device.hbm_limit * HBM_FOR_SERVING:
            short = least / slice.devices - device.hbm_limit * HBM_FOR_SERVING
            rejected.append((slice.accelerator_type, f"OOM by {short / GIB:.1f} GiB a chip in weights alone"))
            continue
        if len(distinct) > 1 and slice.devices > 64 and least * 8 < slice.devices * device.hbm_limit:
            continue  # many times larger than the model: smaller slices of the same kind serve it alike
        found: list[ServePlan] = []
        reason = "its heads do not divide over its chips"
        for tensor in (size for size in (1, 2, 4, 8, 16, 32, 64) if slice.devices % size == 0):
            if shape.heads % tensor:
                continue
            one = evaluate_serve(shape, slice, tensor, load, precision, spot=spot)
            if isinstance(one, str):
                reason = one
            else:
                found.append(one)
        if found:
            plans.append(min(found, key=_cost))
        else:
            rejected.append((slice.accelerator_type, reason))
    return sorted(plans, key=_cost), rejected


def _cost(plan: ServePlan) -> tuple[float, int, float]:
    """Dollars of the load; where they are unknown or equal, fewer chips, then a shorter wait."""
    hourly = float("inf") if plan.dollars_per_hour is None else plan.dollars_per_hour
    return (hourly, plan.slices * plan.slice.chips, plan.tpot)
