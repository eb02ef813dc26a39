"""Pools and job groups with real processes, the server killed at every point of theirs, and a worker that is lost with its job: each job
runs as often as it should, and no cluster is left."""

from pathlib import Path

import pytest

from podway import crash
from podway.launch_options import LaunchOptions, LaunchRequest
from podway.server.group_api import GroupTaskBody
from podway.task.pools import PoolSize
from podway.task.task import Accelerator, Recovery, Resources, Task
from tests.conftest import wait_until
from tests.e2e.harness import Podway
from tests.e2e.test_crash import died
from tests.e2e.test_recovery import lose

pytestmark = pytest.mark.long
POOL_POINTS = [p for p in crash.POINTS if p.startswith("pool.")]
GROUP_POINTS = [p for p in crash.POINTS if p.startswith("group.")]
TWO = PoolSize(workers=2, max_workers=2)


def request(run: str, **more: object) -> LaunchRequest:
    task = Task(run=run, resources=(Resources(accelerator=Accelerator(type="v6e-1")),), **more)  # type: ignore[arg-type]
    return LaunchRequest(task=task, options=LaunchOptions(provider="local"))


def lines(place: Path) -> list[str]:
    return sorted(place.read_text().split()) if place.exists() else []


def states(pod: Podway) -> list[str]:
    return [one.state for one in pod.client.pool("demo").jobs]


def nothing_is_left(pod: Podway) -> None:
    wait_until(lambda: pod.client.clusters() == [], 120, "the end of the clusters")
    wait_until(lambda: pod.host_processes() == [], 60, "the end of their processes")
    assert [one for one in (pod.home / "local").glob("*") if (one / "hosts").exists()] == []


def end_pool(pod: Podway) -> None:
    pod.client.end_pool("demo")
    wait_until(lambda: pod.client.pools() == [], 120, "the end of the pool")
    nothing_is_left(pod)


@pytest.mark.parametrize("point", POOL_POINTS)
def test_killed_while_a_pool_works(pod: Podway, point: str, tmp_path: Path) -> None:
    """The client sends again what it had no answer to; another server takes the pool over."""
    pod.start(crash_at=point)
    pod.client.apply_pool("demo", TWO, request("", setup=f"echo $HOME >> {tmp_path}/setup"))
    job = request(f"echo $SKYPILOT_JOB_RANK >> {tmp_path}/ran")
    assert pod.client.submit_to_pool("demo", job, 4) == [1, 2, 3, 4]
    wait_until(lambda: states(pod) == ["SUCCEEDED"] * 4, 180, "four jobs")
    assert lines(tmp_path / "ran") == ["0", "1", "2", "3"]
    assert len(set(lines(tmp_path / "setup"))) == len(lines(tmp_path / "setup")) == 2
    assert len(pod.client.clusters()) == 2
    end_pool(pod)
    died(pod)


@pytest.mark.parametrize("point", GROUP_POINTS)
def test_killed_while_a_group_runs(pod: Podway, point: str, tmp_path: Path) -> None:
    stays = point == "group.cancel-marked"
    run = f"echo $SKYPILOT_JOBGROUP_NAME-$NAME >> {tmp_path}/ran{'; sleep 1000' if stays else ''}"
    pair = tuple(
        GroupTaskBody(request=request(run, name=name, env={"NAME": name}, stop_duration_s=1))
        for name in ("actor", "learner")
    )
    pod.start(crash_at=point)
    pod.client.launch_group("pair", pair)

    def both_ran() -> bool:
        pod.client.group("pair")  # a client starts the server again
        return lines(tmp_path / "ran") == ["pair-actor", "pair-learner"]

    wait_until(both_ran, 180, "both tasks")
    if stays:
        pod.client.cancel_group("pair")
    end = "CANCELLED" if stays else "SUCCEEDED"
    wait_until(lambda: pod.client.group("pair").state == end, 120, f"a group that is {end}")
    died(pod)
    assert [one.state for one in pod.client.group("pair").tasks] == [end] * 2
    nothing_is_left(pod)
    assert lines(tmp_path / "ran") == ["pair-actor", "pair-learner"], "each once"


def test_a_lost_worker_gives_its_job_to_another(pod: Podway, tmp_path: Path) -> None:
    """The job that ran there begins again elsewhere; one that fails by itself, as often as its task says."""
    pod.start()
    pod.client.apply_pool("demo", TWO, request(""))
    run = f"echo $HOME >> {tmp_path}/ran; while [ ! -e {tmp_path}/go ]; do sleep 0.1; done"
    pod.client.submit_to_pool("demo", request(run))
    wait_until(lambda: len(lines(tmp_path / "ran")) == 1 and states(pod) == ["RUNNING"], 120, "the job")
    first = pod.client.pool("demo").jobs[0].cluster
    assert first is not None
    lose(pod, first)
    wait_until(lambda: len(lines(tmp_path / "ran")) == 2, 180, "the job on another worker")
    (tmp_path / "go").touch()
    wait_until(lambda: states(pod) == ["SUCCEEDED"], 120, "its end")
    assert pod.client.pool("demo").jobs[0].cluster != first and len(set(lines(tmp_path / "ran"))) == 2
    again = Recovery(events=("interruption", "error"), max_restarts_on_errors=2)
    fails = request(f"echo failed >> {tmp_path}/failed; exit 3", recovery=again)
    pod.client.submit_to_pool("demo", fails)
    wait_until(lambda: states(pod) == ["SUCCEEDED", "FAILED"], 180, "the job that fails")
    assert len(lines(tmp_path / "failed")) == 3
    end_pool(pod)
