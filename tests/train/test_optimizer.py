"""AdamW is optax's, Adafactor learns, and rates go where the schedule says."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from podway.train.config import OptimizerConfig, ScheduleConfig
from podway.train.optimizer import global_norm, make_optimizer, rate_at

PARAMS = {"a": jnp.linspace(-1, 1, 12).reshape(3, 4), "norm": jnp.ones((4,))}


def all_decay(tree: Any) -> Any:
    return jax.tree.map(lambda _: True, tree)


def test_adamw_is_optax() -> None:
    config = OptimizerConfig(decay=0.1, b1=0.8, b2=0.9, eps=1e-6)
    ours, theirs = make_optimizer(config, all_decay), optax.adamw(0.01, b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.1)
    mine, state = PARAMS, ours.init(PARAMS)
    other, their_state = PARAMS, theirs.init(PARAMS)
    for i in range(5):
        gradients = jax.tree.map(lambda p, i=i: jnp.sin(p * (i + 1)), PARAMS)
        mine, state = ours.update(gradients, state, mine, jnp.float32(0.01))
        change, their_state = theirs.update(gradients, their_state, other)
        other = optax.apply_updates(other, change)
    for name in PARAMS:
        assert jnp.allclose(mine[name], other[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("config", [OptimizerConfig(moments="bfloat16"), OptimizerConfig(kind="adafactor", decay=0.0)])
def test_each_finds_a_minimum(config: OptimizerConfig) -> None:
    optimizer = make_optimizer(config, lambda tree: jax.tree.map(lambda _: False, tree))
    goal = {"w": jnp.full((4, 4), 0.3)}
    params = {"w": jnp.zeros((4, 4))}
    state = optimizer.init(params)
    if config.kind == "adamw":
        assert state.mean["w"].dtype == jnp.bfloat16 and state.square["w"].dtype == jnp.bfloat16
    for _ in range(200):
        gradients = jax.tree.map(lambda p, g: p - g, params, goal)
        params, state = optimizer.update(gradients, state, params, jnp.float32(0.01))
    assert jnp.max(jnp.abs(params["w"] - goal["w"])) < 0.05


def rates(**settings: Any) -> list[float]:
    schedule = ScheduleConfig(**settings)
    return [float(rate_at(jnp.int32(i), schedule, 2.0)) for i in range(schedule.steps)]


def test_schedules() -> None:
    assert rates(steps=4, kind="constant", warmup=2) == pytest.approx([1.0, 2.0, 2.0, 2.0])
    cosine = rates(steps=12, kind="cosine", warmup=2, final=0.1)
    assert cosine[0] == 1.0 and cosine[1] == cosine[2] == 2.0 and cosine[-1] == pytest.approx(0.2)
    assert all(a > b for a, b in itertools.pairwise(cosine[2:]))
    assert rates(steps=5, kind="linear", final=0.0) == pytest.approx([2.0, 1.5, 1.0, 0.5, 0.0])
    wsd = rates(steps=10, kind="wsd", warmup=2, decay=4, final=0.5)
    assert wsd[2:7] == pytest.approx([2.0] * 5) and wsd[-1] == pytest.approx(1.0)


def test_the_norm_is_of_all_leaves() -> None:
    assert global_norm({"a": jnp.full((3,), 2.0), "b": jnp.full((4,), 1.0)}) == pytest.approx(4.0)
