"""`ModelShape`: everything that tells one decoder-only transformer from another, as plain numbers (no jax).

Every part of Podway that reasons about a model starts here: the parameter table (`layout.py`), the planner, the rehearsal,
the trainer and the engine take the same `ModelShape`. A shape comes from a name (`families.find_model`) or from a Hugging
Face `config.json` (`hf.shape_from_hf`); two shapes are equal when the models compute the same function of their weights.

The records nest by concern: `Attention` says how scores are made, `Rope` how positions enter, `Experts` how tokens are
routed, `Norm` and `Embedding` the rest. What differs from layer to layer (Gemma's windows) is data derived from the shape
(`layer_windows`), never a parameter. Where layers hold arrays of different sizes (the first layers of DeepSeek have no experts),
`layer_kinds` takes the model apart into shapes whose layers are all alike.

Families of `PLANNED_ONLY` can be planned for, and neither trained nor served.
"""

from functools import cache
from typing import Literal

import msgspec

from podway.errors import UserError

Family = Literal[
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "mixtral", "qwen2-moe", "qwen3-moe", "phi3", "podway",
    "deepseek", "gpt-oss", "llama4", "gemma4",
]  # fmt: skip
PLANNED_ONLY: tuple[Family, ...] = ("deepseek", "gpt-oss", "llama4", "gemma4")
Activation = Literal["silu-gated", "gelu-gated", "relu", "gelu"]
# sequential: x += attn(norm(x)); x += mlp(norm(x)).  sandwich: as sequential, with a norm on each output before it is
# added (Gemma 2 and 3).  parallel: x += attn(n) + mlp(n) with one shared n = norm(x) (PaLM, the 16B-128B jobs).
Block = Literal["sequential", "sandwich", "parallel"]


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Immutable, hashable, and strict when it is read from JSON."""


class Norm(Record, frozen=True, kw_only=True):
    """Root-mean-square norm with one weight a channel; there is no bias and no mean subtraction in any known model."""

    eps: float = 1e-6
    plus_one: bool = False  # Gemma multiplies by 1 + w, and starts w at zero


class LinearScaling(Record, tag="linear", frozen=True, kw_only=True):
    """Positions divided by `factor` (Gemma 3's global layers)."""

    factor: float


class Llama3Scaling(Record, tag="llama3", frozen=True, kw_only=True):
    """Llama 3.1's rule: low frequencies divided by `factor`, high ones kept, a ramp between."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


class YarnScaling(Record, tag="yarn", frozen=True, kw_only=True):
    """YaRN: frequencies of few turns within the original context divided by `factor`, the others kept, a ramp between."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0  # turns from which a frequency is kept
    beta_slow: float = 1.0  # turns below which it is divided
    truncate: bool = True  # the ramp begins and ends at whole channels
    magnitude: float = 1.0  # queries and keys are multiplied by this


class LongScaling(Record, tag="longrope", frozen=True, kw_only=True):
    """LongRoPE: each frequency divided by a factor of its own, from one of two lists (Phi 3 and 4)."""

    short: tuple[float, ...]  # where nothing is longer than the original context
    long: tuple[float, ...]
    original_max_position: int
    magnitude: float = 1.0  # queries and keys are multiplied by this


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LongScaling


class Rope(Record, frozen=True, kw_only=True):
    """Rotary position embedding on (first half, second half) pairs of each head, as Hugging Face stores weights."""

    theta: float = 10_000.0
    local_theta: float | None = None  # windowed layers use this one, unscaled (Gemma 3)
    scaling: RopeScaling | None = None
    part: float = (
        1.0  # the share of each head's channels that is turned, from the first on; the others have no position
    )

    def channels(self, d_head: int) -> int:
        """How many channels of a head are turned."""
        return int(d_head * self.part)


class Attention(Record, frozen=True, kw_only=True):
    """How scores are made, beyond the number and size of heads."""

    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False  # a norm over d_head on each query and key head, before rope
    softcap: float | None = None  # scores become cap * tanh(scores / cap)
    query_scale: float | None = None  # scores are multiplied by this ** -0.5; None: d_head
    window: int | None = None  # a windowed layer sees itself and the window - 1 tokens before
    windowed: tuple[bool, ...] = (True,)  # which layers are windowed, cycled over the layers; only with a window
    chunked: bool = False  # windows begin at the multiples of their size (Llama 4)
    sinks: bool = False  # a learned score for each head that stands for no token (GPT-OSS)
    keys_are_values: bool = False  # one matrix makes both (Gemma 4's layers without a window)


class Latent(Record, frozen=True, kw_only=True):
    """Queries, keys and values made of two narrow vectors of each token, of which the cache keeps one (DeepSeek's MLA).

    `d_head` of the shape is what scores are made of: channels from the narrow vector, and `d_rope` with the position.
    """

    kv_rank: int  # of the vector that keys and values are made of
    d_rope: int  # channels of a key that carry the position, the same for all heads
    d_value: int
    q_rank: int | None = None  # None: queries are made of the stream itself


class FullLayers(Record, frozen=True, kw_only=True):
    """Layers without a window whose heads have another size (Gemma 4)."""

    d_head: int
    kv_heads: int
    keys_are_values: bool = False


# Rows that a chip of an expert group sends to another in one round, over the mean (`expert_exchange.py`).
EXPERT_CAPACITY = 1.25


class Experts(Record, frozen=True, kw_only=True):
    """A mixture of experts in place of the MLP of every layer; tokens are never dropped."""

    count: int
    per_token: int
    d_ff: int
    normalise: bool = True  # the weights of the chosen experts are divided by their sum
    balance: float = 0.001  # weight of the balance loss in training (router_aux_loss_coef)
    d_ff_shared: int = 0  # width of one more expert that sees every token; 0: none
    shared_gate: bool = True  # which answers behind a sigmoid gate (Qwen2-MoE)
    bias: bool = False  # in the router and in each expert (GPT-OSS)
    dense_first: int = 0  # layers at the beginning that have a plain MLP
    every: int = 1  # of the others, the last of each so many has experts (Llama 4 Maverick: 2)

    def at(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return layer >= self.dense_first and (layer + 1) % self.every == 0


class Embedding(Record, frozen=True, kw_only=True):
    """The two ends of the network."""

    tied: bool = False  # the output matrix is the embedding table
    scale: float = 1.0  # embeddings are multiplied by this (Gemma: d_model ** 0.5)
    logit_scale: float = 1.0  # logits are multiplied by this (the 16B-128B jobs: d_model ** -0.5)
    logit_softcap: float | None = None


class ModelShape(Record, frozen=True, kw_only=True, cache_hash=True):
    """The dimensions and the variant of one decoder-only transformer."""

    family: Family
    layers: int
    d_model: int
    heads: int
    kv_heads: int
    d_head: int
    d_ff: int  # of the dense MLP; a mixture of experts has its own width in `experts`
    vocab: int
    max_position: int
    activation: Activation = "silu-gated"
    block: Block = "sequential"
    norm: Norm = Norm()
    rope: Rope | None = Rope()  # None: the model has no notion of position but causality
    attention: Attention = Attention()
    embedding: Embedding = Embedding()
    experts: Experts | None = None
    latent: Latent | None = None
    full_layers: FullLayers | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "d_model", "heads", "kv_heads", "d_head", "d_ff", "vocab", "max_position"):
            if getattr(self, name) < 1:
                raise _impossible(f"{name} is {getattr(self, name)}", f"{name} must be at least 1")
        if self.heads % self.kv_heads:
            raise _impossible(
                f"{self.heads} heads cannot share {self.kv_heads} key/value heads",
                "heads must be a multiple of kv_heads",
            )
        if self.rope:
            self._check_rope(self.rope)
        if self.attention.window is not None and (self.attention.window < 1 or not self.attention.windowed):
            raise _impossible(
                f"window is {self.attention.window}", "a window is at least 1 and has a pattern of layers"
            )
        if self.experts and not 1 <= self.experts.per_token <= self.experts.count:
            raise _impossible(
                f"{self.experts.per_token} of {self.experts.count} experts for each token",
                "experts per token must lie between 1 and the number of experts",
            )

    def _check_rope(self, rope: Rope) -> None:
        turned, scaling = rope.channels(self.d_head), rope.scaling
        if self.d_head % 2 or turned % 2 or not 0 < turned <= self.d_head:
            what = f"d_head is {self.d_head}, of which {turned} are turned"
            raise _impossible(
                what, "rotary embedding pairs channels: both must be even, and at least one pair is turned"
            )
        if isinstance(scaling, LongScaling) and {len(scaling.short), len(scaling.long)} != {turned // 2}:
            what = f"longrope has {len(scaling.short)} short and {len(scaling.long)} long factors"
            raise _impossible(what, f"it must have {turned // 2} of each, one for each pair of channels")

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate beside its up-projection (three matrices instead of two)."""
        return self.activation.endswith("-gated")

    @property
    def d_value(self) -> int:
        """Channels of a value."""
        return self.latent.d_value if self.latent else self.d_head

    @property
    def score_scale(self) -> float:
        """What query-key products are multiplied by."""
        return float((self.attention.query_scale or self.d_head) ** -0.5)

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None: the layer sees every token before it."""
        a = self.attention
        return tuple(a.window if a.windowed[i % len(a.windowed)] else None for i in range(self.layers))


def no_quantized_products(shape: ModelShape, kind: str | None) -> str | None:
    """Why the trainer has no int8 or fp8 products for a model; None where it has them, or where none are asked for."""
    if kind in (None, "bfloat16") or shape.experts is None:
        return None
    return f"{kind} products are for dense models, and this one has experts"


def layer_kinds(shape: ModelShape) -> tuple[ModelShape, ...]:
    """Shapes whose layers all hold arrays of the same sizes, and whose layers together are those of the model."""
    experts = shape.experts
    mixed = experts is not None and (experts.dense_first or experts.every > 1)
    return _mixed_kinds(shape) if mixed or shape.full_layers else (shape,)


@cache
def _mixed_kinds(shape: ModelShape) -> tuple[ModelShape, ...]:
    experts = shape.experts
    counts: dict[tuple[bool, int | None], int] = {}
    for layer, window in enumerate(shape.layer_windows):
        kind = (experts is not None and experts.at(layer), window)
        counts[kind] = counts.get(kind, 0) + 1
    return tuple(_kind(shape, routed, window, layers) for (routed, window), layers in counts.items())


def _kind(shape: ModelShape, routed: bool, window: int | None, layers: int) -> ModelShape:
    replace = msgspec.structs.replace
    experts = replace(shape.experts, dense_first=0, every=1) if routed and shape.experts else None
    attention = replace(shape.attention, window=window, windowed=(True,))
    one = replace(shape, layers=layers, experts=experts, attention=attention, full_layers=None)
    full = shape.full_layers
    if full is None or window is not None:
        return one
    attention = replace(attention, keys_are_values=full.keys_are_values)
    return replace(one, attention=attention, d_head=full.d_head, kv_heads=full.kv_heads)


def _impossible(what: str, hint: str) -> UserError:
    return UserError(f"impossible model: {what}", hint)
