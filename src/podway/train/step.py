"""One training step: a pure function from (state, batch) to (state, metrics), compiled once and donated.

1. Weights are cast to the compute dtype once, each device its own piece. (`precision.products`: the scales of quantized
   weights are made here too.)
2. `shard_map` over the batch axes (`sharding.py`); inside, a scan over microbatches adds up gradients. The loss of a
   token is divided by the number of tokens of the whole step, so that microbatches and devices change nothing. Where chips
   share a sequence (`context`), its tokens are put in an order that gives each of them as much work (`model/zigzag.py`).
3. The gradient's norm is clipped, the learning rate taken from the schedule, the optimizer applied.
4. If the loss or the norm is not finite, the weights and the optimizer's state stay as they were.

With LoRA, `trained` holds the adapters and `frozen` the base; else `frozen` is empty. The gradient is that of `trained`.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as replaced
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from msgspec.structs import replace

from podway.model import decoder, zigzag
from podway.model.adapter_files import matrices
from podway.model.attention_blocks import Blocks
from podway.model.decoder import Compute, Tree
from podway.model.expert_tiles import Tiles
from podway.model.layout import TRAIN_RULES, MeshShape, Rules
from podway.model.mesh import constrain, named_sharding, spec
from podway.model.moe import balance_loss
from podway.model.params import params
from podway.model.remat import Policy, remat_policy
from podway.model.shape import Experts, ModelShape
from podway.train import lora, quantized, sharding
from podway.train.config import TrainConfig
from podway.train.devices import device_memory, generation_of
from podway.train.flags import kernel_vmem
from podway.train.loss import Head, choose_chunks, cross_entropy
from podway.train.optimizer import Optimizer, global_norm, make_optimizer, rate_at
from podway.train.remat import kept_tensors

Batch = dict[str, jax.Array]  # inputs, targets, loss_mask (B, S); segment_ids and positions where rows are packed


class State(NamedTuple):
    """Everything that a checkpoint holds; `frozen` is left out of it."""

    step: jax.Array
    trained: Tree
    moments: Any
    frozen: Tree


class StepMetrics(NamedTuple):
    """What one step reports, still on the devices."""

    loss: jax.Array  # mean cross-entropy of a token
    grad_norm: jax.Array  # before clipping
    rate: jax.Array
    tokens: jax.Array  # that counted in the loss
    good: jax.Array  # False: the step was skipped
    stop: jax.Array  # True: some host was asked to stop


@dataclass(frozen=True)
class Program:
    """How to train one model on one mesh: everything that is fixed when the step is compiled."""

    config: TrainConfig
    shape: ModelShape
    mesh: jax.sharding.Mesh
    rules: Rules = TRAIN_RULES
    interpret: bool = False

    @property
    def sizes(self) -> MeshShape:
        return sharding.mesh_shape(self.mesh)

    @property
    def kept(self) -> Rules:
        """Where weights and moments lie between steps; they are computed with where `rules` say."""
        shared = self.config.mesh.state_over_slices and self.sizes.slices > 1
        return replace(self.rules, embed=(*self.rules.embed, "slices")) if shared else self.rules

    @property
    def rings(self) -> tuple[int, ...]:
        return sharding.rings_of(self.mesh)

    @property
    def compute(self) -> Compute:
        kept = kept_tensors(self.config.remat)
        cudnn = self.config.model.kernel == "cudnn" or (self.config.model.kernel is None and _on_gpu())
        generation = generation_of(self.mesh.devices.flat[0].device_kind)
        plain = Compute(
            dtype=jnp.dtype(self.config.precision.compute),
            rules=self.rules,
            kernel=self.config.model.kernel,
            blocks=Blocks(self.config.model.attention_block, self.config.model.attention_fused, generation),
            zigzag=self.sizes.context if zigzag.is_even(self.config.batch.length, self.sizes.context) else 1,
            interpret=self.interpret,
            remat=None if kept is None else _policy(*kept, cudnn=cudnn),
            project=lora.projection(self.config.lora) if self.config.lora.rank else decoder.contract,
            widen=lora.widening(self.config.lora),
            dispatch=self.config.model.dispatch,
            tiles=Tiles(
                self.config.model.expert_tile, generation, kernel_vmem(os.environ.get("LIBTPU_INIT_ARGS", "").split())
            ),
            longest=self.config.batch.length,
        )
        kind = self.config.precision.products
        if kind is None:
            return replaced(plain, gather=sharding.gatherer(plain, self.sizes, self.rings))
        table = matrices(self.shape)
        exchanges = {
            name: sharding.exchange_of(param, self.sizes, self.rings, self.rules) for name, param in table.items()
        }
        return replaced(
            plain,
            project=quantized.projection(kind, exchanges, plain.project),
            gather=sharding.gatherer(plain, self.sizes, self.rings, table),
        )

    @property
    def optimizer(self) -> Optimizer:
        return make_optimizer(self.config.optimizer, self._decays)

    def _decays(self, tree: Tree) -> Tree:
        """Matrices decay; norms and biases do not."""
        plain = {param.name for param in params(self.shape) if "norm" in param.axes or "_bias" in param.name}
        return sharding.unflat({name: name not in plain for name in sharding.flat(tree)}, tree)


def make_step(program: Program, like: State) -> Callable[[State, Batch, jax.Array], tuple[State, StepMetrics]]:
    """The jitted step. Call it inside `jax.set_mesh(program.mesh)`; the state that goes in is used up.

    The state that comes back lies where `like` does, as what goes in must. Left to the compiler, small arrays would come back
    elsewhere: the second step would be another program, compiled while the slice waits, and a resumed run, which begins with the
    first of the two, would differ from one that was not interrupted in the last bits.
    """
    where = jax.tree.map(lambda leaf: leaf.sharding, like)
    return jax.jit(partial(train_step, program), donate_argnums=0, out_shardings=(where, None))


def make_eval(program: Program) -> Callable[[State, Batch], tuple[jax.Array, jax.Array]]:
    """(sum of the cross-entropy, number of tokens) of a batch, jitted."""

    def run(state: State, batch: Batch) -> tuple[jax.Array, jax.Array]:
        total = batch["loss_mask"].astype(jnp.float32).sum()
        trained, frozen = _cast(program, state.trained), _unchanged(program, state)
        on_device = _per_device(program, trained, frozen, batch, partial(_evaluate, program))
        (entropy,) = on_device(trained, frozen, batch, jnp.ones(()))
        return entropy, total

    return jax.jit(run)


def train_step(program: Program, state: State, batch: Batch, stop_flags: jax.Array) -> tuple[State, StepMetrics]:
    """The step before it is compiled.

    `stop_flags` has one number for each device, above 0 where its host was asked to stop. Its maximum goes back to all hosts,
    so that they stop after the same step.
    """
    config = program.config
    tokens = batch["loss_mask"].astype(jnp.float32).sum()
    each = 1 / jnp.maximum(tokens, 1)
    trained, frozen = _cast(program, state.trained), _unchanged(program, state)
    on_device = _per_device(program, trained, frozen, batch, partial(_gradients, program))
    entropy, gradients = on_device(trained, frozen, batch, each)

    norm = global_norm(gradients)
    loss = entropy * each
    good = jnp.isfinite(norm) & jnp.isfinite(loss)
    if config.optimizer.clip:
        by = jnp.minimum(1.0, config.optimizer.clip / jnp.maximum(norm, 1e-12))
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32) * by, gradients)
    rate = rate_at(state.step, config.schedule, config.optimizer.rate)
    trained, moments = program.optimizer.update(gradients, state.moments, state.trained, rate)
    trained, moments = jax.tree.map(
        lambda new, old: jnp.where(good, new, old), (trained, moments), (state.trained, state.moments)
    )
    metrics = StepMetrics(loss, norm, rate, tokens, good, stop_flags.max() > 0)
    return State(state.step + 1, trained, moments, state.frozen), metrics


def _on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def _policy(save: tuple[str, ...], offload: tuple[str, ...], *, cudnn: bool) -> Policy:
    """Keep the named tensors, and with `context` all that the backward pass of attention needs.

    cuDNN's forward also returns the sums of its softmax, which carry no name: there the primitive itself is kept in
    place of the name, or the whole of attention would be computed again for them.
    """
    if not (cudnn and "context" in save):
        return remat_policy(save, offload)
    named = remat_policy(tuple(name for name in save if name != "context"), offload)

    def policy(primitive: Primitive, *values: object, **parameters: object) -> object:
        return primitive.name.startswith("dot_product_attention_fwd") or named(primitive, *values, **parameters)

    return policy


def _cast(program: Program, tree: Tree) -> Tree:
    """Matrices in the compute dtype; norms and the scales of int8 weights stay as they are."""
    wide = {param.name for param in params(program.shape) if param.axes[-1] == "norm"}
    kind = jnp.dtype(program.config.precision.compute)

    def one(name: str, leaf: jax.Array) -> jax.Array:
        return leaf if name in wide or leaf.dtype == jnp.int8 or lora.is_scale(name) else leaf.astype(kind)

    return sharding.unflat({name: one(name, leaf) for name, leaf in sharding.flat(tree).items()}, tree)


def _unchanged(program: Program, state: State) -> Tree:
    """What a step computes with and does not train: the base of LoRA, or the scales of quantized products."""
    kind = program.config.precision.products
    return _cast(program, state.frozen) if kind is None else quantized.weight_scales(state.trained, program.shape, kind)


def _per_device(
    program: Program, trained: Tree, frozen: Tree, batch: Batch, f: Callable[..., Any]
) -> Callable[..., Any]:
    """`f(trained, frozen, batch, each)` on every device of the batch axes; gradients come back where weights lie."""

    def specs(tree: Tree, rules: Rules) -> Tree:
        leaves = {
            name: sharding.manual_part(sharding.stored_spec(name, leaf.shape, program.shape, program.sizes, rules))
            for name, leaf in sharding.flat(tree).items()
        }
        return sharding.unflat(leaves, tree)

    rows = {name: spec(sharding.MANUAL, None) for name in batch}
    out: Any = (spec(), specs(trained, program.kept)) if f.func is _gradients else (spec(),)  # type: ignore[attr-defined]
    given = (specs(trained, program.rules), specs(frozen, program.rules), rows, spec())
    return sharding.on_each(f, program.sizes, given, out)


def _gradients(program: Program, trained: Tree, frozen: Tree, batch: Batch, each: jax.Array) -> tuple[jax.Array, Tree]:
    """Sum of the cross-entropy over all devices, and the gradient of the loss where the weights lie."""
    parts = program.config.batch.microbatches
    if program.config.compile.unroll:
        trained, frozen = _unstacked(trained), _unstacked(frozen)
    derive = jax.value_and_grad(partial(_loss, program), has_aux=True)
    if parts == 1:
        (_, entropy), gradients = derive(trained, frozen, batch, each)
    else:
        kind = jnp.dtype(program.config.precision.gradients)
        cut = {name: _microbatches(array, parts) for name, array in batch.items()}

        def add(sums: tuple[jax.Array, Tree], part: Batch) -> tuple[tuple[jax.Array, Tree], None]:
            (_, entropy), gradients = derive(trained, frozen, part, each)
            return (sums[0] + entropy, jax.tree.map(lambda s, g: s + g.astype(kind), sums[1], gradients)), None

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, kind), trained)
        (entropy, gradients), _ = lax.scan(add, (jnp.zeros((), jnp.float32), zeros), cut)
    if program.config.compile.unroll:
        gradients = _stacked(gradients)
    specs = {
        name: sharding.stored_spec(name, leaf.shape, program.shape, program.sizes, program.kept)
        for name, leaf in sharding.flat(gradients).items()
    }
    return _summed(entropy, program), sharding.sum_gradients(gradients, specs, program.sizes)


def _evaluate(program: Program, trained: Tree, frozen: Tree, batch: Batch, each: jax.Array) -> tuple[jax.Array]:
    _, entropy = _loss(program, trained, frozen, batch, each)
    return (_summed(entropy, program),)


def _summed(x: jax.Array, program: Program) -> jax.Array:
    over = tuple(axis for axis in sharding.MANUAL if program.sizes.size(axis) > 1)
    return lax.psum(x, over) if over else x  # type: ignore[no-untyped-call]


def _microbatches(x: jax.Array, parts: int) -> jax.Array:
    """(B, ...) to (parts, B / parts, ...), every part with rows of all devices that split the batch."""
    return jnp.moveaxis(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 1, 0)


def _loss(program: Program, trained: Tree, frozen: Tree, batch: Batch, each: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(what is minimised, sum of the cross-entropy) of this device's sequences."""
    shape, compute, mesh, config = program.shape, program.compute, program.sizes, program.config.loss
    tree = lora.joined(trained, frozen)
    batch = _in_order(batch, compute)
    tokens, segments, positions = batch["inputs"], batch.get("segment_ids"), batch["positions"]
    x = sharding.embed(tree["embed"], tokens, shape, compute, mesh)
    counted = None if segments is None else segments > 0
    x, usage = _layers(tree, x, positions, segments, counted, shape, compute)
    hidden = decoder.finish(tree, x, shape)

    e = shape.embedding
    name = "embed" if e.tied else "head"
    param = next(p for p in params(shape) if p.name == name)
    assert compute.gather is not None
    memory = device_memory(program.mesh.devices.flat[0].device_kind)
    kept = jnp.dtype(config.logits)
    chunks = choose_chunks(tokens.shape[0], tokens.shape[1], shape.vocab, memory, config.chunks, kept)
    head = Head(e.tied, e.logit_scale, e.logit_softcap, config.z, chunks, kept)
    weights = batch["loss_mask"].astype(jnp.float32)
    total, entropy = cross_entropy(
        hidden, compute.gather(param, tree[name]), batch["targets"], weights, head, program.rules
    )
    loss = total * each
    if shape.experts is not None:
        tokens_seen = jnp.asarray(tokens.size, jnp.float32) if counted is None else counted.sum().astype(jnp.float32)
        share = _summed(weights.sum(), program) * each  # of this microbatch in the step
        loss = loss + share * _balance(program, shape.experts, usage, tokens_seen)
    return loss, entropy


def _in_order(batch: Batch, compute: Compute) -> Batch:
    """The batch with positions, and with the tokens of a sequence in the order in which chips share it."""
    if "positions" not in batch:
        positions = decoder.positions_in(batch.get("segment_ids"), batch["inputs"].shape[1])
        batch = {**batch, "positions": positions}
    if compute.zigzag == 1:
        return batch
    spread = {name: zigzag.spread(array, compute.zigzag) for name, array in batch.items()}
    return {name: constrain(array, ("batch", "length"), compute.rules) for name, array in spread.items()}


def _balance(program: Program, experts: Experts, usage: jax.Array, tokens: jax.Array) -> jax.Array:
    """This device's part of the weighted balance loss of a microbatch.

    How often experts were chosen is counted over all devices, so that the sum of the parts is the loss of the whole
    microbatch on any mesh. (A step of several microbatches balances each of them, as gradient accumulation does
    everywhere: what later ones choose is not known yet.)
    """
    asked = program.config.loss.balance
    weight = experts.balance if asked is None else asked
    chosen, chance = usage
    whole = jnp.stack([_summed(lax.stop_gradient(chosen), program), chance])
    return weight * balance_loss(whole, _summed(tokens, program) * program.shape.layers, experts)


def _layers(
    tree: Tree,
    x: jax.Array,
    positions: jax.Array,
    segments: jax.Array | None,
    counted: jax.Array | None,
    shape: ModelShape,
    compute: Compute,
) -> tuple[jax.Array, jax.Array]:
    """Through all layers, by scan, or written out where the tree has a list of them: (x, usage of experts)."""
    if isinstance(tree["layers"], dict):
        attend = decoder.whole_sequences(shape, compute, segments)
        x, _, usage = decoder.run_layers(tree, x, positions, shape, compute, attend, None, counted)
        return x, usage
    usages = []
    for layer, window in zip(tree["layers"], shape.layer_windows, strict=True):
        alone = replace(shape, layers=1, attention=replace(shape.attention, windowed=(window is not None,)))
        attend = decoder.whole_sequences(alone, compute, segments)
        stack = {"layers": {name: array[None] for name, array in layer.items()}}
        x, _, usage = decoder.run_layers(stack, x, positions, alone, compute, attend, None, counted)
        usages.append(usage)
    return x, jnp.stack(usages).sum(axis=0)


def _unstacked(tree: Tree) -> Tree:
    """The same weights with a list of layers in place of stacks over them."""
    if "layers" not in tree:
        return tree
    stacks = tree["layers"]
    count = len(next(iter(stacks.values())))
    return {**tree, "layers": [{name: array[i] for name, array in stacks.items()} for i in range(count)]}


def _stacked(tree: Tree) -> Tree:
    """The reverse of `_unstacked`."""
    if "layers" not in tree:
        return tree
    return {**tree, "layers": jax.tree.map(lambda *layers: jnp.stack(layers), *tree["layers"])}


def abstract_batch(program: Program, size: int, length: int, packed: bool = False) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and shardings of a batch, for compiling ahead of time."""
    where = named_sharding(program.mesh, ("batch", "length"), (size, length), program.rules)
    names = ("inputs", "targets", "loss_mask", *(("segment_ids", "positions") if packed else ()))
    kinds = {"loss_mask": jnp.float32}
    return {
        name: jax.ShapeDtypeStruct((size, length), kinds.get(name, jnp.int32), sharding=where)  # type: ignore[no-untyped-call]
        for name in names
    }
