"""The kernel for rows that generate: it must store and see what `write` and `attend` of the reference do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podway.model.attention import Pattern
from podway.serve import cache, cache_layout, decode_nvidia
from podway.serve.cache_layout import Plan
from tests.long import every
from tests.serve.test_cache import HEADS, KV, LENGTHS, PATTERNS, TABLES, K, filled, plan_for

_step = jax.jit(cache.write_and_attend, static_argnums=(0, 9))


def arguments(pattern: Pattern, real: list[bool]) -> list[object]:
    rng = np.random.default_rng(7)
    rows = len(LENGTHS)
    q = rng.normal(size=(rows, HEADS, K)).astype(np.float32)
    k, v = (rng.normal(size=(rows, KV, K)).astype(np.float32) for _ in range(2))
    at = np.asarray(LENGTHS, np.int32)  # the new token stands after those that are there
    cells = TABLES[np.arange(rows), at // 8] * 8 + at % 8
    cells = np.where(real, cells, -1).astype(np.int32)
    return [np.int32(1), q, k, v, cells, TABLES, at, pattern, np.bool_(pattern.window is not None)]


# One split, and as many as there are pages, joined by the compiler and by a kernel.
@pytest.mark.parametrize(("programs", "by_compiler"), [(1, 4), (528, 4), (528, 1)])
@pytest.mark.parametrize("pattern", every(3, PATTERNS))
def test_it_stores_and_sees_what_the_reference_does(
    pattern: Pattern, programs: int, by_compiler: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_nvidia, "_PROGRAMS", programs)
    monkeypatch.setattr(decode_nvidia, "_SPLITS_OF_ONE_KERNEL", by_compiler)
    made, *_ = filled(plan_for("reference"), TABLES, LENGTHS, layer=1)
    given = arguments(pattern, [True, True, True])
    plain, expected = _step(plan_for("reference"), made, *given)
    jax.clear_caches()  # the number of programs is no argument
    seen, stored = _step(plan_for("nvidia"), made, *given)
    np.testing.assert_allclose(seen, plain, atol=2e-6)
    np.testing.assert_array_equal(stored.k, expected.k)
    np.testing.assert_array_equal(stored.v, expected.v)


def test_a_row_of_padding_stores_nothing() -> None:
    made, *_ = filled(plan_for("nvidia"), TABLES, LENGTHS, layer=1)
    real = [True, False, True]
    _, stored = _step(plan_for("nvidia"), made, *arguments(PATTERNS[0], real))
    changed = (np.asarray(stored.k) != np.asarray(made.k)).any(axis=(0, 3))
    assert int(changed.sum()) == 2


def test_small_numbers_are_seen_as_they_are_stored() -> None:
    plan = plan_for("nvidia", jnp.float8_e4m3fn)
    made, *_ = filled(plan, TABLES, LENGTHS, layer=1)
    given = arguments(PATTERNS[0], [True] * 3)
    seen, stored = _step(plan, made, *given)
    plain, expected = _step(plan_for("reference", jnp.float8_e4m3fn), made, *given)
    np.testing.assert_allclose(seen, plain, atol=2e-2)
    np.testing.assert_array_equal(stored.k.astype(np.float32), expected.k.astype(np.float32))


@pytest.mark.parametrize("rows", [16, 64, 256])
def test_it_lowers_for_cuda(rows: int) -> None:
    """Shapes of Llama 3 8B; Triton code is made for it without a GPU."""
    plan = Plan("nvidia", 32, 64, 64, 8, 128, jnp.bfloat16)
    like = jax.ShapeDtypeStruct

    def run(made: cache_layout.Cache, q: jax.Array, k: jax.Array, cells: jax.Array, tables: jax.Array) -> object:
        pattern, number = Pattern(0.1, None, None), jnp.int32(3)
        return cache.write_and_attend(plan, made, number, q, k, k, cells, tables, cells, pattern, jnp.asarray(False))

    given = (
        cache_layout.abstract(plan), like((rows, 32, 128), jnp.bfloat16), like((rows, 8, 128), jnp.bfloat16),
        like((rows,), jnp.int32), like((rows, 33), jnp.int32),
    )  # fmt: skip
    assert "triton" in jax.jit(run).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
