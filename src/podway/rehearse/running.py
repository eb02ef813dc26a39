"""Run rehearsals: a process of the compiler for each, as many at once as the machine has memory for (no jax here).

1. The worker lowers its program and says its key. If the cache has the answer, the worker ends there.
2. Else it compiles. A fast rehearsal ends the worker as soon as the compiler has written its schedule and its buffers, which is
   before it makes code: seconds in place of minutes.
3. What libtpu wrote is read into a `CompileReport`, and kept under PODWAY_HOME/cache/rehearse by the key.

An abort of the compiler ends its own process and becomes one line. Ctrl-C, or the end of this process for whatever reason,
ends the workers: they stop when their standard input closes.
"""

import contextlib
import functools
import gzip
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO

import msgspec

from podway.decoding import from_json
from podway.errors import UserError
from podway.extras import require
from podway.files import write_atomically
from podway.home import home
from podway.model.expert_dispatch import Dispatch
from podway.model.families import find_model
from podway.model.layout import parse_mesh
from podway.model.shape import EXPERT_CAPACITY
from podway.rehearse.fabric import Fabric
from podway.rehearse.hlo import read_module
from podway.rehearse.memory import read_memory
from podway.rehearse.messages import Compiled, Invalid, Lowered, Message, Parts
from podway.rehearse.reading import program_of
from podway.rehearse.rehearsal import CompileReport, Rehearsal
from podway.train.flags import flags_for

# A compiler of one program grows to 1.1-2.0 GB (facts: libtpu 0.0.51, the 16B-128B jobs); with room for a larger one.
COMPILER_BYTES = 2_500_000_000
_SCHEDULED = "after_optimizations_after_buffer_assignment.txt"  # written when nothing but code is missing
_TEXTS = ("after_codegen.txt", _SCHEDULED, "after_optimizations.txt")  # the best one first; the last also of an OOM
# Verbatim of the four published jobs: MaxText configs/largest_job/*.sh @5ebcd67fe.
_MAXTEXT_FLAGS = (
    "--xla_tpu_enable_data_parallel_all_reduce_opt=true",
    "--xla_tpu_data_parallel_opt_different_sized_ops=true",
    "--xla_tpu_enable_async_collective_fusion=true",
    "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
    "--xla_tpu_overlap_compute_collective_tc=true",
    "--xla_enable_async_all_gather=true",
)
POLL_S = 0.5
Progress = Callable[[int, str], None]  # number of the rehearsal, what it is at


def check_installed() -> None:
    """A UserError where the compiler is not here."""
    require("rehearse", "podway rehearse")


def at_once(available: int | None = None, cores: int | None = None) -> int:
    """How many compilers may run side by side."""
    free = memory_available() if available is None else available
    return max(1, min(cores or os.cpu_count() or 1, free // COMPILER_BYTES))


def memory_available() -> int:
    """Bytes that can be taken without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return COMPILER_BYTES  # a machine that does not tell: one at a time


def rehearse(
    rehearsals: Sequence[Rehearsal],
    *,
    jobs: int | None = None,
    fresh: bool = False,
    progress: Progress = lambda number, stage: None,
    limit_s: float | None = None,
) -> list[CompileReport]:
    """The compiler's report of each, in the order they were given; what is not compiled after `limit_s` seconds has failed."""
    ends = None if limit_s is None else time.monotonic() + limit_s
    check_installed()
    workers: list[_Worker] = []
    stop = threading.Event()

    def one(number: int, rehearsal: Rehearsal) -> CompileReport:
        if stop.is_set():
            raise KeyboardInterrupt
        with tempfile.TemporaryDirectory(prefix="podway-rehearse-") as folder:
            worker = _Worker(rehearsal, Path(folder))
            workers.append(worker)
            if stop.is_set():
                worker.end()
            return worker.answer(fresh=fresh, progress=lambda stage: progress(number, stage))

    pool = ThreadPoolExecutor(max_workers=jobs or at_once())
    try:
        futures = [pool.submit(one, number, rehearsal) for number, rehearsal in enumerate(rehearsals)]
        return [_result(future, ends) for future in futures]
    finally:
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.end()


def _result(future: Future[CompileReport], ends: float | None) -> CompileReport:
    """Waited for piece by piece: a Ctrl-C that comes just before a wait is heeded only when that wait ends."""
    while not future.done():
        if ends is not None and time.monotonic() > ends:
            return CompileReport(jax="", libtpu="", key="", failed="it was not compiled within the time that was left")
        wait([future], timeout=POLL_S)
    return future.result()


def engine_parts(rehearsal: Rehearsal) -> list[str]:
    """The names of the programs that an engine would compile."""
    check_installed()
    with tempfile.TemporaryDirectory(prefix="podway-rehearse-") as folder:
        worker = _Worker(rehearsal, Path(folder))
        try:
            worker.send(msgspec.json.encode(rehearsal))
            answer = worker.receive()
        finally:
            worker.end()
    match answer:
        case Parts(names=names):
            return list(names)
        case Invalid(what=what, hint=hint):
            raise UserError(what, hint)
        case Compiled(failed=why):
            raise UserError(f"the programs of the engine cannot be listed: {why}", "try another slice or model")
        case _:
            raise UserError("the programs of the engine cannot be listed", "try another slice or model")


def environment(rehearsal: Rehearsal) -> dict[str, str]:
    """Of the process that compiles: no TPU is looked for, several may compile at once, and the flags of the real run."""
    generation = rehearsal.tpu.generation
    if rehearsal.program == "maxtext-2023" and generation == "v5e":  # elsewhere libtpu refuses flags of theirs
        flags = flags_for(None, (*_MAXTEXT_FLAGS, *rehearsal.flags))
    elif rehearsal.what == "serve":
        flags = flags_for(None, rehearsal.flags)
    else:
        flags = flags_for(generation, rehearsal.flags)
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": rehearsal.tpu.accelerator_type,
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "LIBTPU_INIT_ARGS": " ".join(flags),
        "XLA_FLAGS": "",  # this machine's, for its own devices: libtpu ends at the first that it does not know
        "TPU_STDERR_LOG_LEVEL": "3",
    }


class _Worker:
    """One process of the compiler."""

    def __init__(self, rehearsal: Rehearsal, folder: Path) -> None:
        self.rehearsal = rehearsal
        self.folder = folder
        self.errors: IO[bytes] = open(folder / "stderr", "w+b")  # noqa: SIM115 - closed in end()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "podway.rehearse.worker", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=environment(rehearsal),
            start_new_session=True,  # Ctrl-C reaches this process, which ends the worker
        )
        self.peak = 0
        self.listener: threading.Thread | None = None

    def answer(self, *, fresh: bool, progress: Callable[[str], None]) -> CompileReport:
        """What the compiler says, from the cache if it is there."""
        progress("lowering")
        try:
            self.send(msgspec.json.encode(self.rehearsal))
            lowered = self.receive()
            if isinstance(lowered, Invalid):
                raise UserError(lowered.what, lowered.hint)
            if not isinstance(lowered, Lowered):
                failed = lowered.failed if isinstance(lowered, Compiled) else "it names programs, none to compile"
                return CompileReport(jax="", libtpu="", key="", failed=failed)
            known = None if fresh else cached(lowered.key, complete=not self.rehearsal.fast)
            if known is not None:
                progress("known")
                return known
            progress("compiling")
            self.send(b"go")
            end = self._wait()
            progress("reading")
            report = self._read(lowered, end)
            if report.memory is not None:
                store_report(report)
            return report
        finally:
            self.end()

    def send(self, line: bytes) -> None:
        """One line to the process."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; the next message says how

    def receive(self) -> Message:
        """The next message; how the process ended where there is none."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(b"{"):
                found: Message = from_json(line, Message)  # type: ignore[arg-type] # a union of types
                return found
        code = self.process.wait()
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        ended = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return Compiled(failed=f"the compiler's process {ended}" + (f": {lines[-1][:300]}" if lines else ""))

    def _wait(self) -> Compiled:
        """Until it is compiled, or for a fast rehearsal until its schedule is written."""
        received: list[Message] = []
        listener = self.listener = threading.Thread(target=lambda: received.append(self.receive()), daemon=True)
        began = time.monotonic()
        listener.start()
        while listener.is_alive():
            listener.join(0.1)
            self.peak = max(self.peak, _peak_bytes(self.process.pid))
            if self.rehearsal.fast and self._written(_SCHEDULED) is not None and listener.is_alive():
                self.end()
                return Compiled(compile_seconds=time.monotonic() - began)
        end = received[0]
        return end if isinstance(end, Compiled) else Compiled(failed="the compiler's process did not say how it ended")

    def _written(self, suffix: str) -> Path | None:
        """A whole file of the compiler's, by the end of its name."""
        found = max(self.folder.glob(f"*.{suffix}"), key=lambda path: path.stat().st_size, default=None)
        if found is None:
            return None
        size = found.stat().st_size
        if self.process.poll() is None:
            time.sleep(0.2)  # it may still be growing
        if not size or found.stat().st_size != size:
            return None
        return found if suffix not in _TEXTS or is_whole_text(found.read_bytes()) else None

    def _read(self, lowered: Lowered, end: Compiled) -> CompileReport:
        base = CompileReport(
            jax=lowered.jax,
            libtpu=lowered.libtpu,
            key=lowered.key,
            name=lowered.name,
            lowering_seconds=round(lowered.lowering_seconds, 1),
            compile_seconds=round(end.compile_seconds, 1),
            peak_bytes=self.peak,
            failed=end.failed,
        )
        text = next((found for suffix in _TEXTS if (found := self._written(suffix)) is not None), None)
        assignment = self._written("after_optimizations-buffer-assignment.txt")
        live = self._written("after_optimizations-live-range.txt")
        if text is None or assignment is None or live is None:
            return base if base.failed else msgspec.structs.replace(base, failed="the compiler wrote no program")
        module = read_module(text.read_text())
        slice = self.rehearsal.tpu
        fabric = Fabric(slice, lowered.places, _spare_rows(self.rehearsal))
        facts = slice.generation_facts
        limit = (facts.hbm_usable_bytes or facts.chip_hbm_bytes) // facts.devices_per_chip
        memory = read_memory(assignment.read_text(), live.read_text(), module, limit)
        complete = text.name.endswith("after_codegen.txt")
        return msgspec.structs.replace(base, memory=memory, program=program_of(module, fabric, complete=complete))

    def end(self) -> None:
        """Kill it if it still runs, and wait for it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.listener is not None:
            self.listener.join()
        for pipe in (self.process.stdin, self.process.stdout, self.errors):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def is_whole_text(text: bytes) -> bool:
    """Whether a program was written to its end, where its entry is: on a busy machine its size may stand still long before."""
    return b"\nENTRY " in text and text.rstrip().endswith(b"\n}")


def _spare_rows(rehearsal: Rehearsal) -> float:
    """What the buffers of experts hold over the mean, where the mesh splits experts."""
    mesh = rehearsal.setting("mesh.shape")
    experts = find_model(rehearsal.model).experts if mesh and "*" not in mesh else None
    if not mesh or experts is None:
        return 1.0
    kind, capacity = rehearsal.setting("model.expert_dispatch"), rehearsal.setting("model.expert_capacity")
    dispatch = Dispatch(
        "gather" if kind == "gather" else "all-to-all" if kind == "all-to-all" else None,
        float(capacity or EXPERT_CAPACITY),
        drop=rehearsal.setting("model.expert_drop") == "true",
    )
    return dispatch.spare_rows(chips=parse_mesh(mesh).expert, per_token=experts.per_token)


def _peak_bytes(pid: int) -> int:
    """The most memory that a process has had."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM")), 0)
    except OSError:
        return 0


@functools.cache
def _reader() -> str:
    """Of the code that reads the compiler's text: what it read differently before is not known now."""
    names = ("hlo", "costs", "fabric", "kernels", "reading", "memory", "program", "rehearsal")
    digest = hashlib.sha256()
    for name in names:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()[:8]


def _cache_path(key: str) -> Path:
    return home() / "cache" / "rehearse" / f"{key}-{_reader()}.json.gz"


def cached(key: str, *, complete: bool) -> CompileReport | None:
    """An answer that is known; with `complete` only one that was compiled to the end, or that does not fit."""
    try:
        report = from_json(gzip.decompress(_cache_path(key).read_bytes()), CompileReport)
    except (OSError, EOFError, gzip.BadGzipFile, msgspec.MsgspecError):
        return None
    whole = report.program is not None and (report.program.complete or report.failed)
    return report if whole or not complete else None


def store_report(report: CompileReport) -> None:
    """Cache a report; one that is there is replaced at once or not at all."""
    path = _cache_path(report.key)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, gzip.compress(msgspec.json.encode(report)))
