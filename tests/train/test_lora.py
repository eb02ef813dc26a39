"""LoRA: the loss falls, the base stays bit-equal, the merged model is the adapted one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podway.errors import UserError
from podway.model import decoder
from podway.train import lora
from podway.train.state import start_state
from tests.train.running import batch, program, steps

WORDS = ["lora.rank=4", "lora.base=float32", "optimizer.rate=0.02", "lora.targets=[q, v, o, up, down]"]


@pytest.mark.parametrize("base", ["float32", "int8"])
def test_the_loss_falls_and_the_base_stays(base: str) -> None:
    made = program([*WORDS, f"lora.base={base}"])
    with jax.set_mesh(made.mesh):
        before = jax.device_get(start_state(made).frozen)
    state, metrics = steps(made, 4, 8, same=True)
    assert float(metrics[-1].loss) < float(metrics[0].loss) - 0.3
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(jax.device_get(state.frozen)), strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b)
    if base == "int8":
        assert before["layers"]["q"].dtype == np.int8


def test_only_adapters_are_trained() -> None:
    state, _ = steps(program(WORDS), 2, 1)
    assert set(state.trained["layers"]) == {f"{n}_lora_{x}" for n in ("q", "v", "o", "up", "down") for x in "ab"}
    assert set(state.trained) == {"layers"}


def test_it_starts_at_the_base_model() -> None:
    _, full = steps(program(), 4, 1)
    _, adapted = steps(program(WORDS), 4, 1)
    assert float(full[0].loss) == pytest.approx(float(adapted[0].loss), rel=1e-6)


@pytest.mark.parametrize(("base", "tolerance"), [("float32", 1e-4), ("int8", 1e-3)])
def test_merged_weights_are_the_adapted_model(base: str, tolerance: float) -> None:
    made = program([*WORDS, f"lora.base={base}"])
    state, _ = steps(made, 4, 3, same=True)
    tokens = batch(made, 2)["inputs"]
    compute = decoder.Compute(dtype=jnp.float32, kernel="reference", project=lora.projection(made.config.lora))
    plain = decoder.Compute(dtype=jnp.float32, kernel="reference")
    tree = lora.joined(state.trained, state.frozen)
    adapted = decoder.forward(tree, tokens, made.shape, compute).hidden_BSD
    merged = lora.merge(state.trained, state.frozen, made.config.lora, made.shape)
    assert set(merged["layers"]) == set(decoder.abstract(made.shape)["layers"])
    apart = jnp.abs(adapted - decoder.forward(merged, tokens, made.shape, plain).hidden_BSD)
    assert jnp.max(apart) < tolerance


def test_int8_is_near_the_weights() -> None:
    made = program([*WORDS, "lora.base=int8"])
    with jax.set_mesh(made.mesh):
        tree = decoder.init(made.shape, jax.random.key(0))
        frozen = lora.freeze(tree, made.config.lora, made.shape)
    back = lora.merge(lora.init(made.config.lora, made.shape, jax.random.key(1)), frozen, made.config.lora, made.shape)
    for name in ("q", "down"):
        apart = jnp.max(jnp.abs(back["layers"][name] - tree["layers"][name]))
        assert apart < jnp.max(jnp.abs(tree["layers"][name])) / 127


def test_a_matrix_that_the_model_lacks_is_named() -> None:
    made = program()
    with pytest.raises(UserError, match="no matrix 'qq'"):
        lora.targets_of(program(["lora.rank=2", "lora.targets=[qq]"]).config.lora, made.shape)
