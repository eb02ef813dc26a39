"""`make bench-aot`: which rows it asks for, and what it keeps of an answer."""

import msgspec
import pytest
from tools.bench import aot
from tools.bench.aot import Row, is_answered, page_of, read_kept, row_of, training_rows

from podway.model.families import find_model
from podway.rehearse.memory import Hbm
from podway.rehearse.program import Program
from podway.rehearse.reading import read_program
from podway.rehearse.rehearsal import CompileReport, Rehearsal
from podway.train.checks import check_fit, resolve_mesh
from podway.train.settings import read_config
from tests.rehearse.recorded import fabric, text

GIB = 2**30


def test_every_row_can_be_asked_for() -> None:
    rows = training_rows()
    assert len({(name, asked.slice) for name, asked in rows}) == len(rows) == 22
    for _, asked in rows:
        config = read_config(None, [f"model.name={asked.model}", *asked.settings])
        check_fit(config, find_model(asked.model), resolve_mesh(config, asked.tpu.devices))
    wanted = {(asked.model, asked.slice) for _, asked in rows}
    assert {
        ("llama3.1-8b", "v6e-16"),
        ("llama3.1-70b", "v6e-64"),
        ("llama3.1-70b", "v5p-128"),
        ("16b", "v5litepod-256"),
    } <= wanted


def report(gib: float, *, complete: bool, failed: str = "") -> CompileReport:
    program = read_program(text("scan_v5e"), fabric("v5litepod-4"))
    memory = Hbm(arguments=int(gib * GIB), temporary=0, limit=int(15.75 * GIB))
    return CompileReport(
        jax="1", libtpu="2", key="k", memory=memory, compile_seconds=7.0 if not complete else 90.0, failed=failed,
        program=Program(ops=program.ops, complete=complete),
    )  # fmt: skip


def test_a_schedule_is_completed_later_and_an_oom_is_an_answer() -> None:
    asked = Rehearsal(model="llama3.2-1b", slice="v5litepod-4", settings=("mesh.shape=fsdp=4",))
    fast = row_of("x", asked, report(3.0, complete=False), None)
    assert (fast.gib, fast.schedule_seconds, fast.compile_seconds) == (3.0, 7.0, None)
    assert is_answered(fast, fast=True) and not is_answered(fast, fast=False)
    full = row_of("x", asked, report(3.0, complete=True), fast)
    assert (full.schedule_seconds, full.compile_seconds) == (7.0, 90.0) and is_answered(full, fast=False)
    large = row_of("x", asked, report(20.0, complete=False, failed="out of memory"), None)
    assert large.step is None and is_answered(large, fast=False), "nothing is gained by compiling it to the end"
    broken = row_of("x", asked, CompileReport(jax="1", libtpu="2", key="k", failed="it aborted"), None)
    assert broken.gib is None and not is_answered(broken, fast=True)
    page = page_of([fast, large, broken])
    assert "| 3.00 | 15.75 | yes |" in page and "| 20.00 | 15.75 | no |" in page and "does not compile" in page


def test_what_is_kept_is_what_the_page_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = read_kept()
    assert rows, "docs/measurements/aot.json"
    page = aot.PAGE.read_text()
    for row in rows.values():
        assert row.name in page
    four = [row for label, row in rows.items() if "published job" in label]
    assert len(four) == 4 and all(row.gib is not None and row.gib <= row.limit for row in four)
    assert msgspec.json.decode(msgspec.json.encode(rows), type=dict[str, Row]) == rows
