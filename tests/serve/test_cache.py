"""Attention over pages: the reference against plain attention, and the kernels against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import ref_ragged_paged_attention

from podway.errors import UserError
from podway.model.attention import Pattern, reference
from podway.serve import cache, cache_layout, cache_tpu
from podway.serve.cache_layout import Plan

LAYERS, PAGES, PAGE, HEADS, KV, K = 2, 12, 8, 4, 2, 16


def plan_for(backend: cache_layout.Backend, dtype: object = jnp.float32, **changes: int) -> Plan:
    return Plan(backend, LAYERS, PAGES, PAGE, KV, K, dtype, interpret=backend == "nvidia")._replace(**changes)


def filled(
    plan: Plan, tables: np.ndarray, lengths: list[int], layer: int
) -> tuple[cache_layout.Cache, np.ndarray, np.ndarray]:
    """A pool with random keys and values of requests of these lengths, written through their tables."""
    rng = np.random.default_rng(0)
    made = jax.tree.map(lambda a: (rng.normal(size=a.shape) * 3).astype(a.dtype), cache_layout.abstract(plan))
    k = rng.normal(size=(len(lengths), max(lengths), plan.heads, plan.d_head)).astype(np.float32)
    v = rng.normal(size=k.shape).astype(np.float32)
    cells, keys, values = [], [], []
    for n, length in enumerate(lengths):
        places = np.arange(length)
        cells += [tables[n, places // plan.page] * plan.page + places % plan.page, [-1, -1]]
        pad = np.full((2, plan.heads, plan.d_head), 99.0, np.float32)  # padding must change nothing
        keys += [k[n, :length], pad]
        values += [v[n, :length], pad]
    put = jax.jit(cache.write, static_argnums=0)
    made = put(
        plan, made, np.int32(layer), *map(np.concatenate, (keys, values)), np.concatenate(cells).astype(np.int32)
    )
    return made, k, v


TABLES = np.array([[3, 5, 1, 0, 0], [7, 2, 9, 4, 0], [8, 0, 0, 0, 0]], np.int32)
LENGTHS = [21, 32, 5]
PATTERNS = [Pattern(0.25, None, None), Pattern(0.3, 5.0, None), Pattern(0.25, None, 9), Pattern(0.25, 3.0, 6)]


_plain = jax.jit(reference, static_argnums=4)
_attend = jax.jit(cache.attend, static_argnums=(0, 6))


def expected(pattern: Pattern, q: np.ndarray, k: np.ndarray, v: np.ndarray, n: int, start: int) -> np.ndarray:
    """Plain attention over the request's tokens; the queries stand at the end of `start + Q` tokens."""
    length = start + q.shape[0]
    whole = np.zeros((1, length, HEADS, K), np.float32)
    whole[0, start:] = q
    return np.asarray(_plain(whole, k[n : n + 1, :length], v[n : n + 1, :length], None, pattern))[0, start:]


@pytest.mark.parametrize("backend", ["reference", "nvidia"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("queries", [1, 4])
def test_pages_give_what_plain_attention_gives(backend: cache_layout.Backend, pattern: Pattern, queries: int) -> None:
    plan = plan_for(backend)
    made, k, v = filled(plan, TABLES, LENGTHS, layer=1)
    starts = [length - queries for length in LENGTHS]
    q = np.random.default_rng(1).normal(size=(3, queries, HEADS, K)).astype(np.float32)
    windowed = np.bool_(pattern.window is not None)
    out = _attend(plan, made, np.int32(1), q, TABLES, np.asarray(starts, np.int32), pattern, windowed)
    for n, start in enumerate(starts):
        np.testing.assert_allclose(out[n], expected(pattern, q[n], k, v, n, start), atol=2e-6)


def test_a_layer_without_window_sees_everything() -> None:
    plan, pattern = plan_for("nvidia"), Pattern(0.25, None, 6)
    made, k, v = filled(plan, TABLES, LENGTHS, layer=0)
    q = np.ones((3, 1, HEADS, K), np.float32)
    starts = np.asarray([n - 1 for n in LENGTHS], np.int32)
    args = (np.int32(0), q, TABLES, starts, pattern)
    wide = np.asarray(_attend(plan, made, *args, np.bool_(False)))
    narrow = np.asarray(_attend(plan, made, *args, np.bool_(True)))
    np.testing.assert_allclose(wide[1], expected(Pattern(0.25, None, None), q[1], k, v, 1, 31), atol=2e-6)
    assert np.abs(wide - narrow)[:2].max() > 1e-3


@pytest.mark.parametrize("backend", ["reference", "nvidia"])
@pytest.mark.parametrize(("dtype", "error"), [(jnp.int8, 0.02), (jnp.float8_e4m3fn, 0.08)])
def test_small_numbers_stay_close(backend: cache_layout.Backend, dtype: object, error: float) -> None:
    plan = plan_for(backend, dtype)
    made, k, v = filled(plan, TABLES, LENGTHS, layer=1)
    q = np.random.default_rng(1).normal(size=(3, 1, HEADS, K)).astype(np.float32)
    starts = np.asarray([n - 1 for n in LENGTHS], np.int32)
    out = _attend(plan, made, np.int32(1), q, TABLES, starts, PATTERNS[0], np.bool_(False))
    for n, length in enumerate(LENGTHS):
        np.testing.assert_allclose(out[n], expected(PATTERNS[0], q[n], k, v, n, length - 1), atol=error)


@pytest.mark.parametrize("pattern", PATTERNS[::3])
@pytest.mark.parametrize("queries", [1, 4])
def test_what_the_tpu_kernel_is_given(pattern: Pattern, queries: int) -> None:
    """The kernel itself runs on TPUs only; its jnp twin takes the same arguments."""
    plan = plan_for("tpu")
    made, k, v = filled(plan, TABLES, LENGTHS, layer=1)
    starts = [length - queries for length in LENGTHS]
    q = np.random.default_rng(1).normal(size=(3, queries, HEADS, K)).astype(np.float32)
    with jax.disable_jit():
        out = cache_tpu.attend(
            made.k, q, jnp.asarray(TABLES) + PAGES, jnp.asarray(starts, jnp.int32), pattern, jnp.asarray(True),
            kernel=ref_ragged_paged_attention,
        )  # fmt: skip
    for n, start in enumerate(starts):
        np.testing.assert_allclose(out[n], expected(pattern, q[n], k, v, n, start), atol=2e-6)


@pytest.mark.parametrize(("blocks", "queries"), [(1, 1), (64, 1), (8, 32), (1, 6)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
def test_the_nvidia_kernel_lowers_for_cuda(blocks: int, queries: int, dtype: object) -> None:
    """Shapes of Llama 3 8B; Triton code is made for it without a GPU."""
    plan = Plan("nvidia", 32, 64, 64, 8, 128, dtype)

    def run(made: cache_layout.Cache, q: jax.Array, tables: jax.Array, start: jax.Array) -> jax.Array:
        return cache.attend(plan, made, jnp.int32(3), q, tables, start, Pattern(0.1, None, None), jnp.asarray(False))

    like = jax.ShapeDtypeStruct
    arguments = (
        cache_layout.abstract(plan), like((blocks, queries, 32, 128), jnp.bfloat16), like((blocks, 33), jnp.int32),
        like((blocks,), jnp.int32),
    )  # fmt: skip
    assert "triton" in jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def test_bytes_of_a_token() -> None:
    assert cache_layout.token_bytes(Plan("nvidia", 32, 64, 64, 8, 128, jnp.bfloat16)) == 128 * 1024
    assert cache_layout.token_bytes(Plan("tpu", 32, 64, 64, 8, 128, jnp.bfloat16)) == 128 * 1024
    assert cache_layout.token_bytes(Plan("nvidia", 32, 64, 64, 8, 128, jnp.int8)) == 64 * 1024 + 32 * 2 * 8 * 4


def test_int8_on_tpus_is_refused() -> None:
    with pytest.raises(UserError, match="int8"):
        cache_layout.stored_dtype("int8", jnp.bfloat16, "tpu")
