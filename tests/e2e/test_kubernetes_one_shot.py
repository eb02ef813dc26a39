"""One-shot runs on Kubernetes end to end: sent, followed, listed, cancelled, and nothing left of them in the cluster."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from podway.sandbox.kubernetes.running import NodePool, RunningKubernetes, running_kubernetes, why_no_namespaces
from tests.conftest import wait_until
from tests.e2e.harness import Podway

RUN = ("launch", "-y", "--infra", "k8s", "--gpus", "tpu-v6e-16", "--one-shot")


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningKubernetes]:
    why_not = why_no_namespaces()
    if why_not:
        pytest.skip(why_not)
    pools = (NodePool(name="pool-0", accelerator_type="v6e-16"), NodePool(name="pool-1", accelerator_type="v6e-16"))
    with running_kubernetes(tmp_path_factory.mktemp("kubernetes"), pools, kueue="v1beta2", network=96) as running:
        running.set_quota(16)
        yield running


@pytest.fixture
def cluster(kubernetes: RunningKubernetes, pod: Podway) -> Iterator[RunningKubernetes]:
    """The cluster, a server that uses it, and afterwards nothing left in it, though nobody took anything down."""
    (pod.home / "gke.yaml").write_text("queue: multislice-queue\n")
    pod.start(KUBECONFIG=str(kubernetes.kubeconfig))
    yield kubernetes
    wait_until(lambda: kubernetes.left() == {}, 60, "an empty cluster")
    assert kubernetes.nodes is not None and kubernetes.nodes.processes() == 0


def podway(pod: Podway, *words: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "podway.cli.main", *words],
        env={**os.environ, "PODWAY_HOME": str(pod.home)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr + done.stdout


def job(pod: Podway, name: str) -> str:
    return str(pod.client.jobs(name)[-1].state)


def lines_of(pod: Podway, rank: int) -> list[str]:
    """What a rank of the run `long` has printed so far."""
    lines = pod.log_text("long", 1, rank=rank, follow=False).splitlines()
    return [line.partition(") ")[2] for line in lines]


def test_it_runs_to_its_end_with_ranks_secrets_and_exit_codes(
    cluster: RunningKubernetes, pod: Podway, tmp_path: Path
) -> None:
    """A success and a failure; both are listed and their logs are there when nothing else is. With --dryrun it is printed as YAML."""
    task = tmp_path / "task.yaml"
    task.write_text("""
setup: echo set up
resources: {image_id: docker:registry.example/team/train:1}
envs: {SKYPILOT_DOCKER_USERNAME: ada, SKYPILOT_DOCKER_SERVER: registry.example}
secrets: {TOKEN: null, SKYPILOT_DOCKER_PASSWORD: hunter2}
run: |
  echo "rank $SKYPILOT_NODE_RANK token $TOKEN ${#TOKEN}${SKYPILOT_DOCKER_PASSWORD:+ and a password}"
  [ "$SKYPILOT_NODE_RANK" != 1 ] || exit $CODE
""")
    shown = podway(pod, *RUN, "--dryrun", "-c", "good", "--secret", "TOKEN=abc-secret", str(task))
    config, jobset = yaml.safe_load_all(shown[shown.index("---") :])
    assert (config["kind"], jobset["kind"]) == ("ConfigMap", "JobSet") and "abc-secret" not in shown
    assert "hunter2" not in shown
    assert "kubectl create secret docker-registry" in shown
    words = (*RUN, "--raw", "--secret", "TOKEN=abc-secret", str(task))
    said = podway(pod, *words, "-c", "good", "--env", "CODE=0")
    for rank in range(4):
        assert re.search(rf"\(.*rank={rank}, .*\) rank {rank} token \*\*\* 10$", said, re.MULTILINE), said
    assert said.count("set up") == 4 and "podway exec" not in said
    failed = podway(pod, *words, "-c", "bad", "--env", "CODE=7", code=100)
    assert "rank 1" in failed and "exited with code 7" in failed
    wait_until(lambda: pod.client.cluster("bad").state == "GONE", 60, "the failed run to be gone")
    wait_until(lambda: cluster.left() == {}, 60, "an empty cluster")
    assert podway(pod, "status").count("good") == 0
    assert "SUCCEEDED" in podway(pod, "queue", "good") and "FAILED" in podway(pod, "queue", "bad")
    assert "rank 0 token *** 10" in podway(pod, "logs", "good", "--no-follow")
    assert pod.client.jobs("bad")[-1].exits[1].code == 7


def test_exit_42_begins_again_and_keeps_both_logs(cluster: RunningKubernetes, pod: Podway, tmp_path: Path) -> None:
    """JobSet restarts it; the attempts have logs of their own."""
    task = tmp_path / "task.yaml"
    task.write_text("""
resources: {infra: k8s, accelerators: tpu-v6e-16, job_recovery: {max_restarts_on_errors: 1}}
file_mounts: {/flag: {source: gs://flags, mode: MOUNT}}
run: |
  [ ! -e /flag/again ] || { echo "second of $SKYPILOT_NODE_RANK"; exit 0; }
  echo "first of $SKYPILOT_NODE_RANK"
  [ "$SKYPILOT_NODE_RANK" = 1 ] || exec sleep 1000
  until [ -e /flag/go ]; do sleep 0.1; done
  touch /flag/again; exit 42
""")
    podway(pod, "launch", "-y", "--one-shot", "-d", "-c", "again", str(task))
    wait_until(lambda: pod.log_text("again", 1, follow=False).count("first of") == 4, 60, "the first attempt")
    assert cluster.nodes is not None
    (cluster.nodes.place / "buckets" / "flags" / "go").touch()
    assert pod.finished("again", 1) == "SUCCEEDED"
    said = pod.log_text("again", 1)
    assert said.count("first of") == 4 and said.count("second of") == 4, said
    assert pod.client.jobs("again")[-1].attempt == 2


def test_a_server_that_is_killed_loses_no_line_and_cancel_frees_the_chips(
    cluster: RunningKubernetes, pod: Podway
) -> None:
    """Each line once, in order, over two servers; the second of two runs says why it waits, and goes at once when cancelled; one
    whose JobSet somebody deletes has failed."""
    count = "trap 'echo checkpoint; exit 0' TERM; n=0; while :; do n=$((n+1)); echo line $n; sleep 0.05; done"
    podway(pod, *RUN, "-c", "long", "-d", count)
    wait_until(lambda: "line 20\n" in pod.log_text("long", 1, follow=False), 60, "its output")
    pod.kill_server()
    pod.start(KUBECONFIG=str(cluster.kubeconfig))
    podway(pod, *RUN, "-c", "other", "-d", "echo other")
    wait_until(lambda: "16 more needed" in pod.client.cluster("other").reason, 60, "the reason")
    assert "other waits: queue multislice-queue: " in podway(pod, "status")
    assert "is a one-shot run" in podway(pod, "exec", "long", "echo no", code=1)
    assert "is a one-shot run" in podway(pod, "stop", "-y", "long", code=1)
    assert "taken by a one-shot run" in podway(pod, *RUN, "-c", "long", "echo no", code=1)
    podway(pod, "cancel", "-y", "other")
    wait_until(lambda: job(pod, "other") == "CANCELLED", 60, "the waiting one to be cancelled")
    before = [lines_of(pod, rank) for rank in range(4)]
    for rank in range(4):  # every rank's output comes again
        wait_until(lambda rank=rank: len(lines_of(pod, rank)) > len(before[rank]), 60, "more output")
    podway(pod, "cancel", "-y", "long")
    wait_until(lambda: job(pod, "long") == "CANCELLED", 60, "the running one to be cancelled")
    assert cluster.nodes is not None and cluster.nodes.processes() == 0
    for rank in range(4):
        words = lines_of(pod, rank)
        assert words == [*(f"line {n}" for n in range(1, len(words))), "checkpoint"], words
    # Somebody deletes the JobSet: the job has failed and says so, and its Secret goes with the JobSet.
    podway(pod, *RUN, "-c", "lost", "-d", "--secret", "KEY=value-of-it", "echo up; sleep 1000")
    wait_until(lambda: job(pod, "lost") == "RUNNING", 60, "it to run")
    assert cluster.left()["secrets"] == 1
    (found,) = cluster.objects.find("jobsets")
    path = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets/{found['metadata']['name']}"
    cluster.api.answer("DELETE", path, {}, {})
    wait_until(lambda: job(pod, "lost") == "FAILED_DRIVER", 60, "the job to have failed")
    assert "lost" in pod.client.jobs("lost")[-1].reason
