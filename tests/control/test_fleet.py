"""When silence means that a host is gone, and how far a host's clock is from ours."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from podway.control import fleet as fleets
from podway.control.fleet import ALL_SILENT_S, LOST_AFTER_S, Fleet
from podway.errors import ProviderError
from podway.providers import Condition, Observation
from podway.providers.local.provider import LocalProvider
from tests.control.samples import cluster, hosts


class Seen(LocalProvider):
    """Says what it is told to see."""

    def __init__(self, place: Path, condition: Condition | None) -> None:
        super().__init__(place)
        self.condition = condition

    async def observe(self, name: str) -> Observation:
        if self.condition is None:
            raise ProviderError("the cloud does not answer")
        return Observation(condition=self.condition, hosts=hosts())


def make(place: Path, condition: Condition | None) -> Fleet:
    return Fleet(Seen(place, condition), cluster(hosts=hosts()))


def lost(fleet: Fleet, *ranks: int, silent_s: float = LOST_AFTER_S) -> list[bool]:
    async def ask() -> list[bool]:
        since = time.monotonic() - silent_s
        return [await fleet.is_lost(rank, since) for rank in ranks]

    return asyncio.run(ask())


async def answer(op: str, **fields: Any) -> None:
    """What a host that is there does."""


async def heard(op: str, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(fields={})


def test_one_silent_host_among_others_is_lost(tmp_path: Path) -> None:
    fleet = make(tmp_path, "ready")
    fleet.sessions[3].link.call = answer  # type: ignore[assignment,method-assign]
    assert lost(fleet, 2) == [True]


def test_a_host_that_refuses_for_a_moment_is_not_lost(tmp_path: Path) -> None:
    """An API server that has just come back knows no pods for a second, and says so at once."""
    fleet = make(tmp_path, "ready")
    fleet.sessions[3].link.call = answer  # type: ignore[assignment,method-assign]
    assert lost(fleet, 2, silent_s=0) == [False]


def test_a_host_that_is_heard_again_with_the_others_is_not_lost(tmp_path: Path) -> None:
    """We were cut off from all of them for longer than a host may be silent."""
    fleet = make(tmp_path, "ready")
    for session in fleet.sessions:
        session.link.call = heard  # type: ignore[assignment,method-assign]
    assert lost(fleet, 2) == [False]


def test_all_silent_is_our_own_network_for_a_while(tmp_path: Path) -> None:
    fleet = make(tmp_path, "ready")  # nothing listens at its hosts
    assert lost(fleet, 0, 1, 2, 3) == [False] * 4
    fleet.silent = dict.fromkeys(range(4), time.monotonic() - ALL_SILENT_S - 1)
    assert lost(fleet, 0) == [True]


@pytest.mark.parametrize("condition", ["preempted", "absent", "failed", "deleting"])
def test_the_cloud_says_so(tmp_path: Path, condition: Condition) -> None:
    fleet = make(tmp_path, condition)
    fleet.silent = dict.fromkeys(range(4), time.monotonic())
    assert lost(fleet, 0) == [True]
    assert asyncio.run(fleet.any_lost())


def test_a_cloud_that_does_not_answer_says_nothing(tmp_path: Path) -> None:
    fleet = make(tmp_path, None)
    assert lost(fleet, 0) == [False]
    assert not asyncio.run(fleet.any_lost())


class Clock:
    """A host whose clock is off, and that takes its time."""

    def __init__(self, off_s: float, delay_s: float = 0.0) -> None:
        self.off_s, self.delay_s = off_s, delay_s

    async def call(self, op: str, **fields: Any) -> dict[str, Any]:
        await asyncio.sleep(self.delay_s / 2)
        now = time.time() + self.off_s
        await asyncio.sleep(self.delay_s / 2)
        return {"time": now}


@pytest.mark.parametrize(
    ("off_s", "delay_s", "skew_ms"), [(0.0, 0.0, 0), (0.02, 0.0, 0), (-3.0, 0.0, 3000), (5.0, 0.1, -5000)]
)
def test_skew_is_what_to_add(off_s: float, delay_s: float, skew_ms: int) -> None:
    found = asyncio.run(fleets._skew_ms(Clock(off_s, delay_s)))  # type: ignore[arg-type]
    assert found == pytest.approx(skew_ms, abs=60)
    assert (found == 0) == (skew_ms == 0)
