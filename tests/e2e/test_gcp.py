"""Google Cloud end to end, as a person types it: a pretend cloud whose hosts are real, each with its own network, files and sshd."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from podway.control.fleet import LOST_AFTER_S
from podway.errors import UserError
from podway.sandbox.hosts import why_no_hosts
from podway.sandbox.hosts.netns import why_no_namespaces
from podway.sandbox.running import Running, running_sandbox
from podway.server.client import Client
from podway.server.connection import ClientClosed
from podway.task.task import Task
from tests.conftest import wait_until
from tests.e2e.harness import Podway, counting, numbered_lines, without_prefix

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
EAST = "us-east5-b"
SECRET = "s3cr3t-of-the-cloud-7"
ALL_REDUCE = """
import os
import jax, jax.numpy as jnp
from jax.experimental import multihost_utils
jax.distributed.initialize(os.environ["PODWAY_COORDINATOR"], int(os.environ["PODWAY_NUM_HOSTS"]), int(os.environ["PODWAY_RANK"]))
slice_id, slices = int(os.environ["MEGASCALE_SLICE_ID"]), int(os.environ["MEGASCALE_NUM_SLICES"])
parts = multihost_utils.process_allgather(jnp.array([10 ** slice_id]))
print("sum over", slices, "slices:", int(parts.sum()), "coordinator", os.environ["MEGASCALE_COORDINATOR_ADDRESS"])
"""


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    why_not = why_no_hosts() or why_no_namespaces()
    if why_not:
        pytest.skip(why_not)
    jax = importlib.util.find_spec("jax")  # whose packages one job uses on its hosts
    shared = ("--share", str(Path(jax.origin).parent.parent)) if jax and jax.origin else ()
    with running_sandbox(tmp_path_factory.mktemp("sandbox"), options=shared) as running:
        yield running


@pytest.fixture
def cloud(sandbox: Running, pod: Podway, tmp_path: Path) -> Iterator[Running]:
    """The pretend cloud, a server that uses it, and afterwards nothing left in it."""
    pod.start(**sandbox.environment(tmp_path))
    yield sandbox
    for cluster in pod.client.clusters():
        pod.client.down(cluster.name)
    wait_until(lambda: living(sandbox) == [], 60, "an empty cloud")


def living(cloud: Running) -> list[str]:
    return [one["name"].partition("/locations/")[2] or one["name"] for one in cloud.command("GET", "ledger")["living"]]


def podway(pod: Podway, *words: str, code: int = 0, seconds: float = 100) -> str:
    """What a command prints, as a person types it."""
    done = subprocess.run(
        [sys.executable, "-m", "podway.cli.main", *words],
        env={**os.environ, "PODWAY_HOME": str(pod.home)},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_pod_from_launch_to_down(pod: Podway, cloud: Running, tmp_path: Path) -> None:
    """v6e-16: four hosts; files, setup, run, exec, logs, cancel, ssh, down."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "hello.sh").write_text('echo "rank $PODWAY_RANK of $PODWAY_NUM_HOSTS on $(hostname) says $1"\n')
    shown = podway(pod, "launch", "-y", "--raw", "-c", "c", "--infra", "gcp", "--zone", EAST, "--tpus", "v6e-16",
                   "--workdir", str(work), "--secret", f"TOK={SECRET}", "bash hello.sh $TOK; [ ${#TOK} = 21 ]")  # fmt: skip
    nodes = [name.rpartition("/")[2] for name in living(cloud) if "/nodes/" in name]
    assert len(nodes) == 1
    for rank in range(4):
        assert f"rank {rank} of 4 on t1v-n-" in shown
        assert f"-w-{rank} says ***" in shown
    assert SECRET not in shown
    assert f"gcp/{EAST}" in podway(pod, "status")
    podway(pod, "exec", "c", "-d", "echo begun; sleep 60 & wait")
    wait_until(lambda: "begun" in podway(pod, "logs", "c", "2", "--no-follow"), 30, "the second job")
    shown = podway(pod, "ssh", "c", "-w", "3", "--", "whoami; pwd; echo $TPU_WORKER_ID $TPU_NAME")
    assert shown.split() == ["podway", "/home/podway/sky_workdir", "3", *nodes]
    config = str(pod.home / "ssh" / "config")
    out = subprocess.run(["ssh", "-F", config, "c-worker2", "hostname"], capture_output=True, text=True, timeout=120)
    assert out.stdout.strip().endswith("-w-2"), out.stderr
    podway(pod, "cancel", "-y", "c")
    assert pod.finished("c", 2) == "CANCELLED"
    pattern = f"[{SECRET[0]}]{SECRET[1:]}"  # which the looking itself does not match
    look = f"cat /proc/[0-9]*/cmdline | grep -ao '{pattern}'; grep -rsl '{pattern}' ~ /tmp /var/tmp; true"
    for rank in range(4):
        assert podway(pod, "ssh", "c", "-w", str(rank), "--", look) == ""
    assert "can only be deleted" in podway(pod, "stop", "-y", "c", code=1)
    podway(pod, "down", "-y", "c")
    wait_until(lambda: pod.client.clusters() == [], 30, "the end of the cluster")


@pytest.mark.parametrize(
    ("file", "hosts", "kinds"),
    [
        ("tpu-vm-resources.yaml", 1, {"nodes"}),
        ("tpu-pod-resources.yaml", 8, {"nodes", "queuedResources"}),
        ("tpu-node-resources.yaml", 1, {"nodes", "instances", "disks"}),
    ],
)
def test_the_seeds_resources_come_as_they_are_written(
    pod: Podway, cloud: Running, file: str, hosts: int, kinds: set[str]
) -> None:
    podway(pod, "launch", "-y", "-c", "c", "--infra", "gcp", str(EXAMPLES / "seeds" / file))
    wait_until(lambda: pod.client.cluster("c").state == "UP", 60, "the cluster")
    assert {name.split("/")[-2] for name in living(cloud)} == kinds
    shown = podway(pod, "exec", "c", "echo $PODWAY_NUM_HOSTS hosts, TPU $TPU_NAME")
    names = {name.rpartition("/")[2] for name in living(cloud) if "/nodes/" in name}
    assert f"{hosts} hosts, TPU {names.pop()}" in shown
    podway(pod, "down", "-y", "c")
    wait_until(lambda: pod.client.clusters() == [], 30, "the end of the cluster")


def test_two_slices_reduce_over_both_with_jax(pod: Podway, cloud: Running, tmp_path: Path) -> None:
    """2 x v5litepod-16: eight hosts, one queued resource, one gang; each host a JAX process over the hosts' own network."""
    jax = pytest.importorskip("jax")
    packages = Path(jax.__file__).parent.parent
    look = ["/usr/bin/python3", "-c", "import sys; print(*sys.version_info[:2])"]
    seen = subprocess.run(look, capture_output=True, text=True)
    if seen.stdout.split() != [str(part) for part in sys.version_info[:2]]:
        pytest.skip("the hosts' own python3 is of another version than the one that JAX is installed for")
    (tmp_path / "reduce.py").write_text(ALL_REDUCE)
    (tmp_path / "task.yaml").write_text(f"""
name: reduce
resources:
  infra: gcp
  accelerators: tpu-v5litepod-16
num_nodes: 2
workdir: {tmp_path}
envs: {{JAX_PLATFORMS: cpu, PYTHONPATH: "{packages}"}}
run: /usr/bin/python3 reduce.py
""")
    shown = podway(pod, "launch", "-y", "-c", "c", str(tmp_path / "task.yaml"), seconds=110)
    said = podway(pod, "logs", "c", "1", "--raw", "--no-follow")
    assert said.count("sum over 2 slices: 44 coordinator 10.") == 8, shown
    assert sum("/queuedResources/" in name for name in living(cloud)) == 1
    assert sum("/nodes/" in name for name in living(cloud)) == 2
    podway(pod, "down", "-y", "c")
    wait_until(lambda: pod.client.clusters() == [], 30, "the end of the cluster")


def test_cost_is_what_the_cloud_bills(pod: Podway, cloud: Running) -> None:
    """From when the cloud asks money, which is before the hosts can be used, over a stop and a start, to the end."""
    podway(pod, "launch", "-y", "-c", "c", "--infra", "gcp", "--zone", EAST, "--tpus", "v6e-8", "true")
    first = pod.client.cluster("c")
    bills = [line for line in ledger_lines(cloud) if line["event"] == "bills" and "/nodes/c-" in line["name"]][-1]
    assert abs((first.up_since or 0.0) - seconds(bills["at"])) < 1.0, (first, bills)
    podway(pod, "stop", "-y", "c")
    stopped = time.time()
    podway(pod, "start", "-y", "c")
    podway(pod, "down", "-y", "c")
    gone = time.time()
    rests = [line for line in ledger_lines(cloud) if line["name"] == bills["name"] and line["event"] == "rests"]
    # The end of a stretch is seen a moment after it is over, and before the command says so.
    late = (stopped - seconds(rests[0]["at"])) + (gone - seconds(rests[1]["at"]))
    node = next(one for one in cloud.command("GET", "ledger")["gone"] if one["name"] == bills["name"])
    shown = pod.client.cluster("c")
    assert node["hourly_usd"] == shown.hourly_cost and shown.cost is not None
    billed_s = node["cost_usd"] / node["hourly_usd"] * 3600
    assert -1.0 < shown.billed_s - billed_s < late + 1.0, (shown.billed_s, billed_s, late)
    assert abs(shown.cost - shown.billed_s / 3600 * shown.hourly_cost) < 1e-6


def ledger_lines(cloud: Running) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(cloud.state) / "ledger.jsonl").read_text().splitlines()]


def seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


def test_a_slow_cloud_holds_nobody(pod: Podway, cloud: Running) -> None:
    """45 who ask the cloud for orphans while it takes its time; whoever asks the server alone is answered."""
    podway(pod, "status")
    cloud.command("POST", "faults", {"kind": "delay", "service": "tpu", "seconds": 20})
    clients = [pod.client.fork() for _ in range(45)]
    asked = [threading.Thread(target=ask_for_orphans, args=(client,)) for client in clients]
    try:
        for thread in asked:
            thread.start()
        began = time.monotonic()
        for _ in range(5):
            assert pod.client.clusters() == []
        assert time.monotonic() - began < 10
        assert any(thread.is_alive() for thread in asked)
    finally:
        cloud.command("DELETE", "faults")
        for client in clients:
            client.close()
        for thread in asked:
            thread.join(120)
    assert not any(thread.is_alive() for thread in asked)


def ask_for_orphans(client: Client) -> None:
    with contextlib.suppress(ClientClosed, UserError):
        client.orphans()


def test_down_does_not_wait_for_a_host_that_is_cut_off(pod: Podway, cloud: Running) -> None:
    """The cloud that deletes it is what ends the job there; who waits is told for what."""
    podway(pod, "launch", "-y", "-d", "-c", "c", "--infra", "gcp", "--zone", EAST, "--tpus", "v6e-16", "sleep 1000")
    wait_until(lambda: pod.client.cluster("c").open_jobs and pod.client.job("c", 1).state == "RUNNING", 60, "the job")
    node = pod.client.cluster("c").hosts[0].tpu_name
    cloud.command("POST", "partition", {"node": node, "workers": [2]})
    began = time.monotonic()
    shown = podway(pod, "down", "-y", "c")
    took = time.monotonic() - began
    assert "c: Waiting for worker2 (10." in shown and "c: Not waiting for worker2" in shown
    assert took < LOST_AFTER_S, took  # as long as a host is waited for whose cluster stays
    job = pod.client.job("c", 1)
    assert job.state == "CANCELLED"
    assert [end.rank for end in job.exits if end.lost] == [2]
    assert not any("/nodes/" in name for name in living(cloud))


@pytest.mark.long
def test_a_host_cut_off_and_an_sshd_killed_cost_no_line(pod: Podway, cloud: Running) -> None:
    """One worker of a pod is off the network for a while, another's sshd is dead for a while; the job and its log go on."""
    podway(pod, "launch", "-y", "-c", "c", "--infra", "gcp", "--zone", EAST, "--tpus", "v6e-16")
    wait_until(lambda: pod.client.cluster("c").state == "UP", 60, "the cluster")
    node = pod.client.cluster("c").hosts[0].tpu_name
    job = pod.client.exec("c", Task(run=counting("run", 200, pause=0.05))).job
    assert job is not None
    wait_until(lambda: "line 20" in pod.log_text("c", job, follow=False), 30, "the first lines")
    cloud.command("POST", "partition", {"node": node, "workers": [2]})
    cloud.command("POST", "hosts", {"node": node, "workers": [1], "action": "kill-sshd"})
    # Of that rank alone: a host that is cut off a minute counts as lost, and reading its output would wait for it that long.
    wait_until(lambda: "run 3 line 100" in pod.log_text("c", job, follow=False, rank=3), 60, "another's lines")
    cloud.command("POST", "partition", {"node": node, "workers": [2], "on": False})
    cloud.command("POST", "hosts", {"node": node, "workers": [1], "action": "start-sshd"})
    assert pod.finished("c", job, 80) == "SUCCEEDED"
    assert without_prefix(pod.log_text("c", job)) == numbered_lines(4, {"run": 200})
    podway(pod, "down", "-y", "c")
    wait_until(lambda: pod.client.clusters() == [], 30, "the end of the cluster")


@pytest.mark.soak
def test_a_volume_outlives_its_cluster(pod: Podway, cloud: Running, tmp_path: Path) -> None:
    """A persistent disk: formatted once, mounted on a host, found again by another cluster, deleted by its name."""
    if subprocess.run(["losetup", "-f"], capture_output=True).returncode:
        pytest.skip("no loop device can be made here for a data disk")
    (pod.home / "gcp.yaml").write_text("ssh_user: root\n")  # the sandbox's hosts have no sudo
    (tmp_path / "volume.yml").write_text(
        f"type: volume\nname: data\nbackend: gcp\nregion: us-east5\navailability_zone: {EAST}\nsize: 20GB\n"
    )
    (tmp_path / "task.yml").write_text(
        'type: task\nname: keep\nvolumes: ["data:/data"]\nresources: {gpu: v5litepod-1}\n'
        'commands: ["cat /data/said || true", "echo said-by-$(hostname) >> /data/said", "df --output=target /data | tail -1"]\n'
    )
    task = str(tmp_path / "task.yml")
    assert "there is no volume 'data'" in podway(pod, "launch", "-y", "-c", "one", task, code=1)
    assert f"ready on gcp/{EAST} (20 GB, pd-balanced)" in podway(pod, "apply", "-y", "-f", str(tmp_path / "volume.yml"))
    first = podway(pod, "launch", "-y", "-c", "one", task)
    assert "/mnt/podway-volumes/data" in first and "said-by" not in first
    assert "attached to cluster one" in podway(pod, "launch", "-y", "-c", "two", task, code=1)
    assert "used by cluster one" in podway(pod, "volume", "delete", "-y", "data", code=1)
    podway(pod, "down", "-y", "one")
    wait_until(lambda: pod.client.clusters() == [], 60, "the end of the cluster")
    assert "said-by" in podway(pod, "launch", "-y", "-c", "two", task)
    podway(pod, "down", "-y", "two")
    wait_until(lambda: pod.client.clusters() == [], 60, "the end of the cluster")
    podway(pod, "volume", "delete", "-y", "data")
