from hypothesis import given
from hypothesis import strategies as st

from podway.serve.pages import PagePool, page_keys


def test_page_0_is_never_given_away() -> None:
    pool = PagePool(5, 4)
    assert sorted(pool.take(4) or []) == [1, 2, 3, 4]
    assert pool.take(1) is None


def test_take_is_all_or_nothing() -> None:
    pool = PagePool(5, 4)
    assert pool.take(5) is None
    assert pool.free == 4


def test_keys_depend_on_everything_before() -> None:
    a, b = page_keys([1, 2, 3, 4], 2), page_keys([9, 2, 3, 4], 2)
    assert a[0] != b[0] and a[1] != b[1]
    assert page_keys([1, 2, 3, 4, 5], 2) == a
    assert page_keys([1, 2, 3, 4], 2, salt=b"x") != a


def test_keys_go_on_from_a_known_page() -> None:
    tokens = list(range(10))
    whole = page_keys(tokens, 3)
    assert page_keys(tokens, 3, after=whole[0], start=3) == whole[1:]


def test_a_free_page_keeps_its_contents_until_it_is_needed() -> None:
    pool = PagePool(4, 2)
    keys = page_keys([1, 2, 3, 4], 2)
    pages = pool.take(2) or []
    for page, key in zip(pages, keys, strict=True):
        pool.publish(page, key)
    pool.release(pages)
    assert pool.free == 3
    assert pool.matching(keys) == pages
    taken = pool.take(1) or []
    assert taken[0] not in pages, "a page with nothing in it goes first"
    taken += pool.take(1) or []
    assert pool.matching(keys) == pages[:1], "the end of a prefix is forgotten before its beginning"
    pool.check([taken])


def test_a_shared_page_is_free_when_all_let_go() -> None:
    pool = PagePool(3, 2)
    [page] = pool.take(1) or []
    pool.publish(page, b"k")
    pool.reuse(pool.matching([b"k"]))
    pool.release([page])
    assert pool.held == 1
    pool.release([page])
    assert pool.held == 0


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "free"]), st.integers(0, 4)), max_size=60))
def test_no_page_is_lost_or_held_twice(moves: list[tuple[str, int]]) -> None:
    pool = PagePool(9, 2)
    holders: list[list[int]] = []
    for number, (move, size) in enumerate(moves):
        if move == "take" and (pages := pool.take(size)) is not None:
            holders.append(pages)
            for page in pages[:1]:
                pool.publish(page, number.to_bytes(2, "big"))
        elif move == "share" and holders:
            found = pool.matching(list(pool._page_of)[:1])
            pool.reuse(found)
            holders.append(found)
        elif move == "free" and holders:
            pool.release(holders.pop(size % len(holders)))
        pool.check(holders)
