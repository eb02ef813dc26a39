"""Rehearsals that people ask the server for: the TPU compiler, in a process of its own, off the event loop.

One runs at a time (a compiler takes gigabytes), a few wait, and each may be cancelled. The process is the command line's own
`podway rehearse train … -o json`: its stages are the progress, its document the result. Kept in memory, by the server that runs
them; a server that ends kills them, and the compiler keeps what it found in its cache.
"""

import asyncio
import contextlib
import secrets
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from podway.decoding import from_json
from podway.errors import UserError
from podway.server.page_api import BufferView, CompiledView, RehearsalBody, RehearsalView

AT_ONCE, MOST_OPEN, MOST_KEPT = 1, 8, 100
PING_S = 15.0
LONGEST_S = 3600.0
STAGES = ("lowering", "compiling", "reading", "known")
LARGEST_LINE = 1 << 20


class _CompiledMemory(msgspec.Struct):
    limit: float
    total: float
    fits: bool
    buffers: list[BufferView] = []


class _StepEstimate(msgspec.Struct):
    point: float
    parts: dict[str, float] = {}


class _PlannedStep(msgspec.Struct):
    bytes: float
    seconds: float


class _RehearsalDocument(msgspec.Struct):
    """What is read of `-o json`."""

    versions: dict[str, str] = {}
    compile_seconds: float = 0.0
    failed: str | None = None
    memory: _CompiledMemory | None = None
    estimate: _StepEstimate | None = None
    planned: _PlannedStep | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    fixes: list[str] = []


class _OpenRehearsal:
    """One rehearsal, and those who wait for news of it."""

    def __init__(self, view: RehearsalView, body: RehearsalBody) -> None:
        self.view = view
        self.body = body
        self.task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def set(self, **fields: object) -> None:
        self.view = msgspec.structs.replace(self.view, **fields)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait(self, timeout: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout)


class Rehearsals:
    """Those of one server; used from its event loop alone."""

    def __init__(self) -> None:
        self._known: dict[str, _OpenRehearsal] = {}
        self._gate = asyncio.Semaphore(AT_ONCE)

    def begin(self, user: str, body: RehearsalBody) -> RehearsalView:
        """Ask for one; it runs when those before it have ended."""
        if sum(one.view.ended is None for one in self._known.values()) >= MOST_OPEN:
            raise UserError("too many rehearsals are waiting", "wait for one to end, or cancel one", status=429)
        for key in [key for key, one in self._known.items() if one.view.ended is not None][: -MOST_KEPT or None]:
            del self._known[key]
        view = RehearsalView(
            id=secrets.token_hex(8),
            user=user,
            model=body.model or "config.json",
            slice=body.slice,
            mesh=body.mesh,
            state="waiting",
            asked=time.time(),
        )
        opened = self._known[view.id] = _OpenRehearsal(view, body)
        opened.task = asyncio.create_task(self._run(opened))
        return view

    def list(self, user: str | None) -> list[RehearsalView]:
        """A person's, or with None everybody's; the latest first."""
        return [one.view for one in reversed(self._known.values()) if user in (None, one.view.user)]

    async def follow(self, key: str, user: str | None) -> AsyncIterator[RehearsalView]:
        """As it changes, until it has ended; the same again now and then is a sign of life."""
        opened = self._find(key, user)
        while True:
            yield opened.view
            if opened.view.ended is not None:
                return
            await opened.wait(PING_S)

    async def cancel(self, key: str, user: str | None) -> RehearsalView:
        """End it, and its process."""
        opened = self._find(key, user)
        if opened.task is not None and opened.view.ended is None:
            opened.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await opened.task
        if opened.view.ended is None:  # it was cancelled before it began
            opened.set(state="cancelled", ended=time.time())
        return opened.view

    def _find(self, key: str, user: str | None) -> _OpenRehearsal:
        found = self._known.get(key)
        if found is None or user not in (None, found.view.user):
            raise UserError(f"there is no rehearsal {key!r}", "it may be of another server, or long ago", status=404)
        return found

    async def _run(self, opened: _OpenRehearsal) -> None:
        try:
            async with self._gate:
                opened.set(state="running", began=time.time())
                with tempfile.TemporaryDirectory(prefix="podway-rehearsal-") as folder:
                    async with asyncio.timeout(LONGEST_S):
                        code, out, error = await _compile(opened, Path(folder))
            opened.set(**_outcome(code, out, error), stage="", ended=time.time())
        except asyncio.CancelledError:
            opened.set(state="cancelled", stage="", ended=time.time())
            raise
        except TimeoutError:
            opened.set(state="failed", note="the compiler took too long", stage="", ended=time.time())
        except Exception as error:
            opened.set(state="failed", note=f"Podway itself failed: {error}", stage="", ended=time.time())


async def _compile(opened: _OpenRehearsal, folder: Path) -> tuple[int, bytes, str]:
    """Run the command; its code, its output, and its last lines of complaint."""
    process = await asyncio.create_subprocess_exec(
        *command_of(opened.body, folder),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=LARGEST_LINE,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        out = asyncio.create_task(process.stdout.read())
        said: deque[str] = deque(maxlen=2)  # an error and what to do about it
        async for line in process.stderr:
            text = line.decode(errors="replace").strip()
            stage = text.rpartition(": ")[2].partition(",")[0]
            if stage in STAGES:
                opened.set(stage=stage)
            elif text:
                said.append(text)
        return await process.wait(), await out, ": ".join(said)
    finally:
        if process.returncode is None:
            process.kill()  # its compilers end with it: their standard input closes
            await process.wait()


def command_of(body: RehearsalBody, folder: Path) -> list[str]:
    """The command line; each value is one word, which cannot become another option."""
    model = body.model
    if body.config is not None:
        file = folder / "config.json"
        file.write_bytes(msgspec.json.encode(body.config))
        model = str(file)
    tpu = f"{body.slice.partition('-')[0]}-{body.topology}" if body.topology else body.slice
    words = [f"--tpu={tpu}", f"--mesh={body.mesh}", f"--batch={body.batch}", f"--microbatches={body.microbatches}"]
    words += [f"--seq={body.seq}", f"--remat={body.remat}", "-o", "json"]
    if body.offload:
        words.append(f"--offload={'+'.join(body.offload)}")
    return [sys.executable, "-m", "podway.cli.main", "rehearse", "train", *words, "--", model]


def _outcome(code: int, out: bytes, error: str) -> dict[str, object]:
    try:
        found = from_json(out, list[_RehearsalDocument])[0]
    except (msgspec.MsgspecError, IndexError):
        note = error.removeprefix("Error: ") or f"the command ended with {code}"
        return {"state": "failed", "note": note[:500]}
    memory, estimate, planned = found.memory, found.estimate, found.planned
    compiled = CompiledView(
        fits=memory is not None and memory.fits,
        bytes=memory.total if memory else None,
        limit=memory.limit if memory else None,
        planned_bytes=planned.bytes if planned else None,
        step_s=estimate.point if estimate else None,
        planned_s=planned.seconds if planned else None,
        tokens_s=found.tokens_per_second,
        mfu=found.mfu,
        compile_s=found.compile_seconds,
        libtpu=found.versions.get("libtpu", ""),
        parts=estimate.parts if estimate else {},
        buffers=memory.buffers[:8] if memory else [],
        fixes=found.fixes,
        failed=found.failed or "",
    )
    return {"state": "done", "compiled": compiled}
