"""kill -9 of an agent, of a whole host, and of the command, while launching, cancelling and going down."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.e2e.harness import Podway, counting, numbered_lines, task, without_prefix
from tests.long import every

PODWAY = str(Path(sys.executable).parent / "podway")


def strike(pod: Podway, victim: str) -> None:
    """Kill the agent of host 1, or all of host 1."""
    pod.kill_all_in(pod.home / "local" / "c" / "host-1", "serve" if victim == "agent" else "")


def nothing_runs(pod: Podway) -> bool:
    return not [process for process in pod.host_processes() if "serve" not in process.info["cmdline"]]


@pytest.mark.parametrize("victim", every(2, ["agent", "host"]))
def test_killed_while_launching(pod: Podway, victim: str) -> None:
    """The machine comes back and the job runs there, or it is lost and the job says which rank; never a false state."""
    pod.start()
    pod.client.launch(task(counting("run", 60, 0.01), setup=counting("setup", 10)), cluster="c")
    wait_until(lambda: (pod.home / "local" / "c" / "host-1" / ".podway" / "agent.pid").exists(), what="an agent")
    strike(pod, victim)
    state = pod.finished("c", 1)
    lines = without_prefix("\n".join(x for x in pod.log_text("c", 1).splitlines() if " line " in x))
    if state == "SUCCEEDED":
        assert lines == numbered_lines(2, {"setup": 10, "run": 60})
    else:
        assert state in ("FAILED", "FAILED_SETUP") and "rank 1" in pod.client.job("c", 1).reason
        assert max(lines.values(), default=1) == 1  # whatever was printed came once
    wait_until(lambda: nothing_runs(pod), 10, "the end of every process of the job")
    pod.down("c")


@pytest.mark.parametrize("victim", every(2, ["agent", "host"]))
def test_killed_while_cancelling(pod: Podway, victim: str) -> None:
    pod.start()
    pod.client.launch(task("trap '' TERM; sleep 1000 & sleep 1000", stop_duration_s=1), cluster="c")
    wait_until(lambda: any("started run" in event.text for event in pod.client.events("c")))
    pod.client.cancel("c")
    strike(pod, victim)
    assert pod.finished("c", 1) in ("CANCELLED", "FAILED")
    assert nothing_runs(pod)
    again = pod.client.exec("c", task("echo next"))
    assert pod.finished("c", again.job or 0) == "SUCCEEDED"
    pod.down("c")


@pytest.mark.parametrize("victim", every(2, ["agent", "host"]))
def test_killed_while_going_down(pod: Podway, victim: str) -> None:
    pod.start()
    pod.client.launch(task("sleep 1000", stop_duration_s=1), cluster="c")
    wait_until(lambda: any("started run" in event.text for event in pod.client.events("c")))
    pod.client.down("c")
    strike(pod, victim)
    wait_until(lambda: pod.client.clusters() == [], 40, "the end of the cluster")
    assert pod.host_processes() == []
    assert not (pod.home / "local" / "c").exists()


@pytest.mark.parametrize("after_s", every(2, [0.1, 0.3, 0.6, 1.0]))
def test_killed_command(pod: Podway, after_s: float) -> None:
    """`podway launch` dies at some moment; either nothing was begun, or it is known and ends as it should."""
    pod.start()
    child = subprocess.Popen(
        [PODWAY, "launch", "-y", "-c", "c", "--tpus", "v4-16", "sleep 1; echo through"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    time.sleep(after_s)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    time.sleep(1.5)  # what it had sent is read by then
    if pod.client.clusters():
        jobs = pod.client.jobs("c")
        if jobs:
            assert pod.finished("c", 1) == "SUCCEEDED"
            assert pod.log_text("c", 1).count("through") == 2
        down = subprocess.Popen([PODWAY, "down", "-y", "c"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(0.2)
        os.kill(down.pid, signal.SIGKILL)
        down.wait()
        if pod.client.cluster("c").goal != "gone":  # it died before it had asked
            pod.client.down("c")
        wait_until(lambda: pod.client.clusters() == [], 40, "the end of the cluster")
    assert pod.host_processes() == []
