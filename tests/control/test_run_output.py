"""The output of a one-shot run on its way to the archive: streams that break, repeat and are refused."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from podway.control import run_output
from podway.control.archive import Archive
from podway.control.records import Job
from podway.control.run_output import RunOutput
from podway.errors import ProviderError, UserError
from podway.providers import OutputLine, RunObservation, RunRank
from tests.control.samples import job

LINES = [
    OutputLine(second * 10**9 + part, f"{second}.{part}\n".encode()) for second in range(1, 6) for part in range(4)
]


class BreakingProvider:
    """Gives a few lines, since the second it is asked for, and then breaks; at last it ends."""

    def __init__(self, error: Exception, limit: int) -> None:
        self.error, self.limit = error, limit
        self.asked: list[int] = []

    async def run_output(self, name: str, source: str, since: int) -> AsyncIterator[list[OutputLine]]:
        self.asked.append(since)
        there = [line for line in LINES if line.time_ns >= since * 10**9]
        for start in range(0, min(len(there), self.limit), 3):
            yield there[start : min(start + 3, self.limit)]
        if len(there) > self.limit:
            raise self.error


def copied(provider: object, place: Path, secrets: dict[str, str]) -> str:
    archive, one = Archive(place), running()

    async def copy() -> None:
        output = RunOutput(provider, "c", archive, secrets)  # type: ignore[arg-type]
        output.follow(one, RunObservation(state="running", ranks=(RunRank(rank=0, source="pod"),)))
        await output.finish(60)
        output.close()

    asyncio.run(copy())
    return archive.read(one, 0, "run", 0)[0].decode()


def running() -> Job:
    plain = job()
    return msgspec.structs.replace(plain, attempt=msgspec.structs.replace(plain.attempt, pids={"run": [1]}))


@pytest.mark.parametrize("limit", [5, 7, 8, 19])
def test_a_stream_that_breaks_is_read_on_without_gap_or_repeat(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_output, "AGAIN_S", 0.0)
    provider = BreakingProvider(ProviderError("broke off"), limit)
    shown = copied(provider, tmp_path, {"KEY": "3.2"})
    assert shown == "".join(line.text.decode() for line in LINES).replace("3.2", "***")
    assert len(provider.asked) > 1


def test_a_log_that_nobody_may_read_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_output, "AGAIN_S", 0.0)
    provider = BreakingProvider(UserError("pods/log is forbidden", "ask"), 0)
    assert copied(provider, tmp_path, {}) == "podway: the output of pod cannot be read: pods/log is forbidden\n"
    assert len(provider.asked) == run_output.REFUSALS


def test_what_an_attempt_printed_is_kept_with_it(tmp_path: Path) -> None:
    """Though the run had begun again before anybody looked; what of it is there is read to its end."""
    archive, one = Archive(tmp_path), running()
    attempt = msgspec.structs.replace(one.attempt, number=2, pids={"run": [1], "run-2": [1]})
    again = msgspec.structs.replace(one, attempt=attempt)

    async def copy() -> None:
        output = RunOutput(BreakingProvider(ProviderError("never"), len(LINES)), "c", archive, {})  # type: ignore[arg-type]
        ranks, earlier = (RunRank(rank=0, source="new"),), (RunRank(rank=0, source="old"),)
        output.follow(again, RunObservation(state="waiting", restarts=1, ranks=ranks, earlier=earlier))
        await output.finish(60)
        output.close()

    asyncio.run(copy())
    whole = "".join(line.text.decode() for line in LINES)
    assert [archive.read(again, 0, label, 0)[0].decode() for label in ("run", again.label("run"))] == [whole, whole]
