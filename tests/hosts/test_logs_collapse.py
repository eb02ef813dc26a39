"""What all ranks print alike is shown once; nothing is lost, repeated, reordered or late."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podway.hosts.logs import collapse as logs_collapse
from podway.hosts.logs.collapse import Collapser, Shown
from podway.hosts.logs.lines import Line

SECOND = 1_000_000_000


class Ranks:
    """Writes lines of several ranks, `end` counting each rank's lines."""

    def __init__(self, hosts: int) -> None:
        self.counts = [0] * hosts

    def line(self, rank: int, seconds: float, text: str, phase: str = "run") -> Line:
        self.counts[rank] += 1
        return (int(seconds * SECOND), rank, phase, self.counts[rank], text.encode())

    def lines(self, *spoken: tuple[int, float, str]) -> list[Line]:
        return [self.line(*said) for said in sorted(spoken, key=lambda said: said[1])]


def seen(shown: list[Shown]) -> list[tuple[list[int], str]]:
    found = []
    for item in shown:
        lines = item if isinstance(item, list) else [item]
        found.append((sorted(line[1] for line in lines), lines[0][4].decode()))
    return found


def test_a_line_of_all_is_shown_once_as_soon_as_the_last_has_printed_it() -> None:
    collapser, ranks = Collapser(4), Ranks(4)
    collapser.push([ranks.line(rank, 1 + rank / 100, "hello") for rank in range(3)], now=0.0)
    assert collapser.pop(0.1) == []
    collapser.push([ranks.line(3, 1.2, "hello")], now=0.2)
    assert seen(collapser.pop(0.2)) == [([0, 1, 2, 3], "hello")]
    assert collapser.due() is None


def test_the_lines_in_between_go_first() -> None:
    collapser, ranks = Collapser(3), Ranks(3)
    collapser.push(
        ranks.lines(
            (0, 1.0, "a"), (0, 1.1, "own 0"), (0, 1.2, "b"),
            (1, 1.3, "a"), (1, 1.4, "own 1"), (1, 1.5, "b"),
            (2, 1.45, "a"), (2, 1.6, "b"),
        ),
        now=0.0,
    )  # fmt: skip
    assert seen(collapser.pop(0.0)) == [
        ([0, 1, 2], "a"),
        ([0], "own 0"),
        ([1], "own 1"),
        ([0, 1, 2], "b"),
    ]


def test_another_order_is_shown_as_it_was() -> None:
    collapser, ranks = Collapser(2), Ranks(2)
    collapser.push(ranks.lines((0, 1.0, "a"), (0, 1.1, "b"), (1, 1.2, "b"), (1, 1.3, "a")), now=0.0)
    assert seen(collapser.finish()) == [([0], "a"), ([0, 1], "b"), ([1], "a")]


def test_a_line_behind_the_common_one_stays_behind_it() -> None:
    collapser, ranks = Collapser(3), Ranks(3)
    spoken = [(0, 1.0, "x"), (0, 1.1, "common"), (1, 1.2, "common"), (1, 1.3, "x"), (2, 1.4, "common")]
    collapser.push(ranks.lines(*spoken), now=0.0)
    assert seen(collapser.finish()) == [([0], "x"), ([0, 1, 2], "common"), ([1], "x")]


def test_what_is_shown_together_is_in_order_of_time() -> None:
    collapser, ranks = Collapser(3), Ranks(3)
    collapser.push(ranks.lines((2, 1.0, "c"), (1, 1.1, "b"), (0, 1.2, "a"), (2, 1.3, "d")), now=0.0)
    assert [text for _, text in seen(collapser.finish())] == ["c", "b", "a", "d"]


def test_some_are_a_group_of_their_own_if_three_or_more() -> None:
    collapser, ranks = Collapser(8), Ranks(8)
    spoken = [(rank, 1 + rank / 100, "warning") for rank in (0, 1, 2, 5, 7)] + [(3, 1.0, "two"), (4, 1.001, "two")]
    collapser.push(ranks.lines(*spoken), now=0.0)
    assert seen(collapser.finish()) == [([0, 1, 2, 5, 7], "warning"), ([3], "two"), ([4], "two")]


def test_rank_0_is_not_kept_waiting_and_stragglers_are_one_group() -> None:
    collapser, ranks = Collapser(8), Ranks(8)
    collapser.push(ranks.lines(*((rank, 1 + rank / 100, "compiling") for rank in range(4))), now=10.0)
    assert collapser.due() == pytest.approx(10.4)
    assert collapser.pop(10.39) == []
    # Those that printed it a little later than rank 0 are shown with it.
    assert seen(collapser.pop(10.41)) == [([0, 1, 2, 3], "compiling")]
    for rank in range(4, 8):
        collapser.push([ranks.line(rank, 1.5 + rank / 100, "compiling")], now=10.5 + rank / 100)
    assert collapser.pop(12.5) == []
    assert seen(collapser.pop(12.6)) == [([4, 5, 6, 7], "compiling")]


def test_a_line_waits_for_rank_0_longer_than_rank_0_for_others() -> None:
    collapser, ranks = Collapser(2), Ranks(2)
    collapser.push([ranks.line(1, 1.0, "x")], now=0.0)
    assert collapser.pop(1.9) == []
    collapser.push([ranks.line(0, 2.9, "x")], now=1.9)
    assert seen(collapser.pop(1.9)) == [([0, 1], "x")]
    collapser.push([ranks.line(1, 3.0, "y")], now=2.0)
    assert collapser.due() == 4.0
    assert seen(collapser.pop(4.0)) == [([1], "y")]


def test_in_an_old_log_the_window_is_kept_by_the_hosts_clocks() -> None:
    collapser, ranks = Collapser(2), Ranks(2)
    collapser.push(ranks.lines((0, 1.0, "near"), (1, 2.9, "near"), (0, 10.0, "far"), (1, 12.5, "far")), now=0.0)
    assert seen(collapser.finish()) == [([0, 1], "near"), ([0], "far"), ([1], "far")]


def test_repeated_lines_are_matched_one_by_one() -> None:
    collapser, ranks = Collapser(2), Ranks(2)
    for _ in range(3):
        collapser.push([ranks.line(0, 1.0, "")], now=0.0)
    for expected in range(1, 4):
        collapser.push([ranks.line(1, 1.0, "")], now=0.0)
        assert seen(collapser.pop(0.0)) == [([0, 1], "")], expected
    assert collapser._holders == {} and collapser._again == [{}, {}]


def test_phases_are_kept_apart() -> None:
    collapser, ranks = Collapser(2), Ranks(2)
    collapser.push([ranks.line(0, 1.0, "x", "setup"), ranks.line(1, 1.0, "x")], now=0.0)
    assert collapser.pop(0.0) == []
    collapser.push([ranks.line(1, 1.0, "x", "setup")], now=0.0)
    assert seen(collapser.pop(0.0)) == [([1], "x"), ([0, 1], "x")]


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    collapser, ranks = Collapser(4), Ranks(4)
    collapser.end(3)
    collapser.push(ranks.lines(*((rank, 1.0, "x") for rank in range(3))), now=0.0)
    assert seen(collapser.pop(0.0)) == [([0, 1, 2], "x")]
    collapser.push([ranks.line(2, 1.1, "bye")], now=0.0)
    collapser.end(2)  # its last line still waits to be everybody's
    collapser.push(ranks.lines((0, 1.2, "bye"), (1, 1.2, "bye")), now=0.0)
    assert seen(collapser.pop(0.0)) == [([0, 1, 2], "bye")]
    collapser.push(ranks.lines((0, 1.3, "two"), (1, 1.3, "two")), now=0.0)
    assert seen(collapser.pop(0.0)) == [([0], "two"), ([1], "two")]


def test_one_host_shows_everything_at_once() -> None:
    collapser, ranks = Collapser(1), Ranks(1)
    collapser.push(ranks.lines((0, 1.0, "a"), (0, 1.0, "a")), now=0.0)
    assert seen(collapser.pop(0.0)) == [([0], "a"), ([0], "a")]


@pytest.mark.parametrize(("size", "count"), [(10, 5000), (100_000, 500)])
def test_what_waits_is_bounded_in_lines_and_bytes(size: int, count: int) -> None:
    collapser, ranks = Collapser(2, limit=1000), Ranks(2)
    shown = []
    for number in range(count):
        collapser.push([ranks.line(1, 1 + number / 1e6, f"{number} " + "x" * size)], now=0.0)
        shown += collapser.pop(0.0)
        assert collapser._lines <= 1000 and collapser._bytes <= logs_collapse.MOST_BYTES
    shown += collapser.finish()
    assert [text.split()[0] for _, text in seen(shown)] == [str(number) for number in range(count)]
    assert collapser._lines == collapser._bytes == 0


steps = st.lists(
    st.tuples(
        st.integers(0, 4),  # rank
        st.sampled_from(["", "a", "b", "own"]),
        st.integers(0, SECOND // 10) | st.integers(0, 3 * SECOND),  # step of the merged clock
        st.just(0.0) | st.floats(0, 1),  # pause before it is pushed
        st.booleans(),  # pop
        st.sampled_from(["run", "run", "run", "setup"]),
    ),
    max_size=80,
)


@settings(max_examples=300)
@given(steps, st.integers(1, 5), st.integers(2, 40), st.just(set()) | st.sets(st.integers(0, 4)))
def test_every_line_once_each_ranks_order_and_rank_0_in_time(
    spoken: list[tuple[int, str, int, float, bool, str]], hosts: int, limit: int, quiet: set[int]
) -> None:
    collapser, ranks = Collapser(hosts, limit=limit), Ranks(hosts)
    pushed: list[list[Line]] = [[] for _ in range(hosts)]
    shown: list[Shown] = []
    waiting: dict[int, float] = {}  # rank 0's lines by number -> when they came
    time = now = 0
    for rank in quiet & set(range(hosts)):
        collapser.end(rank)
    for rank, text, tick, pause, pop, phase in spoken:
        if rank >= hosts or rank in quiet:
            continue
        time += tick
        now += pause
        line = ranks.line(rank, 0, f"{text}{rank if text == 'own' else ''}", phase)
        line = (time, *line[1:])
        pushed[rank].append(line)
        collapser.push([line], now)
        if rank == 0:
            waiting[line[3]] = now
        if pop:
            shown += collapser.pop(now)
            gone = {at[3] for item in shown for at in (item if isinstance(item, list) else [item]) if at[1] == 0}
            assert all(number in gone for number, came in waiting.items() if came + 0.4 <= now)
            assert (collapser.due() or math.inf) > now
    shown += collapser.finish()
    told: list[list[Line]] = [[] for _ in range(hosts)]
    for item in shown:
        lines = item if isinstance(item, list) else [item]
        assert len({(line[2], line[4]) for line in lines}) == 1
        assert not isinstance(item, list) or len(lines) >= 3 or len(lines) == hosts
        for line in lines:
            told[line[1]].append(line)
    assert told == pushed
    assert collapser._holders == {} and not any(collapser._again) and collapser._lines == collapser._bytes == 0
