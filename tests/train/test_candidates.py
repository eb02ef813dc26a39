"""Candidates one after the other: what is measured, why one failed, and what a log line holds."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.errors import UserError
from podway.train.candidates import Measurement, _environment, _reason, read_candidates, read_line, run_candidates
from tests.train.running import EXACT


def test_a_bad_candidate_costs_nothing_but_its_time(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    good = [*EXACT, "batch.sequences=2", "batch.length=16", "schedule.steps=4"]
    assert run_candidates([[*good, "mesh.shape=fsdp=7"], good], 600) == 0
    first, second = (read_line(line) for line in capfd.readouterr().out.splitlines())
    assert first is not None and first.failed is not None and "needs 7 chips" in first.failed
    assert second is not None and second.candidate == 1 and second.seconds is not None and second.loss is not None


@pytest.mark.parametrize(
    ("code", "text", "reason"),
    [
        (1, "jaxlib: RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes\nat line", "out of memory"),
        (124, "completed step: 0", "took too long"),
        (1, "Error: rank 1 of 2 was lost: its process or host has died\n  see its log", "another rank failed"),
        (1, "noise\nError: unknown model 'x'\n  did you mean y?\n", "unknown model 'x'"),
        (3, "", "exit code 3"),
    ],
)
def test_why_it_failed(code: int, text: str, reason: str) -> None:
    assert _reason(code, text) == reason


def test_each_candidate_has_a_port_of_its_own() -> None:
    given_ = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:8476", "A": "b"}
    assert _environment(given_, 2) == {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:8479", "A": "b"}
    assert _environment({"A": "b"}, 2) == {"A": "b"}


@given(st.text(max_size=60))
def test_other_lines_are_not_measurements(text: str) -> None:
    found = read_line(text)
    assert found is None or isinstance(found, Measurement)
    whole = Measurement(candidate=3, seconds=0.5, failed=text)
    assert read_line(f"(worker1, rank=1, pid=7, ip=127.0.0.2) {whole.line()}") == whole


def test_a_file_that_is_not_a_list_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(UserError, match="cannot read candidates"):
        read_candidates(str(tmp_path / "c.json"))
