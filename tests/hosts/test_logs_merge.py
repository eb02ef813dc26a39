"""One stream by time out of many ranks, without waiting long for a silent one."""

from hypothesis import given
from hypothesis import strategies as st

from podway.hosts.logs.lines import Line
from podway.hosts.logs.merge import Merger


def line(rank: int, time: int, text: str = "x", end: int = 0) -> Line:
    return (time, rank, "run", end, text.encode())


def test_a_line_leaves_when_every_live_rank_has_reported_past_it() -> None:
    merger = Merger(3)
    merger.push(0, [line(0, 10), line(0, 30)], now=1.0)
    merger.push(1, [line(1, 20)], now=1.0)
    assert merger.pop(1.0) == []  # rank 2 may still have something earlier
    merger.push(2, [], now=1.1, reported=15)
    assert merger.pop(1.1) == [line(0, 10)]
    merger.end(2)
    assert merger.pop(1.1) == [line(1, 20)]
    merger.push(1, [line(1, 40)], now=1.2)
    assert merger.pop(1.2) == [line(0, 30)]


def test_a_silent_rank_holds_nothing_longer_than_the_hold() -> None:
    merger = Merger(2, hold=0.3)
    merger.push(0, [line(0, 10)], now=5.0)
    merger.push(0, [line(0, 20)], now=5.2)
    assert merger.due() == 5.3
    assert merger.pop(5.29) == []
    assert merger.pop(5.3) == [line(0, 10)]
    assert merger.due() == 5.5
    assert merger.pop(5.5) == [line(0, 20)]
    assert merger.due() is None


def test_what_is_earlier_goes_with_what_is_overdue() -> None:
    merger = Merger(3)
    merger.push(0, [line(0, 100)], now=1.0)
    merger.push(1, [line(1, 50), line(1, 150)], now=1.2)
    assert merger.pop(1.3) == [line(1, 50), line(0, 100)]


def test_equal_times_go_by_rank() -> None:
    merger = Merger(3)
    for rank in (2, 0, 1):
        merger.push(rank, [line(rank, 7), line(rank, 7, "y")], now=0.0)
    assert merger.pop(0.0) == [line(rank, 7, text) for rank in range(3) for text in "xy"]


def test_skew_is_applied_and_a_ranks_times_never_go_back() -> None:
    merger = Merger(2, skew={1: -1000})
    merger.push(0, [line(0, 50)], now=0.0)
    merger.push(0, [line(0, 40)], now=0.0)
    merger.push(1, [line(1, 1030), line(1, 1060)], now=0.0, reported=1100)
    assert [(at[1], at[0]) for at in merger.pop(9.0)] == [(1, 30), (0, 50), (0, 50), (1, 60)]


def test_a_full_rank_says_so_until_it_is_popped() -> None:
    merger = Merger(2, limit=10_000)
    lines = [line(0, time, "x" * 99, end=time * 100) for time in range(1, 101)]
    merger.push(0, lines[:10], now=0.0)
    assert merger.full == set()
    merger.push(0, lines[10:], now=0.0)
    assert merger.full == {0}
    merger.push(1, [line(1, 95)], now=0.0)
    assert len(merger.pop(0.0)) == 96
    assert merger.full == set() and merger.holds(0)
    merger.pop(1.0)
    assert merger._sizes == [0, 0] and not merger.holds(0)


pushes = st.lists(
    st.tuples(
        st.integers(0, 3),  # rank
        st.lists(st.integers(0, 30), max_size=4),  # steps of its clock
        st.floats(0, 0.5),  # pause
        st.booleans(),  # look now
    ),
    max_size=25,
)


@given(pushes, st.sets(st.integers(0, 3)))
def test_nothing_is_lost_and_each_ranks_order_is_kept(
    steps: list[tuple[int, list[int], float, bool]], ended: set[int]
) -> None:
    merger = Merger(4, hold=0.3)
    clocks, counts = [0] * 4, [0] * 4
    arrived: dict[tuple[int, int], float] = {}
    out: list[Line] = []
    now = 0.0
    for rank, ticks, pause, look in steps:
        lines = []
        for tick in ticks:
            clocks[rank] += tick
            lines.append(line(rank, clocks[rank], end=counts[rank]))
            arrived[rank, counts[rank]] = now
            counts[rank] += 1
        merger.push(rank, lines, now)
        now += pause
        if look:
            some = merger.pop(now)
            assert some == sorted(some, key=lambda at: at[0])
            out += some
            gone = {(at[1], at[3]) for at in out}
            assert all(key in gone for key, then in arrived.items() if then + 0.3 <= now)
    for rank in ended:
        merger.end(rank)
    out += merger.pop(now + 1)
    for rank in range(4):
        assert [at[3] for at in out if at[1] == rank] == list(range(counts[rank]))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1000)), max_size=60), st.data())
def test_with_all_data_at_hand_the_order_is_by_time(events: list[tuple[int, int]], data: st.DataObject) -> None:
    events.sort(key=lambda event: event[1])
    merger = Merger(4)
    own = [
        [line(rank, time, end=number) for number, (at, time) in enumerate(events) if at == rank] for rank in range(4)
    ]
    out: list[Line] = []
    while any(own):
        rank = data.draw(st.sampled_from([rank for rank in range(4) if own[rank]]))
        size = data.draw(st.integers(1, len(own[rank])))
        merger.push(rank, own[rank][:size], now=0.0)
        own[rank] = own[rank][size:]
        if not own[rank]:
            merger.end(rank)
        out += merger.pop(0.0)
    for rank in range(4):
        merger.end(rank)
    out += merger.pop(0.0)
    assert [at[0] for at in out] == [time for _, time in events]
