"""Products in int8 and fp8: near the exact ones forward and backward, the same on every mesh, and sent between devices as bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podway.model.adapter_files import matrices
from podway.model.decoder import Project
from podway.model.families import find_model
from podway.model.layout import TRAIN_RULES, MeshShape
from podway.train.quantized import FORMATS, Kind, projection, weight_scales
from podway.train.sharding import Exchange, exchange_of
from podway.train.state import abstract_state
from tests.train.running import program, steps

ALONE = Exchange(gather=lambda x: x, scatter=lambda x: x, own_outputs=lambda x: x)
# Of the root mean square, with random numbers: 8 bits of a range of four deviations, and 4 bits of every number.
APART: dict[Kind, float] = {"int8": 0.02, "fp8": 0.06}


def off(found: jax.Array, exact: jax.Array) -> float:
    return float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact))


@pytest.mark.parametrize("kind", FORMATS)
def test_products_and_their_gradients_are_near_the_exact_ones(kind: Kind) -> None:
    """A matrix of two input dimensions and two outputs, tokens and outputs of very different sizes."""
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (2, 16, 4, 32)) * jnp.exp(3 * jax.random.normal(keys[1], (2, 16, 1, 1)))
    w = jax.random.normal(keys[2], (4, 32, 3, 8)) * jnp.exp(2 * jax.random.normal(keys[3], (3, 8)))
    dy = jax.random.normal(keys[4], (2, 16, 3, 8))
    how = FORMATS[kind]
    scale = jnp.max(jnp.abs(w), axis=(0, 1)) / how.largest
    project = projection(kind, {"o": ALONE}, lambda *_: pytest.fail("the product has scales"))

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return project("o", x, {"o": w, "o_scale": scale}, 2)

    y, pull = jax.vjp(product, x, w)
    exact, exact_pull = jax.vjp(lambda x, w: jnp.tensordot(x, w, 2), x, w)
    assert off(y, exact) < APART[kind]
    for found, wanted in zip(pull(dy), exact_pull(dy), strict=True):
        assert off(found, wanted) < APART[kind]


@pytest.mark.parametrize("kind", FORMATS)
def test_nothing_stays_nothing(kind: Kind) -> None:
    project = projection(kind, {"up": ALONE}, lambda *_: pytest.fail("the product has scales"))
    weights = {"up": jnp.zeros((8, 4)), "up_scale": jnp.full((4,), 1e-30 / FORMATS[kind].largest)}
    y, pull = jax.vjp(lambda x: project("up", x, weights, 1), jnp.zeros((2, 3, 8)))
    assert not np.any(y) and not np.any(pull(jnp.zeros_like(y))[0])


def test_scales_belong_to_the_outputs_of_the_layers() -> None:
    made = program()
    tree = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), abstract_state(made).trained)
    scales = weight_scales(tree, made.shape, "int8")["layers"]
    shape = made.shape
    assert scales["q_scale"].shape == (shape.layers, shape.heads, shape.d_head)
    assert scales["o_scale"].shape == (shape.layers, shape.d_model)
    assert np.allclose(scales["down_scale"], 1 / 127)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["int8", pytest.param("fp8", marks=pytest.mark.soak)])
def test_a_step_is_near_the_exact_one(kind: Kind) -> None:
    _, exact = steps(program(), 4, 1)
    _, found = steps(program([f"precision.products={kind}"]), 4, 1)
    for one, two in zip(found, exact, strict=True):
        assert one.good
        assert float(one.loss) == pytest.approx(float(two.loss), rel=0.01)
        assert float(one.grad_norm) == pytest.approx(float(two.grad_norm), rel=0.05)


def test_weights_travel_as_bytes_and_gradients_as_pieces() -> None:
    """What fsdp gathers is int8, half the bytes of bfloat16, and each device makes its piece with its own outputs' scales."""
    shape = find_model("tiny-llama3")
    mesh = jax.sharding.AbstractMesh((4,), ("fsdp",))
    for name in ("up", "down"):  # inputs and outputs are split
        param = matrices(shape)[name]
        exchange = exchange_of(param, MeshShape(fsdp=4), (4,), TRAIN_RULES)
        project = projection("int8", {name: exchange}, lambda *_: pytest.fail("the product has scales"))

        def gradient(
            x: jax.Array, w: jax.Array, scale: jax.Array, name: str = name, project: Project = project
        ) -> object:
            return jax.grad(lambda w: project(name, x, {name: w, f"{name}_scale": scale}, 1).sum())(w)

        dims = param.dims[1:]
        split = jax.sharding.PartitionSpec(*("fsdp" if axis == "embed" else None for axis in param.axes[1:]))
        whole = jax.sharding.PartitionSpec()
        mapped = jax.shard_map(gradient, mesh=mesh, in_specs=(whole, split, whole), out_specs=split, check_vma=False)
        made = jax.make_jaxpr(mapped)(jnp.ones((2, 8, dims[0])), jnp.ones(dims), jnp.ones(dims[1]))
        gathered = [line for line in str(made).splitlines() if "= all_gather" in line]
        assert len(gathered) == 1 and f":i8[{dims[0]},{dims[1]}]" in gathered[0]
        assert made.out_avals[0].shape == dims and "reduce_scatter" in str(made)
