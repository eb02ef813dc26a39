"""Kubernetes end to end, as a person types it: a small Kubernetes of this process, whose TPU nodes run pods as processes."""

import os
import subprocess
import sys
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
def cluster(kubernetes: RunningKubernetes, pod: Podway) -> Iterator[RunningKubernetes]:
    """The cluster, a server that uses it, and afterwards nothing left in it."""
    (pod.home / "gke.yaml").write_text("queue: multislice-queue\n")
    pod.start(KUBECONFIG=str(kubernetes.kubeconfig))
    yield kubernetes
    for one in pod.client.clusters():
        pod.client.down(one.name)
    wait_until(lambda: kubernetes.left() == {}, 60, "an empty cluster")
    wait_until(lambda: running_pods(kubernetes) in (None, 0), 60, "no process of a pod")


def running_pods(kubernetes: RunningKubernetes) -> int | None:
    """Pods whose processes run; None where they run on real nodes."""
    return None if kubernetes.nodes is None else kubernetes.nodes.processes()


def podway(pod: Podway, *words: str, code: int = 0, seconds: float = 120) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "podway.cli.main", *words],
        env={**os.environ, "PODWAY_HOME": str(pod.home), "KUBECONFIG": os.environ.get("KUBECONFIG", "")},
        capture_output=True,
        text=True,
        timeout=seconds,
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
    assert "podway ssh" not in said, "nobody can log in to a pod"
    assert "hosts of gke have no shell" in podway(pod, "ssh", "two", code=1)
    assert "UP" in podway(pod, "status")
    assert "on rank 3" in podway(pod, "exec", "two", "--raw", "echo on rank $PODWAY_RANK")
    failed = podway(pod, "exec", "two", "echo last words; [ $PODWAY_RANK != 5 ] || exit 7", code=100)
    assert "rank 5" in failed and "7" in failed
    podway(pod, "exec", "two", "-d", "sleep 1000")
    podway(pod, "cancel", "two", "-y")
    wait_until(lambda: pod.client.jobs("two")[-1].state == "CANCELLED", 60, "the job to be cancelled")
    assert running_pods(cluster) in (None, 8)
    podway(pod, "down", "-y", "two")
    wait_until(lambda: cluster.left() == {}, 60, "an empty cluster")


def test_the_second_says_why_it_waits_and_runs_after(cluster: RunningKubernetes, pod: Podway) -> None:
    """Two clusters against quota for one."""
    first = ("launch", "-y", "--infra", "k8s", "--gpus", "tpu-v6e-16", "--num-nodes", "2")
    podway(pod, *first, "-c", "one", "echo first")
    podway(pod, *first, "-c", "other", "-d", "echo second")
    wait_until(lambda: "32 more needed" in pod.client.cluster("other").reason, 60, "the reason")
    assert "other waits: queue multislice-queue: " in podway(pod, "status")
    podway(pod, "down", "-y", "one")
    wait_until(lambda: pod.client.cluster("other").state == "UP", 60, "the second to be up")
    wait_until(lambda: pod.client.jobs("other")[-1].state == "SUCCEEDED", 60, "its job to end")


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
    wait_until(lambda: pod.client.jobs("back")[-1].state == "RUNNING", 60, "the job to run")
    node = next(one["spec"]["nodeName"] for one in cluster.pods())
    assert cluster.nodes is not None
    cluster.nodes.lose(node)
    wait_until(lambda: pod.client.jobs("back")[-1].state == "SUCCEEDED", 90, "the job to come back")
    podway(pod, "stop", "-y", "back")
    assert cluster.nodes.processes() == 0 and cluster.left()["jobsets"] == 1
    podway(pod, "start", "-y", "back")
    assert "again" in podway(pod, "exec", "back", "echo again")
