"""kill -9 of the server, an agent, a runner, a whole host, at every stage: the state is true afterwards, nothing leaks, no line is
lost or doubled."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from podway import crash
from tests.conftest import wait_until
from tests.e2e.harness import Podway, counting, numbered_lines, task, without_prefix
from tests.long import every

DOWN_POINTS = [p for p in crash.POINTS if p.startswith("down.")]
STOP_POINTS = [p for p in crash.POINTS if p.startswith("stop.")]
CANCEL_POINTS = ["cancel.marked", "job.cancel-sent"]
RECOVERY_POINTS = [p for p in crash.POINTS if p.startswith(("failover.", "again.", "recover."))]  # test_recovery*.py
SERVICE_POINTS = [p for p in crash.POINTS if p.startswith("service.")]  # test_services.py
NODE_POOL_POINTS = [p for p in crash.POINTS if p.startswith("node-pool.")]  # tests/providers/test_gke_launch_pools.py
POOL_POINTS = [p for p in crash.POINTS if p.startswith(("pool.", "group."))]  # test_pool_crashes.py
OTHER_POINTS = [
    *(*DOWN_POINTS, *STOP_POINTS, *CANCEL_POINTS, *RECOVERY_POINTS),
    *(*SERVICE_POINTS, *NODE_POOL_POINTS, *POOL_POINTS),
]
LAUNCH_POINTS = [p for p in crash.POINTS if p not in OTHER_POINTS]


def died(pod: Podway) -> None:
    wait_until(lambda: pod.child.poll() is not None, 30, "the crash")
    assert pod.child.returncode == -signal.SIGKILL


def test_every_point_is_walked() -> None:
    every = LAUNCH_POINTS + OTHER_POINTS
    assert sorted(every) == sorted(crash.POINTS)


@pytest.mark.parametrize("point", every(3, LAUNCH_POINTS))
def test_killed_while_launching_and_running(pod: Podway, point: str) -> None:
    """The client asks again by itself; one cluster, one job, every line once, exit codes true."""
    pod.start(crash_at=point)
    launched = pod.client.launch(task(counting("run", 120), setup=counting("setup", 20)), cluster="c")
    text = pod.log_text("c", launched.job or 0)
    died(pod)
    assert without_prefix(text) == numbered_lines(2, {"setup": 20, "run": 120})
    assert pod.finished("c", 1) == "SUCCEEDED"
    job = pod.client.jobs("c")
    assert [(j.number, [e.code for e in j.exits]) for j in job] == [(1, [0, 0])]
    assert len(pod.client.clusters()) == 1
    assert without_prefix(pod.log_text("c", 1)) == numbered_lines(2, {"setup": 20, "run": 120})
    pod.down("c")


@pytest.mark.parametrize("point", every(3, CANCEL_POINTS))
def test_killed_while_cancelling(pod: Podway, point: str) -> None:
    pod.start(crash_at=point)
    pod.client.launch(task("trap '' TERM; sleep 1000 & sleep 1000", stop_duration_s=1), cluster="c")
    wait_until(lambda: pod.client.job("c", 1).state == "RUNNING" and len(pod.host_processes()) >= 4)
    pod.client.cancel("c")
    died(pod)
    assert pod.finished("c", 1) == "CANCELLED"
    assert not [p for p in pod.host_processes() if "sleep" in p.info["cmdline"]]
    assert pod.client.launch(task("echo next"), cluster="c").job == 2
    assert pod.finished("c", 2) == "SUCCEEDED"
    pod.down("c")


@pytest.mark.parametrize("point", every(3, DOWN_POINTS))
def test_killed_while_going_down(pod: Podway, point: str) -> None:
    pod.start(crash_at=point)
    pod.client.launch(task("sleep 1000", stop_duration_s=1), cluster="c")
    wait_until(lambda: pod.client.job("c", 1).state == "RUNNING")
    pod.client.down("c")
    died(pod)
    wait_until(lambda: pod.client.clusters() == [], 30, "the end of the cluster")
    assert pod.client.job("c", 1).state == "CANCELLED"
    assert pod.host_processes() == []
    assert not (pod.home / "local" / "c").exists()


@pytest.mark.parametrize("point", every(3, STOP_POINTS))
def test_killed_while_stopping(pod: Podway, point: str) -> None:
    pod.start(crash_at=point)
    pod.client.launch(task("echo kept > ~/kept"), cluster="c")
    assert pod.finished("c", 1) == "SUCCEEDED"
    pod.client.stop("c")
    died(pod)
    wait_until(lambda: pod.client.cluster("c").state == "STOPPED", 30, "the stop")
    assert pod.host_processes() == []
    again = pod.client.launch(task("cat ~/kept"), cluster="c")
    assert "kept" in pod.log_text("c", again.job or 0)
    pod.down("c")


def agents(pod: Podway) -> list[psutil.Process]:
    return [p for p in pod.host_processes() if "serve" in p.info["cmdline"]]


def test_killed_agent_loses_nothing(pod: Podway) -> None:
    pod.start()
    pod.client.launch(task(counting("run", 200, 0.01)), cluster="c")
    killer = threading.Timer(0.8, lambda: [agent.kill() for agent in agents(pod)])
    killer.start()
    text = pod.log_text("c", 1)
    killer.join()
    assert without_prefix("\n".join(x for x in text.splitlines() if " line " in x)) == numbered_lines(2, {"run": 200})
    assert pod.finished("c", 1) == "SUCCEEDED"
    pod.down("c")


def test_killed_host_fails_the_job_by_name(pod: Podway) -> None:
    pod.start()
    pod.client.launch(task("echo begun; sleep 1000"), cluster="c")
    wait_until(lambda: any("started run" in event.text for event in pod.client.events("c")))
    pod.kill_all_in(pod.home / "local" / "c" / "host-1")
    assert pod.finished("c", 1) == "FAILED"
    assert "worker1 (rank 1" in pod.client.job("c", 1).reason
    again = pod.client.launch(task("echo up again"), cluster="c")
    assert pod.finished("c", again.job or 0) == "SUCCEEDED"
    pod.down("c")


def test_a_rank_that_ends_early_leaves_the_others_alone(pod: Podway) -> None:
    """Simulated hosts share one machine: what one host's agent ends must be its own."""
    pod.start()
    pod.client.launch(task("if [ $PODWAY_RANK = 0 ]; then echo early; else sleep 3; echo late; fi"), cluster="c")
    text = pod.log_text("c", 1)
    assert "early" in text and "late" in text
    assert pod.finished("c", 1) == "SUCCEEDED"
    pod.down("c")


def test_killed_client_does_not_matter(pod: Podway) -> None:
    pod.start()
    pod.client.launch(task(counting("run", 100, 0.01)), cluster="c")
    command = [sys.executable, "-m", "podway.cli.main", "logs", "c", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as reader:
        assert reader.stdout and reader.stdout.readline()
        reader.kill()
    assert pod.finished("c", 1) == "SUCCEEDED"
    assert without_prefix(pod.log_text("c", 1)) == numbered_lines(2, {"run": 100})
    pod.down("c")


def test_logs_outlive_the_cluster(pod: Podway) -> None:
    pod.start()
    pod.client.launch(task(counting("run", 30)), cluster="c")
    assert pod.finished("c", 1) == "SUCCEEDED"
    pod.down("c")
    assert without_prefix(pod.log_text("c", 1)) == numbered_lines(2, {"run": 30})
    assert not Path(pod.home / "local" / "c").exists()
