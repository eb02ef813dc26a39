"""Measured runs beside their plans, and plans by one's own runs."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from podway.catalog.slices import find_slice
from podway.cli.index import podway
from podway.errors import UserError
from podway.plan.chips import device_of, set_rates
from podway.plan.measured import compare, needed_rate_of, plan_of, read_run
from podway.plan.uncertainty import set_own_runs
from podway.profile_trace import classes_of

SETTINGS = """
model: {name: llama3.1-8b}
mesh: {shape: "fsdp=16"}
batch: {sequences: 48, length: 8192, microbatches: 1}
remat: {policy: custom, save: [], offload: [residual, qkv, context]}
"""


@pytest.fixture(autouse=True)
def published_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PODWAY_HOME", str(tmp_path / "home"))
    yield
    set_rates({})
    set_own_runs({})


def run_of(folder: Path, *, seconds: float = 3.6, steps: int = 10) -> Path:
    folder.mkdir()
    (folder / "settings.yaml").write_text(SETTINGS)
    lines = [{"step": n, "seconds": 90.0 if n == 0 else seconds} for n in range(steps)] + [
        {"step": steps, "eval_loss": 2.0}
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def trace_of(folder: Path, ops: list[tuple[str, str, float]]) -> None:
    """A trace of two steps on two devices, each with these operations (name, category, milliseconds)."""
    events: list[dict[str, object]] = []
    for pid in (3, 7):
        for tid, name in ((1, "Steps"), (2, "XLA Modules"), (3, "XLA Ops")):
            events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}})
        for step in range(2):
            events.append({"ph": "X", "pid": pid, "tid": 1, "name": str(step), "ts": 0, "dur": 1e6})
            for name, category, length in ops:
                args = {"hlo_category": category}
                events.append(
                    {"ph": "X", "pid": pid, "tid": 3, "name": name, "ts": 0, "dur": length * 1e3, "args": args}
                )
    path = folder / "profile" / "plugins" / "profile" / "now" / "host.trace.json.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))


def call(*words: str) -> str:
    result = CliRunner().invoke(podway, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_run_is_the_median_of_its_steady_steps(tmp_path: Path) -> None:
    run = read_run(run_of(tmp_path / "run"))
    assert (run.seconds, run.steps) == (3.6, 7)
    plan = plan_of(run, find_slice("v6e-16"), 1)
    assert plan.training.offload == ("residual", "qkv", "context") and plan.mesh.fsdp == 16


def test_classes_of_a_profile(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run")
    assert classes_of(folder) is None
    ops = [("fusion.1", "convolution fusion", 1600.0), ("splash_mha_fwd.2", "custom-call", 900.0),
           ("all-gather.7", "all-gather", 300.0), ("copy.3", "data formatting", 200.0)]  # fmt: skip
    trace_of(folder, ops)
    assert classes_of(folder) == pytest.approx({"products": 1.6, "attention": 0.9, "collectives": 0.3, "other": 0.2})
    _, _, rows = compare(folder, find_slice("v6e-16"))
    found = {row.part: row.measured for row in rows}
    assert found["waiting"] == pytest.approx(0.6) and found["step"] == 3.6
    page = call("plan", "compare", str(folder), "--tpu", "v6e-16")
    assert "products" in page and "MEASURED" in page and "the planned interval" in page
    document = json.loads(call("plan", "compare", str(folder), "--tpu", "v6e-16", "-o", "json"))
    assert document["parts"]["step"]["measured"] == 3.6


def test_own_runs_are_kept_used_and_forgotten(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", seconds=4.6)
    words = ("plan", "train", "llama3.1-8b", "--tpu", "v6e-16", "--batch", "48")
    before = call(*words)
    assert "calibrated on Llama 3.1 8B and 70B" in before
    assert "v6e-16" in call("calibrate", str(folder), "--tpu", "v6e-16")
    after = call(*words)
    assert "calibrated on 1 of your own run (podway calibrate)" in after and after != before
    run = read_run(folder)
    assert plan_of(run, find_slice("v6e-16"), 1).time.total == pytest.approx(4.6, rel=0.001)
    assert "1 run forgotten" in call("calibrate", "--forget", "v6e")
    assert call(*words) == before
    assert "No runs are kept" in call("calibrate")


def test_the_needed_rate_gives_the_measured_step(tmp_path: Path) -> None:
    run = read_run(run_of(tmp_path / "run", seconds=4.2))
    rate = needed_rate_of(plan_of(run, find_slice("v6e-16"), 1), run)
    assert 0.5 < rate < 1 and rate != device_of("v6e").matrix_efficiency


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        read_run(tmp_path)
    with pytest.raises(UserError, match="has 2 steps"):
        read_run(run_of(tmp_path / "short", steps=2))
    fast = run_of(tmp_path / "fast", seconds=0.01)
    with pytest.raises(UserError, match=r"products at 1.20 of the chips' peak"):
        call("calibrate", str(fast), "--tpu", "v6e-16")
    with pytest.raises(UserError, match="which slice"):
        call("calibrate", str(fast))
    (fast / "metrics.jsonl").write_text("not json\n")
    with pytest.raises(UserError, match="line 1 is not a step"):
        read_run(fast)
    broken = run_of(tmp_path / "broken")
    trace_of(broken, [])
    next((broken / "profile").rglob("*.gz")).write_bytes(b"\x1f\x8b broken")
    with pytest.raises(UserError, match="cannot be read as a trace"):
        classes_of(broken)
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    (home / "calibration.json").write_text("[{]")
    with pytest.raises(UserError, match=r"calibration.json cannot be read"):
        call("plan", "train", "llama3.1-8b", "--tpu", "v6e-16")
    assert "forgotten" in call("calibrate", "--forget", "all")
