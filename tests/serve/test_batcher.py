import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podway.errors import UserError
from podway.serve.batcher import Batcher, Limits, Request
from tests.serve.fake_engine import Driver, answer_alone

LIMITS = Limits(slots=4, max_len=48, page=4, pages=40, block=4, blocks=(2, 4), rows=(1, 2, 4), steps=4)


def limits(**changes: int) -> Limits:
    import msgspec

    return msgspec.structs.replace(LIMITS, **changes)


def expect(request: Request) -> None:
    prompt, most = request.tokens[: request.prompt_len], request.limit - request.prompt_len
    assert request.answer == answer_alone(prompt, most, request.stop_ids, request.min_tokens)
    ended = request.answer and request.answer[-1] in request.stop_ids and len(request.answer) >= request.min_tokens
    assert request.finish == ("stop" if ended else "length")


def test_the_batcher_imports_no_jax() -> None:
    code = "import sys, podway.serve.batcher; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_one_request_by_hand() -> None:
    """5 tokens of prompt: two blocks in one step, which brings the first token; then 4 and 1 more."""
    driver = Driver(LIMITS, depth=0)
    request = Request("a", [1, 2, 3, 4, 5], 6)
    driver.batcher.submit(request)
    driver.turn()
    [step] = driver.steps
    assert (step.block_bucket, step.row_bucket, step.steps) == (2, 4, 1)
    assert [(p.start, p.count, p.row) for p in step.pieces] == [(0, 5, 0)]
    assert len(request.answer) == 1
    driver.turn()
    assert (driver.steps[-1].block_bucket, driver.steps[-1].row_bucket, driver.steps[-1].steps) == (0, 1, 4)
    driver.finish()
    assert len(driver.steps) == 3
    expect(request)
    assert driver.batcher.pool.held == 0


def test_a_long_prompt_is_cut_and_others_generate_beside_it() -> None:
    driver = Driver(LIMITS, depth=0)
    first, long = Request("a", [7, 7], 30), Request("b", list(range(1, 41)), 4)
    driver.batcher.submit(first)
    driver.turn()
    driver.batcher.submit(long)
    driver.turn()
    step = driver.steps[-1]
    assert [(p.start, p.count, p.row) for p in step.pieces] == [(0, 16, -1)]
    assert [row.request for row in step.rows] == [first], "decode goes on while a prompt is computed"
    driver.turn()
    driver.turn()
    assert [(p.start, p.count, p.row) for p in driver.steps[-1].pieces] == [(32, 8, 1)]
    driver.finish()
    expect(first)
    expect(long)


def test_a_known_prefix_is_not_computed_again() -> None:
    driver = Driver(LIMITS)
    shared = list(range(1, 13))
    a, b = Request("a", [*shared, 20], 3), Request("b", [*shared, 30], 3)
    driver.batcher.submit(a)
    driver.finish()
    driver.batcher.submit(b)
    driver.finish()
    assert (a.cached, b.cached) == (0, 12)
    expect(a)
    expect(b)


def test_requests_of_one_step_share_their_prompt() -> None:
    """n > 1: the second finds the pages that the first computes in the same step."""
    driver = Driver(limits(blocks=(8,)))
    twins = [Request(f"t{i}", list(range(1, 14)), 5) for i in range(3)]
    for twin in twins:
        driver.batcher.submit(twin)
    driver.finish()
    assert [twin.cached for twin in twins] == [0, 12, 12]
    for twin in twins:
        expect(twin)


def test_a_prompt_that_is_all_known_still_computes_its_last_token() -> None:
    driver = Driver(LIMITS)
    for name in "ab":
        driver.batcher.submit(request := Request(name, [5, 6, 7, 8, 9, 10, 11, 12], 2))
        driver.finish()
        expect(request)
    assert request.cached == 4


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_a_conversation_goes_on_from_its_answer(count: int) -> None:
    """The last token of an answer was never an input: the page it lies in is not full, even if it looks so."""
    driver = Driver(LIMITS)
    driver.batcher.submit(first := Request("a", [1, 2, 3, 4, 5, 6], count))
    driver.finish()
    driver.batcher.submit(second := Request("b", [*first.tokens, 7, 8], 3))
    driver.finish()
    assert second.cached == (len(first.tokens) - 1) // 4 * 4
    expect(second)


def test_salt_keeps_prefixes_apart_and_scoring_computes_all() -> None:
    driver = Driver(LIMITS)
    prompt = list(range(1, 10))
    a, b = Request("a", prompt, 1), Request("b", prompt, 1, salt=b"other")
    c = Request("c", prompt, 1, scores_prompt=True)
    for request in (a, b, c):
        driver.batcher.submit(request)
        driver.finish()
    assert (b.cached, c.cached) == (0, 0)


def test_the_youngest_gives_way_and_is_computed_again() -> None:
    driver = Driver(limits(pages=13))  # 48 tokens in all
    a, b = Request("a", list(range(1, 17)), 28), Request("b", list(range(21, 37)), 28)
    for request in (a, b):
        driver.batcher.submit(request)
    driver.finish()
    assert (a.preemptions, b.preemptions > 0) == (0, True)
    expect(a)
    expect(b)


def test_stop_is_seen_and_the_rest_ignored() -> None:
    free = answer_alone([3, 1, 4], 20, frozenset())
    stop = frozenset({free[5]})
    driver = Driver(LIMITS)
    request = Request("a", [3, 1, 4], 20, stop_ids=stop)
    late = Request("b", [3, 1, 4], 20, stop_ids=stop, min_tokens=8)
    for one in (request, late):
        driver.batcher.submit(one)
    driver.finish()
    expect(request)
    expect(late)
    assert len(late.answer) >= 8


def test_cancel_frees_at_once_and_says_nothing_more() -> None:
    driver = Driver(LIMITS)
    a, b = Request("a", [1, 2, 3], 30), Request("b", [4, 5, 6], 30)
    for request in (a, b):
        driver.batcher.submit(request)
    driver.turn()
    driver.turn()
    held = driver.batcher.pool.held
    heard = len([e for e in driver.emitted if e.request is a])
    driver.batcher.cancel(a)
    assert driver.batcher.pool.held < held
    driver.batcher.cancel(a)
    driver.finish()
    assert a.finish == "cancelled" and len([e for e in driver.emitted if e.request is a]) == heard
    expect(b)


def test_a_request_in_the_queue_can_be_cancelled() -> None:
    batcher = Batcher(LIMITS)
    batcher.submit(request := Request("a", [1], 2))
    batcher.cancel(request)
    assert batcher.idle and batcher.plan() is None


def test_nobody_overtakes() -> None:
    """A large request at the head waits for pages, and a small one behind it waits too."""
    driver = Driver(limits(pages=13), depth=0)
    a, big, small = Request("a", [1] * 20, 8), Request("big", [2] * 40, 2), Request("small", [3], 2)
    for request in (a, big, small):
        driver.batcher.submit(request)
    driver.turn()
    assert [r.id for r in driver.batcher.running] == ["a"]
    driver.finish()
    firsts = list(dict.fromkeys(e.request.id for e in driver.emitted))
    assert firsts == ["a", "big", "small"]


def test_no_answer_wanted() -> None:
    driver = Driver(LIMITS)
    driver.batcher.submit(request := Request("a", [1, 2, 3], 0))
    driver.finish()
    assert (request.answer, request.finish) == ([], "length")


def test_guided_requests_wait_for_their_tokens() -> None:
    driver = Driver(LIMITS, depth=2)
    guided, free = Request("g", [1, 2], 6, guided=True), Request("f", [3], 12)
    for request in (guided, free):
        driver.batcher.submit(request)
    while driver.turn():
        assert guided.in_flight <= 1
    expect(guided)
    expect(free)
    with_guided = [s for s in driver.steps if not s.pieces and {guided, free} == {r.request for r in s.rows}]
    assert with_guided and all(s.steps > 1 for s in with_guided), "the other goes on by several tokens beside it"


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request("a", [], 4), "empty"),
        (Request("a", [1] * 40, 9), "the limit is 48"),
        (Request("a", [1] * 30, 11), "9 pages"),
    ],
)
def test_what_can_never_run_is_refused(request_: Request, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Batcher(limits(pages=10)).submit(request_)


requests = st.tuples(
    st.integers(0, 3),  # which prompt family: those of one share prefixes
    st.integers(1, 30),  # prompt tokens
    st.integers(0, 18),  # answer tokens
    st.sets(st.integers(0, 49), max_size=2),  # stop ids
    st.booleans(),  # guided
    st.integers(0, 6),  # turns before it arrives
    st.one_of(st.none(), st.integers(0, 12)),  # cancelled after so many turns
)


@settings(max_examples=150)
@given(
    st.lists(requests, min_size=1, max_size=14),
    st.integers(13, 40),
    st.integers(0, 2),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([(1,), (2, 4), (3, 16)]),
)
def test_any_schedule_equals_one_by_one(
    wanted: list[tuple[int, int, int, set[int], bool, int, int | None]],
    pages: int,
    depth: int,
    steps: int,
    blocks: tuple[int, ...],
) -> None:
    import msgspec

    driver = Driver(msgspec.structs.replace(LIMITS, pages=pages, steps=steps, blocks=blocks), depth=depth)
    made = []
    for i, (family, length, most, stops, guided, wait, cancel) in enumerate(wanted):
        prompt = [(family * 17 + place * 5 + 1) % 50 for place in range(length)]
        request = Request(f"r{i}", prompt, most, stop_ids=frozenset(stops), guided=guided)
        made.append((request, wait, cancel))
    waiting = list(made)
    for turn in range(200):
        for item in [w for w in waiting if w[1] <= turn]:
            driver.batcher.submit(item[0])
            waiting.remove(item)
        for request, wait, cancel in made:
            if cancel is not None and turn >= wait + cancel and request.number >= 0:
                driver.batcher.cancel(request)
                driver.batcher.check()
        driver.turn()
    driver.finish()
    for request, _, cancel in made:
        if request.finish == "cancelled":
            assert cancel is not None
            prompt = request.tokens[: request.prompt_len]
            whole = answer_alone(prompt, request.limit - len(prompt), request.stop_ids)
            assert request.answer == whole[: len(request.answer)]
        else:
            expect(request)
    assert driver.batcher.pool.held == 0
    assert set(driver.engine.calls) <= {(r, 0) for r in LIMITS.rows} | {(LIMITS.slots, b) for b in blocks}


def test_every_step_has_a_program_and_no_program_is_for_nothing() -> None:
    """Many slots: prompts alone, prompts beside rows, and more short prompts at once than may end in a step of prompts."""
    limits = Limits(
        slots=80, max_len=2100, page=64, pages=3000, block=64, blocks=(4, 16, 32), rows=(1, 16, 80), steps=2
    )  # fmt: skip
    chance, used = random.Random(3), set()
    for load in (80, 40, 3, 60, 1):
        driver = Driver(limits)
        for number in range(load):
            long = chance.choice([3, 60, 300, 2000]) if load < 80 else 3
            driver.batcher.submit(
                Request(str(number), [chance.randrange(50) for _ in range(long)], chance.randrange(1, 6))
            )
            if chance.random() < 0.2:
                driver.turn()
        driver.finish()
        used |= set(driver.engine.calls)
    assert used <= set(limits.programs())
    assert len(limits.programs()) == 3 + 3 + 2 * 2, "prompts beside rows have at most 1,024 tokens in a step"
    assert {(32, 32), (64, 16)} <= used
