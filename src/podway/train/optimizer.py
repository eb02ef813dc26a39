"""Learning-rate schedules, AdamW and Adafactor, as pure functions over trees of arrays.

`make_optimizer(config)` gives `init(params)` and `update(gradients, state, params, rate)`. AdamW is written out here,
because its moments may be kept in bfloat16 (half the memory of the state) and the whole update then is one pass over
memory; a test holds it to optax. Adafactor is optax's.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podway.errors import UserError
from podway.train.config import OptimizerConfig, ScheduleConfig

Tree = Any
Decays = Callable[[Tree], Tree]  # which leaves are decayed: a tree of bools


class Optimizer(NamedTuple):
    """`init(params) -> state`; `update(gradients, state, params, rate) -> (params, state)`."""

    init: Callable[[Tree], Tree]
    update: Callable[[Tree, Tree, Tree, jax.Array], tuple[Tree, Tree]]


class Moments(NamedTuple):
    """The state of AdamW."""

    steps: jax.Array
    mean: Tree
    square: Tree


def rate_at(step: jax.Array, schedule: ScheduleConfig, peak: float) -> jax.Array:
    """The learning rate of a step (from 0)."""
    at = step.astype(jnp.float32)
    rising = (at + 1) / max(schedule.warmup, 1)
    low = schedule.final
    length = schedule.decay if schedule.kind == "wsd" else schedule.steps - schedule.warmup
    done = jnp.clip((at - (schedule.steps - length)) / max(length - 1, 1), 0.0, 1.0)  # 1 at the last step
    falling: jax.Array
    if schedule.kind == "constant":
        falling = jnp.ones(())
    elif schedule.kind == "cosine":
        falling = low + (1 - low) * 0.5 * (1 + jnp.cos(jnp.pi * done))
    else:
        falling = 1 - (1 - low) * done
    return peak * jnp.where(at < schedule.warmup, rising, falling)


def make_optimizer(config: OptimizerConfig, decays: Decays) -> Optimizer:
    """The optimizer of a run; `decays` says which leaves weight decay is for."""
    return _adamw(config, decays) if config.kind == "adamw" else _adafactor(config, decays)


def _adamw(config: OptimizerConfig, decays: Decays) -> Optimizer:
    kept = jnp.dtype(config.moments)

    def init(params: Tree) -> Moments:
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, kept), params)
        return Moments(jnp.zeros((), jnp.int32), zeros, jax.tree.map(jnp.copy, zeros))

    def update(gradients: Tree, state: Moments, params: Tree, rate: jax.Array) -> tuple[Tree, Moments]:
        count = state.steps + 1
        undo_mean = 1 / (1 - config.b1 ** count.astype(jnp.float32))
        undo_square = 1 / (1 - config.b2 ** count.astype(jnp.float32))

        def one(g: jax.Array, m: jax.Array, v: jax.Array, p: jax.Array, decayed: bool) -> tuple[jax.Array, ...]:
            g, wide = g.astype(jnp.float32), p.astype(jnp.float32)
            m = config.b1 * m.astype(jnp.float32) + (1 - config.b1) * g
            v = config.b2 * v.astype(jnp.float32) + (1 - config.b2) * g * g
            direction = m * undo_mean / (jnp.sqrt(v * undo_square) + config.eps)
            if decayed and config.decay:
                direction = direction + config.decay * wide
            return (wide - rate * direction).astype(p.dtype), m.astype(kept), v.astype(kept)

        done = jax.tree.map(one, gradients, state.mean, state.square, params, decays(params))
        new, mean, square = (jax.tree.map(lambda _, t, i=i: t[i], params, done) for i in range(3))
        return new, Moments(count, mean, square)

    return Optimizer(init, update)


def _adafactor(config: OptimizerConfig, decays: Decays) -> Optimizer:
    try:
        import optax  # type: ignore[import-untyped]  # here, because only this optimizer needs it
    except ImportError:
        raise UserError("adafactor needs optax", "pip install 'podway[train]'") from None
    # The rate is applied here and not by optax, so that one schedule serves both optimizers.
    inner = optax.adafactor(
        learning_rate=1.0, min_dim_size_to_factor=128, multiply_by_parameter_scale=False, dtype_momentum=config.moments
    )

    def init(params: Tree) -> Tree:
        return inner.init(params)

    def update(gradients: Tree, state: Tree, params: Tree, rate: jax.Array) -> tuple[Tree, Tree]:
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        steps, state = inner.update(wide, state, params)

        def one(p: jax.Array, by: jax.Array, decayed: bool) -> jax.Array:
            shrunk = p.astype(jnp.float32) * (1 - rate * config.decay if decayed else 1.0)
            return (shrunk + rate * by).astype(p.dtype)

        return jax.tree.map(one, params, steps, decays(params)), state

    return Optimizer(init, update)


def global_norm(tree: Tree) -> jax.Array:
    """The Euclidean norm of all leaves together, in float32."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(jnp.sum(jnp.stack(squares)))
