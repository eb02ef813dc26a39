"""Following many ranks at once: on a clock that runs by itself, and on the real one."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.errors import ProviderError
from podway.hosts.logs.follow import PIECE_BYTES, Chunk, Cursor, LineSource, Options, Renderer, follow, pieces

T = TypeVar("T")
END_S = 4.0


class LeapingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock leaps to the next timer as soon as nothing else is to be done."""

    def __init__(self) -> None:
        super().__init__()
        self._leapt = 0.0

    def time(self) -> float:
        return self._leapt

    def _run_once(self) -> None:
        scheduled = [handle for handle in self._scheduled if not handle._cancelled]  # type: ignore[attr-defined]
        if not self._ready:  # type: ignore[attr-defined]
            assert scheduled, "everybody waits for ever"
            self._leapt = max(self._leapt, min(handle._when for handle in scheduled))
        super()._run_once()  # type: ignore[misc]


def leap(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        return runner.run(work)


def now() -> float:
    return asyncio.get_running_loop().time()


class Feed:
    """A rank that writes what it is told to at given seconds, phase by phase; -1 as the end: never."""

    def __init__(self, rank: int, **phases: tuple[list[tuple[float, bytes]], float]) -> None:
        self.rank = rank
        self.phases = list(phases)
        self._script = phases
        self.reads: list[tuple[float, str, int, float, int]] = []
        self.fails: list[tuple[float, float, ProviderError]] = []  # from, to

    async def read(self, phase: str, offset: int, wait: float, limit: int) -> Chunk:
        self.reads.append((now(), phase, offset, wait, limit))
        deadline = now() + wait
        writes, ends = self._script[phase]
        while True:
            for since, until, error in self.fails:
                if since <= now() < until:
                    raise error
            data, times = b"", []
            for when, text in writes:
                if when <= now():
                    data += text
                    times.append((len(data), int(when * 1e9) + 1))
            ended = 0 <= ends <= now()
            if len(data) > offset or ended or now() >= deadline:
                end = min(len(data), offset + limit)
                covering = [(min(at, end), moment) for at, moment in times if at > offset]
                return Chunk(
                    data=data[offset:end],
                    times=covering,
                    next=end,
                    ended=ended and end == len(data),
                    pid=100 + self.rank,
                )
            coming = [when for when, _ in writes if when > now()] + [ends] * (ends > now()) + [deadline]
            await asyncio.sleep(min(coming) - now())


class Screen:
    """Remembers what was emitted and when."""

    def __init__(self, slow: float = 0.0) -> None:
        self.lines: list[str] = []
        self.at: list[float] = []
        self._slow = slow

    async def __call__(self, lines: list[str]) -> None:
        self.lines += lines
        self.at += [now()] * len(lines)
        if self._slow:
            await asyncio.sleep(self._slow)


def ips(count: int) -> list[str]:
    return [f"10.0.0.{rank}" for rank in range(count)]


def test_setup_then_run_on_every_rank() -> None:
    feeds = [
        Feed(
            rank,
            setup=([(0.1 + rank / 100, b"installing\n")], 1.0),
            run=([(1.5, b"hello\n"), (2.5 + rank / 100, b"item %d\n" % rank)], 3.0),
        )
        for rank in range(4)
    ]
    screen = Screen()
    assert leap(follow(feeds, Renderer(Options(), ips(4)), screen)) == {}
    assert screen.lines == [
        "(setup, all 4 hosts) installing",
        "(all 4 hosts) hello",
        "(head, rank=0, pid=100) item 0",
        *(f"(worker{rank}, rank={rank}, pid={100 + rank}, ip=10.0.0.{rank}) item {rank}" for rank in (1, 2, 3)),
    ]
    # The last of the four waits in the merger for somebody who might have printed before it.
    assert screen.at[0] == pytest.approx(0.13 + 0.3, abs=0.05)
    assert screen.at[1] == pytest.approx(1.5, abs=0.05)
    assert screen.at[2] <= 2.5 + 0.7 + 0.05


def test_the_first_line_is_not_delayed_by_looking_at_the_past() -> None:
    feed = Feed(0, run=([(0.5, b"one\n"), (0.9, b"two\n")], 5.0))
    screen = Screen()
    leap(follow([feed], Renderer(Options(), ips(1)), screen))
    assert screen.lines == ["(task, pid=100) one", "(task, pid=100) two"]
    assert screen.at == pytest.approx([0.5, 0.9], abs=0.03)


def test_a_silent_rank_delays_nobody_much() -> None:
    feeds = [Feed(0, run=([(1.0, b"x\n")], 9.0)), Feed(1, run=([], 9.0))]
    screen = Screen()
    leap(follow(feeds, Renderer(Options(), ips(2)), screen))
    assert screen.at == pytest.approx([1.7], abs=0.05)


def test_a_lost_connection_is_retried_and_said_once_and_nothing_is_lost() -> None:
    writes = [(float(second), b"line %d\n" % second) for second in range(1, 30)]
    feeds = [Feed(rank, run=(writes, 30.0)) for rank in range(4)]
    feeds[3].fails = [(5.5, 15.0, ProviderError("gone"))]
    screen = Screen()
    assert leap(follow(feeds, Renderer(Options(raw=True), ips(4)), screen)) == {}
    notes = [line for line in screen.lines if "connection" in line]
    assert notes == ["(worker3) connection lost, retrying"]
    for rank in range(4):
        own = [line.split(") ")[1] for line in screen.lines if f"rank={rank}" in line]
        assert own == [f"line {second}" for second in range(1, 30)]
    # Less and less often, and at least every ten seconds: 6, 6.5, 7.5, 9.5, 13.5, 21.5.
    assert len([read for read in feeds[3].reads if 5.5 <= read[0] < 15]) <= 6


def test_a_rank_that_is_gone_for_good_is_named_and_the_others_go_on() -> None:
    feeds = [Feed(rank, run=([(1.0, b"a\n"), (4.0, b"b\n")], 5.0)) for rank in range(3)]
    feeds[1].fails = [(2.0, 99.0, ProviderError("the host was deleted", transient=False))]
    feeds[1]._script["run"] = ([(1.0, b"a\n"), (3.0, b"never read\n")], 5.0)
    screen = Screen()
    lost = leap(follow(feeds, Renderer(Options(), ips(3)), screen))
    assert list(lost) == [1]
    assert screen.lines == [
        "(all 3 hosts) a",
        "(worker1) the rest of its log cannot be read: the host was deleted",
        "(head, rank=0, pid=100) b",
        "(worker2, rank=2, pid=102, ip=10.0.0.2) b",
    ]


def test_not_staying_shows_what_there_is() -> None:
    feeds = [
        Feed(rank, setup=([(0.0, b"s\n")], 0.0), run=([(0.0, b"now\n"), (5.0, b"later\n")], -1)) for rank in (0, 1)
    ]
    screen = Screen()
    leap(follow(feeds, Renderer(Options(), ips(2)), screen, stay=False))
    assert screen.lines == ["(setup, all 2 hosts) s", "(all 2 hosts) now"]
    assert max(screen.at) < 1


def test_not_staying_gives_up_on_a_host_that_does_not_answer() -> None:
    feeds = [Feed(rank, run=([(0.0, b"now\n")], -1)) for rank in (0, 1)]
    feeds[1].fails = [(0.0, 999.0, ProviderError("no route"))]
    screen = Screen()
    lost = leap(follow(feeds, Renderer(Options(), ips(2)), screen, stay=False))
    assert list(lost) == [1] and len(feeds[1].reads) == 3
    assert "(head, rank=0, pid=100) now" in screen.lines


def test_tail_waits_for_every_rank_and_follows() -> None:
    past = [(0.0, b"".join(b"line %d\n" % number for number in range(100_000)))]
    feeds = [Feed(rank, run=([*past, (3.0, b"new\n")], 4.0)) for rank in range(2)]
    screen = Screen()
    leap(follow(feeds, Renderer(Options(tail=2), ips(2)), screen))
    assert screen.lines == ["(all 2 hosts) line 99998", "(all 2 hosts) line 99999", "(all 2 hosts) new"]
    assert screen.at[0] < 1 and screen.at[2] == pytest.approx(3.0, abs=0.05)


def test_tail_does_not_wait_for_a_host_that_does_not_answer() -> None:
    feeds = [Feed(rank, run=([(0.0, b"a\nb\n")], 60.0)) for rank in range(3)]
    feeds[1].fails = [(0.0, 30.0, ProviderError("gone"))]
    screen = Screen()
    leap(follow(feeds, Renderer(Options(tail=1, raw=True), ips(3)), screen))
    assert [line.split(") ")[1] for line in screen.lines] == ["connection lost, retrying", "b", "a", "b"]
    assert screen.at[1] < 1 and screen.at[2] >= 30


def test_one_rank_reads_one_host() -> None:
    feeds = [Feed(rank, run=([(0.5, b"x\n")], 1.0)) for rank in range(8)]
    screen = Screen()
    leap(follow(feeds, Renderer(Options(rank=5), ips(8)), screen))
    assert screen.lines == ["(worker5, rank=5, pid=105, ip=10.0.0.5) x"]
    assert [bool(feed.reads) for feed in feeds] == [rank == 5 for rank in range(8)]


def test_a_bar_that_stands_still_is_shown() -> None:
    feed = Feed(0, run=([(1.0, b"\r10%"), (2.0, b"\r20%"), (60.0, b"\r90%"), (61.0, b"\n")], 62.0))
    screen = Screen()
    leap(follow([feed], Renderer(Options(), ips(1)), screen))
    assert screen.lines == ["(task, pid=100) 20%", "(task, pid=100) 90%"]
    assert 12 <= screen.at[0] <= 23 and screen.at[1] == pytest.approx(61, abs=0.1)


def test_a_slow_reader_is_waited_for() -> None:
    """64 MB from 4 ranks for somebody who takes a second for every batch: no more is read than fits."""
    block = b"".join(b"%07d " % number + b"x" * 91 + b"\n" for number in range(10_000))
    feeds = [Feed(rank, run=([(0.0, block * 8)], 0.0)) for rank in range(4)]
    renderer = Renderer(Options(raw=True), ips(4))
    ahead = 0

    async def emit(lines: list[str]) -> None:
        nonlocal ahead
        await asyncio.sleep(1.0)
        read = sum(renderer.offset(rank, "run") for rank in range(4))
        ahead = max(ahead, read - sum(renderer.cursor.offset(rank, "run") for rank in range(4)))

    leap(follow(feeds, renderer, emit))
    assert 1 << 20 < ahead < 40 << 20
    assert [renderer.cursor.offset(rank, "run") for rank in range(4)] == [len(block) * 8] * 4


def test_a_feed_that_never_waits_does_not_keep_us_busy() -> None:
    class Hasty(Feed):
        async def read(self, phase: str, offset: int, wait: float, limit: int) -> Chunk:
            return await super().read(phase, offset, 0.0, limit)

    feed = Hasty(0, run=([(5.0, b"x\n")], 10.0))
    screen = Screen()
    leap(follow([feed], Renderer(Options(), ips(1)), screen))
    assert screen.lines == ["(task, pid=100) x"] and len(feed.reads) < 100


def test_the_first_failure_of_the_reader_ends_it() -> None:
    async def emit(lines: list[str]) -> None:
        raise ConnectionResetError("the client went away")

    async def watch() -> int:
        feeds = [Feed(rank, run=([(1.0, b"x\n")], -1)) for rank in range(3)]
        with pytest.raises(ConnectionResetError):
            await follow(feeds, Renderer(Options(), ips(3)), emit)
        return len(asyncio.all_tasks())

    assert leap(watch()) == 1


def test_cancelling_leaves_nothing_behind() -> None:
    async def watch() -> int:
        feeds = [Feed(rank, run=([], -1)) for rank in range(5)]
        task = asyncio.create_task(follow(feeds, Renderer(Options(), ips(5)), Screen()))
        await asyncio.sleep(100)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return len(asyncio.all_tasks())

    assert leap(watch()) == 1


@pytest.mark.parametrize("stop_after", range(1, 40, 4))
def test_somebody_who_comes_back_sees_the_rest(stop_after: int) -> None:
    """The server dies at any point: the next one goes on from the cursor of the last lines that arrived."""

    class Died(Exception):
        pass

    def feeds() -> list[Feed]:
        made = []
        for rank in range(3):
            setup = [(0.1 * number, b"setup %d\n" % number) for number in range(5)]
            run = [(1 + 0.2 * number + rank / 50, b"line %d\n" % number) for number in range(10)]
            run += [(3.5, b"own %d of %d\n" % (number, rank)) for number in range(3)]
            made.append(Feed(rank, setup=(setup, 0.9), run=(sorted(run), 5.0)))
        return made

    whole = Screen()
    leap(follow(feeds(), Renderer(Options(), ips(3)), whole))
    seen: list[str] = []
    token = ""

    async def dying(renderer: Renderer) -> None:
        async def emit(lines: list[str]) -> None:
            nonlocal token
            seen.extend(lines)
            token = renderer.cursor.encode()
            if len(seen) >= stop_after:
                raise Died

        await follow(feeds(), renderer, emit)

    try:
        leap(dying(Renderer(Options(), ips(3))))
    except Died:
        rest = Screen()
        leap(follow(feeds(), Renderer(Options(), ips(3), cursor=Cursor.decode(token, 3)), rest))
        seen += rest.lines
    assert sorted(seen) == sorted(whole.lines)
    assert len(whole.lines) == 5 + 10 + 9


def test_on_the_real_clock() -> None:
    """A line of four ranks reaches the screen when the last has printed it, one of rank 0 alone within 0.7 s."""

    async def watch() -> tuple[Screen, float]:
        start = now()
        feeds = [
            Feed(rank, run=([(start + 0.2, b"all\n")] + [(start + 0.5, b"mine\n")] * (rank == 0), start + END_S))
            for rank in range(4)
        ]
        screen = Screen()
        await follow(feeds, Renderer(Options(), ips(4)), screen)
        return screen, start

    screen, start = asyncio.run(watch())
    assert screen.lines == ["(all 4 hosts) all", "(head, rank=0, pid=100) mine"]
    assert 0.2 <= screen.at[0] - start <= screen.at[1] - start
    assert 0.5 <= screen.at[1] - start < END_S  # before the end, which would bring it out in any case


@given(
    st.lists(st.tuples(st.integers(1, 40_000), st.integers(1, 9)), max_size=12), st.integers(0, 10**6), st.booleans()
)
def test_a_long_chunk_in_pieces_gives_the_same_lines(parts: list[tuple[int, int]], offset: int, ended: bool) -> None:
    data, times, now = b"", [], 1
    for length, passed in parts:
        now += passed
        data += (b"y" * (length % 97) + b"\n") * (length // 97) + b"z" * (length % 97)
        times.append([offset + len(data), now])
    chunk = Chunk(data=data, times=times, next=offset + len(data), ended=ended)
    whole, cut = LineSource(0, "run", offset), LineSource(0, "run", offset)
    found = list(pieces(chunk))
    assert all(len(piece.data) <= PIECE_BYTES for piece in found) and found[-1].ended is ended
    assert b"".join(piece.data for piece in found) == data and found[-1].next == chunk.next
    lines = [line for piece in found for line in cut.feed(piece.data, piece.times)] + cut.finish()
    assert lines == whole.feed(chunk.data, chunk.times) + whole.finish()
