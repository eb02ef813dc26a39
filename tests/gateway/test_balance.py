"""Which replica takes a request."""

import hypothesis.strategies as st
from hypothesis import given

from podway.gateway.balance import FAILURES, FIRST_REST_S, SLACK_TOKENS, Balancer, prefixes
from podway.gateway.table import Backend

A, B, C = (Backend(id=name, address=name) for name in "abc")


def test_the_least_loaded_takes_it() -> None:
    balancer = Balancer()
    balancer.begun("s", A, 100, ())
    balancer.begun("s", B, 50, ())
    assert balancer.choose("s", (A, B), (), 0.0) == B
    balancer.ended("a", 100)
    assert balancer.choose("s", (A, B), (), 0.0) == A


def test_a_beginning_goes_where_it_was() -> None:
    balancer = Balancer()
    first = prefixes(b"x" * 5000)
    balancer.begun("s", B, 10, first)
    assert balancer.choose("s", (A, B), prefixes(b"x" * 300), 0.0) == B
    assert balancer.choose("s", (A, B), prefixes(b"y" * 300), 0.0) == A
    assert balancer.choose("other", (A, B), first, 0.0) == A  # another service's cache


def test_a_beginning_goes_elsewhere_where_its_replica_has_too_much_to_do() -> None:
    balancer = Balancer()
    first = prefixes(b"x" * 5000)
    balancer.begun("s", B, SLACK_TOKENS + 1, first)
    assert balancer.choose("s", (A, B), first, 0.0) == A


def test_longer_beginnings_win() -> None:
    balancer = Balancer()
    balancer.begun("s", A, 1, prefixes(b"x" * 256))
    balancer.begun("s", B, 1, prefixes(b"x" * 1024)[-1:])
    assert balancer.choose("s", (A, B), prefixes(b"x" * 1024), 0.0) == B


def test_a_failing_replica_rests_and_comes_back() -> None:
    balancer = Balancer()
    for _ in range(FAILURES):
        balancer.failed("a", 100.0)
    assert balancer.choose("s", (A, B), (), 101.0) == B
    assert balancer.choose("s", (A, B), (), 101.0, tried={"b"}) == A  # better than no answer
    assert balancer.choose("s", (A, B), (), 100.0 + FIRST_REST_S) == A
    balancer.failed("a", 100.0 + FIRST_REST_S)
    assert balancer.health["a"].until == 100.0 + 3 * FIRST_REST_S  # longer the second time


def test_half_of_them_always_stay_in() -> None:
    balancer = Balancer()
    for name in "abc":
        for _ in range(FAILURES):
            balancer.failed(name, 0.0)
    assert balancer.choose("s", (A, B, C), (), 1.0) is not None


def test_everything_tried_is_none() -> None:
    assert Balancer().choose("s", (A, B), (), 0.0, tried={"a", "b"}) is None
    assert Balancer().choose("s", (), (), 0.0) is None


def test_a_canary_gets_its_share_when_nothing_waits() -> None:
    balancer = Balancer()
    canary = Backend(id="b", address="b", weight=0.1)
    counts = {"a": 0, "b": 0}
    for _ in range(1100):
        chosen = balancer.choose("s", (A, canary), (), 0.0)
        assert chosen is not None
        counts[chosen.id] += 1
        balancer.begun("s", chosen, 10, ())
        balancer.ended(chosen.id, 10)
    assert 90 <= counts["b"] <= 110


def test_a_newcomer_is_not_flooded() -> None:
    balancer = Balancer()
    for _ in range(1000):
        balancer.begun("s", A, 10, ())
        balancer.ended("a", 10)
    chosen = []
    for _ in range(10):
        one = balancer.choose("s", (A, B), (), 0.0)
        assert one is not None
        chosen.append(one.id)
        balancer.begun("s", one, 10, ())
        balancer.ended(one.id, 10)
    assert chosen.count("b") <= 6


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 1000), st.booleans()), max_size=60))
def test_nothing_is_left_when_all_has_ended(requests: list[tuple[str, int, bool]]) -> None:
    balancer = Balancer()
    for name, tokens, good in requests:
        balancer.begun("s", Backend(id=name, address=name), tokens, prefixes(name.encode() * 300))
        balancer.succeeded(name) if good else balancer.failed(name, 0.0)
    assert sum(balancer.outstanding.values()) == sum(tokens for _, tokens, _ in requests)
    for name, tokens, _ in requests:
        balancer.ended(name, tokens)
    assert balancer.outstanding == {}
    balancer.keep(set())
    assert balancer.health == {}


@given(st.binary(max_size=3000), st.binary(max_size=3000))
def test_prefixes_agree_as_far_as_the_texts_do(one: bytes, other: bytes) -> None:
    common = 0
    while common < min(len(one), len(other)) and one[common] == other[common]:
        common += 1
    for length, first, second in zip((256, 512, 1024, 2048), prefixes(one), prefixes(other), strict=False):
        assert (first == second) == (length <= common)
