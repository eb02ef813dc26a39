"""Ending a job on hosts of which some do not answer."""

import asyncio
from typing import Any, cast

import pytest

from podway.control import stopping
from podway.control.fleet import Fleet
from podway.errors import ProviderError
from podway.order import Host


class FakeSession:
    """A host that answers to `cancel` after so many calls, or (None) never."""

    def __init__(self, rank: int, answers_after: int | None) -> None:
        self.host = Host(rank=rank, slice=0, worker=rank, address=f"10.0.0.{rank + 1}", home="/", id=str(rank))
        self.left = answers_after
        self.fails = False

    async def call(self, op: str, **fields: Any) -> dict[str, Any]:
        if self.fails:
            raise ProviderError("nothing answers")
        if self.left is None:
            await asyncio.sleep(3600)
        await asyncio.sleep(0.01)
        assert self.left is not None
        self.left -= 1
        return {"gone": self.left <= 0}


class FakeFleet:
    def __init__(self, *answers: int | None) -> None:
        self.sessions = [FakeSession(rank, after) for rank, after in enumerate(answers)]
        self.hosts = tuple(session.host for session in self.sessions)
        self.given_up: set[int] = set()


def stop(fleet: FakeFleet, *, going: bool) -> list[str]:
    told: list[str] = []

    async def is_going() -> bool:
        return going

    async def tell(text: str) -> None:
        told.append(text)

    async def main() -> None:
        async with asyncio.timeout(60):
            await stopping.stop_job(cast(Fleet, fleet), "j", 1.0, is_going=is_going, tell=tell)

    asyncio.run(main())
    return told


def test_hosts_that_answer_are_waited_for_to_the_end() -> None:
    fleet = FakeFleet(1, 30)
    assert stop(fleet, going=True) == []
    assert fleet.given_up == set() and fleet.sessions[1].left == 0


def test_a_host_whose_agent_cannot_be_reached_is_left_to_the_provider() -> None:
    fleet = FakeFleet(1, 1)
    fleet.sessions[1].fails = True
    assert stop(fleet, going=False) == []


def test_a_silent_host_of_a_cluster_that_goes_is_given_up_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "WAIT_S", 0.1)
    monkeypatch.setattr(stopping, "TELL_S", 0.1)
    monkeypatch.setattr(stopping, "SILENT_S", 1.0)
    fleet = FakeFleet(1, None, None)
    told = stop(fleet, going=True)
    assert fleet.given_up == {1, 2}
    assert told == [
        "Waiting for worker1 (10.0.0.2), worker2 (10.0.0.3), up to 1 s: no answer",
        "Not waiting for worker1 (10.0.0.2), worker2 (10.0.0.3) any longer: no answer",
    ]
