"""Dropless routing against every expert computed for every token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podway.model.expert_dispatch import Dispatch, DispatchKind
from podway.model.grouped import Adapted, ExpertMlp
from podway.model.layout import SERVE_RULES, TRAIN_RULES, parse_mesh, spec_on
from podway.model.mesh import make_mesh
from podway.model.moe import Routing, apply_experts, balance_loss, route
from podway.model.shape import Experts

D, F = 16, 8
SILU = ExpertMlp(jax.nn.silu)


def arrays(experts: Experts, batch: int = 8) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    keys = jax.random.split(jax.random.key(1), 5)
    x = jax.random.normal(keys[0], (batch, 5, D))
    router = jax.random.normal(keys[1], (D, experts.count))
    matrices = tuple(
        jax.random.normal(key, size) * 0.3
        for key, size in zip(keys[2:], [(experts.count, D, F)] * 2 + [(experts.count, F, D)], strict=True)
    )
    return x, router, matrices


def densely(x: jax.Array, router: jax.Array, matrices: tuple[jax.Array, ...], experts: Experts) -> jax.Array:
    gate, up, down = matrices
    chances = jax.nn.softmax(x @ router, axis=-1)
    best, _ = jax.lax.top_k(chances, experts.per_token)
    weights = jnp.where(chances >= best[..., -1:], chances, 0.0)
    if experts.normalise:
        weights = weights / weights.sum(-1, keepdims=True)
    hidden = jax.nn.silu(jnp.einsum("bsd,edf->bsef", x, gate)) * jnp.einsum("bsd,edf->bsef", x, up)
    return jnp.einsum("bsef,efd,bse->bsd", hidden, down, weights)


@pytest.mark.parametrize(
    ("mesh", "kind"),
    [
        (None, None),
        ("fsdp=2,expert=4", "all-to-all"),
        ("fsdp=2,expert=4", "gather"),
        ("expert=2,tensor=2,context=1,data=2", "all-to-all"),
        ("expert=2,tensor=2,context=1,data=2", "gather"),
    ],
)
@pytest.mark.parametrize("normalise", [True, False])
def test_dropless_equals_dense(
    normalise: bool, mesh: str | None, kind: DispatchKind | None, eight_devices: list[jax.Device]
) -> None:
    experts = Experts(count=4, per_token=2, d_ff=F, normalise=normalise)
    given = arrays(experts)

    def sparsely(x: jax.Array, router: jax.Array, matrices: tuple[jax.Array, ...], experts: Experts) -> jax.Array:
        routing = route(x @ router, experts)
        return apply_experts(x, routing, matrices, experts, SILU, TRAIN_RULES, Dispatch(kind))

    def outcome(function) -> object:  # type: ignore[no-untyped-def]
        def loss(x, router, matrices):  # type: ignore[no-untyped-def]
            out = function(x, router, matrices, experts)
            return jnp.sum(out * jnp.cos(jnp.arange(D))), out

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*given)

    expected = outcome(densely)
    if mesh is None:
        found = outcome(sparsely)
    else:
        with jax.set_mesh(make_mesh(parse_mesh(mesh, chips=8), eight_devices)):
            found = outcome(sparsely)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=2e-5)


def test_adapters_of_experts_train_as_their_merged_matrices_do(eight_devices: list[jax.Device]) -> None:
    """Outputs and gradients, of adapters too, are those of dense matrices that the adapters were added to."""
    experts = Experts(count=4, per_token=2, d_ff=F, normalise=True)
    x, router, matrices = arrays(experts)
    keys = iter(jax.random.split(jax.random.key(2), 6))
    lows = tuple(0.3 * jax.random.normal(next(keys), (4, w.shape[1], 2)) for w in matrices)
    highs = tuple(0.3 * jax.random.normal(next(keys), (4, 2, w.shape[2])) for w in matrices)

    def outcome(merged: bool) -> object:
        def loss(x, router, lows, highs):  # type: ignore[no-untyped-def]
            each = zip(matrices, lows, highs, strict=True)
            if merged:
                out = densely(x, router, tuple(w + a @ b for w, a, b in each), experts)
            else:
                adapted = tuple(Adapted(*one) for one in each)
                out = apply_experts(x, route(x @ router, experts), adapted, experts, SILU, TRAIN_RULES)
            return jnp.sum(out * jnp.cos(jnp.arange(D))), out

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))(x, router, lows, highs)

    with jax.set_mesh(make_mesh(parse_mesh("fsdp=2,expert=2,tensor=2"), eight_devices)):
        found = outcome(merged=False)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(outcome(merged=True)), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=2e-5)


def test_a_server_splits_experts_of_few_columns_by_expert(eight_devices: list[jax.Device]) -> None:
    experts = Experts(count=8, per_token=2, d_ff=F, normalise=True)
    x, router, matrices = arrays(experts, batch=1)
    mesh = parse_mesh("tensor=4,data=2", chips=8)
    dims = (experts.count, D, F)
    assert spec_on(("experts", "embed", "mlp"), dims, mesh, SERVE_RULES) == (("expert", "tensor"), None, None)
    wide = (experts.count, D, 4 * 128)
    assert spec_on(("experts", "embed", "mlp"), wide, mesh, SERVE_RULES) == ("expert", None, "tensor")

    def serve(x: jax.Array) -> jax.Array:
        return apply_experts(x, route(x @ router, experts), matrices, experts, SILU, SERVE_RULES)

    with jax.set_mesh(make_mesh(mesh, eight_devices)):
        found = jax.jit(serve)(x)
    np.testing.assert_allclose(np.asarray(found), np.asarray(densely(x, router, matrices, experts)), atol=2e-5)


def one_expert(x: jax.Array, matrices: tuple[jax.Array, ...], number: int) -> jax.Array:
    gate, up, down = (w[number] for w in matrices)
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


@pytest.mark.parametrize("mesh", [None, "fsdp=2,expert=4"])
def test_all_tokens_at_one_expert_are_all_answered(mesh: str | None, eight_devices: list[jax.Device]) -> None:
    """The worst case that a capacity would drop; on a mesh, the rounds that a group of four chips needs for it."""
    experts = Experts(count=4, per_token=1, d_ff=F)
    x, _, matrices = arrays(experts)
    chosen = jnp.full((*x.shape[:2], 1), 3)
    everyone = Routing(chosen, jnp.ones(chosen.shape), jnp.zeros(()))

    def loss(x: jax.Array, matrices: tuple[jax.Array, ...]) -> jax.Array:
        return jnp.sum(apply_experts(x, everyone, matrices, experts, SILU, TRAIN_RULES) ** 2)

    expected = jax.value_and_grad(lambda x, matrices: jnp.sum(one_expert(x, matrices, 3) ** 2), (0, 1))(x, matrices)
    sizes = parse_mesh(mesh, chips=8) if mesh else parse_mesh("data=1")
    with jax.set_mesh(make_mesh(sizes, eight_devices[: sizes.chips])):
        found = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, matrices)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=2e-5, rtol=1e-5)


def test_what_is_beyond_the_capacity_may_be_dropped(eight_devices: list[jax.Device]) -> None:
    """Of 40 tokens on each of two chips all go to the other: 24 rows, 1.2 times the mean, are answered and 16 are not."""
    experts = Experts(count=2, per_token=1, d_ff=F)
    x, _, matrices = arrays(experts, batch=16)
    chosen = jnp.repeat(jnp.array([1, 0]), 8)[:, None, None] * jnp.ones((1, 5, 1), jnp.int32)
    routing = Routing(chosen, jnp.ones(chosen.shape), jnp.zeros(()))
    with jax.set_mesh(make_mesh(parse_mesh("expert=2"), eight_devices[:2])):
        found = jax.jit(
            lambda x: apply_experts(x, routing, matrices, experts, SILU, TRAIN_RULES, Dispatch(capacity=1.2, drop=True))
        )(x)
    whole = jnp.concatenate([one_expert(x[:8], matrices, 1), one_expert(x[8:], matrices, 0)]).reshape(2, 40, D)
    kept = jnp.arange(40)[None, :, None] < 24
    np.testing.assert_allclose(found.reshape(2, 40, D), jnp.where(kept, whole, 0), atol=1e-5)


def test_balance_is_smallest_when_experts_are_used_alike() -> None:
    experts = Experts(count=4, per_token=1, d_ff=F)
    alike = jnp.eye(4)[None] * 20.0
    assert balance_loss(route(alike, experts).usage_2E, 4, experts) == pytest.approx(1.0, abs=1e-3)
    one = jnp.zeros((1, 4, 4)).at[..., 2].set(20.0)
    assert balance_loss(route(one, experts).usage_2E, 4, experts) == pytest.approx(4.0, abs=1e-3)


def test_balance_is_that_of_transformers() -> None:
    """Its definition, written out: means over all tokens of all layers, summed over the choices; padding is left out."""
    experts, random = Experts(count=8, per_token=2, d_ff=F), np.random.default_rng(3)
    logits = random.normal(size=(3, 2, 6, 8)).astype(np.float32)  # layers, batch, length, experts
    counted = random.random((2, 6)) < 0.7
    usage = sum(route(jnp.asarray(layer), experts, jnp.asarray(counted)).usage_2E for layer in logits)
    found = balance_loss(usage, 3 * int(counted.sum()), experts)

    rows = logits[:, counted].reshape(-1, 8).astype(np.float64)
    chances = np.exp(rows) / np.exp(rows).sum(-1, keepdims=True)
    mask = np.eye(8)[np.argsort(-chances, axis=-1)[:, :2]]  # tokens, choices, experts
    assert float(found) == pytest.approx(8 * (mask.mean(0) * chances.mean(0)).sum(), abs=1e-5)
