"""Kubernetes end to end, as a person types it: a small Kubernetes of this process, whose TPU nodes run pods as processes."""

import fcntl
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from podway.sandbox.kubernetes.running import NodePool, RunningKubernetes, running_kubernetes, why_no_namespaces
from tests.conftest import wait_until
from tests.e2e.harness import Podway

POOLS = (
    NodePool(name="pool-0", accelerator_type="v6e-16"),
    NodePool(name="pool-1", accelerator_type="v6e-16"),
)


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningKubernetes]:
    why_not = why_no_namespaces()
    if why_not:
        pytest.skip(why_not)
    with running_kubernetes(tmp_path_factory.mktemp("kubernetes"), POOLS, kueue="v1beta2", network=94) as running:
        running.set_quota(32)
        yield running


@pytest.fixture
def cluster(kubernetes: RunningKubernetes, pod: Podway, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningKubernetes]:
    """The cluster, a server that uses it, and afterwards nothing left in it."""
    monkeypatch.setenv("KUBECONFIG", str(kubernetes.kubeconfig))
    (pod.home / "gke.yaml").write_text("queue: multislice-queue\n")
    pod.start()
    yield kubernetes
    for one in pod.client.clusters():
        pod.client.down(one.name)
    wait_until(lambda: kubernetes.left() == {}, 120, "an empty cluster")
    wait_until(lambda: running_pods(kubernetes) in (None, 0), 120, "no process of a pod")


def running_pods(kubernetes: RunningKubernetes) -> int | None:
    """Pods whose processes run; None where they run on real nodes."""
    return None if kubernetes.nodes is None else kubernetes.nodes.processes()


def at_a_terminal(pod: Podway, name: str) -> None:
    """A shell whose terminal has the size of this one, also after that changed; it counts as somebody who is there."""
    master, slave = pty.openpty()

    def resize(rows: int, columns: int) -> None:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    resize(33, 101)
    shell = subprocess.Popen(
        [sys.executable, "-m", "podway.cli.main", "ssh", name],
        env={**os.environ, "PODWAY_HOME": str(pod.home), "TERM": "dumb"},
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    seen = b""

    def until(text: bytes) -> None:
        nonlocal seen
        deadline = time.monotonic() + 90
        while text not in seen:
            assert time.monotonic() < deadline, seen
            if select.select([master], [], [], 1.0)[0]:
                seen += os.read(master, 65536)

    try:
        until(b"sky_workdir# ")
        os.write(master, b"stty size; tty; echo rank $PODWAY_RANK is $((6 * 7))\n")
        until(b"rank 0 is 42")
        assert b"33 101" in seen and b"/dev/pts/" in seen
        resize(20, 60)
        shell.send_signal(signal.SIGWINCH)
        os.write(master, b"until [ \"$(stty size)\" = '20 60' ]; do sleep 0.1; done; echo now it is $((3 * 4))\n")
        until(b"now it is 12")
        os.write(master, b"exit 7\n")
        wait_until(lambda: shell.poll() is not None or drained(master), 120, "the end of the shell")
        assert shell.wait(60) == 7
    finally:
        shell.kill()
        shell.wait()
        os.close(slave)
        os.close(master)


def drained(master: int) -> bool:
    """Reads what is there, so that nobody waits for it to be read; never true."""
    if select.select([master], [], [], 0)[0]:
        os.read(master, 65536)
    return False


def podway(pod: Podway, *words: str, code: int = 0, seconds: float = 120, stdin: str | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "podway.cli.main", *words],
        env={**os.environ, "PODWAY_HOME": str(pod.home)},
        capture_output=True,
        text=True,
        timeout=seconds,
        input=stdin,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_life(cluster: RunningKubernetes, pod: Podway, tmp_path: Path) -> None:
    """launch on two slices, logs with ranks, exec, a job that fails, cancel, and down: nothing is left."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "hello.txt").write_text("from the working directory\n")
    task = tmp_path / "task.yaml"
    task.write_text(
        """
name: two
num_nodes: 2
resources: {infra: k8s, accelerators: tpu-v6e-16}
workdir: work
secrets: {TOKEN: null}
run: |
  cat hello.txt
  echo "rank $SKYPILOT_NODE_RANK slice $MEGASCALE_SLICE_ID worker $TPU_WORKER_ID token ${#TOKEN}"
"""
    )
    said = podway(pod, "launch", "--raw", "-y", "-c", "two", "--secret", "TOKEN=abcdef", str(task))
    for rank in range(8):
        assert f"rank {rank} slice {rank // 4} worker {rank % 4} token 6" in said, said
    assert said.count("from the working directory") == 8
    assert "podway ssh two" in said
    assert (
        podway(pod, "ssh", "two", "-w", "5", "--", "echo $PODWAY_RANK; pwd; exit 3", code=3)
        == "5\n/podway/home/sky_workdir\n"
    )
    assert podway(pod, "ssh", "two", "--", "cat", stdin="through stdin") == "through stdin"
    at_a_terminal(pod, "two")
    if shutil.which("ssh"):
        config = str(pod.home / "ssh" / "config")
        wait_until((pod.home / "ssh" / "hosts" / "two").exists, 120, "the entry")
        said = subprocess.run(
            ["ssh", "-F", config, "two-worker5", "echo $PODWAY_RANK; exit 3"], capture_output=True, timeout=240
        )
        assert (said.stdout, said.returncode) == (b"5\n", 3), said.stderr
    assert "UP" in podway(pod, "status")
    assert "on rank 3" in podway(pod, "exec", "two", "--raw", "echo on rank $PODWAY_RANK")
    failed = podway(pod, "exec", "two", "echo last words; [ $PODWAY_RANK != 5 ] || exit 7", code=100)
    assert "rank 5" in failed and "7" in failed
    podway(pod, "exec", "two", "-d", "sleep 1000")
    podway(pod, "cancel", "two", "-y")
    wait_until(lambda: pod.client.jobs("two")[-1].state == "CANCELLED", 120, "the job to be cancelled")
    assert running_pods(cluster) in (None, 8)
    podway(pod, "down", "-y", "two")
    wait_until(lambda: cluster.left() == {}, 120, "an empty cluster")


def test_the_second_says_why_it_waits_and_runs_after(cluster: RunningKubernetes, pod: Podway) -> None:
    """Two clusters against quota for one."""
    first = ("launch", "-y", "--infra", "k8s", "--gpus", "tpu-v6e-16", "--num-nodes", "2")
    podway(pod, *first, "-c", "one", "echo first")
    podway(pod, *first, "-c", "other", "-d", "echo second")
    wait_until(lambda: "32 more needed" in pod.client.cluster("other").reason, 120, "the reason")
    assert "other waits: queue multislice-queue: " in podway(pod, "status")
    podway(pod, *first, "-c", "third", "-d", "echo third")
    wait_until(lambda: "queue, place 2 of 2: " in pod.client.cluster("third").reason, 120, "its place in the queue")
    podway(pod, "down", "-y", "third")
    podway(pod, "down", "-y", "one")
    wait_until(lambda: pod.client.cluster("other").state == "UP", 120, "the second to be up")
    wait_until(lambda: pod.client.jobs("other")[-1].state == "SUCCEEDED", 120, "its job to end")


def test_pods_are_given_the_time_to_end_that_their_task_asks_for(
    cluster: RunningKubernetes, pod: Podway, tmp_path: Path
) -> None:
    task = tmp_path / "task.dstack.yml"
    task.write_text("type: task\ncommands: [python train.py]\nstop_duration: 2m\nresources: {gpu: v6e-16}\n")
    shown = podway(pod, "launch", "--dryrun", "-y", "--infra", "k8s", "-c", "slow", str(task))
    assert "terminationGracePeriodSeconds: 120" in shown


@pytest.mark.long
def test_buckets_are_mounted_in_the_pods(cluster: RunningKubernetes, pod: Podway, tmp_path: Path) -> None:
    """By what the launch asked for: a part of one, read only, and one to write to; a task that wants more is refused."""
    if cluster.nodes is None:
        pytest.skip("its buckets are directories of pretended nodes")
    buckets = cluster.nodes.place / "buckets"
    (buckets / "corpus" / "c4").mkdir(parents=True)
    (buckets / "corpus" / "c4" / "words.txt").write_text("many words\n")
    (tmp_path / "work").mkdir()
    task = tmp_path / "task.yaml"
    task.write_text(
        """
resources: {infra: k8s, accelerators: tpu-v6e-16}
workdir: work
file_mounts:
  /data: {source: gs://corpus/c4, mode: MOUNT, config: {mount: {read_only: true}}}
  ~/out: {source: gs://runs, mode: MOUNT}
run: |
  cat /data/words.txt
  touch /data/no 2>/dev/null && echo written to what is read only
  echo $PODWAY_RANK > ~/out/rank-$PODWAY_RANK
"""
    )
    shown = podway(pod, "launch", "--dryrun", "-y", "-c", "io", str(task))
    assert "gcsfuse.csi.storage.gke.io" in shown and "only-dir=c4" in shown and "gke-gcsfuse/volumes" in shown
    said = podway(pod, "launch", "--raw", "-y", "-c", "io", str(task))
    assert said.count("many words") == 4 and "written to" not in said
    assert sorted(path.name for path in (buckets / "runs").iterdir()) == [f"rank-{rank}" for rank in range(4)]
    podway(pod, "exec", "io", str(task))
    other = tmp_path / "other.yaml"
    other.write_text("file_mounts: {/more: {source: gs://more, mode: MOUNT}}\nrun: ls /more\n")
    jobs = len(pod.client.jobs("io"))
    refused = podway(pod, "exec", "io", str(other), code=1)
    assert "cluster io does not have gs://more mounted at /more" in refused and "--one-shot" in refused
    assert len(pod.client.jobs("io")) == jobs


def give_storage(cluster: RunningKubernetes) -> None:
    """A storage class `shared`; where claims are really bound, with one disk of it."""
    kind = {"metadata": {"name": "shared"}, "provisioner": "kubernetes.io/no-provisioner"}
    if isinstance(cluster, RunningKubernetes):
        cluster.objects.create("storageclasses", "", kind)
        return
    cluster.admin.call("POST", "/apis/storage.k8s.io/v1/storageclasses", kind)
    disk = {
        "capacity": {"storage": "5Gi"},
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "shared",
        "persistentVolumeReclaimPolicy": "Retain",
        "hostPath": {"path": "/nonexistent"},
    }
    cluster.admin.call("POST", "/api/v1/persistentvolumes", {"metadata": {"name": "disk-0"}, "spec": disk})


@pytest.mark.long
def test_volumes_outlive_clusters(cluster: RunningKubernetes, pod: Podway, tmp_path: Path) -> None:
    """A claim by its name and by a part of it, on every host of a slice; the next cluster finds what the first wrote."""
    if cluster.nodes is None:
        pytest.skip("its claims are directories of pretended nodes")
    give_storage(cluster)
    volume = tmp_path / "volume.yaml"
    volume.write_text(
        "name: data\ntype: k8s-pvc\nsize: 5Gi\nconfig: {storage_class_name: shared, access_mode: ReadWriteMany}\n"
    )
    assert "Volume data is ready on gke" in podway(pod, "apply", "-y", "-f", str(volume))
    assert "data" in podway(pod, "volume", "list")
    task = tmp_path / "task.yaml"
    task.write_text(
        """
resources: {infra: k8s, accelerators: tpu-v6e-16}
volumes: {/data: data, ~/part: {name: data, sub_path: models/a}}
run: |
  ls /data
  echo $PODWAY_RANK > /data/$NAME-$PODWAY_RANK
  touch ~/part/$NAME-$PODWAY_RANK
"""
    )
    podway(pod, "launch", "-y", "-c", "one", "--env", "NAME=first", str(task))
    assert "used by cluster one" in podway(pod, "volume", "delete", "-y", "data", code=1)
    podway(pod, "exec", "one", "--env", "NAME=again", str(task))
    podway(pod, "down", "-y", "one")
    said = podway(pod, "launch", "--one-shot", "--raw", "-y", "-c", "two", "--env", "NAME=second", str(task))
    assert said.count("first-3") == 4 and said.count("again-0") == 4, said
    assert "does not have the volume" not in said
    (place,) = (cluster.nodes.place / "claims" / "default").iterdir()
    assert len(list((place / "models" / "a").iterdir())) == 12
    wait_until(lambda: pod.client.cluster("two").state == "GONE", 120, "the run to be gone")
    podway(pod, "launch", "-y", "-c", "three", "--infra", "k8s", "--gpus", "tpu-v6e-16", "true")
    refused = podway(pod, "exec", "three", "--env", "NAME=x", str(task), code=1)
    assert "cluster three does not have the volume data" in refused
    podway(pod, "volume", "delete", "-y", "data")
    assert "No existing volumes" in podway(pod, "volume", "list")


@pytest.mark.long
def test_a_preempted_node_brings_the_job_back(cluster: RunningKubernetes, pod: Podway, tmp_path: Path) -> None:
    """The job outlives its hosts where its task says so, and stop and start free and take the quota again."""
    task = tmp_path / "task.yaml"
    task.write_text(
        """
resources: {infra: k8s, accelerators: tpu-v6e-16, job_recovery: {strategy: FAILOVER}}
run: |
  echo attempt $PODWAY_ATTEMPT
  [ $PODWAY_ATTEMPT != 1 ] || sleep 1000
"""
    )
    podway(pod, "launch", "-y", "-c", "back", "-d", str(task))
    wait_until(lambda: pod.client.jobs("back")[-1].state == "RUNNING", 120, "the job to run")
    node = next(one["spec"]["nodeName"] for one in cluster.pods())
    assert cluster.nodes is not None
    cluster.nodes.lose(node)
    wait_until(lambda: pod.client.jobs("back")[-1].state == "SUCCEEDED", 90, "the job to come back")
    podway(pod, "stop", "-y", "back")
    assert cluster.nodes.processes() == 0 and cluster.left()["jobsets"] == 1
    podway(pod, "start", "-y", "back")
    assert "again" in podway(pod, "exec", "back", "echo again")
