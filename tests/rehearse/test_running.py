"""The compiler as a process: one real program, the cache, an abort, an end in the middle."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from podway import extras
from podway.errors import UserError
from podway.model.layout import parse_mesh
from podway.plan.training import Adapters, Training
from podway.rehearse import running, worker
from podway.rehearse.fabric import Fabric
from podway.rehearse.memory import Hbm
from podway.rehearse.messages import Lowered
from podway.rehearse.program import Program, asynchronous
from podway.rehearse.rehearsal import CompileReport, Rehearsal, training_settings
from podway.rehearse.running import (
    at_once,
    cached,
    check_installed,
    environment,
    is_whole_text,
    rehearse,
    store_report,
)
from podway.rehearse.timeline import estimate
from podway.train.settings import read_config
from tests.rehearse.recorded import text

TINY = Rehearsal(
    model="tiny-llama3",
    slice="v5litepod-4",
    settings=("mesh.shape=fsdp=4", "batch.sequences=8", "batch.length=128"),
    fast=True,
)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PODWAY_HOME", str(tmp_path / "home"))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (OSError, IndexError):
        return False


def test_a_real_step_is_compiled_once() -> None:
    pytest.importorskip("libtpu")
    stages: list[str] = []
    report = rehearse([TINY], progress=lambda number, stage: stages.append(stage))[0]
    assert not report.failed and report.memory is not None and report.program is not None
    assert stages == ["lowering", "compiling", "reading"]
    assert 0 < report.memory.arguments < report.memory.total < report.memory.limit and report.peak_bytes > 2**28
    assert "trained/layers/q" in {buffer.name for buffer in report.memory.buffers} or report.memory.buffers
    assert asynchronous(report.program)["all-gather"][0] > 0
    guess = estimate(report.program, Fabric(TINY.tpu))
    assert 0 < guess.low <= guess.point <= guess.high < 1
    stages.clear()
    again = rehearse([TINY], progress=lambda number, stage: stages.append(stage))[0]
    assert again == report and stages == ["lowering", "known"]


def test_the_same_text_for_other_chips_is_another_program() -> None:
    class Lowered:
        def as_text(self) -> str:
            return "module {}"

    versions = {"jax": "1", "libtpu": "2"}
    asked = [
        Rehearsal(model="m", slice=name, slices=n)
        for name, n in (("v3-8", 1), ("v2-8", 1), ("tpu7x-8", 1), ("v3-8", 2))
    ]
    assert len({worker._key(Lowered(), one, versions) for one in asked}) == 4
    assert worker._key(Lowered(), asked[0], versions) == worker._key(Lowered(), asked[0], versions)


def test_a_wrong_wish_is_the_trainers_own_line() -> None:
    pytest.importorskip("libtpu")
    wrong = msgspec.structs.replace(TINY, settings=("mesh.shape=fsdp=4", "batch.sequences=7", "batch.length=128"))
    with pytest.raises(UserError, match="7 sequences cannot be split"):
        rehearse([wrong])


def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> None:
    """Another program in the place of the worker."""
    script = tmp_path / "worker.py"
    script.write_text(code)
    real = subprocess.Popen

    def popen(command: list[str], **more: object) -> object:
        return real([sys.executable, str(script), command[-1]], **more)  # type: ignore[call-overload]

    monkeypatch.setattr(running.subprocess, "Popen", popen)


def test_an_abort_of_the_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ready = Lowered(jax="1", libtpu="2", name="x", key="k", places=(), lowering_seconds=1.0)
    lowered = msgspec.json.encode(ready).decode()
    stand_in(
        monkeypatch, tmp_path,
        "import os, sys\n"
        f"sys.stdin.readline(); print('{lowered}', flush=True); sys.stdin.readline()\n"
        "print('F0000 check failed: shape', file=sys.stderr, flush=True); os.abort()\n",
    )  # fmt: skip
    report = rehearse([TINY])[0]
    assert report.failed == "the compiler's process was killed by signal 6: F0000 check failed: shape"
    assert report.program is None and cached("k", complete=False) is None


def test_ctrl_c_ends_the_workers(tmp_path: Path) -> None:
    """The process that asks is interrupted while the worker sleeps; nothing of it is left."""
    script = tmp_path / "worker.py"
    script.write_text(
        f"import os, sys, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    asking = tmp_path / "asking.py"
    asking.write_text(
        "import faulthandler, signal, subprocess, sys\n"
        "from podway.rehearse import running\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal, whatever started the tests\n"
        "signal.pthread_sigmask(signal.SIG_SETMASK, [])\n"
        "faulthandler.register(signal.SIGUSR1)\n"
        "from tests.rehearse.test_running import TINY\n"
        "real = subprocess.Popen\n"
        f"running.subprocess.Popen = lambda command, **more: real([sys.executable, {str(script)!r}], **more)\n"
        "running.rehearse([TINY])\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with open(tmp_path / "report", "wb") as report:
        process = subprocess.Popen([sys.executable, str(asking)], env=env, stderr=report)
    deadline = time.monotonic() + 30
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    worker = int((tmp_path / "pid").read_text())
    assert alive(worker)
    process.send_signal(signal.SIGINT)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGUSR1)  # where does it stand?
        time.sleep(1)
        process.kill()
        raise AssertionError((tmp_path / "report").read_text()) from None
    while alive(worker):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_cache_keeps_whole_answers_apart() -> None:
    memory = Hbm(arguments=1, temporary=2, limit=10)
    fast = CompileReport(jax="1", libtpu="2", key="abc", memory=memory, program=Program(ops=(), complete=False))
    store_report(fast)
    assert cached("abc", complete=False) == fast
    assert cached("abc", complete=True) is None, "a schedule is no compiled program"
    full = msgspec.structs.replace(fast, program=Program(ops=(), complete=True))
    store_report(full)
    assert cached("abc", complete=True) == full == cached("abc", complete=False)
    path = next((Path(os.environ["PODWAY_HOME"]) / "cache" / "rehearse").iterdir())
    path.write_bytes(path.read_bytes()[:20])
    assert cached("abc", complete=False) is None, "a broken file is no answer"


def test_as_many_at_once_as_the_memory_holds() -> None:
    assert at_once(available=24 * 10**9, cores=16) == 9
    assert at_once(available=24 * 10**9, cores=2) == 2
    assert at_once(available=10**9, cores=16) == 1


def test_not_installed_is_one_line_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: None if name == "libtpu" else object())
    with pytest.raises(UserError) as caught:
        check_installed()
    assert "libtpu" in caught.value.what and "podway[rehearse]" in caught.value.hint


def test_the_flags_are_those_of_the_program() -> None:
    flags = environment(TINY)["LIBTPU_INIT_ARGS"]
    assert "decompose_einsum_reduce_scatter" in flags
    other = environment(msgspec.structs.replace(TINY, program="maxtext-2023"))["LIBTPU_INIT_ARGS"]
    assert "fuse_all_gather" in other and "decompose_einsum" not in other
    assert environment(msgspec.structs.replace(TINY, what="serve", part="fill slots"))["LIBTPU_INIT_ARGS"] == ""


@pytest.mark.parametrize(
    "training",
    [
        Training(seq=4096, batch=32),
        Training(seq=4096, batch=32, remat="qkv+context", microbatches=2, optimizer="adafactor", moments="bfloat16"),
        Training(seq=2048, batch=16, adapters=Adapters(rank=8, base="int8", targets=("q", "v")), params="bfloat16"),
    ],
)
def test_a_plan_becomes_settings_that_the_trainer_reads(training: Training) -> None:
    mesh = parse_mesh("fsdp=8,tensor=2", chips=16, tile=(2, 1))
    config = read_config(None, ["model.name=llama3.1-8b", *training_settings(mesh, training)])
    assert config.batch.sequences == training.batch and config.batch.length == training.seq
    assert config.batch.microbatches == training.microbatches and config.optimizer.kind == training.optimizer
    assert config.optimizer.moments == training.moments and config.precision.weights == training.params
    assert parse_mesh(config.mesh.shape, chips=16, tile=config.mesh.tile) == mesh
    if training.adapters:
        assert (config.lora.rank, config.lora.base, config.lora.targets) == (8, "int8", ("q", "v"))
    if "+" in training.remat:
        assert (config.remat.policy, config.remat.save) == ("custom", ("qkv", "context"))


@pytest.mark.parametrize("name", ["scan_v5e", "scan_v6e_sparsecore"])
def test_a_program_that_is_still_being_written_is_not_taken_for_whole(name: str) -> None:
    """A compiler that gets no time writes nothing for longer than anyone waits: what is there then is no program."""
    written = text(name).encode()
    assert is_whole_text(written)
    ends = [at for at in range(1, len(written)) if written[at - 1 : at] == b"\n"]
    assert not any(is_whole_text(written[:at]) for at in ends[:-1] if written[at:].strip())
    assert not is_whole_text(written[: len(written) // 2]) and not is_whole_text(b"")
