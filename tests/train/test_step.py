"""One step: microbatches, remat and unrolling change nothing; a step that is no number changes nothing either."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podway.train.state import start_state
from podway.train.step import make_eval, make_step
from tests.long import every
from tests.train.running import batch, program, steps


def test_the_loss_falls_and_is_told() -> None:
    _, metrics = steps(program(["optimizer.rate=0.01"]), 4, 6, same=True)
    losses = [float(one.loss) for one in metrics]
    assert losses[0] == pytest.approx(np.log(256), abs=0.8) and losses[-1] < losses[0] - 1
    assert all(one.good and not one.stop for one in metrics)
    assert metrics[0].tokens == int(batch(program(), 4)["loss_mask"].sum())


@pytest.mark.parametrize(
    "words",
    every(
        3,
        [
            ["batch.microbatches=4"],
            ["remat.policy=none"],
            ["remat.policy=minimal"],
            ["remat.policy=custom", "remat.save=[mlp_in, residual]"],
            ["remat.policy=minimal_offloaded"],
            ["compile.unroll=true", "batch.microbatches=2"],
            ["loss.chunks=8"],
        ],
    ),
)
def test_what_must_change_nothing(words: list[str]) -> None:
    plain, metrics = steps(program(), 8)
    other, others = steps(program(words), 8)
    for one, two in zip(metrics, others, strict=True):
        assert float(one.loss) == pytest.approx(float(two.loss), rel=1e-5)
        assert float(one.grad_norm) == pytest.approx(float(two.grad_norm), rel=1e-4)
    for a, b in zip(jax.tree.leaves(plain.trained), jax.tree.leaves(other.trained), strict=True):
        # Adam divides by the gradient's size, so where that is next to nothing rounding shows; by far under one update.
        assert jnp.max(jnp.abs(a - b)) < 1e-4


@pytest.mark.parametrize("model", every(2, ["tiny-gemma3", "tiny-parallel"]))
def test_unrolled_layers_keep_their_own_windows(model: str) -> None:
    _, metrics = steps(program([f"model.name={model}"]), 2, 1)
    _, others = steps(program([f"model.name={model}", "compile.unroll=true"]), 2, 1)
    assert float(metrics[0].grad_norm) == pytest.approx(float(others[0].grad_norm), rel=1e-4)


def test_a_step_that_is_no_number_changes_nothing() -> None:
    made = program()
    with jax.set_mesh(made.mesh):
        state = start_state(made)
        broken = state.trained | {"final_norm": state.trained["final_norm"].at[0].set(jnp.nan)}
        state = state._replace(trained=broken)
        before = jax.device_get(state)
        after, metrics = make_step(made, state)(state, batch(made, 2), jnp.zeros((1,), jnp.int32))
    assert not metrics.good
    assert int(after.step) == 1
    for a, b in zip(jax.tree.leaves(before.trained), jax.tree.leaves(jax.device_get(after.trained)), strict=True):
        assert np.array_equal(a, b, equal_nan=True)
    assert int(after.moments.steps) == 0


def test_clipping_bounds_the_gradient() -> None:
    """With a plain mean of gradients as the first moment, a clipped step moves it by no more than the bound."""
    state, metrics = steps(program(["optimizer.clip=0.01"]), 4, 1)
    total = sum(float(jnp.sum(jnp.square(m))) for m in jax.tree.leaves(state.moments.mean)) ** 0.5
    assert metrics[0].grad_norm > 0.1
    assert total == pytest.approx(0.01 * (1 - 0.9), rel=1e-3)


def test_one_host_that_is_asked_stops_all() -> None:
    made = program()
    with jax.set_mesh(made.mesh):
        state = start_state(made)
        _, metrics = make_step(made, state)(state, batch(made, 2), jnp.ones((1,), jnp.int32))
    assert metrics.stop


def test_evaluation_is_the_loss_of_the_step() -> None:
    made = program()
    _, metrics = steps(made, 4, 1)
    with jax.set_mesh(made.mesh):
        entropy, tokens = make_eval(made)(start_state(made), batch(made, 4))
    assert float(entropy / tokens) == pytest.approx(float(metrics[0].loss), rel=1e-6)


def test_bfloat16_is_near_float32() -> None:
    _, metrics = steps(program(), 4, 1)
    _, half = steps(program(["precision.compute=bfloat16"]), 4, 1)
    assert float(half[0].loss) == pytest.approx(float(metrics[0].loss), rel=0.01)
