"""The parameter table, declared once (no jax).

`params(shape)` lists every array of a model: name, dimensions, a logical axis for each dimension, how it starts, and
which Hugging Face tensors it is made of. Arrays of a layer are stacked over the layers (axis "layers"), because the
decoder scans over them. Initialisation (`decoder.py`), shardings (`layout.py`), checkpoints (`weights.py`) and planned
bytes all come from this table. `activations(shape)` does the same for the tensors that a training step may keep.

Letters: L layers, D d_model, H heads, G kv_heads, K d_head, F d_ff, E experts, V vocab.
"""

from collections.abc import Mapping
from functools import cache
from math import prod
from typing import Any, Literal, NamedTuple

import msgspec

from podway.model.shape import Experts, Latent, ModelShape, layer_kinds

Init = Literal["ones", "zeros", "embedding", "input", "output"]  # decoder.init says what each one means


class MatrixDims(NamedTuple):
    """The dimensions of a matrix, apart."""

    stacks: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Param(msgspec.Struct, frozen=True, kw_only=True):
    """One array of the model.

    A matrix is stored (stack..., inputs..., outputs...); its Hugging Face tensor is (outputs, inputs), flattened to two
    dimensions. `inputs` counts the input dimensions after the stacked ones; 0 means that both have the same order.
    """

    name: str  # path in the tree: 'embed', 'layers/q'
    dims: tuple[int, ...]
    axes: tuple[str, ...]  # one logical axis a dimension
    init: Init
    hf: str  # tensor name, with {layer} and {expert} where it is stacked
    inputs: int = 0
    rows: tuple[int, int] | None = (
        None  # where its outputs begin in a tensor it shares with others, and how many that one has
    )

    @property
    def stacked(self) -> int:
        """How many leading dimensions are stacks of Hugging Face tensors (layers, then experts)."""
        return self.hf.count("{")

    @property
    def split_dims(self) -> MatrixDims:
        """Stacks, inputs and outputs."""
        begin, end = self.stacked, self.stacked + self.inputs
        return MatrixDims(self.dims[:begin], self.dims[begin:end], self.dims[end:])

    @property
    def fan_in(self) -> int:
        """How many products are summed into one output of this matrix."""
        return prod(self.split_dims.inputs)

    @property
    def hf_dims(self) -> tuple[int, ...]:
        """The dimensions of each of its Hugging Face tensors."""
        inner = self.dims[self.stacked :]
        if self.inputs:
            return (prod(inner[self.inputs :]), prod(inner[: self.inputs]))
        return (prod(inner),) if "head_dim" in self.axes else inner

    @property
    def size(self) -> int:
        return prod(self.dims)


@cache
def params(shape: ModelShape) -> tuple[Param, ...]:
    """Every array of the model, in the order in which it is used."""
    D, V = shape.d_model, shape.vocab
    ends = [Param(name="embed", dims=(V, D), axes=("vocab", "embed"), init="embedding", hf="model.embed_tokens.weight")]
    kinds = layer_kinds(shape)
    for number, kind in enumerate(kinds):
        attention = _latent_attention(kind, kind.latent) if kind.latent else _attention(kind)
        layers = [*_norms(kind), *attention, *(_experts(kind) if kind.experts else _mlp(kind))]
        ends += [_stack(kind.layers, param, f"{number}/" if len(kinds) > 1 else "") for param in layers]
    ends += [Param(name="final_norm", dims=(D,), axes=("norm",), init=_norm_init(shape), hf="model.norm.weight")]
    if not shape.embedding.tied:
        ends += [Param(name="head", dims=(D, V), axes=("embed", "vocab"), init="input", hf="lm_head.weight", inputs=1)]
    return tuple(ends)


def _stack(layers: int, param: Param, kind: str) -> Param:
    return msgspec.structs.replace(
        param,
        name=f"layers/{kind}{param.name}",
        dims=(layers, *param.dims),
        axes=("layers", *param.axes),
        hf="model.layers.{layer}." + param.hf,
    )


def _norm_init(shape: ModelShape) -> Init:
    return "zeros" if shape.norm.plus_one else "ones"


def _norms(shape: ModelShape) -> list[Param]:
    names = {
        "sequential": {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
        "parallel": {"attn_norm": "input_layernorm"},
        "sandwich": {
            "attn_norm": "input_layernorm",
            "attn_out_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_out_norm": "post_feedforward_layernorm",
        },
    }[shape.block]
    start = _norm_init(shape)
    return [
        Param(name=name, dims=(shape.d_model,), axes=("norm",), init=start, hf=f"{hf}.weight")
        for name, hf in names.items()
    ]


def _attention(shape: ModelShape) -> list[Param]:
    D, H, G, K, a = shape.d_model, shape.heads, shape.kv_heads, shape.d_head, shape.attention
    table = []
    begin, shared = 0, shape.family == "phi3"
    made = (("q", H, "heads"), ("k", G, "kv_heads"), ("v", G, "kv_heads"))
    for name, count, axis in made[:2] if a.keys_are_values else made:
        hf = "self_attn.qkv_proj" if shared else f"self_attn.{name}_proj"
        table.append(
            Param(
                name=name,
                dims=(D, count, K),
                axes=("embed", axis, "head_dim"),
                init="input",
                hf=f"{hf}.weight",
                inputs=1,
                rows=(begin, (H + 2 * G) * K) if shared else None,
            )
        )
        begin += count * K
        if a.qkv_bias:
            table.append(
                Param(name=f"{name}_bias", dims=(count, K), axes=(axis, "head_dim"), init="zeros", hf=f"{hf}.bias")
            )
    table.append(
        Param(
            name="o",
            dims=(H, K, D),
            axes=("heads", "head_dim", "embed"),
            init="output",
            hf="self_attn.o_proj.weight",
            inputs=2,
        )
    )
    if a.out_bias:
        table.append(Param(name="o_bias", dims=(D,), axes=("norm",), init="zeros", hf="self_attn.o_proj.bias"))
    if a.sinks:
        table.append(Param(name="sinks", dims=(H,), axes=("heads",), init="zeros", hf="self_attn.sinks"))
    if a.qk_norm:
        table += [
            Param(name=f"{x}_norm", dims=(K,), axes=("norm",), init=_norm_init(shape), hf=f"self_attn.{x}_norm.weight")
            for x in ("q", "k")
        ]
    return table


def _latent_attention(shape: ModelShape, latent: Latent) -> list[Param]:
    """Each vector is made narrow, normalised, and made wide again for every head; the channels of a position go beside."""
    D, H, K, rope, V = shape.d_model, shape.heads, shape.d_head, latent.d_rope, latent.d_value

    def matrix(name: str, inner: tuple[str, int], heads: int, each: int, hf: str) -> Param:
        dims = (inner[1], heads, each) if heads else (inner[1], each)
        axes = (inner[0], "heads", "head_dim") if heads else (inner[0], "norm")
        return Param(name=name, dims=dims, axes=axes, init="input", hf=f"self_attn.{hf}.weight", inputs=1)

    def norm(name: str, size: int, hf: str) -> Param:
        return Param(name=name, dims=(size,), axes=("norm",), init="ones", hf=f"self_attn.{hf}.weight")

    table = []
    if latent.q_rank is None:
        table.append(matrix("q", ("embed", D), H, K, "q_proj"))
    else:
        table += [
            matrix("q_down", ("embed", D), 0, latent.q_rank, "q_a_proj"),
            norm("q_down_norm", latent.q_rank, "q_a_layernorm"),
            matrix("q_up", ("norm", latent.q_rank), H, K, "q_b_proj"),
        ]
    out = Param(
        name="o",
        dims=(H, V, D),
        axes=("heads", "head_dim", "embed"),
        init="output",
        hf="self_attn.o_proj.weight",
        inputs=2,
    )
    return [
        *table,
        matrix("kv_down", ("embed", D), 0, latent.kv_rank + rope, "kv_a_proj_with_mqa"),
        norm("kv_down_norm", latent.kv_rank, "kv_a_layernorm"),
        matrix("kv_up", ("norm", latent.kv_rank), H, K - rope + V, "kv_b_proj"),
        out,
    ]


def _matrices(shape: ModelShape, d_ff: int, prefix: str, hf: str, names: tuple[str, str, str]) -> list[Param]:
    """Gate (if the activation has one), up and down of one MLP; `names` are the Hugging Face words for the three."""
    D = shape.d_model
    inward = [("gate", names[0]), ("up", names[1])] if shape.gated else [("up", names[1])]
    table = [
        Param(name=prefix + n, dims=(D, d_ff), axes=("embed", "mlp"), init="input", hf=f"{hf}{w}.weight", inputs=1)
        for n, w in inward
    ]
    down = Param(
        name=f"{prefix}down",
        dims=(d_ff, D),
        axes=("mlp", "embed"),
        init="output",
        hf=f"{hf}{names[2]}.weight",
        inputs=1,
    )
    return [*table, down]


_DENSE_NAMES = ("gate_proj", "up_proj", "down_proj")


def _mlp(shape: ModelShape) -> list[Param]:
    table = _matrices(shape, shape.d_ff, "", "mlp.", _DENSE_NAMES)
    if shape.family != "phi3":
        return table
    shared = [
        msgspec.structs.replace(param, hf="mlp.gate_up_proj.weight", rows=(begin, 2 * shape.d_ff))
        for param, begin in zip(table[:2], (0, shape.d_ff), strict=True)
    ]
    return [*shared, table[2]]


def _experts(shape: ModelShape) -> list[Param]:
    assert shape.experts is not None
    D, E, mixtral = shape.d_model, shape.experts.count, shape.family == "mixtral"
    room = "block_sparse_moe." if mixtral else "mlp."
    # The router is not split over the experts: it is small, and every token asks all of it.
    table = [
        Param(name="router", dims=(D, E), axes=("embed", "router"), init="input", hf=f"{room}gate.weight", inputs=1)
    ]
    names = ("w1", "w3", "w2") if mixtral else _DENSE_NAMES
    for one in _matrices(shape, shape.experts.d_ff, "experts_", f"{room}experts.{{expert}}.", names):
        table.append(msgspec.structs.replace(one, dims=(E, *one.dims), axes=("experts", *one.axes)))
    if shape.experts.bias:
        table += _expert_biases(shape, shape.experts, room)
    if shape.experts.d_ff_shared:
        table += _matrices(shape, shape.experts.d_ff_shared, "shared_", f"{room}shared_expert.", _DENSE_NAMES)
    if shape.experts.d_ff_shared and shape.experts.shared_gate:
        table.append(
            Param(
                name="shared_router",
                dims=(D, 1),
                axes=("embed", "router"),
                init="input",
                hf=f"{room}shared_expert_gate.weight",
                inputs=1,
            )
        )
    return table


def _expert_biases(shape: ModelShape, experts: Experts, room: str) -> list[Param]:
    E, widths = experts.count, {"gate": experts.d_ff, "up": experts.d_ff, "down": shape.d_model}
    table = [Param(name="router_bias", dims=(E,), axes=("norm",), init="zeros", hf=f"{room}gate.bias")]
    for name, width in widths.items():
        axes = ("experts", "norm" if name == "down" else "mlp")
        table.append(
            Param(name=f"experts_{name}_bias", dims=(E, width), axes=axes, init="zeros", hf=f"{room}{name}_bias")
        )
    return table


def count(shape: ModelShape) -> int:
    """Number of parameters; a tied embedding counts once."""
    return sum(param.size for param in params(shape))


def active_count(shape: ModelShape) -> int:
    """Number of parameters that one token meets: all but the experts it is not sent to."""
    return count(shape) - sum(_idle(shape, param) for param in params(shape))


def matrix_count(shape: ModelShape) -> int:
    """Number of parameters that multiply one token in a matrix product: no lookup, no norm, no bias, no idle expert."""
    head = shape.vocab * shape.d_model if shape.embedding.tied else 0
    return head + sum(param.size - _idle(shape, param) for param in params(shape) if param.inputs)


def _idle(shape: ModelShape, param: Param) -> int:
    if shape.experts is None or "experts" not in param.axes:
        return 0
    return param.size // shape.experts.count * (shape.experts.count - shape.experts.per_token)


def kv_count(shape: ModelShape) -> int:
    """Numbers that one token adds to the key/value cache, over all layers."""
    return sum(kind.layers * cached_numbers(kind) for kind in layer_kinds(shape))


def cached_numbers(kind: ModelShape) -> int:
    """The same for one layer of a kind."""
    if kind.latent is not None:
        return kind.latent.kv_rank + kind.latent.d_rope
    return 2 * kind.kv_heads * kind.d_head


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """{'embed': a, 'layers/q': b} -> {'embed': a, 'layers': {'q': b}}: the tree that the decoder takes."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        room, _, last = name.rpartition("/")
        (tree.setdefault(room, {}) if room else tree)[last] = leaf
    return tree


class Activation(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of one layer and one token that a remat policy may save, by the name the decoder marks it with."""

    name: str
    dims: tuple[int, ...]  # after (batch, length)
    axes: tuple[str, ...]

    @property
    def size(self) -> int:
        return prod(self.dims)


@cache
def activations(shape: ModelShape) -> tuple[Activation, ...]:
    """The named tensors of one layer, in the order in which they are made; one name may mark several tensors."""
    D, H, G, K, V = shape.d_model, shape.heads, shape.kv_heads, shape.d_head, shape.d_value
    table = [Activation(name="residual", dims=(D,), axes=("act_embed",))]
    table += [
        Activation(name="qkv", dims=(n, size), axes=(axis, "head_dim"))
        for n, axis, size in ((H, "heads", K), (G, "kv_heads", K), (G, "kv_heads", V))
    ]
    table += [
        Activation(name="context", dims=(H, V), axes=("heads", "head_dim")),
        Activation(name="attn_out", dims=(D,), axes=("act_embed",)),
    ]
    # Each matrix into the MLP makes one tensor; an expert model makes one for every expert a token is sent to.
    e = shape.experts
    widths = [e.per_token * e.d_ff] + ([e.d_ff_shared] if e.d_ff_shared else []) if e else [shape.d_ff]
    table += [
        Activation(name="mlp_in", dims=(width,), axes=("mlp",)) for width in widths for _ in range(1 + shape.gated)
    ]
    return (*table, Activation(name="mlp_out", dims=(D,), axes=("act_embed",)))
