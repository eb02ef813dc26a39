"""A person's own machines, end to end: four real sshd hosts shaped as a v6e-16, with their faults."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from podway.sandbox.hosts import make_hosts, make_key, pool_text, why_no_hosts
from podway.sandbox.hosts.netns import NetnsHosts, why_no_namespaces
from podway.task.task import Accelerator, Placement, Resources, Task, Volume
from tests.conftest import wait_until
from tests.e2e.harness import Podway, counting, files_with, numbered_lines, without_prefix
from tests.e2e.test_jobs import HOSTILE

SECRET = "s3cr3t-of-the-lab-42"


@pytest.fixture(scope="module")
def made() -> Iterator[NetnsHosts]:
    why_not = why_no_hosts() or why_no_namespaces()
    if why_not:
        pytest.skip(why_not)
    with make_hosts(4, separate=True) as hosts:
        assert isinstance(hosts, NetnsHosts)
        yield hosts


@pytest.fixture
def lab(made: NetnsHosts, pod: Podway) -> Iterator[NetnsHosts]:
    """The machines in a pool of this Podway; a test must leave no process and no file on them."""
    (pod.home / "ssh").mkdir()
    (pod.home / "ssh" / "lab.yaml").write_text(pool_text(made, "v6e-16"))
    yield made
    for index in range(4):
        assert made.processes(index) == []
        assert made.run(index, "ls -A /root /tmp").split() == ["/root:", "/tmp:"]


def task(run: str, **more: object) -> Task:
    where = Placement(provider="ssh", region="lab")
    return Task(run=run, resources=(Resources(accelerator=Accelerator(type="v6e-16"), placement=where),), **more)  # type: ignore[arg-type]


def podway(pod: Podway, *words: str, code: int = 0) -> str:
    """What a command prints, as a person types it."""
    done = subprocess.run(
        [sys.executable, "-m", "podway.cli.main", *words],
        env={**os.environ, "PODWAY_HOME": str(pod.home)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_launch_exec_logs_ssh_down(pod: Podway, lab: NetnsHosts, tmp_path: Path) -> None:
    source = tmp_path / "work"
    source.mkdir()
    (source / "hello.sh").write_text(
        'echo "$(hostname) rank $PODWAY_RANK of $PODWAY_NUM_HOSTS at $PODWAY_HOST_IP says $1"\n'
    )
    pod.start()
    shown = podway(pod, "launch", "-y", "-c", "c", "--infra", "ssh/lab", "--tpus", "v6e-16", "--workdir", str(source),
                   "--secret", f"TOK={SECRET}", "bash hello.sh $TOK; [ ${#TOK} = 20 ]")  # fmt: skip
    for rank, host in enumerate(lab.hosts):
        assert f"h{rank} rank {rank} of 4 at {host.address} says ***" in shown
    assert "ssh/lab" in podway(pod, "status")
    shown = podway(pod, "exec", "c", "bash hello.sh $TOK; sleep 30 & wait", "--secret", f"TOK={SECRET}", "-d")
    for index in range(4):  # a cancel would end a rank that has not spoken yet
        wait_until(lambda index=index: "sleep 30" in " ".join(lab.processes(index)), what="the second job")
    for index in range(4):
        assert_nowhere(lab, index, SECRET)
    shown = podway(pod, "ssh", "c", "-w", "3", "--", "hostname; pwd; echo $TPU_WORKER_ID")
    assert shown.split() == ["h3", "/root/sky_workdir", "3"]
    config = str(pod.home / "ssh" / "config")
    out = subprocess.run(["ssh", "-F", config, "c-worker2", "hostname"], capture_output=True, text=True, timeout=120)
    assert out.stdout.strip() == "h2", out.stderr
    podway(pod, "cancel", "-y", "c")
    assert pod.finished("c", 2) == "CANCELLED"
    text = podway(pod, "logs", "c", "2", "--no-follow", "--raw")
    assert text.count("says ***") == 4 and SECRET not in text
    disk = Volume(path="/shown/data", instance_path="/srv/disk")
    pod.client.exec("c", task("echo own disk of $(hostname) > /shown/data/own; cat /srv/disk/own", volumes=(disk,)))
    assert pod.finished("c", 3) == "SUCCEEDED"
    assert all(f"own disk of h{rank}" in pod.log_text("c", 3) for rank in range(4))
    assert "cannot be stopped: its hosts are machines of your own" in podway(pod, "stop", "-y", "c", code=1)
    podway(pod, "down", "-y", "c")
    wait_until(lambda: pod.client.clusters() == [], 30, "the end of the cluster")
    assert files_with(pod.home, SECRET) == []


def assert_nowhere(lab: NetnsHosts, index: int, secret: str) -> None:
    """On no disk of the host, and in no argument there."""
    root = lab.files(index)
    for folder in ("root", "tmp", "run", "var/log"):
        assert files_with(root / folder, secret) == []
    assert all(secret not in line for line in lab.processes(index))


def test_cancel_reaches_hostile_processes_on_every_host(pod: Podway, lab: NetnsHosts) -> None:
    pod.start()
    everything = "\n".join(f"({script}) &" for script in HOSTILE.values()) + "\nwait"
    pod.client.launch(task(everything, stop_duration_s=1), cluster="c")
    wait_until(lambda: all(len(lab.processes(index)) > 8 for index in range(4)), 30, "the processes")
    begun = time.monotonic()
    pod.client.cancel("c")
    assert pod.finished("c", 1) == "CANCELLED"
    took = time.monotonic() - begun
    for index in range(4):
        (agent,) = lab.processes(index)
        assert "agent-" in agent
    assert took < 1 + 2, f"cancel took {took:.1f} s"
    pod.down("c")


def lines_written(lab: NetnsHosts, index: int) -> int:
    return int(lab.run(index, "cat /root/.podway/jobs/*/run/output* 2>/dev/null | wc -l"))


def test_lost_connections_neither_kill_jobs_nor_lose_lines(pod: Podway, lab: NetnsHosts) -> None:
    """sshd dies on one host, a second is cut off, the server is killed; the job goes on and every line comes once."""
    pod.start()
    lines = 400
    pod.client.launch(task(counting("run", lines, pause=0.02)), cluster="c")
    text: list[str] = []
    wait_until(lambda: all(lines_written(lab, index) for index in range(4)), 30, "output on every host")
    watcher = threading.Thread(target=lambda: text.append(pod.log_text("c", 1)))
    watcher.start()
    pids = lab.run(1, "pgrep -x podway-runner")
    lab.kill_sshd(1)
    lab.cut_off(2)
    time.sleep(1.0)
    pod.kill_server()
    time.sleep(1.0)
    lab.start_sshd(1)
    pod.start()
    time.sleep(2.0)
    lab.reconnect(2)
    assert lab.run(1, "pgrep -x podway-runner") == pids
    assert pod.finished("c", 1, 60) == "SUCCEEDED"
    watcher.join(20)
    assert without_prefix(pod.log_text("c", 1)) == numbered_lines(4, {"run": lines})
    pod.down("c")


def test_what_cannot_be_launched_says_why_in_one_line(pod: Podway, lab: NetnsHosts, tmp_path: Path) -> None:
    pod.start()
    pool = pod.home / "ssh" / "lab.yaml"
    good = pool.read_text()
    pool.write_text(good.replace(str(lab.key), str(make_key(tmp_path / "wrong"))))
    shown = podway(pod, "launch", "-y", "-c", "c", "--infra", "ssh/lab", "--tpus", "v6e-16", "true", code=100)
    assert f"root@{lab.hosts[0].address} refused the login with {tmp_path}/wrong" in shown
    assert "Traceback" not in shown
    wait_until(lambda: pod.client.clusters() == [], 30, "the end of the cluster")
    pool.write_text(good.replace("accelerator", "acelerator", 1))
    shown = podway(pod, "launch", "-y", "-c", "c", "--infra", "ssh/lab", "--tpus", "v6e-16", "true", code=1)
    assert f"{pool}:4:" in shown and "did you mean `accelerator`?" in shown
    shown = podway(pod, "launch", "-y", "-c", "c", "--infra", "ssh/lap", "true", code=1)
    assert "there is no pool 'lap' of ssh hosts" in shown and "lab" in shown
    pool.write_text(good)
    assert pod.client.clusters() == []


@pytest.mark.soak
def test_a_volume_outlives_its_cluster(pod: Podway, lab: NetnsHosts) -> None:
    """A directory on each machine; another volume may be seen at the same path afterwards."""
    pod.start()
    for name in ("one", "two"):
        podway(pod, "volume", "create", name, "--infra", "ssh/lab")
    say = "cat /srv/data/said 2>/dev/null; echo $(hostname)-$PODWAY_JOB_ID >> /srv/data/said; readlink /srv/data"
    try:
        for number, (name, told) in enumerate((("one", False), ("one", True), ("two", False))):
            volumes = (Volume(path="/srv/data", name=name),)
            launched = pod.client.launch(task(say, volumes=volumes), cluster=f"c{number}")
            assert pod.finished(f"c{number}", launched.job or 1) == "SUCCEEDED"
            shown = podway(pod, "logs", f"c{number}", "--no-follow")
            assert f"/root/podway-volumes/{name}" in shown and ("h0-" in shown) == told
            podway(pod, "down", "-y", f"c{number}")
        podway(pod, "volume", "delete", "-y", "one", "two")
    finally:
        for index in range(4):
            lab.run(index, "rm -f /srv/data; rmdir /root/podway-volumes /srv 2>/dev/null; true")
