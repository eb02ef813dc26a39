"""Token buckets and budgets."""

import hypothesis.strategies as st
from hypothesis import given

from podway.gateway.limits import MOST_LIMITED, Budgets, RateLimiter, seconds_to_midnight


def test_a_bucket_fills_again() -> None:
    buckets = RateLimiter()
    assert [buckets.take(("a",), 1.0, 2.0, 100.0) for _ in range(2)] == [0.0, 0.0]
    assert buckets.take(("a",), 1.0, 2.0, 100.0) == 1.0
    assert buckets.take(("a",), 1.0, 2.0, 100.5) == 0.5
    assert buckets.take(("b",), 1.0, 2.0, 100.5) == 0.0  # others have their own
    assert buckets.take(("a",), 1.0, 2.0, 101.0) == 0.0


def test_a_clock_that_jumps_back_gives_nothing_and_takes_nothing() -> None:
    buckets = RateLimiter()
    buckets.take(("a",), 1.0, 1.0, 100.0)
    assert buckets.take(("a",), 1.0, 1.0, 50.0) == 1.0
    assert buckets.take(("a",), 1.0, 1.0, 51.0) == 0.0


def test_memory_is_bounded() -> None:
    buckets = RateLimiter()
    for number in range(MOST_LIMITED + 10):
        buckets.take((str(number),), 1.0, 1.0, 0.0)
    assert len(buckets._levels) == MOST_LIMITED


@given(st.floats(0.1, 100), st.integers(1, 20), st.lists(st.floats(0, 5), min_size=1, max_size=200))
def test_never_more_than_the_rate_allows(rate: float, size: int, waits: list[float]) -> None:
    buckets, now, passed = RateLimiter(), 0.0, 0
    for wait in waits:
        now += wait
        passed += buckets.take(("a",), rate, float(size), now) == 0.0
    assert passed <= size + rate * now + 1e-6


def test_budgets_begin_again_at_midnight() -> None:
    budgets = Budgets()
    budgets.spend("u", 90, 86_000.0)
    assert budgets.left("u", 100, 86_000.0) == 10
    budgets.spend("u", 90, 86_001.0)
    assert budgets.left("u", 100, 86_001.0) == 0
    assert budgets.left("u", 100, 86_400.0) == 100
    assert seconds_to_midnight(86_390.0) == 10
