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
from typing import Any, Literal

import msgspec

from podway.model.shape import ModelShape

Init = Literal["ones", "zeros", "embedding", "input", "output"]  # decoder.init says what each one means


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
    def fan_in(self) -> int:
        """How many products are summed into one output of this matrix."""
        return prod(self.dims[self.stacked : self.stacked + self.inputs])

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
    layers = [*_norms(shape), *_attention(shape), *(_experts(shape) if shape.experts else _mlp(shape))]
    ends += [_stack(shape.layers, param) for param in layers]
    ends += [Param(name="final_norm", dims=(D,), axes=("norm",), init=_norm_init(shape), hf="model.norm.weight")]
    if not shape.embedding.tied:
        ends += [Param(name="head", dims=(D, V), axes=("embed", "vocab"), init="input", hf="lm_head.weight", inputs=1)]
    return tuple(ends)


def _stack(layers: int, param: Param) -> Param:
    return msgspec.structs.replace(
        param,
        name="layers/" + param.name,
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
    for name, count, axis in (("q", H, "heads"), ("k", G, "kv_heads"), ("v", G, "kv_heads")):
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
    if a.qk_norm:
        table += [
            Param(name=f"{x}_norm", dims=(K,), axes=("norm",), init=_norm_init(shape), hf=f"self_attn.{x}_norm.weight")
            for x in ("q", "k")
        ]
    return table


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
    if shape.experts.d_ff_shared:
        table += _matrices(shape, shape.experts.d_ff_shared, "shared_", f"{room}shared_expert.", _DENSE_NAMES)
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
    return 2 * shape.layers * shape.kv_heads * shape.d_head


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
    D, H, G, K = shape.d_model, shape.heads, shape.kv_heads, shape.d_head
    table = [Activation(name="residual", dims=(D,), axes=("act_embed",))]
    table += [
        Activation(name="qkv", dims=(n, K), axes=(axis, "head_dim"))
        for n, axis in ((H, "heads"), (G, "kv_heads"), (G, "kv_heads"))
    ]
    table += [
        Activation(name="context", dims=(H, K), axes=("heads", "head_dim")),
        Activation(name="attn_out", dims=(D,), axes=("act_embed",)),
    ]
    # Each matrix into the MLP makes one tensor; an expert model makes one for every expert a token is sent to.
    e = shape.experts
    widths = [e.per_token * e.d_ff] + ([e.d_ff_shared] if e.d_ff_shared else []) if e else [shape.d_ff]
    table += [
        Activation(name="mlp_in", dims=(width,), axes=("mlp",)) for width in widths for _ in range(1 + shape.gated)
    ]
    return (*table, Activation(name="mlp_out", dims=(D,), axes=("act_embed",)))
