"""One-shot runs on Kubernetes: as YAML, beside XPK's, and run on a small Kubernetes."""

import base64
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from podway.catalog.slices import find_slice
from podway.cli.manifests import as_yaml
from podway.control.bucket_mounts import with_buckets
from podway.control.one_shot_job import exit_of, first_failure
from podway.errors import UserError
from podway.order import Order
from podway.providers import Request
from podway.providers.gke import one_shot
from podway.providers.gke.manifests import (
    JOB_INDEX,
    POD_INDEX,
    RESTART_ATTEMPT,
    JobSetContext,
    labels_of,
    object_name,
)
from podway.providers.gke.one_shot import render_one_shot
from podway.providers.gke.pod_logs import LineSplitter
from podway.providers.gke.runs import one_shot_observation, pull_secret_of, run_observation
from podway.providers.gke.settings import GkeSettings
from podway.providers.gke.state import Seen
from podway.sandbox.kubernetes.running import NodePool, RunningKubernetes, running_kubernetes, why_no_namespaces
from podway.task.task import Bucket, FileMount, Git, LocalDir, Recovery, Registry, Task
from tests.conftest import wait_until
from tests.providers.xpk_oracle import CASES, GOLDEN, facts

SETTINGS = GkeSettings(queue="multislice-queue", priority_class="medium")
CONTEXT = JobSetContext(owner="ab12cd34", context="east", namespace="default", settings=SETTINGS)
TASK = Task(
    name="train",
    setup="pip install -r requirements.txt",
    run="python3 train.py --rank $SKYPILOT_NODE_RANK\n",
    env={"A": "it's $HOME"},
    secrets={"HF_TOKEN": "very-secret-value"},
    workdir=Git(url="https://example.com/repo.git", ref="main"),
    file_mounts=(FileMount(target="/data", source=Bucket(uri="gs://corpus/c4", read_only=True)),),
    recovery=Recovery(max_restarts_on_errors=3, exit_codes=(3, 4)),
    stop_duration_s=300,
    max_duration_s=3600,
)


def order(tpu: str, slices: int = 1, **more: Any) -> Order:
    found = find_slice(tpu)
    return Order(
        accelerator_type=found.accelerator_type,
        topology=found.topology_text,
        provider="gke",
        slices=slices,
        hosts_per_slice=found.hosts,
        chips_per_host=found.chips_per_host,
        **more,
    )


def jobset(request: Request) -> dict[str, Any]:
    return dict(request.steps[-1].body)


def test_what_kubectl_apply_takes_is_golden() -> None:
    """PODWAY_REWRITE_GOLDEN=1 after a wanted change. No secret is in it."""
    found = order("v5litepod-16", 2, spot=True, image="docker:gcr.io/p/maxtext:1")
    request = render_one_shot(CONTEXT, "Seed_128b", with_buckets(found, [TASK]), TASK, "ada")
    text = as_yaml(msgspec.to_builtins(request), TASK)
    path = GOLDEN.parent / "one-shot.yaml"
    if os.environ.get("PODWAY_REWRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()
    assert "very-secret-value" not in text
    documents = list(yaml.safe_load_all(text))
    assert documents == [dict(step.body) for step in request.steps]


@pytest.mark.parametrize("case", CASES)
def test_it_equals_what_xpk_submits(case: str) -> None:
    """In every field that matters, for the same command line."""
    words = dict(word.removeprefix("--").split("=", 1) for word in CASES[case])
    codes = tuple(int(code) for code in words.get("restart-on-exit-codes", "").split(",") if code)
    restarts = int(words.get("max-restarts", 0))
    grace = words.get("termination-grace-period-seconds")
    task = Task(
        run="python3 train.py",
        recovery=Recovery(max_restarts_on_errors=restarts, exit_codes=codes) if restarts else None,
        stop_duration_s=int(grace) if grace else None,
    )
    settings = msgspec.structs.replace(
        SETTINGS,
        priority_class=words.get("priority", "medium"),
        pull_secret=words.get("docker-image-pull-secret"),
    )
    context = msgspec.structs.replace(CONTEXT, settings=settings)
    wanted = order(words["tpu-type"], int(words.get("num-slices", 1)))
    ours = facts(jobset(render_one_shot(context, "demo", wanted, task, "ada")))
    theirs = json.loads(GOLDEN.read_text())[case]
    if words["tpu-type"] in ("v5litepod-8", "v6e-8"):
        # XPK takes two machines of 4 chips for these; Podway the one machine of 8, as Cloud TPU does: no network between them.
        assert (theirs["hosts"], theirs["chips"], ours["hosts"], ours["chips"]) == ([2, 2], 4, [1, 1], 8)
        ours |= {"hosts": [2, 2], "chips": 4}
    assert ours == theirs


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (Task(run="x", workdir=LocalDir(path="/x")), "nothing syncs workdir"),
        (
            Task(run="x", file_mounts=(FileMount(target="~/a", source=LocalDir(path="/x")),)),
            "nothing syncs file_mounts ~/a",
        ),
        (Task(run="x", file_mounts=(FileMount(target="/a", source=Bucket(uri="gs://b", mode="COPY")),)), "not copied"),
        (Task(run="x", kind="service"), "runs a task to its end"),
    ],
)
def test_what_it_cannot_do_is_one_sentence(task: Task, said: str) -> None:
    with pytest.raises(UserError, match=said):
        render_one_shot(CONTEXT, "demo", order("v6e-16"), task, "ada")


@pytest.mark.parametrize(
    ("image", "server", "kept"),
    [
        ("docker:us-docker.pkg.dev/p/r/i:1", None, "us-docker.pkg.dev"),
        ("docker:us-docker.pkg.dev/p/r/i:1", "mirror.example:5000", "mirror.example:5000"),
        ("docker:ada/private", None, "https://index.docker.io/v1/"),
        ("docker:ada/private", "docker.io", "https://index.docker.io/v1/"),
    ],
)
def test_the_login_of_a_task_is_a_pull_secret_of_its_own(image: str, server: str | None, kept: str) -> None:
    """Before the one of the settings; the password is nowhere else, and the task's processes do not have it."""
    registry = Registry(username="ada", password_secret="PULL", server=server)
    task = Task(run="x", secrets={"PULL": "hunter2"}, registry=registry)
    context = msgspec.structs.replace(CONTEXT, settings=GkeSettings(pull_secret="everyones"))
    request = render_one_shot(context, "demo", order("v6e-16", image=image, pull_login=True), task, "ada")
    made = jobset(request)
    pod = made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    ident = object_name("ab12cd34", "demo")
    assert pod["imagePullSecrets"] == [{"name": f"{ident}-pull"}, {"name": "everyones"}]
    assert "envFrom" not in pod["containers"][0]
    secret = pull_secret_of(made, registry, "hunter2")
    assert secret["metadata"]["name"] == f"{ident}-pull" and secret["metadata"]["labels"] == labels_of(CONTEXT, "demo")
    login = {"username": "ada", "password": "hunter2", "auth": base64.b64encode(b"ada:hunter2").decode()}
    assert json.loads(base64.b64decode(secret["data"][".dockerconfigjson"])) == {"auths": {kept: login}}
    shown = as_yaml(msgspec.to_builtins(request), task)
    assert f"kubectl create secret docker-registry {ident}-pull -n default" in shown and "hunter2" not in shown
    assert f"--docker-server={kept} --docker-username=ada " in shown
    assert '--docker-password="$PULL"' in shown and "secret generic" not in shown
    broken = msgspec.structs.replace(
        task, registry=Registry(username="a\nkind: Secret", password_secret="PULL", server=server)
    )
    assert "\nkind: Secret" not in as_yaml(msgspec.to_builtins(request), broken)


def test_the_priority_class_of_a_task_takes_precedence() -> None:
    made = jobset(render_one_shot(CONTEXT, "demo", order("v6e-16", priority_class="high"), Task(run="x"), "ada"))
    assert made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["priorityClassName"] == "high"


def test_a_slice_that_gke_does_not_have() -> None:
    with pytest.raises(UserError, match="no node label for v2-8"):
        render_one_shot(CONTEXT, "demo", order("v2-8"), Task(run="x"), "ada")


@pytest.mark.parametrize("name", ["a", "A_b.c", "x" * 62, "-9", "Ünï", "a" + "-" * 60 + "b"])
def test_names_are_short_enough_for_pods(name: str) -> None:
    ident = object_name("ab12cd34", name)
    assert len(f"{ident}-slice-999-9999-abcde") <= 63
    assert ident.replace("-", "").isalnum() and ident == ident.lower() and ident.isascii() and ident[0].isalpha()
    assert ident != object_name("ab12cd35", name)


def test_lines_of_a_log_have_their_times() -> None:
    """However the bytes are cut; what has no time is the node's own word."""
    log = b"2026-01-02T03:04:05.000000007Z one\n2026-01-02T04:04:05+01:00 two\n\nodd"
    for cut in range(len(log)):
        lines = LineSplitter()
        found = [*lines.feed(log[:cut]), *lines.feed(log[cut:]), *lines.finish()]
        second = 1767323045 * 10**9
        assert [line.text for line in found] == [b"one\n", b"two\n", b"\n", b"odd"]
        assert [line.time_ns - second for line in found] == [7, 0, 0, 0]


def pod(rank: int, phase: str, attempt: int = 0, code: int | None = None, ended: str = "") -> dict[str, Any]:
    state = {"terminated": {"exitCode": code, "finishedAt": ended}} if code is not None else {"running": {}}
    labels = {JOB_INDEX: "0", POD_INDEX: str(rank), RESTART_ATTEMPT: str(attempt)}
    return {
        "metadata": {"name": f"p{rank}-{attempt}", "labels": labels},
        "status": {"phase": phase, "containerStatuses": [{"state": state}]},
    }


def test_what_a_run_is_said_to_be() -> None:
    """Before, while and after it runs, and between two attempts."""
    made = jobset(render_one_shot(CONTEXT, "demo", order("v4-16"), Task(run="x"), "ada"))
    made["status"] = {}
    up = (pod(0, "Running"), pod(1, "Running"))

    def both(*pods: dict[str, Any]) -> tuple[str, str]:
        seen = Seen(jobset=made, pods=pods)
        return one_shot_observation(seen, "o", "/h").condition, run_observation(seen).state

    assert both(pod(0, "Running"), pod(1, "Pending")) == ("creating", "waiting")
    assert both(*up) == ("ready", "running")
    made["status"] = {"restarts": 1}
    assert both(*up) == ("ready", "waiting"), "those of the first attempt are on their way out"
    between = run_observation(Seen(jobset=made, pods=(*up, pod(0, "Running", 1))))
    assert [one.source for one in between.earlier] == ["p0-0", "p1-0"], "until they are gone their output is read"
    assert [one.source for one in between.ranks] == ["p0-1"]
    assert both(pod(0, "Running", 1), pod(1, "Running", 1)) == ("ready", "running")
    made["status"]["conditions"] = [{"type": "Failed", "status": "True", "message": "m"}]
    ends = (pod(0, "Failed", 1, 137, "2026-01-01T00:00:01Z"), pod(1, "Failed", 1, 3, "2026-01-01T00:00:02Z"))
    assert both(*ends) == ("ready", "failed") and both() == ("ready", "failed")
    ranks = list(run_observation(Seen(jobset=made, pods=ends)).ranks)
    blamed = first_failure(ranks)
    assert blamed is not None and (blamed.rank, blamed.code) == (1, 3), "a rank that was killed is a consequence"
    assert [(end.code, end.signal) for end in map(exit_of, ranks)] == [(None, 9), (3, None)]
    made["metadata"]["deletionTimestamp"] = "now"
    assert both(*up) == ("deleting", "deleting")


# run for real


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningKubernetes]:
    why_not = why_no_namespaces()
    if why_not:
        pytest.skip(why_not)
    pools = (
        NodePool(name="a", accelerator_type="v4-16"),
        NodePool(name="b", accelerator_type="v4-16"),
        NodePool(name="c"),
    )
    with running_kubernetes(tmp_path_factory.mktemp("kubernetes"), pools, network=95) as running:
        yield running


def run_to_end(kubernetes: RunningKubernetes, name: str, task: Task) -> tuple[Seen, dict[str, str]]:
    """The JobSet and its pods when it has ended, and each host's log."""
    context = msgspec.structs.replace(CONTEXT, settings=GkeSettings())
    request = render_one_shot(context, name, order("v4-16", 2), task, "ada")
    for step in request.steps:
        plural = {"ConfigMap": "configmaps", "JobSet": "jobsets"}[step.body["kind"]]
        group = "/api/v1" if plural == "configmaps" else "/apis/jobset.x-k8s.io/v1alpha2"
        kubernetes.api.answer("POST", f"{group}/namespaces/default/{plural}", {}, dict(step.body))
    ident = object_name("ab12cd34", name)

    def ended() -> dict[str, Any] | None:
        found = kubernetes.objects.get("jobsets", "default", ident)
        return found if (found.get("status") or {}).get("terminalState") else None

    found = wait_until(ended, 90, "the JobSet to end")
    logs = {}
    assert kubernetes.nodes is not None
    seen = Seen(jobset=found, pods=tuple(kubernetes.objects.find("pods", "default")))
    for pod in seen.pods:
        log = kubernetes.nodes._log_of("default", pod["metadata"]["name"])
        logs[pod["spec"]["hostname"].removeprefix(f"{ident}-slice-")] = log.path.read_text() if log else ""
    kubernetes.api.answer("DELETE", f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets/{ident}", {}, {})
    kubernetes.api.answer("DELETE", f"/api/v1/namespaces/default/configmaps/{ident}", {}, {})
    wait_until(lambda: not kubernetes.objects.find("pods"), 60, "the pods to go")
    return seen, logs


def ended(seen: Seen) -> tuple[str, int]:
    """How it ended, and after how many restarts."""
    assert seen.jobset is not None
    return seen.jobset["status"]["terminalState"], seen.jobset["status"].get("restarts", 0)


def test_two_slices_run_to_their_end(kubernetes: RunningKubernetes) -> None:
    """Every rank knows its place, finds its peers by name, and has the scripts and the environment."""
    say = 'echo "$SKYPILOT_NODE_RANK $MEGASCALE_SLICE_ID $TPU_WORKER_ID $A $(getent hosts "${PODWAY_COORDINATOR%:*}" | cut -d" " -f1)"'
    seen, logs = run_to_end(kubernetes, "two", Task(setup="echo set up", run=say, env={"A": "it's"}))
    assert ended(seen) == ("Completed", 0)
    assert sorted(logs) == ["0-0", "0-1", "1-0", "1-1"]
    for rank, place in enumerate(sorted(logs)):
        assert logs[place].splitlines() == ["set up", f"{rank} {rank // 2} {rank % 2} it's 127.95.0.2"]


def test_exit_42_restarts_all_and_exit_1_fails(kubernetes: RunningKubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the failure policy says: after one restart the second attempt ends with another code, which is final. A setup that fails is
    told from a run that does."""
    monkeypatch.setattr(one_shot, "SHORTEST_LIFE_S", 0)
    run = 'mark=/podway/home/seen; [ "$PODWAY_RANK" = 3 ] || exec sleep 1000; exit $CODE'
    back = Recovery(max_restarts_on_errors=1)
    seen, _ = run_to_end(kubernetes, "again", Task(run=run, env={"CODE": "42"}, recovery=back))
    assert ended(seen) == ("Failed", 1)
    seen, _ = run_to_end(kubernetes, "final", Task(setup=run, run="echo no", env={"CODE": "1"}, recovery=back))
    assert ended(seen) == ("Failed", 0)
    blamed = first_failure(list(run_observation(seen).ranks))
    assert blamed is not None and (blamed.rank, blamed.code, blamed.phase) == (3, 1, "setup")


def test_a_pod_that_fails_lives_until_a_server_has_seen_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it is told to end; one that succeeds goes at once, since it is kept."""
    monkeypatch.setattr(one_shot, "SHORTEST_LIFE_S", 2)
    made = jobset(render_one_shot(CONTEXT, "demo", order("v4-16"), Task(run="x"), "ada"))
    (container,) = made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    script = container["command"][2].replace(one_shot.FOLDER, str(tmp_path))
    for name in ("hosts", "slice-0", "rank", "setup"):
        (tmp_path / name).touch()
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PODWAY_SLICE_ID": "0", "PODWAY_WORKER": "0"}

    def life(run: str, *, told: bool = False) -> tuple[int, float]:
        (tmp_path / "run").write_text(f"echo up; {run}")
        began = time.monotonic()
        with subprocess.Popen(["bash", "-c", script], env=env, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"up\n"
            if told:
                process.terminate()
        return process.returncode, time.monotonic() - began

    for run, told, code in (("exit 42", False, 42), ("exec sleep 1000", True, 143)):
        found = life(run, told=told)
        assert found[0] == code and found[1] >= 2, found
    assert life("exit 0")[0] == 0


def test_a_pod_that_is_told_to_end_tells_its_command(kubernetes: RunningKubernetes) -> None:
    """SIGTERM reaches the command, which may write a checkpoint and end as it likes."""
    run = "trap 'echo checkpoint; exit 0' TERM; echo up; while :; do sleep 0.1; done"
    context = msgspec.structs.replace(CONTEXT, settings=GkeSettings())
    request = render_one_shot(context, "term", order("v4-16"), Task(run=run), "ada")
    for step, path in zip(request.steps, ("/api/v1", "/apis/jobset.x-k8s.io/v1alpha2"), strict=True):
        plural = f"{step.body['kind'].lower()}s"
        kubernetes.api.answer("POST", f"{path}/namespaces/default/{plural}", {}, dict(step.body))
    nodes = kubernetes.nodes
    assert nodes is not None

    def logs() -> list[str]:
        found = [
            nodes._log_of("default", pod["metadata"]["name"]) for pod in kubernetes.objects.find("pods", "default")
        ]
        return [log.path.read_text() for log in found if log is not None and log.path.exists()]

    wait_until(lambda: logs() == ["up\n", "up\n"], 60, "both to be up")
    ident = object_name("ab12cd34", "term")
    kept = [
        log for pod in kubernetes.objects.find("pods") if (log := nodes._log_of("default", pod["metadata"]["name"]))
    ]
    opened = [log.path.open() for log in kept]  # the node removes the files with the pods
    kubernetes.api.answer("DELETE", f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets/{ident}", {}, {})
    kubernetes.api.answer("DELETE", f"/api/v1/namespaces/default/configmaps/{ident}", {}, {})
    wait_until(lambda: not kubernetes.objects.find("pods"), 60, "the pods to go")
    for file in opened:
        with file:
            assert file.read() == "up\ncheckpoint\n"
