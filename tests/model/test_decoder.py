from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

from podway.errors import UserError
from podway.model.attention import Pattern, pattern_of, reference
from podway.model.decoder import (
    Compute,
    Layer,
    abstract,
    embed,
    finish,
    forward,
    init,
    logits,
    positions_in,
    run_layers,
)
from podway.model.families import find_model, known_models
from podway.model.layout import SERVE_RULES, TRAIN_RULES, MeshShape, bytes_per_chip, parse_mesh
from podway.model.mesh import make_mesh, named_sharding
from podway.model.params import count
from podway.model.remat import NAMES, remat_policy
from podway.model.shape import ModelShape
from tests.long import every

F32 = Compute(dtype=jnp.float32)
LENGTH = 16


@cache
def fresh(name: str, dtype: Any = jnp.float32) -> Any:
    return jax.jit(init, static_argnums=(0, 2))(find_model(name), jax.random.key(0), dtype)


def tokens_for(shape: ModelShape, batch: int = 8) -> jax.Array:
    return jax.random.randint(jax.random.key(5), (batch, LENGTH), 0, shape.vocab)


def loss(tree: Any, tokens: jax.Array, segments: jax.Array | None, shape: ModelShape, compute: Compute) -> jax.Array:
    out = forward(tree, tokens, shape, compute, segments_BS=segments)
    chances = jax.nn.log_softmax(logits(tree, out.hidden_BSD, shape, compute))
    targets = jnp.roll(tokens, -1, axis=1)
    return -jnp.take_along_axis(chances, targets[..., None], axis=-1).mean() + 0.01 * out.balance


@pytest.mark.parametrize("name", every(2, ["tiny-llama3", "tiny-parallel", "tiny-qwen2-moe"]))
def test_a_fresh_model_is_sane(name: str) -> None:
    """Every parameter has a gradient, and an untied model knows nothing: its loss starts near log(vocab)."""
    shape = find_model(name)
    tree = fresh(name)
    assert sum(leaf.size for leaf in jax.tree.leaves(tree)) == count(shape)
    step = jax.jit(jax.value_and_grad(loss), static_argnums=(3, 4))
    value, gradients = step(tree, tokens_for(shape), None, shape, F32)
    assert np.isfinite(value)
    assert shape.embedding.tied or value == pytest.approx(np.log(shape.vocab), rel=0.25)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(gradients))


# Together: every mesh axis, key heads that do not divide, windows that alternate, experts split and not.
@pytest.mark.parametrize(
    ("name", "mesh"),
    every(
        2,
        [
            ("tiny-llama3.2", "fsdp=8"),
            ("tiny-qwen2.5", "fsdp=2,tensor=4"),
            ("tiny-gemma3", "slices=2,context=2,tensor=2"),
            ("tiny-qwen3-moe", "data=2,expert=2,tensor=2"),
            ("tiny-mixtral", "fsdp=4,expert=2"),
        ],
    ),
)
def test_every_mesh_computes_what_one_device_does(name: str, mesh: str, eight_devices: list[jax.Device]) -> None:
    shape, jax_mesh = find_model(name), make_mesh(parse_mesh(mesh, chips=8), eight_devices)
    tree, tokens = fresh(name), tokens_for(shape)
    segments = (jnp.arange(LENGTH) > 6).astype(jnp.int32)[None].repeat(8, 0)
    compute = Compute(dtype=jnp.float32, remat=remat_policy(save=("qkv", "context")))
    step = jax.jit(jax.value_and_grad(loss), static_argnums=(3, 4))
    expected = step(tree, tokens, segments, shape, compute)
    where = jax.tree.map(lambda leaf: leaf.sharding, abstract(shape, jnp.float32, jax_mesh))
    rows = named_sharding(jax_mesh, ("batch", "length"), tokens.shape, TRAIN_RULES)
    with jax.set_mesh(jax_mesh):
        value, gradients = step(
            jax.device_put(tree, where), jax.device_put(tokens, rows), jax.device_put(segments, rows), shape, compute
        )
    # Of float32 around 6, eight units in the last place: one device alone gives results five apart with other flags of XLA.
    assert value == pytest.approx(float(expected[0]), abs=4e-6)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-6)


@pytest.mark.parametrize("save", [(), ("context",), NAMES])
def test_remat_changes_no_number(save: tuple[str, ...]) -> None:
    shape = find_model("tiny-llama3")
    tree, tokens = fresh("tiny-llama3"), tokens_for(shape, 2)
    step = jax.jit(jax.grad(loss), static_argnums=(3, 4))
    kept = step(tree, tokens, None, shape, F32)
    again = step(tree, tokens, None, shape, Compute(dtype=jnp.float32, remat=remat_policy(save=save)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), again, kept)


def test_an_unknown_tensor_is_refused() -> None:
    with pytest.raises(UserError, match="'atention'"):
        remat_policy(save=("atention",))


def test_segments_are_sequences_of_their_own() -> None:
    """Two sequences packed in a row give what they give alone."""
    shape = find_model("tiny-gemma3")
    tree, tokens = fresh("tiny-gemma3"), tokens_for(shape, 1)
    segments = (jnp.arange(LENGTH) >= 7).astype(jnp.int32)[None]
    packed = forward(tree, tokens, shape, F32, segments_BS=segments).hidden_BSD
    alone = [forward(tree, part, shape, F32).hidden_BSD for part in (tokens[:, :7], tokens[:, 7:])]
    np.testing.assert_allclose(packed, jnp.concatenate(alone, axis=1), atol=2e-5)


def test_layers_written_out_compute_what_the_scan_does() -> None:
    shape = find_model("tiny-gemma3")
    tree, tokens = fresh("tiny-gemma3"), tokens_for(shape, 2)
    listed = tree | {"layers": [jax.tree.map(lambda w, n=n: w[n], tree["layers"]) for n in range(shape.layers)]}
    scanned, written = (forward(t, tokens, shape, F32).hidden_BSD for t in (tree, listed))
    np.testing.assert_allclose(written, scanned, atol=2e-6)


def test_positions_restart_with_each_segment() -> None:
    segments = jnp.array([[4, 4, 4, 9, 9, 4], [0, 1, 2, 2, 2, 2]])
    assert positions_in(segments, 6).tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3]]
    assert positions_in(None, 3).tolist() == [[0, 1, 2]]


def test_the_engines_door() -> None:
    """A cache of its own, threaded through the scan: token by token gives what the whole sequence gives."""
    shape = find_model("tiny-gemma3")
    tree, tokens = fresh("tiny-gemma3"), tokens_for(shape, 2)
    whole = forward(tree, tokens, shape, F32).hidden_BSD
    room = (shape.layers, 2, LENGTH, shape.kv_heads, shape.d_head)

    def step(cache: tuple[jax.Array, jax.Array], token: jax.Array, at: jax.Array) -> tuple[Any, jax.Array]:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array, layer: Layer, cache: Any) -> tuple[jax.Array, Any]:
            place = (layer.number, 0, at, 0, 0)
            cache = tuple(jax.lax.dynamic_update_slice(c, x[None], place) for c, x in zip(cache, (k, v), strict=True))
            keys, values = (c[layer.number] for c in cache)
            behind = at - jnp.arange(LENGTH)
            window = jnp.where(layer.windowed, shape.attention.window or 0, LENGTH)
            scores = jnp.einsum("bshk,bthk->bhst", q, jnp.repeat(keys, 2, axis=2)) * shape.score_scale
            scores = jnp.where((behind >= 0) & (behind < window), scores, -jnp.inf)
            return jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores), jnp.repeat(values, 2, axis=2)), cache

        x = embed(tree, token[:, None], shape, F32)
        x, cache, _ = run_layers(tree, x, jnp.full((2, 1), at), shape, F32, attend, cache)
        return cache, finish(tree, x, shape)[:, 0]

    empty = (jnp.zeros(room), jnp.zeros(room))
    _, found = jax.lax.scan(lambda c, xs: step(c, *xs), empty, (tokens.T, jnp.arange(LENGTH)))
    np.testing.assert_allclose(found.swapaxes(0, 1), whole, atol=2e-5)


@pytest.mark.parametrize("rules", [TRAIN_RULES, SERVE_RULES], ids=["train", "serve"])
@pytest.mark.parametrize("name", ["llama3.1-8b", "qwen3-30b-a3b", "gemma3-27b", "16b"])
def test_planned_bytes_are_the_bytes_of_the_arrays(name: str, rules: Any, eight_devices: list[jax.Device]) -> None:
    shape = find_model(name)
    for text in ("fsdp=8", "fsdp=2,tensor=4", "data=2,expert=4", "slices=2,fsdp=2,tensor=2"):
        mesh = parse_mesh(text)
        tree = abstract(shape, jnp.float32, make_mesh(mesh, eight_devices), rules)
        real = sum(4 * np.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(tree))
        assert real == bytes_per_chip(shape, mesh, rules, 4)


def test_planned_bytes_are_on_each_device(eight_devices: list[jax.Device]) -> None:
    shape, mesh = find_model("tiny-mixtral"), MeshShape(fsdp=2, tensor=2, expert=2)
    where = jax.tree.map(lambda leaf: leaf.sharding, abstract(shape, jnp.bfloat16, make_mesh(mesh, eight_devices)))
    tree = jax.device_put(fresh("tiny-mixtral", jnp.bfloat16), where)
    held = dict.fromkeys(eight_devices, 0)
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    assert set(held.values()) == {bytes_per_chip(shape, mesh, TRAIN_RULES, 2)}


def test_half_precision_is_close_to_full() -> None:
    shape = find_model("tiny-qwen3")
    tree, tokens = fresh("tiny-qwen3"), tokens_for(shape, 2)
    full, half = (
        logits(tree, forward(tree, tokens, shape, compute).hidden_BSD, shape, compute) for compute in (F32, Compute())
    )
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(half, full, atol=0.15)
    assert float(jnp.abs(half - full).max()) > 0


def test_layers_with_windows_differ_from_layers_without() -> None:
    q, k, v = (jax.random.normal(key, (1, 12, 2, 8)) for key in jax.random.split(jax.random.key(0), 3))
    shape = find_model("tiny-gemma3")
    assert pattern_of(shape, 4) == Pattern(24**-0.5, None, 4)
    band, everything = (reference(q, k, v, None, pattern_of(shape, window)) for window in (4, None))
    np.testing.assert_allclose(band[:, :4], everything[:, :4], atol=1e-6)
    assert float(jnp.abs(band[:, 4:] - everything[:, 4:]).max()) > 1e-2


@pytest.mark.parametrize("name", every(4, [name for name in known_models() if not name.startswith("tiny-")]))
def test_every_known_model_traces(name: str) -> None:
    """Shapes agree through the whole network, forward and backward, without a number being computed."""
    shape = replace(find_model(name), layers=2)
    tree = abstract(shape)
    tokens = jax.ShapeDtypeStruct((1, 128), jnp.int32)

    def step(tree: Any, tokens: jax.Array) -> Any:
        return jax.value_and_grad(loss)(tree, tokens, None, shape, Compute())

    value, gradients = jax.eval_shape(step, tree, tokens)
    assert value.shape == ()
    assert jax.tree.structure(gradients) == jax.tree.structure(tree)
