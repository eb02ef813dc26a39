"""From chunks to printed lines, and coming back for the rest."""

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podway.errors import UserError
from podway.hosts.logs import render as logs_render
from podway.hosts.logs.cursor import Cursor
from podway.hosts.logs.render import Chunk, Options, Renderer

SECOND = 1_000_000_000
START = 1_700_000_000 * SECOND


class Host:
    """The output of one rank, as an agent keeps it."""

    def __init__(self, rank: int, phase: str = "run") -> None:
        self.rank, self.phase = rank, phase
        self.data = b""
        self.times: list[tuple[int, int]] = []

    def write(self, data: bytes, seconds: float) -> None:
        self.data += data
        self.times.append((len(self.data), START + int(seconds * SECOND)))

    def chunk(self, offset: int, limit: int = 1 << 20, ended: bool = False) -> Chunk:
        data = self.data[offset : offset + limit]
        end = offset + len(data)
        times = [(min(at, end), when) for at, when in self.times if at > offset and at - len(data) < end]
        return Chunk(data=data, times=times, next=end, ended=ended and end == len(self.data), pid=100 + self.rank)


def push(renderer: Renderer, host: Host, now: float = 0.0, limit: int = 1 << 20, ended: bool = False) -> None:
    offset = renderer.offset(host.rank, host.phase)
    renderer.push(host.rank, host.phase, host.chunk(offset, limit, ended), now)


def written(hosts: int, *lines: bytes, own: bool = False) -> list[Host]:
    made = [Host(rank) for rank in range(hosts)]
    for number, line in enumerate(lines):
        for host in made:
            host.write(line + (b" of %d" % host.rank if own else b"") + b"\n", number + host.rank / 100)
    return made


def shown(made: list[Host], options: Options | None = None, **more: object) -> list[str]:
    renderer = Renderer(options or Options(), [f"10.0.0.{host.rank}" for host in made], **more)  # type: ignore[arg-type]
    for rank in renderer.ranks:
        push(renderer, made[rank], ended=True)
        renderer.end(rank)
    printed: list[str] = []
    while some := renderer.finish():
        printed += some
    return printed


def test_one_host() -> None:
    assert shown(written(1, b"a", b"a")) == ["(task, pid=100) a", "(task, pid=100) a"]
    assert shown(written(1, b"a"), name="train") == ["(train, pid=100) a"]


def test_many_hosts() -> None:
    assert shown(written(4, b"a", b"b")) == ["(all 4 hosts) a", "(all 4 hosts) b"]
    assert shown(written(2, b"a", own=True)) == [
        "(head, rank=0, pid=100) a of 0",
        "(worker1, rank=1, pid=101, ip=10.0.0.1) a of 1",
    ]
    some = written(8, b"a")
    for host in some[:6]:
        host.write(b"late\n", 9)
    assert shown(some) == ["(all 8 hosts) a", "(hosts 0-5) late"]


def test_setup_is_named() -> None:
    renderer = Renderer(Options(), ["10.0.0.0", "10.0.0.1"])
    for rank in (0, 1):
        host = Host(rank, "setup")
        host.write(b"pip install\nitem %d\n" % rank, 1)
        push(renderer, host)
    assert renderer.finish() == [
        "(setup, all 2 hosts) pip install",
        "(setup, head, rank=0, pid=100) item 0",
        "(setup, worker1, rank=1, pid=101, ip=10.0.0.1) item 1",
    ]


def test_raw_shows_every_copy_and_rank_one_rank() -> None:
    made = written(3, b"a", b"b")
    assert shown(made, Options(raw=True)) == [
        f"({who}) {text}"
        for text in "ab"
        for who in (
            "head, rank=0, pid=100",
            "worker1, rank=1, pid=101, ip=10.0.0.1",
            "worker2, rank=2, pid=102, ip=10.0.0.2",
        )
    ]
    assert shown(made, Options(rank=1)) == [f"(worker1, rank=1, pid=101, ip=10.0.0.1) {text}" for text in "ab"]


def test_timestamps_and_colours() -> None:
    made = [Host(0)]
    made[0].write(b"\x1b[31mred\x1b[0m\x1b[2K\n", 0.25)
    assert shown(made, Options(timestamps=True)) == ["2023-11-14T22:13:20.250Z (task, pid=100) red"]
    assert shown(made, Options(colour=True)) == ["\x1b[36m(task, pid=100)\x1b[0m \x1b[31mred\x1b[0m\x1b[0m"]


def test_secrets_are_masked() -> None:
    made = written(2, b"token=hunter2-secret")
    assert shown(made, secrets=["hunter2-secret"]) == ["(all 2 hosts) token=***"]


def test_binary_output_breaks_nothing() -> None:
    made = [Host(0), Host(1)]
    noise = random.Random(5).randbytes(200_000)
    for host in made:
        host.write(noise, 1)
    lines = shown(made)
    assert all(not re.search(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]", line) for line in lines)
    assert len(lines) > 500


@pytest.mark.parametrize(("tail", "count"), [(0, 100), (1, 1), (7, 7), (1000, 100)])
def test_tail(tail: int, count: int) -> None:
    made = written(3, *(b"line %d" % number for number in range(100)))
    assert shown(made, Options(tail=tail)) == [f"(all 3 hosts) line {number}" for number in range(100 - count, 100)]


def test_tail_then_what_follows() -> None:
    made = written(2, *(b"line %d" % number for number in range(50)))
    renderer = Renderer(Options(tail=2), ["", ""])
    for host in made:
        push(renderer, host, now=0.0)
    assert renderer.take(5.0) == []
    renderer.note(1, "connection lost, retrying")
    assert renderer.take(5.0) == ["(worker1) connection lost, retrying"]
    renderer.caught_up()
    assert renderer.take(5.0) == ["(all 2 hosts) line 48", "(all 2 hosts) line 49"]
    assert [renderer.cursor.offset(rank, "run") for rank in (0, 1)] == [len(made[0].data)] * 2
    for host in made:
        host.write(b"more\n", 99)
        push(renderer, host, now=6.0)
    assert renderer.take(6.0) == ["(all 2 hosts) more"]


def test_tail_is_bounded_in_bytes_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs_render, "TAIL_BYTES", 10_000)
    lines = shown(written(1, *(b"%d " % number + b"x" * 1000 for number in range(100))), Options(tail=50))
    assert lines[0].startswith("(the last ") and 5 < len(lines) < 12
    assert lines[-1].startswith("(task, pid=100) 99 x")


def test_a_rank_that_has_ended_is_waited_for_until_its_last_line_is_merged() -> None:
    made = [Host(0), Host(1)]
    renderer = Renderer(Options(), ["", ""])
    made[1].write(b"bye\n", 2.0)
    push(renderer, made[1], ended=True)
    renderer.end(1)
    assert renderer.take(0.0) == []
    made[0].write(b"bye\n", 2.1)
    push(renderer, made[0], now=0.1)
    assert renderer.take(0.1) == ["(all 2 hosts) bye"]


def test_a_pid_may_come_late() -> None:
    renderer = Renderer(Options(), [""])
    renderer.push(0, "run", Chunk(data=b"a\n", times=[(2, 1)], next=2), 0.0)
    assert renderer.take(0.0) == ["(task, pid=-) a"]
    renderer.push(0, "run", Chunk(data=b"b\n", times=[(4, 2)], next=4, pid=7), 0.0)
    assert renderer.take(0.0) == ["(task, pid=7) b"]


def test_bad_options() -> None:
    with pytest.raises(UserError, match="no rank 4") as error:
        Renderer(Options(rank=4), [""] * 4)
    assert error.value.hint == "the ranks are 0 to 3"
    with pytest.raises(UserError, match="--tail -1"):
        Options(tail=-1)


def test_a_chunk_from_elsewhere_is_our_own_bug() -> None:
    with pytest.raises(ValueError, match="does not begin at 0"):
        Renderer(Options(), [""]).push(0, "run", Chunk(data=b"a\n", times=[], next=9), 0.0)


def test_the_cursor_moves_only_past_lines_that_were_taken() -> None:
    made = written(2, b"a", b"bb", b"ccc", own=True)
    renderer = Renderer(Options(), ["", ""])
    for host in made:
        push(renderer, host)
    seen = []
    while some := renderer.finish(most=1):
        (line,) = some
        rank, text = int(line.split("rank=")[1][0]), line.split(") ")[1]
        seen.append(text)
        assert made[rank].data[: renderer.cursor.offset(rank, "run")].endswith(text.encode() + b"\n")
        other = renderer.cursor.offset(1 - rank, "run")
        assert made[1 - rank].data[:other].count(b"\n") == sum(f"of {1 - rank}" in known for known in seen)
    assert len(seen) == 6


def test_what_waits_to_be_printed_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs_render, "MERGE_BYTES", 50_000)
    made = [Host(0)]
    for second in range(2000):
        made[0].write(b"x" * 99 + b"\n", second)
    renderer = Renderer(Options(), [""])
    printed = 0
    while printed < 2000:
        if not renderer.full:
            push(renderer, made[0], limit=10_000)
        printed += len(renderer.take(0.0, most=1))
        assert len(renderer._out) + sum(len(lines) for _, lines in renderer._merger._queues[0]) <= 500


FORM = re.compile(
    r"\((?:(?P<setup>setup), )?"
    r"(?:all (?P<all>\d+) hosts|hosts (?P<some>[\d,-]+)|(?:head|worker\d+), rank=(?P<rank>\d+), [^)]*)\) "
    r"(?P<text>.*)"
)


def told(lines: list[str], hosts: int) -> list[list[str]]:
    """What each rank printed, read back from what was shown."""
    found: list[list[str]] = [[] for _ in range(hosts)]
    for line in lines:
        match = FORM.fullmatch(line)
        assert match, line
        if match["all"]:
            assert int(match["all"]) == hosts
            ranks = list(range(hosts))
        elif match["some"]:
            ranks = []
            for part in match["some"].split(","):
                first, _, last = part.partition("-")
                ranks += range(int(first), int(last or first) + 1)
        else:
            ranks = [int(match["rank"])]
        for rank in ranks:
            found[rank].append((match["setup"] or "run") + " " + match["text"])
    return found


speech = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["", "a", "b", "common"]), st.integers(0, 40)), max_size=50
)


@settings(max_examples=200)
@given(st.integers(2, 4), speech, st.integers(0, 50), st.integers(1, 30), st.integers(0, 1 << 32))
def test_every_line_is_shown_once_whatever_the_chunks_the_timing_and_the_restarts(
    hosts: int, spoken: list[tuple[int, str, int]], split: int, limit: int, seed: int
) -> None:
    """Setup, then run, on every host; the reader is replaced now and then by one that has the last cursor it was given."""
    made = {(rank, phase): Host(rank, phase) for rank in range(hosts) for phase in ("setup", "run")}
    expected: list[list[str]] = [[] for _ in range(hosts)]
    moment = 0.0
    for number, (rank, text, tenths) in enumerate(spoken):
        rank %= hosts
        phase = "setup" if number < split else "run"
        moment += tenths / 10
        made[rank, phase].write(f"{text}\n".encode(), moment)
        expected[rank].append(f"{phase} {text}")
    # Setup of a rank comes before its run.
    for lines in expected:
        lines.sort(key=lambda line: not line.startswith("setup"))
    chance = random.Random(seed)
    ips = [f"10.0.0.{rank}" for rank in range(hosts)]
    renderer = Renderer(Options(), ips)
    printed: list[str] = []
    doing = {rank: ["setup", "run"] for rank in range(hosts)}
    now = 0.0
    while any(doing.values()):
        rank = chance.choice([rank for rank, phases in doing.items() if phases])
        phase = doing[rank][0]
        push(renderer, made[rank, phase], now, limit, ended=True)
        if renderer.offset(rank, phase) == len(made[rank, phase].data):
            doing[rank].pop(0)
            if not doing[rank]:
                renderer.end(rank)
        now += chance.choice([0.0, 0.1, 0.5, 3.0])
        printed += renderer.take(now, most=chance.choice([1, 3, 100]))
        if chance.random() < 0.1:
            renderer = Renderer(Options(), ips, cursor=Cursor.decode(renderer.cursor.encode(), hosts))
            doing = {rank: ["setup", "run"] for rank in range(hosts)}
    while some := renderer.finish(most=2):
        printed += some
    assert told(printed, hosts) == expected


@settings(max_examples=100)
@given(speech)
def test_rank_0_is_shown_within_0_7_seconds(spoken: list[tuple[int, str, int]]) -> None:
    """Followed live by somebody who looks whenever something is due."""
    made = [Host(rank) for rank in range(4)]
    renderer = Renderer(Options(), ["10.0.0.1"] * 4)
    waiting: list[float] = []  # when rank 0's lines that are not shown yet came
    now = 0.0

    def look() -> None:
        for _ in told(renderer.take(now), 4)[0]:
            waiting.pop(0)
        assert not waiting or now < waiting[0] + 0.7 + 1e-6

    for rank, text, tenths in spoken:
        arrives = now + tenths / 20
        while (due := renderer.due()) is not None and due <= arrives:
            now = max(now, due)
            look()
        now = arrives
        made[rank].write(f"{text}\n".encode(), now)
        push(renderer, made[rank], now)
        if rank == 0:
            waiting.append(now)
        look()
