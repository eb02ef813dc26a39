"""The logs of a job: from the output of every rank, wherever it is, to lines on a screen.

    feeds -> follow -> Renderer: LineSource -> Merger -> Collapser -> text -> emit

1. `follow` runs a reader for each rank. It asks the rank's feed for the next bytes, phase after phase, and pushes them into
   the renderer, which decides what is shown and in which order (`render`, and what it is made of).
2. One more task takes lines from the renderer when there are any or when the next are due, and hands them to `emit`.
3. A rank whose lines wait is not read further, so that memory is bounded however long the log and however slow the reader.
4. Work is done in small pieces, and before each the `turn` of the caller is awaited: a server that follows many logs at once lets
   them take turns, so that it answers others in between.
5. A feed that loses its host is asked again, less and less often; nothing is lost or repeated, since reading is by offset.

Somebody who comes back brings the `Cursor` of the last lines they were given and goes on from there.
"""

import asyncio
import bisect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Protocol

from podway.errors import ProviderError
from podway.hosts.logs.collapse import Collapser
from podway.hosts.logs.cursor import Cursor
from podway.hosts.logs.lines import BAR_S, Line, LineSource
from podway.hosts.logs.merge import Merger
from podway.hosts.logs.render import Chunk, Options, Renderer
from podway.hosts.logs.text import display, mask, prefix

__all__ = [
    "Chunk",
    "Collapser",
    "Cursor",
    "Follow",
    "Line",
    "LineSource",
    "LogFeed",
    "Merger",
    "Options",
    "Renderer",
    "display",
    "follow",
    "mask",
    "prefix",
]

WAIT_S = 10.0  # how long a feed may wait for output before it answers that there is none
TICK_S = 0.02  # lines that come closer together than this are printed together
READ_BYTES = 8 << 20  # asked for at once, all ranks together
_LEAST_READ, _MOST_READ = 32 << 10, 1 << 20
PIECE_BYTES = 16 << 10  # pushed at once
PIECE_LINES = 256  # taken at once
EMIT_LINES = 2048  # emitted at once
_EMPTY_S = 0.2
_RETRY_S, _RETRY_MOST_S = 0.5, 10.0
_TRIES_TO_LOOK = 3  # of a reader who does not stay


class LogFeed(Protocol):
    """Where the output of one rank comes from: an agent, or the archive of an ended job."""

    @property
    def rank(self) -> int:
        """Which rank."""

    @property
    def phases(self) -> Iterable[str]:
        """Its phases in order, such as setup and run; asked for the next one when one has ended."""

    async def read(self, phase: str, offset: int, wait: float, limit: int) -> Chunk:
        """The bytes from `offset` on, at most `limit` and all there are below that; if none, wait so long for some.

        A phase that will not run any more has ended. `ProviderError` says that the host did not answer.
        """


Emit = Callable[[list[str]], Awaitable[None]]
Turn = Callable[[], Awaitable[None]]


async def no_turn() -> None:
    """Whoever follows alone waits for nobody."""


async def follow(
    feeds: Sequence[LogFeed], renderer: Renderer, emit: Emit, *, stay: bool = True, turn: Turn = no_turn
) -> dict[int, ProviderError]:
    """Show the log until every rank has ended (or, not to `stay`, what there is now); answer the ranks that were lost."""
    return await Follow(feeds, renderer, emit, stay=stay, turn=turn).run()


class Follow:
    """Reads every rank and emits what the renderer shows. `emit` may look at `renderer.cursor`."""

    def __init__(self, feeds: Sequence[LogFeed], renderer: Renderer, emit: Emit, *, stay: bool, turn: Turn) -> None:
        self._feeds = [feed for feed in feeds if feed.rank in renderer.ranks]
        self._renderer = renderer
        self._emit = emit
        self._stay = stay
        self._turn = turn
        self._limit = min(_MOST_READ, max(_LEAST_READ, READ_BYTES // max(1, len(self._feeds))))
        self._behind = {feed.rank for feed in self._feeds}  # have not read all that was there when we began
        self._reading = len(self._feeds)
        self._lost: dict[int, ProviderError] = {}
        self._news = asyncio.Event()  # something was pushed
        self._room = asyncio.Event()  # something was taken

    async def run(self) -> dict[int, ProviderError]:
        """Until the end; the first failure of `emit` ends it too."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for feed in self._feeds:
                    tasks.create_task(self._read(feed))
                tasks.create_task(self._show())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return self._lost

    async def _show(self) -> None:
        """Emit what is to be shown, as soon as it is and not before."""
        while self._reading:
            self._news.clear()
            lines: list[str] = []
            while len(lines) < EMIT_LINES:
                await self._turn()
                lines += self._renderer.take(_now(), PIECE_LINES)
                if not self._renderer.busy:
                    break
            self._room.set()
            if lines:
                await self._emit(lines)
                await asyncio.sleep(TICK_S if len(lines) < EMIT_LINES else 0)
                continue
            due = self._renderer.due()
            try:
                async with asyncio.timeout(None if due is None else max(0.0, due - _now())):
                    await self._news.wait()
            except TimeoutError:
                pass
        while lines := self._renderer.finish(EMIT_LINES):
            await self._emit(lines)
            await self._turn()

    async def _read(self, feed: LogFeed) -> None:
        """Push everything a rank writes, phase after phase."""
        try:
            for phase in feed.phases:
                if not await self._read_phase(feed, phase):
                    break
        except ProviderError as error:
            self._lost[feed.rank] = error
            self._renderer.note(feed.rank, f"the rest of its log cannot be read: {error}")
        self._renderer.end(feed.rank)
        self._has_caught_up(feed.rank)
        self._reading -= 1
        self._news.set()

    async def _read_phase(self, feed: LogFeed, phase: str) -> bool:
        """Push everything a rank writes in a phase; False if we are not to wait for its end."""
        rank, renderer = feed.rank, self._renderer
        since = _now()
        while True:
            while rank in renderer.full:
                self._room.clear()
                await self._room.wait()
            asked = _now()
            wait = 0.0 if rank in self._behind else WAIT_S
            chunk = await self._ask(feed, phase, wait)
            for piece in pieces(chunk):
                await self._turn()
                renderer.push(rank, phase, piece, _now())
                self._news.set()
            if chunk.ended:
                return True
            if len(chunk.data) < self._limit:
                self._has_caught_up(rank)
                if not self._stay:
                    return False
            if chunk.data:
                since = _now()
                continue
            if _now() - since >= BAR_S:
                renderer.idle(rank, phase, _now())
            if wait and _now() - asked < TICK_S:  # a feed that does not wait must not keep us busy
                await asyncio.sleep(_EMPTY_S)

    async def _ask(self, feed: LogFeed, phase: str, wait: float) -> Chunk:
        """Read on; while the host does not answer, try again."""
        pause = _RETRY_S
        tries = 0
        while True:
            try:
                return await feed.read(phase, self._renderer.offset(feed.rank, phase), wait, self._limit)
            except ProviderError as error:
                tries += 1
                if not error.transient or (not self._stay and tries == _TRIES_TO_LOOK):
                    raise
            if tries == 1:
                self._renderer.note(feed.rank, "connection lost, retrying")
                self._news.set()
            if self._stay:
                self._has_caught_up(feed.rank)  # the others need not wait for it
            await asyncio.sleep(pause)
            pause = min(2 * pause, _RETRY_MOST_S)

    def _has_caught_up(self, rank: int) -> None:
        """This rank has pushed all that was there at the beginning; when all have, the tail is known."""
        if rank in self._behind:
            self._behind.discard(rank)
            if not self._behind:
                self._renderer.caught_up()
                self._news.set()


def pieces(chunk: Chunk) -> Iterator[Chunk]:
    """A long chunk as several, each with the times of its own bytes."""
    begin, times = chunk.next - len(chunk.data), list(chunk.times)
    for start in range(0, max(1, len(chunk.data)), PIECE_BYTES):
        data = chunk.data[start : start + PIECE_BYTES]
        end = begin + start + len(data)
        last = bisect.bisect_left(times, end, key=lambda pair: pair[0])  # it may cover some of the next piece too
        ended = chunk.ended and end == chunk.next
        yield Chunk(data=data, times=times[: last + 1], next=end, ended=ended, pid=chunk.pid)
        times = times[last:]


def _now() -> float:
    return asyncio.get_running_loop().time()
