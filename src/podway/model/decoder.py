"""The decoder: pure functions over the tree of the parameter table.

Letters: B batch, S length, D d_model, H heads, G kv_heads, N either, K d_head, F d_ff, E experts, V vocab.

    tokens -> embed -> scan over the layers -> final norm -> hidden -> logits

`forward` goes from tokens to hidden, and `logits` the rest, so that a trainer may cut the logits into chunks. Parameters
may be stored in float32; each is cast to `Compute.dtype` where it is used. Norms, rotations, softmax and logits are made
in float32.

Three doors for those who build on it, all in `Compute`:
  gather   what is done to each stored array before use (default: cast, and gather what fsdp split)
  project  how a layer multiplies by one of its matrices (LoRA and int8 weights come in here)
  remat    which named tensors are kept for the backward pass (`remat.py`)

And one for a server on one GPU: `add_norm`, the sum of the residual stream and the norm after it as one operation.

And one argument of `run_layers`: `attend`. The trainer's attention sees whole sequences; the serving engine passes its
own, which writes keys and values to its pages and reads them back. It is called once in the scan's body as

    attend(q_BSHK, k_BSGK, v_BSGK, layer, carry) -> (context_BSHK, carry)

where `layer` has the layer's number and whether it is windowed (both traced), keys are already rotated, queries not yet
scaled, and `carry` is any pytree that is threaded through the layers (one page pool for all of them).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from msgspec.structs import replace

from podway.model import rope
from podway.model.attention import Kernel, attend, pattern_of
from podway.model.attention_blocks import AUTO, Blocks
from podway.model.embedding import look_up
from podway.model.expert_dispatch import DROPLESS, Dispatch
from podway.model.expert_tiles import AUTO_TILES, Tiles
from podway.model.grouped import ExpertMlp, Matrix
from podway.model.layout import TRAIN_RULES, Rules
from podway.model.mesh import constrain, named_sharding
from podway.model.moe import apply_experts, balance_loss, route
from podway.model.params import Param, nest, params
from podway.model.remat import Policy, mark
from podway.model.shape import Activation, ModelShape, Norm

Tree = dict[str, Any]  # arrays by the names of the parameter table
Weights = dict[str, jax.Array]  # the arrays of one layer


class Layer(NamedTuple):
    """What is known of a layer inside the scan."""

    number: jax.Array  # int32, from 0
    windowed: jax.Array  # bool


Carry = Any  # a pytree that is threaded through the layers
Stream = tuple[jax.Array, jax.Array | None, Carry]  # between layers: x, what is still to be added to it, the carry
Turn = Callable[[jax.Array, jax.Array], jax.Array]  # queries or keys, and whether the layer is windowed
Attend = Callable[[jax.Array, jax.Array, jax.Array, Layer, Carry], tuple[jax.Array, Carry]]
Gather = Callable[[Param, jax.Array], jax.Array]
Project = Callable[[str, jax.Array, Weights, int], jax.Array]
Widen = Callable[[str, Weights], Matrix]
Head = Callable[[jax.Array, Tree], jax.Array]
AddNorm = Callable[[jax.Array, jax.Array, jax.Array, Norm], tuple[jax.Array, jax.Array]]


def contract(name: str, x: jax.Array, weights: Weights, inputs: int) -> jax.Array:
    """x (..., inputs...) times weights[name] (inputs..., outputs...), over the last `inputs` dimensions of x."""
    return jnp.tensordot(x, weights[name], axes=inputs)


def plain_weights(name: str, weights: Weights) -> jax.Array:
    """A stack of experts as it is stored."""
    return weights[name]


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How to compute, as `ModelShape` says what."""

    dtype: DTypeLike = jnp.bfloat16
    rules: Rules = TRAIN_RULES
    kernel: Kernel | None = None  # None: the best for this machine
    blocks: Blocks = AUTO  # of the splash kernel
    zigzag: int = (
        1  # chips whose work the order of the tokens makes equal (zigzag.py); 1: tokens in the order of the text
    )
    interpret: bool = False  # run Pallas kernels in interpret mode (tests on CPU)
    remat: Policy | None = None  # None: keep everything
    gather: Gather | None = None
    project: Project = contract
    widen: Widen = plain_weights  # a stack of experts as it is multiplied
    dispatch: Dispatch = DROPLESS  # how tokens reach the experts of other chips
    tiles: Tiles = AUTO_TILES  # of the experts' products
    head: Head | None = None  # logits of an untied head, in float32; None: by the head as it is stored
    longest: int | None = None  # positions are below this; None: below the model's `max_position`
    add_norm: AddNorm | None = None  # (x + added, the norm of it by this weight); None: left to the compiler


class Output(NamedTuple):
    hidden_BSD: jax.Array
    balance: jax.Array  # the experts' balance loss; 0 for a dense model


def init(shape: ModelShape, key: jax.Array, dtype: DTypeLike = jnp.float32) -> Tree:
    """Random parameters; each array depends on the key and its place in the table only, whatever the sharding."""
    return nest({p.name: _start(p, shape, jax.random.fold_in(key, i), dtype) for i, p in enumerate(params(shape))})


def _start(param: Param, shape: ModelShape, key: jax.Array, dtype: DTypeLike) -> jax.Array:
    if param.init == "ones":
        return jnp.ones(param.dims, dtype)
    if param.init == "zeros":
        return jnp.zeros(param.dims, dtype)
    if param.init == "embedding":  # logits of a tied model start with variance 1
        std = 1 / (shape.embedding.logit_scale * shape.d_model**0.5)
    else:  # outputs start with variance 1; what is added to the residual stream shrinks with the number of additions
        std = param.fan_in**-0.5 / ((2 * shape.layers) ** 0.5 if param.init == "output" else 1)
    sample = jax.random.truncated_normal(key, -3, 3, param.dims, jnp.float32)
    start: jax.Array = (sample * std).astype(dtype)
    return start


def abstract(
    shape: ModelShape, dtype: DTypeLike = jnp.float32, mesh: jax.sharding.Mesh | None = None, rules: Rules = TRAIN_RULES
) -> Tree:
    """The tree of `init` without its numbers: shapes, dtypes and, with a mesh, shardings."""

    def one(param: Param) -> jax.ShapeDtypeStruct:
        sharding = named_sharding(mesh, param.axes, param.dims, rules) if mesh is not None else None
        return jax.ShapeDtypeStruct(param.dims, dtype, sharding=sharding)  # type: ignore[no-untyped-call]

    return nest({param.name: one(param) for param in params(shape)})


def forward(
    tree: Tree,
    tokens_BS: jax.Array,
    shape: ModelShape,
    compute: Compute,
    *,
    positions_BS: jax.Array | None = None,
    segments_BS: jax.Array | None = None,
) -> Output:
    """Whole sequences, causally. Tokens see only their own segment; positions default to the index in the segment."""
    if positions_BS is None:
        positions_BS = positions_in(segments_BS, tokens_BS.shape[1])
    x_BSD = embed(tree, tokens_BS, shape, compute)
    counted_BS = None if segments_BS is None else segments_BS > 0
    x_BSD, _, usage = run_layers(
        tree, x_BSD, positions_BS, shape, compute, whole_sequences(shape, compute, segments_BS), None, counted_BS
    )
    tokens = tokens_BS.size if counted_BS is None else counted_BS.sum()
    balance = balance_loss(usage, tokens * shape.layers, shape.experts) if shape.experts else usage
    return Output(finish(tree, x_BSD, shape), balance)


def positions_in(segments_BS: jax.Array | None, length: int) -> jax.Array:
    """(B or 1, S): how far each token is from the first of its run of equal segment ids."""
    index = jnp.arange(length, dtype=jnp.int32)[None, :]
    if segments_BS is None:
        return index
    begins = jnp.pad(segments_BS[:, 1:] != segments_BS[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)


def embed(tree: Tree, tokens_BS: jax.Array, shape: ModelShape, compute: Compute) -> jax.Array:
    table = tree["embed"].astype(compute.dtype)
    if compute.gather is not None:
        table = compute.gather(params(shape)[0], table)
    x_BSD = look_up(table, tokens_BS, compute.rules)
    return x_BSD * jnp.asarray(shape.embedding.scale, compute.dtype)


def finish(tree: Tree, x_BSD: jax.Array, shape: ModelShape) -> jax.Array:
    return rms_norm(x_BSD, tree["final_norm"], shape.norm)


def logits(tree: Tree, hidden: jax.Array, shape: ModelShape, compute: Compute) -> jax.Array:
    """(..., V) in float32 of hidden (..., D)."""
    gather, e = _gatherer(shape, compute), shape.embedding
    if e.tied:
        out = jnp.einsum("...d,vd->...v", hidden, gather("embed", tree["embed"]), preferred_element_type=jnp.float32)
    elif compute.head is not None:
        out = compute.head(hidden, tree)
    else:
        head = gather("head", tree["head"])
        out = jnp.einsum("...d,dv->...v", hidden, head, preferred_element_type=jnp.float32)
    out = out.astype(jnp.float32) * e.logit_scale
    return out if e.logit_softcap is None else e.logit_softcap * jnp.tanh(out / e.logit_softcap)


def run_layers(
    tree: Tree,
    x_BSD: jax.Array,
    positions_BS: jax.Array,
    shape: ModelShape,
    compute: Compute,
    attend_with: Attend,
    carry: Carry,
    counted_BS: jax.Array | None = None,
) -> tuple[jax.Array, Carry, jax.Array]:
    """All layers, by scan or written out: (x, carry, usage of the experts by the counted tokens, see `Routing`)."""
    turn = _rotation(shape, positions_BS, compute)
    gather = _gatherer(shape, compute)
    windowed = jnp.asarray([window is not None for window in shape.layer_windows])

    # Written out for one device, what a layer adds is left to the norm of the next one, which sums and norms at once.
    later = compute.add_norm is not None and not isinstance(tree["layers"], dict)

    def body(state: Stream, here: tuple[Weights, Layer]) -> tuple[Stream, jax.Array]:
        x, added, carry = state
        stored, layer = here
        x = mark(x, "residual")
        weights = {name: gather(f"layers/{name}", array) for name, array in stored.items()}
        x, added, carry, usage = _layer(x, added, weights, layer, carry, turn, shape, compute, attend_with, counted_BS)
        if later:
            return (x, added, carry), usage
        return (constrain(x + added, ("batch", "length", "act_embed"), compute.rules), None, carry), usage

    if compute.remat is not None:
        body = jax.checkpoint(body, policy=compute.remat, prevent_cse=False)
    layers = Layer(jnp.arange(shape.layers, dtype=jnp.int32), windowed)
    if isinstance(tree["layers"], dict):
        begin: Stream = (x_BSD, None, carry)
        (x_BSD, _, carry), usages = jax.lax.scan(body, begin, (tree["layers"], layers))
        return x_BSD, carry, usages.sum(axis=0)
    # A list of single layers is written out: where the compiler would copy a layer's weights out of the stack at each
    # turn of a scan, a step that is bound by reading them takes longer.
    each, added = [], None
    for number, weights in enumerate(tree["layers"]):
        here = Layer(layers.number[number], layers.windowed[number])
        (x_BSD, added, carry), usage = body((x_BSD, added, carry), (weights, here))
        each.append(usage)
    return x_BSD if added is None else x_BSD + added, carry, jnp.stack(each).sum(axis=0)


def whole_sequences(shape: ModelShape, compute: Compute, segments_BS: jax.Array | None) -> Attend:
    """The trainer's attention: no cache, every layer's own window."""
    windows = sorted(set(shape.layer_windows), key=lambda w: w or 0)  # [None], [w] or [None, w]

    def run(q: jax.Array, k: jax.Array, v: jax.Array, layer: Layer, carry: Carry) -> tuple[jax.Array, Carry]:
        def through(window: int | None) -> Callable[..., jax.Array]:
            return lambda q, k, v: attend(
                q, k, v, segments_BS, pattern_of(shape, window), compute.rules,
                kernel=compute.kernel, blocks=compute.blocks, zigzag=compute.zigzag, interpret=compute.interpret,
            )  # fmt: skip

        if len(windows) == 1:
            return through(windows[0])(q, k, v), carry
        # One program holds both kinds of layer, and runs the one it needs: masks are fixed when it is compiled.
        everything, band = (through(window) for window in windows)
        out: jax.Array = jax.lax.cond(layer.windowed, band, everything, q, k, v)
        return out, carry

    return run


def _layer(
    x: jax.Array,
    added: jax.Array | None,
    w: Weights,
    layer: Layer,
    carry: Carry,
    turn: Turn,
    shape: ModelShape,
    compute: Compute,
    attend_with: Attend,
    counted_BS: jax.Array | None,
) -> tuple[jax.Array, jax.Array, Carry, jax.Array]:
    """(x, what is to be added to it, carry, usage)."""
    x, normed = _sum_and_norm(x, added, w["attn_norm"], shape, compute)
    attended, carry = _attention(normed, w, layer, carry, turn, shape, compute, attend_with)
    if shape.block == "parallel":
        out, usage = _mlp(normed, w, shape, compute, counted_BS)
        return x + attended, out, carry, usage
    if shape.block == "sandwich":
        attended = rms_norm(attended, w["attn_out_norm"], shape.norm)
    x, normed = _sum_and_norm(x, attended, w["mlp_norm"], shape, compute)
    out, usage = _mlp(normed, w, shape, compute, counted_BS)
    if shape.block == "sandwich":
        out = rms_norm(out, w["mlp_out_norm"], shape.norm)
    return x, out, carry, usage


def _sum_and_norm(
    x: jax.Array, added: jax.Array | None, weight: jax.Array, shape: ModelShape, compute: Compute
) -> tuple[jax.Array, jax.Array]:
    if added is not None and compute.add_norm is not None:
        return compute.add_norm(x, added, weight, shape.norm)
    x = x if added is None else x + added
    return x, rms_norm(x, weight, shape.norm)


def _attention(
    x: jax.Array,
    w: Weights,
    layer: Layer,
    carry: Carry,
    turn: Turn,
    shape: ModelShape,
    compute: Compute,
    attend_with: Attend,
) -> tuple[jax.Array, Carry]:
    def heads(name: str, axis: str) -> jax.Array:
        out = compute.project(name, x, w, 1)
        if shape.attention.qkv_bias:
            out = out + w[f"{name}_bias"]
        return constrain(out, ("batch", "length", axis, "head_dim"), compute.rules)

    if "qkv" in w:  # the three matrices side by side: one product (serve/weight_layout.py)
        q, k, v = jnp.split(heads("qkv", "heads"), [shape.heads, shape.heads + shape.kv_heads], axis=2)
    else:
        q, k, v = heads("q", "heads"), heads("k", "kv_heads"), heads("v", "kv_heads")
    if shape.attention.qk_norm:
        q, k = rms_norm(q, w["q_norm"], shape.norm), rms_norm(k, w["k_norm"], shape.norm)
    q, k = turn(q, layer.windowed), turn(k, layer.windowed)
    q, k, v = (mark(x, "qkv") for x in (q, k, v))
    context, carry = attend_with(q, k, v, layer, carry)
    out = compute.project("o", context, w, 2)
    if shape.attention.out_bias:
        out = out + w["o_bias"]
    out = constrain(out, ("batch", "length", "act_embed"), compute.rules)
    return mark(out, "attn_out"), carry


def _mlp(
    x: jax.Array, w: Weights, shape: ModelShape, compute: Compute, counted_BS: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    if shape.experts is None:
        out, usage = _dense(x, w, "", shape, compute), jnp.zeros((), jnp.float32)
    else:
        logits_BSE = jnp.tensordot(x, w["router"], 1, preferred_element_type=jnp.float32)
        routing = route(logits_BSE, shape.experts, counted_BS)
        names = ("experts_gate", "experts_up", "experts_down") if shape.gated else ("experts_up", "experts_down")
        matrices = tuple(compute.widen(name, w) for name in names)
        mlp = ExpertMlp(_ACTIVATE[shape.activation], compute.tiles)
        out = apply_experts(x, routing, matrices, shape.experts, mlp, compute.rules, compute.dispatch)
        usage = routing.usage_2E
        if shape.experts.d_ff_shared:
            share = jax.nn.sigmoid(jnp.tensordot(x, w["shared_router"], 1))
            out = out + share * _dense(x, w, "shared_", shape, compute)
    out = constrain(out, ("batch", "length", "act_embed"), compute.rules)
    return mark(out, "mlp_out"), usage


def _dense(x: jax.Array, w: Weights, prefix: str, shape: ModelShape, compute: Compute) -> jax.Array:
    def into(name: str) -> jax.Array:
        out = compute.project(prefix + name, x, w, 1)
        return mark(constrain(out, ("batch", "length", "mlp"), compute.rules), "mlp_in")

    activate = _ACTIVATE[shape.activation]
    if f"{prefix}gate_up" in w:  # both side by side (serve/weight_layout.py)
        gate, up = jnp.split(into("gate_up"), 2, axis=-1)
        wide = activate(gate) * up
    else:
        wide = activate(into("gate")) * into("up") if shape.gated else activate(into("up"))
    return compute.project(f"{prefix}down", wide, w, 1)


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


_ACTIVATE: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu-gated": jax.nn.silu,
    "gelu-gated": _gelu,
    "relu": jax.nn.relu,
    "gelu": _gelu,
}


def rms_norm(x: jax.Array, weight: jax.Array, norm: Norm) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + norm.eps)
    scale = weight.astype(jnp.float32) + (1.0 if norm.plus_one else 0.0)
    return (wide * scale).astype(x.dtype)


def _rotation(shape: ModelShape, positions_BS: jax.Array, compute: Compute) -> Turn:
    """How queries and keys are turned: by one set of angles, or by one for each kind of layer."""
    kind = shape.rope
    if kind is None:
        return lambda x, windowed: x

    def angles(local: bool) -> rope.Angles:
        freqs = rope.frequencies(kind, shape.d_head, local=local, longest=compute.longest or shape.max_position)
        made = rope.angles(positions_BS, freqs, rope.magnitude(kind, local=local))
        # Where small kernels count, they are made once: the compiler would make them in each layer again.
        if compute.add_norm is None:
            return made
        once: rope.Angles = jax.lax.optimization_barrier(made)  # type: ignore[no-untyped-call]
        return once

    everywhere = angles(local=False)
    if kind.local_theta is None:
        return lambda x, windowed: rope.rotate(x, everywhere)
    local = angles(local=True)

    def turn(x: jax.Array, windowed: jax.Array) -> jax.Array:
        cos, sin = (jnp.where(windowed, near, far) for near, far in zip(local, everywhere, strict=True))
        return rope.rotate(x, (cos, sin))

    return turn


def _gatherer(shape: ModelShape, compute: Compute) -> Callable[[str, jax.Array], jax.Array]:
    table = {param.name: param for param in params(shape)}
    gather = compute.gather or default_gather(compute)
    return lambda name, array: gather(table[name], array) if name in table else array


def default_gather(compute: Compute) -> Gather:
    """Cast matrices and biases to the compute dtype, and gather what fsdp split along d_model.

    The gradient is asked for in the stored layout, so that the compiler may reduce-scatter it instead of reducing it
    everywhere and throwing most of it away.
    """
    stored = compute.rules
    used = replace(stored, embed=())

    def gather(param: Param, array: jax.Array) -> jax.Array:
        if param.axes[-1] == "norm" and not param.name.endswith("_bias"):
            return array  # norms work in float32
        axes = param.axes[len(param.axes) - array.ndim :]  # inside the scan the layer axis is gone

        @jax.custom_vjp
        def through(x: jax.Array) -> jax.Array:
            return constrain(x, axes, used)

        through.defvjp(lambda x: (through(x), None), lambda _, g: (constrain(g, axes, stored),))
        return through(array.astype(compute.dtype))

    return gather
