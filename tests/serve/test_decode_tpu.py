"""The TPU kernel for rows that generate, interpreted: it must store and see what `write` and `attend` of the reference do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podway.model.attention import Pattern
from podway.serve import cache, cache_layout, decode_tpu
from podway.serve.cache_layout import Plan
from tests.long import every
from tests.serve.test_cache import LAYERS, LENGTHS, PAGE, PAGES, PATTERNS, TABLES, K, filled

_step = jax.jit(cache.write_and_attend, static_argnums=(0, 9))
# Query heads and key/value heads: four heads share a group of rows, a head fills one, a head is padded to one.
HEADS = [(8, 4), (16, 2), (3, 1)]
BLOCKS = [2 * PAGE, PAGE, 1024]  # two pages, one, and all
CASES = [(pattern, heads, tokens) for pattern in reversed(PATTERNS) for heads in HEADS for tokens in BLOCKS]


def plan_for(backend: cache_layout.Backend, heads: int, dtype: object = jnp.float32) -> Plan:
    return Plan(backend, LAYERS, PAGES, PAGE, heads, K, dtype, interpret=backend == "tpu")


def arguments(heads: tuple[int, int], pattern: Pattern, live: list[bool]) -> list[object]:
    rng, rows = np.random.default_rng(7), len(LENGTHS)
    q = rng.normal(size=(rows, heads[0], K)).astype(np.float32)
    k, v = (rng.normal(size=(rows, heads[1], K)).astype(np.float32) for _ in range(2))
    at = np.asarray(LENGTHS, np.int32)  # the new token stands after those that are there
    cells = np.where(live, TABLES[np.arange(rows), at // PAGE] * PAGE + at % PAGE, -1).astype(np.int32)
    return [np.int32(1), q, k, v, cells, TABLES, at, pattern, np.bool_(pattern.window is not None)]


def as_tpu(made: cache_layout.Cache) -> cache_layout.Cache:
    """The reference's pool as the TPU has it: keys and values in turn, padded to whole lanes."""
    assert made.v is not None
    both = jnp.stack([made.k, made.v], axis=2)  # (pages, G, 2, page, K)
    pool = jnp.moveaxis(both, 3, 1).reshape(made.k.shape[0], PAGE, -1, K)
    return cache_layout.Cache(jnp.pad(pool, [(0, 0)] * 3 + [(0, cache_layout.lanes(K) - K)]), None, None, None)


@pytest.mark.parametrize(("pattern", "heads", "tokens"), every(36, CASES))
def test_it_stores_and_sees_what_the_reference_does(
    pattern: Pattern, heads: tuple[int, int], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_tpu, "_BLOCK_TOKENS", tokens)
    jax.clear_caches()  # the size of a block is no argument
    plain, tpu = plan_for("reference", heads[1]), plan_for("tpu", heads[1])
    before, *_ = filled(plain, TABLES, LENGTHS, layer=1)
    pool = as_tpu(before)
    given = arguments(heads, pattern, [True, True, True])
    expected, stored = _step(plain, before, *given)
    seen, after = _step(tpu, pool, *given)
    np.testing.assert_allclose(seen, expected, atol=2e-6)
    np.testing.assert_array_equal(after.k, as_tpu(stored).k)


@pytest.mark.long
def test_a_row_that_is_not_live_stores_nothing_and_harms_nobody() -> None:
    tpu = plan_for("tpu", 2)
    pool, *_ = filled(tpu, TABLES, LENGTHS, layer=1)
    every_row, _ = _step(tpu, pool, *arguments((16, 2), PATTERNS[0], [True] * 3))
    seen, after = _step(tpu, pool, *arguments((16, 2), PATTERNS[0], [False, True, False]))
    np.testing.assert_array_equal(seen[1], every_row[1])
    assert int((np.asarray(after.k) != np.asarray(pool.k)).any(axis=(2, 3)).sum()) == 1
    assert np.isfinite(seen).all()


def test_a_window_leaves_pages_unread() -> None:
    """Pages that lie wholly before the window hold what is not a number here, and nobody sees it."""
    tpu, pattern = plan_for("tpu", 2), Pattern(0.25, None, 6)
    pool, *_ = filled(tpu, TABLES, LENGTHS, layer=1)
    given = arguments((16, 2), pattern, [True] * 3)
    clean, _ = _step(tpu, pool, *given)
    spoiled = np.array(pool.k)
    spoiled[PAGES + TABLES[1, :3]] = np.nan  # of 32 tokens and a new one; its window of 6 begins in the fourth page
    seen, _ = _step(tpu, pool._replace(k=jnp.asarray(spoiled)), *given)
    np.testing.assert_array_equal(seen[1], clean[1])
