"""Checkpoints: what is saved comes back, what is kept, and what is said when something is wrong."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from podway.errors import UserError
from podway.train.checkpoint import Checkpointer


class TrainState(NamedTuple):
    step: jax.Array
    weights: dict[str, Any]
    moments: Any


def state_of(value: float) -> TrainState:
    weights = {"w": jnp.full((64, 8), value), "deep": {"b": jnp.full((8,), value, jnp.bfloat16)}}
    return TrainState(jnp.int32(value), weights, optax.adamw(1e-3).init(weights))


def abstract(state: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Checkpointer]:
    with Checkpointer(tmp_path / "steps", keep=2, every=2, keep_every=6) as made:
        yield made


def test_what_is_saved_comes_back(keeper: Checkpointer, tmp_path: Path) -> None:
    assert keeper.latest() is None
    assert keeper.save(3, state_of(3), extra={"data": "here", "n": [1, 2]}, force=True)
    keeper.wait()
    with Checkpointer(tmp_path / "steps", keep=2) as other:
        assert other.latest() == 3
        found, extra = other.restore(3, abstract(state_of(0)))
    assert isinstance(found, TrainState)
    assert extra == {"data": "here", "n": [1, 2]}
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(state_of(3)), strict=True):
        assert one.dtype == two.dtype
        assert (one == two).all()


def test_steps_that_are_due_and_steps_that_stay(keeper: Checkpointer) -> None:
    saved = [step for step in range(1, 15) if keeper.save(step, state_of(step))]
    assert saved == [2, 4, 6, 8, 10, 12, 14]
    assert not keeper.save(14, state_of(99), force=True), "a step that is there is not written again"
    keeper.wait()
    assert keeper.steps() == [6, 12, 14], "the last two, and every sixth"
    assert keeper.restore(14, abstract(state_of(0)))[0].step == 14


def test_saved_values_are_those_of_the_call_though_memory_is_given_away(keeper: Checkpointer) -> None:
    following = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    state = {f"w{i}": jnp.zeros(1 << 18) for i in range(4)}
    for step in range(1, 4):
        state = following(state)
        keeper.save(step, state, force=True)
    following(state)
    keeper.wait()
    for step in keeper.steps():
        found, _ = keeper.restore(step, abstract({f"w{i}": jnp.zeros(1 << 18) for i in range(4)}))
        assert all((leaf == step).all() for leaf in found.values())


def test_types_may_change_on_the_way_back(keeper: Checkpointer) -> None:
    keeper.save(1, {"w": jnp.full((4,), 1.5)}, force=True)
    keeper.wait()
    wanted = {"w": jax.ShapeDtypeStruct((4,), jnp.bfloat16, sharding=jnp.zeros(4).sharding)}
    found, _ = keeper.restore(1, wanted)
    assert found["w"].dtype == jnp.bfloat16
    assert found["w"].tolist() == [1.5] * 4


@pytest.mark.parametrize("left", ["12", "12.orbax-checkpoint-tmp"])
def test_what_is_not_whole_is_skipped(tmp_path: Path, left: str) -> None:
    folder = tmp_path / "steps"
    with Checkpointer(folder) as first:
        first.save(5, state_of(5), force=True)
    (folder / left / "state").mkdir(parents=True)
    (folder / left / "state" / "file").write_text("half of it")
    with Checkpointer(folder) as keeper:
        assert keeper.latest() == 5
        keeper.save(12, state_of(12), force=True)
        keeper.wait()
        assert keeper.latest() == 12
        assert keeper.restore(12, abstract(state_of(0)))[0].step == 12


def test_another_model_is_told_by_name(keeper: Checkpointer) -> None:
    keeper.save(1, state_of(1), force=True)
    keeper.wait()
    other = abstract(state_of(0))._replace(weights={"w": jax.ShapeDtypeStruct((64, 9), jnp.float32)})
    with pytest.raises(UserError) as caught:
        keeper.restore(1, other)
    assert "weights.deep.b was [8] and is now absent" in caught.value.what
    assert "weights.w was [64, 8] and is now [64, 9]" in caught.value.what


def test_a_step_that_is_not_there(keeper: Checkpointer) -> None:
    with pytest.raises(UserError, match="no checkpoint of step 4"):
        keeper.restore(4, abstract(state_of(0)))


def test_a_damaged_step_names_the_one_before(keeper: Checkpointer, tmp_path: Path) -> None:
    for step in (1, 2):
        keeper.save(step, {"w": jnp.arange(1 << 16)}, force=True)
    keeper.wait()
    for file in (tmp_path / "steps" / "2" / "state").rglob("*"):
        if file.is_file() and file.stat().st_size > 1000:
            file.write_bytes(bytes(100))
    with pytest.raises(UserError) as caught:
        keeper.restore(2, abstract({"w": jnp.arange(1 << 16)}))
    assert "cannot read step 2" in caught.value.what
    assert "step 1" in caught.value.hint
    assert (np.asarray(keeper.restore(1, abstract({"w": jnp.arange(1 << 16)}))[0]["w"]) == np.arange(1 << 16)).all()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot open"):
        Checkpointer(tmp_path / "file" / "steps")
