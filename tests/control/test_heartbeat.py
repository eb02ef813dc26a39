"""The head host is told its rest rule while a server is there: at once when it changes, and often enough before it counts as gone."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from podway.control import heartbeat, transitions
from podway.control.heartbeat import RETRY_S, SENT_IN_SILENCE, Heartbeat, shutdown_policy, silence
from podway.control.records import Cluster, ClusterState, shell_key
from podway.order import Order
from podway.providers import HttpCall, SelfTeardown
from podway.providers.gcp.render import RenderContext, render
from podway.providers.gcp.self_teardown import self_teardown
from podway.providers.gcp.settings import Settings
from podway.providers.local.provider import LocalProvider
from podway.task.task import Autostop
from tests.control.samples import cluster, hosts

REST = Autostop(idle_minutes=10, down=True)
UP = cluster(state=ClusterState.UP, hosts=hosts(), up_since=1.0, autostop=REST)
WAY = SelfTeardown(token_url="http://169.254.169.254/token", calls=(HttpCall(method="DELETE", url="https://x/n"),))


class WithAWay(LocalProvider):
    def self_teardown(self, name: str, order: Order, *, down: bool) -> SelfTeardown:  # type: ignore[override]
        return WAY


def test_the_rule(tmp_path: Path) -> None:
    provider: Any = WithAWay(tmp_path)
    assert shutdown_policy(provider, UP) == {
        "idle_s": 600.0,
        "silence_s": 600.0,
        "shell": shell_key(UP),
        "token_url": WAY.token_url,
        "calls": ({"method": "DELETE", "url": "https://x/n"},),
    }
    assert shutdown_policy(provider, msgspec.structs.replace(UP, autostop=None)) is None
    assert shutdown_policy(LocalProvider(tmp_path), UP) is None
    jobs_only = msgspec.structs.replace(UP, autostop=msgspec.structs.replace(REST, wait_for="jobs"))
    assert (shutdown_policy(provider, jobs_only) or {})["shell"] == ""


@pytest.mark.parametrize(("minutes", "seconds"), [(0, 30.0), (1, 60.0), (600, 600.0)])
def test_silence_is_within_reason(minutes: float, seconds: float) -> None:
    assert silence(msgspec.structs.replace(UP, autostop=Autostop(idle_minutes=minutes))) == seconds


def test_told_at_once_and_again_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    confirmed: list[Autostop | None] = []
    answers = [True, False, True, True]

    async def send(provider: object, cluster: Cluster, policy: object) -> bool:
        sent.append(policy)
        return answers.pop(0)

    async def confirm(autostop: Autostop | None) -> None:
        confirmed.append(autostop)

    monkeypatch.setattr(heartbeat, "_send", send)

    async def work() -> None:
        beat, provider = Heartbeat(confirm), WithAWay(tmp_path)
        armed = msgspec.structs.replace(UP, autostop_armed=True)
        assert beat.beat(provider, UP) == RETRY_S  # not confirmed yet
        await asyncio.sleep(0.01)
        assert beat.beat(provider, armed) == silence(UP) / SENT_IN_SILENCE
        await asyncio.sleep(0.01)
        assert len(sent) == 1 and confirmed == [REST]
        other = msgspec.structs.replace(UP, autostop=Autostop(idle_minutes=3, down=True))
        for _ in range(2):  # the first time the head does not answer: it is asked again, and only then is it confirmed
            assert beat.beat(provider, other) == RETRY_S
            await asyncio.sleep(0.01)
        assert len(sent) == 3 and confirmed == [REST, other.autostop]
        beat.beat(provider, msgspec.structs.replace(UP, autostop=None))
        await asyncio.sleep(0.01)
        assert sent[3:] == [None] and confirmed[2:] == [None]
        beat.beat(provider, msgspec.structs.replace(UP, state=ClusterState.INIT))
        await asyncio.sleep(0.01)
        assert len(sent) == 4

    asyncio.run(work())


def test_a_promise_holds_for_the_policy_it_was_given_for() -> None:
    armed = transitions.arm_autostop(UP, REST)
    assert armed.autostop_armed
    assert not transitions.arm_autostop(UP, Autostop(idle_minutes=1)).autostop_armed
    assert not transitions.set_autostop(armed, Autostop(idle_minutes=1)).autostop_armed
    assert not transitions.arm_autostop(armed, None).autostop_armed


CONTEXT = RenderContext(project="my-project", owner="ab12cd34", public_key="k", settings=Settings())
PLACE = {"provider": "gcp", "accelerator_type": "v6e-8", "zone": "us-east5-b", "chips_per_host": 8}


def calls(down: bool, **changes: Any) -> list[str] | None:
    order = Order(**{**PLACE, **changes})
    found = self_teardown(render("demo", order, CONTEXT), order, down=down)
    return None if found is None else [f"{call.method} {call.url}" for call in found.calls]


def test_on_google_cloud_the_head_ends_what_was_made() -> None:
    base = "https://tpu.googleapis.com/v2/projects/my-project/locations/us-east5-b"
    name = calls(True)[0].rpartition("/")[2]  # type: ignore[index]
    assert calls(True) == [f"DELETE {base}/nodes/{name}"]
    assert calls(False) == [f"POST {base}/nodes/{name}:stop"]
    assert calls(True, spot=True) == [f"DELETE {base}/queuedResources/{name}?force=true"]
    assert calls(False, spot=True) is None
    several = calls(True, spot=True, zones=("us-east5-a", "us-east5-b"))
    assert several == [f"DELETE {base}/queuedResources/{name}?force=true"]  # the other zone was given back


def test_a_legacy_node_goes_before_its_host() -> None:
    found = calls(True, accelerator_type="v3-8", zone="us-central1-a", tpu_vm=False) or []
    assert [call.split("/")[3] for call in found] == ["v1", "compute"]
    assert all(call.startswith("DELETE ") for call in found)
