"""How a model serves on a slice: what fits, how fast tokens come, how many replicas a load needs, what they cost.

1. A replica is a tensor group of devices. Weights are split over it by the serving rules; what they and the engine's
   scratch leave of 90% of HBM holds keys and values.
2. A step of the engine carries one token of each running request and a chunk of the prompts of new ones; `engine_costs` says what
   it takes. Running requests settle where they leave as fast as they come: requests = rate x output tokens x step (Little's law).
3. A replica can take what the largest batch in its KV cache can, and is planned to be used at 80% of that. This ranks slices,
   tensor groups, replicas and precisions by cost.
4. The best are simulated (`batching.py`): requests that come at random and vary in length. `--ttft` and `--tpot` bound the 99th
   percentile; where it is above, the plan gets more replicas, and is left out where that does not help.
"""

from collections.abc import Sequence
from functools import cache
from math import ceil, log2, prod
from typing import NamedTuple

import msgspec

from podway.catalog.prices import price_of
from podway.catalog.slices import Slice
from podway.errors import UserError
from podway.model.layout import SERVE_RULES, MeshShape, kv_repeats, shard_shape
from podway.model.params import count, params
from podway.model.shape import PLANNED_ONLY, ModelShape
from podway.plan.batching import Simulated, simulate
from podway.plan.chips import device_of
from podway.plan.engine_costs import Engine, Precision, cached_share, engine_of, kv_bytes_per_token
from podway.plan.memory import GIB
from podway.plan.plans import HOUR
from podway.plan.training import BYTES, COMPUTE_BYTES
from podway.quantities import format_seconds

HBM_FOR_SERVING = 0.9  # the engine's memory_fraction (podway.serve.build)
SLOTS, PROMPT_TOKENS, MAX_LENGTH = 256, 2048, 8192  # its defaults: requests at once, prompt tokens of a step, context
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


class ServePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One way to serve a load."""

    slice: Slice
    tensor: int  # devices of a replica
    per_slice: int  # replicas in a slice
    weights_bytes: float  # per device
    kv_bytes_per_token: float  # per device
    kv_tokens: int  # that a replica can hold
    hbm_limit: int
    precision: Precision
    batch: float  # requests that run at once, at the planned rate
    ttft: float  # of an average request
    tpot: float
    tpot_limit: float  # what no engine can beat with this batch, by nominal HBM bandwidth and peak FLOPs
    capacity: float  # requests a second of one replica at most
    replicas: int
    slices: int
    output_tokens_per_second: float  # of all replicas, if used to capacity
    dollars_per_hour: float | None
    dollars_per_million: float | None  # output tokens, at the load
    binds: str
    simulated: Simulated | None = None


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


def evaluate_serve(
    shape: ModelShape,
    slice: Slice,
    tensor: int,
    load: Load,
    precision: Precision,
    *,
    spot: bool = False,
    replicas: int | None = None,
) -> ServePlan | str:
    """One way to serve, or the reason why it does not work; `replicas`: at least this many."""
    device = device_of(slice.generation)
    if not _readable(shape, tensor, precision):
        return f"the kernel cannot read fp8 keys and values of a single head on a chip (tensor={tensor})"
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
    engine = engine_of(shape, slice, tensor, precision, weights)
    mean = _Mean(engine, load)
    largest = min(SLOTS, int(tokens / held))
    capacity = mean.rate(largest)
    copies = slice.devices // tensor
    replicas = max(replicas or 1, ceil(load.rate / (capacity * USED)))
    batch = mean.settled(load.rate / replicas, largest)
    step, prefill = mean.step(batch), engine.seconds(0, 0, load.prompt, load.prompt)
    for name, value, most in (("TTFT", prefill + step, load.ttft), ("TPOT", step, load.tpot)):
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
        precision=precision,
        batch=batch,
        ttft=prefill + step,
        tpot=step,
        tpot_limit=engine.limit_seconds(batch, batch * mean.context),
        capacity=capacity,
        replicas=replicas,
        slices=slices,
        output_tokens_per_second=capacity * load.output * copies * slices,
        dollars_per_hour=total,
        dollars_per_million=None if total is None else total / HOUR / (load.rate * load.output) * 1e6,
        binds=engine.binds(batch, batch * mean.context, batch * mean.chunk, load.prompt),
    )


def _readable(shape: ModelShape, tensor: int, precision: Precision) -> bool:
    """Whether the engine's kernel reads such a cache: in fp8 it takes two heads at a time."""
    heads = shape.kv_heads * kv_repeats(shape.heads, shape.kv_heads, tensor) // tensor
    return precision.kv != "fp8" or heads > 1 or shape.latent is not None


class _Mean(NamedTuple):
    """An engine in a steady state: each running request has seen half of its answer, and prompts come as fast as answers end."""

    engine: Engine
    load: Load

    @property
    def context(self) -> float:
        """Tokens in cache of a running request, on average."""
        middle = self.load.prompt + self.load.output / 2
        return middle * cached_share(self.engine.shape, middle)

    @property
    def chunk(self) -> float:
        """Prompt tokens that come with each output token."""
        return self.load.prompt / self.load.output

    def step(self, batch: float) -> float:
        """Seconds of a step with this many requests running."""
        return self.engine.seconds(batch, batch * self.context, batch * self.chunk, self.load.prompt)

    def rate(self, batch: float) -> float:
        """Requests a second that leave a batch of this size."""
        return batch / (self.load.output * self.step(batch))

    def settled(self, rate: float, largest: int) -> float:
        """The batch at which requests leave as fast as they come."""
        low, high = 0.0, float(largest)
        for _ in range(ceil(log2(SLOTS)) + 6):
            middle = (low + high) / 2
            low, high = (middle, high) if self.rate(max(middle, 1e-6)) < rate else (low, middle)
        return max(1.0, high)


def step_of(
    shape: ModelShape, slice: Slice, tensor: int, load: Load, precision: Precision, batch: float, *, bare: bool = False
) -> float:
    """Seconds of a step of a fixed batch: of an engine that also reads prompts, or (`bare`) of a loop that only decodes."""
    weights = weights_per_device(shape, tensor, precision.weights)
    engine = engine_of(shape, slice, tensor, precision, weights, bare=bare)
    mean = _Mean(engine, load)
    return engine.seconds(batch, batch * mean.context) if bare else mean.step(batch)


def replica_rate(shape: ModelShape, slice: Slice, tensor: int, load: Load, precision: Precision) -> float:
    """Requests a second of a replica whose KV cache is full."""
    device = device_of(slice.generation)
    weights = weights_per_device(shape, tensor, precision.weights)
    room = device.hbm_limit * HBM_FOR_SERVING - weights - scratch_per_device(shape, tensor)
    longest = load.prompt + load.output
    held = longest * cached_share(shape, longest) * kv_bytes_per_token(shape, tensor, precision.kv)
    mean = _Mean(engine_of(shape, slice, tensor, precision, weights), load)
    return mean.rate(min(SLOTS, max(1, int(room / held))))


def simulated(shape: ModelShape, plan: ServePlan, load: Load) -> ServePlan:
    """A plan with what a simulation of one replica under its share of the load gives."""
    engine = engine_of(shape, plan.slice, plan.tensor, plan.precision, plan.weights_bytes)
    found = simulate(
        engine, rate=load.rate / plan.replicas, prompt=load.prompt, output=load.output, slots=SLOTS,
        kv_tokens=plan.kv_tokens, chunk=PROMPT_TOKENS, share=cached_share(shape, load.prompt + load.output),
    )  # fmt: skip
    return msgspec.structs.replace(plan, simulated=found)


def _kept(shape: ModelShape, plan: ServePlan, load: Load, *, spot: bool) -> ServePlan | str:
    """A plan whose 99th percentiles keep what was promised, with more replicas if need be; the reason where none does."""
    for _ in range(_MORE):
        plan = simulated(shape, plan, load)
        assert plan.simulated is not None
        late = [
            (name, value)
            for name, value, most in (
                ("TTFT", plan.simulated.ttft[2], load.ttft),
                ("TPOT", plan.simulated.tpot[2], load.tpot),
            )
            if most is not None and value > most
        ]
        if not late:
            return plan
        more = evaluate_serve(
            shape, plan.slice, plan.tensor, load, plan.precision, spot=spot, replicas=ceil(plan.replicas * 1.3 + 0.5)
        )
        if isinstance(more, str):
            return more
        plan = more
    name, value = late[0]
    return f"p99 {name} is {format_seconds(value)} with {plan.replicas} replicas (tensor={plan.tensor})"


# What `auto` tries. The engine's TPU kernel reads keys and values in bfloat16 and fp8 (podway.serve.cache_layout).
WEIGHT_PRECISIONS, KV_PRECISIONS = ("bfloat16", "int8"), ("bfloat16", "fp8")
_SIMULATED = 6  # of the cheapest plans
_MORE = 5  # times that replicas are added before a promise is given up


def search_serve(
    shape: ModelShape,
    load: Load,
    candidates: Sequence[Slice],
    precision: Precision,
    *,
    spot: bool = False,
    simulate_best: bool = False,
) -> tuple[list[ServePlan], list[tuple[str, str]]]:
    """Plans by cost of the load (unknown prices last), and the slices that do not work with the reason. `auto` as a precision
    tries each that the engine has; `simulate_best` simulates the cheapest and holds them to the promised percentiles."""
    distinct = {s.accelerator_type: s for s in reversed(candidates)}
    choices = [
        Precision(weights, kv)
        for weights in (WEIGHT_PRECISIONS if precision.weights == "auto" else (precision.weights,))
        for kv in (KV_PRECISIONS if precision.kv == "auto" else (precision.kv,))
    ]
    plans: list[ServePlan] = []
    rejected: list[tuple[str, str]] = []
    for slice in reversed(distinct.values()):
        found = _on_slice(shape, load, slice, choices, spot=spot, alone=len(distinct) == 1)
        if isinstance(found, str):
            rejected.append((slice.accelerator_type, found))
        elif found is not None:
            plans.append(found)
    plans.sort(key=_cost)
    if not simulate_best:
        return plans, rejected
    kept: list[ServePlan] = []
    for plan in plans[:_SIMULATED]:
        held = _kept(shape, plan, load, spot=spot)
        if isinstance(held, str):
            rejected.append((plan.slice.accelerator_type, held))
        else:
            kept.append(held)
    return sorted(kept, key=_cost) + plans[_SIMULATED:], rejected


def _on_slice(
    shape: ModelShape, load: Load, slice: Slice, choices: Sequence[Precision], *, spot: bool, alone: bool
) -> ServePlan | str | None:
    """The cheapest plan of a slice, the reason why there is none, or None for a slice that is not worth a look."""
    device = device_of(slice.generation)
    least = min(float(count(shape) * BYTES[one.weights]) for one in choices)
    if least > slice.devices * device.hbm_limit * HBM_FOR_SERVING:
        short = least / slice.devices - device.hbm_limit * HBM_FOR_SERVING
        return f"OOM by {short / GIB:.1f} GiB a chip in weights alone"
    if not alone and slice.devices > 64 and least * 8 < slice.devices * device.hbm_limit:
        return None  # many times larger than the model: smaller slices of the same kind serve it alike
    found: list[ServePlan] = []
    reason = "its heads do not divide over its chips"
    for tensor in (size for size in (1, 2, 4, 8, 16, 32, 64) if slice.devices % size == 0):
        if shape.heads % tensor:
            continue
        for precision in (one for one in choices if len(choices) == 1 or _readable(shape, tensor, one)):
            one = evaluate_serve(shape, slice, tensor, load, precision, spot=spot)
            if isinstance(one, str):
                reason = one
            else:
                found.append(one)
    return min(found, key=_cost) if found else reason


def serve_notes(shape: ModelShape, precision: Precision) -> list[str]:
    """What a person should know of plans for serving beside their figures."""
    notes = []
    if shape.family in PLANNED_ONLY:
        notes.append(f"podway serve has no {shape.family} decoder: this model is planned, not served")
    if precision.kv == "int8":
        notes.append("podway serve refuses an int8 cache on TPUs (--kv fp8 is read): this is a plan for another engine")
    return notes


def _cost(plan: ServePlan) -> tuple[float, int, float]:
    """Dollars of the load; where they are unknown or equal, fewer chips, then a shorter wait."""
    hourly = float("inf") if plan.dollars_per_hour is None else plan.dollars_per_hour
    return (hourly, plan.slices * plan.slice.chips, plan.tpot)
