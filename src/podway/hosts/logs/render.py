"""From the output of every rank to the lines a person reads, and how far they have read.

    chunks -> LineSource (a line each) -> Merger (by time) -> Collapser (alike: once) -> prefix and text -> take()

`--raw` and one host leave out the collapser; `--rank` reads one rank only. With `--tail N` nothing is shown until the log that
was there at the beginning has been read (`caught_up`), and then its last N lines. Nothing here waits or reads: the caller
pushes chunks and says what time it is.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import add
from time import gmtime, strftime

import msgspec

from podway.errors import UserError
from podway.hosts.logs.alike import Alike, figures_differ, spread
from podway.hosts.logs.collapse import Collapser, Shown
from podway.hosts.logs.cursor import Cursor
from podway.hosts.logs.lines import END, PHASE, RANK, TEXT, Line, LineSource
from podway.hosts.logs.merge import LINE_COST, Merger
from podway.hosts.logs.text import Mask, display, group_prefix, host_name, prefix, tint

# Memory of all ranks' lines that wait to be merged, and of the lines kept for --tail.
MERGE_BYTES = 24 << 20
TAIL_BYTES = 32 << 20
MOST_AT_ONCE = 8192
_TAIL_CUT = f"(the last {TAIL_BYTES >> 20} MiB are shown; --tail 0 shows everything)"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How the log is to be shown."""

    raw: bool = False  # every copy of a line
    rank: int | None = None  # one rank only
    tail: int = 0  # the last so many lines of what is there; 0: all
    colour: bool = False
    timestamps: bool = False
    spread: bool = False  # behind a line that is shown once, the range of each figure that differs between ranks

    def __post_init__(self) -> None:
        if self.tail < 0:
            raise UserError(f"--tail {self.tail} is below 0", "give a number of lines, or 0 for all of them")


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """What a host answers to a read from an offset."""

    data: bytes
    times: Sequence[Sequence[int]]  # [end offset, ns] in order, covering the data
    next: int  # the offset to read from next
    ended: bool = False  # the phase has ended and this is the last of its output
    pid: int | None = None  # the user's process, once known


class Renderer:
    """Push chunks, take lines. `ips` has an address for each rank; `cursor` is where an earlier reader stopped.

    `tail_from` is where to begin for the sake of --tail: what is before it is known to be too long ago.
    """

    def __init__(
        self,
        options: Options,
        ips: Sequence[str],
        *,
        name: str = "",
        secrets: Iterable[str] = (),
        cursor: Cursor | None = None,
        tail_from: Cursor | None = None,
        skew: Mapping[int, int] | None = None,
    ) -> None:
        self.options = options
        self.hosts = len(ips)
        self.cursor = cursor or tail_from or Cursor(self.hosts)
        self.ranks = range(self.hosts) if options.rank is None else [_checked(options.rank, self.hosts)]
        self._ips = ips
        self._name = name
        secrets = list(secrets)
        self._mask = Mask(secrets) if secrets else None
        self._sources: dict[tuple[int, str], LineSource] = {}
        self._pids: dict[tuple[int, str], int] = {}
        self._prefixes: dict[str, list[str]] = {}
        self._second = (-1, "")
        self._merger = Merger(self.hosts, skew=skew, limit=MERGE_BYTES // len(self.ranks))
        self._collapser = None if options.raw or len(self.ranks) == 1 else Collapser(self.hosts, alike=Alike(ips))
        self._merged: list[Line] = []  # in order; from `_at` on not looked at yet
        self._at = 0
        self._ending: set[int] = set()
        for rank in set(range(self.hosts)) - set(self.ranks):
            self._merger.end(rank)
        self._out: deque[Shown | str] = deque()
        self._tail = _Tail(options.tail) if options.tail and cursor is None else None

    @property
    def full(self) -> set[int]:
        """The ranks not to read from for now."""
        return set(self.ranks) if self._pending else self._merger.full

    @property
    def busy(self) -> bool:
        """Whether `take` has more to do right now."""
        return bool(self._pending or self._out)

    @property
    def _pending(self) -> int:
        return len(self._merged) - self._at

    def offset(self, rank: int, phase: str) -> int:
        """Where to read on: behind what was pushed, or else behind what an earlier reader has seen."""
        source = self._sources.get((rank, phase))
        return source.offset if source else self.cursor.offset(rank, phase)

    def push(self, rank: int, phase: str, chunk: Chunk, now: float) -> None:
        """Take the next output of a rank, which was read at `offset(rank, phase)`."""
        source = self._sources.get((rank, phase))
        if source is None:
            source = self._sources[rank, phase] = LineSource(rank, phase, self.cursor.offset(rank, phase))
        if chunk.data and chunk.next != source.offset + len(chunk.data):
            raise ValueError(f"chunk of rank {rank} does not begin at {source.offset}: it ends at {chunk.next}")
        if chunk.pid is not None and self._pids.get((rank, phase)) != chunk.pid:
            self._pids[rank, phase] = chunk.pid
            self._heads(phase)[rank] = ""
        lines = source.feed(chunk.data, chunk.times)
        if chunk.ended:
            lines += source.finish()
        self._merger.push(rank, lines, now, source.time)

    def idle(self, rank: int, phase: str, now: float) -> None:
        """A rank has written nothing for `BAR_S`: show where its progress bar stands."""
        source = self._sources.get((rank, phase))
        if source:
            self._merger.push(rank, source.idle(), now)

    def end(self, rank: int) -> None:
        """A rank's last phase has ended."""
        self._merger.end(rank)
        self._ending.add(rank)

    def note(self, rank: int, text: str) -> None:
        """Say something of our own about a rank, at once."""
        who = host_name(rank) if self.hosts > 1 else self._name or "task"
        self._out.append(self._tinted(f"({who}) ") + text)

    def caught_up(self) -> None:
        """All that was there when reading began has been pushed: the tail is known, and is taken next."""
        if self._tail:
            self._drain()
            self._to_tail()
            if self._tail.cut:
                self._out.append(_TAIL_CUT)
            self._out += self._tail.kept
            self._tail = None

    def due(self) -> float | None:
        """When `take` will have something even if nothing more is pushed; None if nothing waits."""
        times = (self._merger.due(), self._collapser.due() if self._collapser else None)
        return min((time for time in times if time is not None), default=None)

    def take(self, now: float, most: int = MOST_AT_ONCE) -> list[str]:
        """The next lines to print, at most so many, after a look at as many more. `cursor` says how far they bring the reader."""
        if len(self._out) < most:  # or else leave it where it is bounded
            if not self._pending:
                self._merged, self._at = self._merger.pop(now), 0
            self._look_at(most, now)
        return self._printed(most)

    def finish(self, most: int = MOST_AT_ONCE) -> list[str]:
        """The next of all that is left, at the end of the log or of reading it; empty when nothing is."""
        self._merged += self._merger.pop(math.inf)
        while self._pending and not self._out and not self._tail:
            self._look_at(most, 0.0)
        if not self._pending or self._tail:
            self._drain()
            self.caught_up()
        return self._printed(most)

    def _look_at(self, most: int, now: float) -> None:
        """Decide about the next lines, so many."""
        lines = self._merged[self._at : self._at + most]
        self._at += len(lines)
        if not self._pending:
            self._merged, self._at = [], 0
        if self._collapser:
            self._collapser.push(lines, now)
            self._end_drained()
            self._out += self._collapser.pop(now)
        else:
            self._out += lines

    def _drain(self) -> None:
        """Decide about every line at once."""
        self._merged += self._merger.pop(math.inf)
        self._look_at(self._pending, 0.0)
        if self._collapser:
            self._out += self._collapser.finish()
            self._end_drained()

    def _end_drained(self) -> None:
        """Tell the collapser of ranks that have ended, once it has their last lines."""
        if self._collapser and self._ending and not self._pending:
            for rank in [rank for rank in self._ending if not self._merger.holds(rank)]:
                self._collapser.end(rank)
                self._ending.discard(rank)

    def _to_tail(self) -> None:
        """Keep what would be shown; only notes are shown at once."""
        notes = [item for item in self._out if isinstance(item, str)]
        for item in self._out:
            if self._tail and not isinstance(item, str):
                for dropped in self._tail.keep(item):
                    self._advance(dropped)
        self._out = deque(notes)

    def _printed(self, most: int) -> list[str]:
        """Take items off `_out`, move the cursor past them and write them out. Tight, since every line comes here."""
        if self._tail:
            self._to_tail()
        out = self._out
        times: list[int] = []  # of each line; -1 for a note, which is written as it is
        heads: list[str] = []
        raws: list[bytes] = []
        current = ""
        for _ in range(min(most, len(out))):
            item = out.popleft()
            if isinstance(item, tuple):
                time, rank, phase, end, raw = item
                if phase != current:
                    current, offsets, known = phase, self.cursor.phase(phase), self._heads(phase)
                offsets[rank] = end
                head = known[rank] or self._head(rank, phase)
            elif isinstance(item, list):
                time, head, raw = self._group(item)
            else:
                time, head, raw = -1, item, b""
            times.append(time)
            heads.append(head)
            raws.append(raw)
        if self.options.timestamps:
            heads = [
                head if time < 0 else f"{self._clock(time)} {head}" for time, head in zip(times, heads, strict=True)
            ]
        return list(map(add, heads, self._texts(raws)))

    def _group(self, lines: list[Line]) -> tuple[int, str, bytes]:
        """Lines of several ranks as one: its time, prefix and text."""
        self._advance(lines)
        time, _, _, _, raw = lines[0]
        texts = [line[TEXT] for line in lines]
        differ = figures_differ(texts)
        if differ and self.options.spread:
            raw += f" [{', '.join(spread(texts))}]".encode()
        return time, self._group_head(lines, differ), raw

    def _texts(self, raws: list[bytes]) -> list[str]:
        """What a terminal may show of these lines. Most can be shown as they are, which is seen for all at once."""
        joined = b"\n".join(raws).decode("utf-8", "replace")
        texts = joined.split("\n")
        if not joined.replace("\n", "").isprintable():
            colour = self.options.colour
            texts = [
                text if text.isprintable() else display(raw, colour) for text, raw in zip(texts, raws, strict=True)
            ]
        return [self._mask(text) for text in texts] if self._mask else texts

    def _advance(self, item: Shown) -> None:
        """Move the cursor past a line of one rank or of several."""
        lines = item if isinstance(item, list) else [item]
        offsets = self.cursor.phase(lines[0][PHASE])
        for line in lines:
            offsets[line[RANK]] = line[END]

    def _group_head(self, lines: list[Line], differ: bool) -> str:
        ranks = range(self.hosts) if len(lines) == self.hosts else [line[RANK] for line in lines]
        figures = lines[0][RANK] if differ else None
        return self._tinted(group_prefix(lines[0][PHASE], ranks, self.hosts, figures))

    def _heads(self, phase: str) -> list[str]:
        """The prefixes of a phase by rank, empty where not made yet."""
        return self._prefixes.setdefault(phase, [""] * self.hosts)

    def _head(self, rank: int, phase: str) -> str:
        pid = self._pids.get((rank, phase))
        made = self._tinted(prefix(phase, rank, self.hosts, pid, self._ips[rank], self._name))
        self._heads(phase)[rank] = made
        return made

    def _tinted(self, made: str) -> str:
        return tint(made) if self.options.colour else made

    def _clock(self, time: int) -> str:
        """UTC, since the reader may sit in another time zone than the server that writes this."""
        second, rest = divmod(time, 1_000_000_000)
        if second != self._second[0]:
            self._second = (second, strftime("%Y-%m-%dT%H:%M:%S", gmtime(second)))
        return f"{self._second[1]}.{rest // 1_000_000:03d}Z"


class _Tail:
    """The last lines, in bounded memory."""

    def __init__(self, lines: int) -> None:
        self._most = lines
        self._bytes = 0
        self.kept: deque[Shown] = deque()
        self.cut = False  # memory was the limit, not the number of lines

    def keep(self, item: Shown) -> Iterator[Shown]:
        """Keep this one; answer those that are therefore left out."""
        self.kept.append(item)
        self._bytes += _cost(item)
        while len(self.kept) > self._most or self._bytes > TAIL_BYTES:
            self.cut = self.cut or len(self.kept) <= self._most
            first = self.kept.popleft()
            self._bytes -= _cost(first)
            yield first


def _cost(item: Shown) -> int:
    return sum(len(line[TEXT]) + LINE_COST for line in item) if isinstance(item, list) else len(item[TEXT]) + LINE_COST


def _checked(rank: int, hosts: int) -> int:
    if 0 <= rank < hosts:
        return rank
    known = "only rank 0 exists" if hosts == 1 else f"the ranks are 0 to {hosts - 1}"
    raise UserError(f"there is no rank {rank}: the job runs on {hosts} host{'s' * (hosts > 1)}", known)
