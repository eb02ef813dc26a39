"""What befalls hosts, queue and control plane while a job runs: it comes back where its task says so, and nothing is lost or left."""

import re
from pathlib import Path

import pytest
from tools.bench.own_kubernetes import CLUSTER_QUEUE, NAMESPACE, OwnKubernetes

from podway.providers.gke.api import Fields
from tests.conftest import wait_until
from tests.e2e.harness import Podway
from tests.e2e.test_kubernetes import podway

pytestmark = pytest.mark.kubernetes

QUEUE_PATH = f"/apis/kueue.x-k8s.io/v1beta2/clusterqueues/{CLUSTER_QUEUE}"
COMES_BACK = """
resources: {infra: k8s, accelerators: tpu-v6e-16, job_recovery: {strategy: FAILOVER}}
run: |
  echo attempt $PODWAY_ATTEMPT
  [ $PODWAY_ATTEMPT != 1 ] || sleep 1000
"""
ENDS = """
resources: {infra: k8s, accelerators: tpu-v6e-16}
run: echo rank $PODWAY_RANK is up; sleep 1000
"""
# Who sees it first tells it: the one who drives the job by the rank's end, the one who watches the cluster by a pod that is still
# there, or by the JobSet when all are gone.
LOST = re.compile(
    r"its hosts were lost: (run on \S+ \(rank 1, \S+\) (was killed by signal 15|exited with code 143)"
    r"|pod back-\w+-slice-0-\d-\w+ ended with exit code 143"
    r"|jobset failed due to reaching max number of restarts \(first failed job: back-\w+-slice-0\))"
)


def launch(pod: Podway, tmp_path: Path, text: str) -> None:
    """A cluster `back` whose job runs."""
    (tmp_path / "task.yaml").write_text(text)
    podway(pod, "launch", "-y", "-c", "back", "-d", str(tmp_path / "task.yaml"))
    wait_until(lambda: state(pod) == "RUNNING", 60, "the job to run")


def state(pod: Podway) -> str:
    return pod.client.jobs("back")[-1].state


def pod_paths(own: OwnKubernetes) -> list[str]:
    return [f"/api/v1/namespaces/{NAMESPACE}/pods/{one['metadata']['name']}" for one in own.pods()]


def stop_queue(own: OwnKubernetes, policy: str) -> None:
    body: Fields = {"spec": {"stopPolicy": policy}}
    own.admin.call("PATCH", QUEUE_PATH, body, kind="application/merge-patch+json")


def test_a_deleted_pod_brings_the_job_back(own: OwnKubernetes, pod: Podway, tmp_path: Path) -> None:
    launch(pod, tmp_path, COMES_BACK)
    own.admin.call("DELETE", pod_paths(own)[1])
    wait_until(lambda: state(pod) == "SUCCEEDED", 90, "the job to come back")


def test_a_deleted_pod_fails_a_job_without_recovery(own: OwnKubernetes, pod: Podway, tmp_path: Path) -> None:
    launch(pod, tmp_path, ENDS)
    wait_until(lambda: pod.log_text("back", 1, follow=False).count("is up") == 4, 60, "every rank to run")
    own.admin.call("DELETE", pod_paths(own)[1])
    wait_until(lambda: pod.client.jobs("back")[-1].ended, 90, "the job to end")
    found = pod.client.jobs("back")[-1]
    assert found.state == "FAILED_DRIVER" and LOST.fullmatch(found.reason), found


def test_an_evicted_workload_says_why_and_comes_back(own: OwnKubernetes, pod: Podway, tmp_path: Path) -> None:
    """Kueue takes the quota back, and gives it again later."""
    launch(pod, tmp_path, COMES_BACK)
    stop_queue(own, "HoldAndDrain")
    try:
        wait_until(lambda: own.nodes is not None and own.nodes.processes() == 0, 60, "the pods to go")
        wait_until(lambda: "queue multislice-queue: " in pod.client.cluster("back").reason, 60, "the reason")
        wait_until(lambda: state(pod) == "RECOVERING", 60, "the job to wait for it")
    finally:
        stop_queue(own, "None")
    wait_until(lambda: state(pod) == "SUCCEEDED", 90, "the job to come back")


def test_the_api_server_is_killed_while_a_job_runs(own: OwnKubernetes, pod: Podway) -> None:
    """Each line of each rank is there once."""
    run = 'for i in $(seq 150); do echo "rank $PODWAY_RANK line $i"; sleep 0.1; done'
    podway(pod, "launch", "-y", "--infra", "k8s", "--gpus", "tpu-v6e-16", "-c", "back", "-d", run)
    wait_until(lambda: pod.log_text("back", 1, follow=False).count("line 1\n") == 4, 60, "every rank to run")
    for _ in range(2):
        own.restart("kube-apiserver")
    wait_until(lambda: pod.client.jobs("back")[-1].ended, 90, "the job to end")
    found = pod.client.jobs("back")[-1]
    assert found.state == "SUCCEEDED", found.reason
    lines = [line.split(") ", 1)[1] for line in pod.log_text("back", 1).splitlines() if line.startswith("(")]
    assert sorted(line for line in lines if "line" in line) == sorted(
        f"rank {rank} line {number}" for rank in range(4) for number in range(1, 151)
    )


@pytest.mark.parametrize("name", ["jobset", "kueue", "kube-controller-manager", "kube-scheduler"])
def test_a_controller_that_is_down_delays_a_launch(name: str, own: OwnKubernetes, pod: Podway) -> None:
    """What it would do is done when it is back. Without the webhooks of JobSet and Kueue no JobSet is taken: it is sent again."""
    own.kill(name)
    try:
        podway(pod, "launch", "-y", "--infra", "k8s", "--gpus", "tpu-v6e-16", "-c", "back", "-d", "echo done")
        if name not in ("jobset", "kueue"):
            wait_until(lambda: pod.client.cluster("back").reason, 60, "a reason")
        assert state(pod) == "PENDING"
    finally:
        own.start(name)
        own.wait_for(name)
    wait_until(lambda: state(pod) == "SUCCEEDED", 90, "the job to end")
