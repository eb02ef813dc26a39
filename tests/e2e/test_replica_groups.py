"""Services whose replicas are in groups, from dstack's files, with real processes on simulated slices: a router and its workers, and
what becomes of them when one is killed, updated, scaled or cannot start."""

import http.client
import json
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import pytest

from podway.errors import UserError
from podway.gateway.state_dir import running_gateway
from podway.launch_options import LaunchOptions, LaunchRequest
from podway.sandbox.hosts import make_hosts, pool_text, why_no_hosts, why_no_namespaces
from podway.server.service_api import ReplicaView
from podway.task.environment import Overrides
from podway.task.read import read_task_text
from podway.task.task import Placement
from tests.conftest import wait_until
from tests.e2e.harness import Podway
from tests.e2e.test_services import ended, needs_networks

PROGRAMS = Path(__file__).parent.parent / "gateway"
ROUTER = f"exec {sys.executable} {PROGRAMS / 'router_program.py'} $PODWAY_PORT"
WORKER = f"exec {sys.executable} {PROGRAMS / 'worker_program.py'} $PODWAY_PORT"
PD = """
type: service
name: web
port: 18080
auth: false
stop_duration: 5s
probes: [{type: http, url: /health, interval: 1s}]
groups:
- {commands: ["@router"], router: {type: smg}, resources: {cpu: 1}}
- {name: prefill, commands: ["@worker first prefill"], resources: {gpu: v5litepod-1}}
- {name: decode, commands: ["@worker then decode"], resources: {gpu: v6e-1}}
"""
# A router beside workers of one kind, as many as the load asks for, from none.
REGULAR = """
type: service
name: web
port: 18080
auth: false
stop_duration: 5s
probes: [{type: http, url: /health, interval: 1s}]
replicas:
- {name: router, count: 1, commands: ["@router"], router: sglang, resources: {cpu: 1}}
- {name: worker, count: 0..2, commands: ["@worker word"], resources: {gpu: v5litepod-1},
   scaling: {metric: rps, target: 50, scale_up_delay: 1, scale_down_delay: 1}}
"""


def file(text: str, **changes: str) -> LaunchRequest:
    for old, new in changes.items():
        text = text.replace(old, new)
    text = text.replace("@router", ROUTER).replace("@worker", WORKER)
    return LaunchRequest(task=read_task_text(text, overrides=Overrides()), options=LaunchOptions(provider="local"))


def of_group(pod: Podway, group: str) -> list[ReplicaView]:
    """Those of a group that take part in the service."""
    return [one for one in pod.client.service("web").replicas if one.group == group and one.state == "READY"]


def settled(pod: Podway, seconds: float = 120) -> None:
    """Until every group is as the file says, and nothing else is there."""

    def there() -> bool:
        found = pod.client.service("web")
        enough = all(one.ready_replicas == one.target_replicas for one in found.groups)
        others = [one for one in found.replicas if one.state not in ("READY", "FAILED", "GONE")]
        return enough and not others and found.state in ("READY", "NO_REPLICA") and routed(pod)

    wait_until(there, seconds, "groups that are as they should be")


def routed(pod: Podway) -> bool:
    """Whether the router lists all workers that are ready."""
    found = pod.client.service("web")
    routers = [one for one in found.replicas if one.state == "READY" and one.group in ("0", "router")]
    workers = {one.number for one in found.replicas if one.state == "READY"} - {one.number for one in routers}
    return all(set(one.workers) == workers for one in routers)


def revisions(pod: Podway) -> set[int]:
    """Of the replicas that are ready."""
    return {one.revision for one in pod.client.service("web").replicas if one.state == "READY"}


def ask(pod: Podway) -> list[str]:
    """What all workers of one request said, through the gateway, which holds it while nothing can answer."""
    running = running_gateway(pod.home / "gateway")
    assert running is not None
    request = urllib.request.Request(
        f"{running.url}/services/web/v1/chat/completions", b"{}", {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return list(json.loads(answer.read())["said"])


def gateway_knows(pod: Podway) -> None:
    """Until the gateway that the server starts has the service's routes."""
    wait_until(lambda: pod.client.service("web").url, 60, "the gateway's report")

    def answers() -> bool:
        try:
            return bool(ask(pod))
        except urllib.error.HTTPError as error:
            assert error.code == 404  # not told of the service yet
            return False

    wait_until(answers, 120, "the service at the gateway")


@needs_networks
@pytest.mark.long
def test_prefill_and_decode_behind_their_router(pod: Podway) -> None:
    """The router alone gets requests; a worker killed is replaced on its list; an update of one group leaves the others alone."""
    pod.start()
    shown = pod.client.preview_service(file(PD))
    assert sorted(shown.groups) == ["0", "decode", "prefill"] and shown.change == "create"
    pod.client.apply_service(file(PD))
    settled(pod)
    found = pod.client.service("web")
    assert [(one.name, one.router, one.state) for one in found.groups] == [
        ("0", "smg", "READY"),
        ("prefill", None, "READY"),
        ("decode", None, "READY"),
    ]
    (router,) = of_group(pod, "0")
    assert [one.id for one in pod.client.gateway_routes().services[0].backends] == [router.cluster]
    gateway_knows(pod)
    assert ask(pod) == ["first", "then"]

    (prefill,) = of_group(pod, "prefill")
    pod.kill_all_in(pod.home / "local" / prefill.cluster, only=str(PROGRAMS / "worker_program.py"))
    wait_until(lambda: [one.number for one in of_group(pod, "prefill")] not in ([], [prefill.number]), 120, "another")
    settled(pod)
    assert ask(pod) == ["first", "then"]

    kept = {one.number for one in of_group(pod, "prefill") + of_group(pod, "0")}
    assert pod.client.apply_service(file(PD, then="later")).change == "roll"
    # `ask` raises on any answer but 200, so no request may fail in between.
    wait_until(lambda: ask(pod) == ["first", "later"], 120, "the new decode worker")
    settled(pod)
    assert ask(pod) == ["first", "later"]
    assert {one.number for one in of_group(pod, "prefill") + of_group(pod, "0")} == kept
    assert revisions(pod) == {2}
    with pytest.raises(UserError, match="no canary"):
        pod.client.apply_service(file(PD, then="last"), canary=0.1)
    ended(pod)


@needs_networks
@pytest.mark.long
def test_no_request_fails_while_the_workers_of_a_role_are_replaced(pod: Podway) -> None:
    """The only decode worker is replaced, again and again, by a router that takes its time to list one: requests go on meanwhile."""
    pod.start()
    pod.client.apply_service(file(PD))
    settled(pod)
    gateway_knows(pod)
    answers: list[list[str]] = []
    failures: list[str] = []
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(0.01):
            try:
                answers.append(ask(pod))
            except (OSError, http.client.HTTPException) as error:
                failures.append(str(error))

    asking = [threading.Thread(target=go_on) for _ in range(2)]
    for one in asking:
        one.start()
    try:
        for word in ("second", "third", "fourth"):
            pod.client.apply_service(file(PD, then=word))
            wait_until(lambda word=word: ["first", word] in answers or failures, 120, f"answers of the {word}")
            settled(pod)
    finally:
        over.set()
        for one in asking:
            one.join(130)
    assert failures == []
    ended(pod)


@needs_networks
@pytest.mark.long
def test_a_router_that_dies_is_told_its_workers_again(pod: Podway) -> None:
    """While there is none, requests wait at the gateway."""
    pod.start()
    pod.client.apply_service(file(PD))
    settled(pod)
    gateway_knows(pod)
    (router,) = of_group(pod, "0")
    workers = {one.number for one in of_group(pod, "prefill") + of_group(pod, "decode")}
    answers: list[list[str]] = []
    failures: list[str] = []  # at most the one that was with the router when it was killed
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(0.05):
            try:
                answers.append(ask(pod))
            except (OSError, http.client.HTTPException) as error:
                failures.append(str(error))

    asking = threading.Thread(target=go_on)
    asking.start()
    try:
        pod.kill_all_in(pod.home / "local" / router.cluster, only=str(PROGRAMS / "router_program.py"))
        wait_until(
            lambda: [one.number for one in of_group(pod, "0")] not in ([], [router.number]), 120, "another router"
        )
        settled(pod)
        count = len(answers)
        wait_until(lambda: len(answers) > count + 3, 60, "answers of the new router")
    finally:
        over.set()
        asking.join(130)
    assert len(failures) <= 1, failures
    assert {tuple(one) for one in answers} == {("first", "then")}
    assert {one.number for one in of_group(pod, "prefill") + of_group(pod, "decode")} == workers
    (again,) = of_group(pod, "0")
    assert set(again.workers) == workers
    ended(pod)


@needs_networks
@pytest.mark.long
def test_workers_from_none_and_back(pod: Podway) -> None:
    """With no worker a request waits at the gateway, and brings one up; with none asking, it goes."""
    pod.start()
    pod.client.apply_service(file(REGULAR))
    wait_until(lambda: pod.client.service("web").state == "NO_REPLICA" and of_group(pod, "router"), 120, "the router")
    assert pod.client.gateway_routes().services[0].backends == ()
    gateway_knows(pod)
    assert ask(pod) == ["word"]
    wait_until(lambda: pod.client.service("web").state == "NO_REPLICA", 180, "no worker again")
    assert [one.state for one in pod.client.service("web").groups] == ["READY", "NO_REPLICA"]
    pod.client.scale_service("web", 2, group="worker")
    wait_until(lambda: len(of_group(pod, "worker")) == 2, 120, "two workers")
    settled(pod)
    with pytest.raises(UserError, match="has groups"):
        pod.client.scale_service("web", 2)
    ended(pod)


@needs_networks
@pytest.mark.long
def test_a_group_that_cannot_start_is_named(pod: Podway) -> None:
    pod.start()
    pod.client.apply_service(file(PD, **{"@worker then decode": "exit 3 # --disaggregation-mode decode"}))
    wait_until(lambda: pod.client.service("web").state == "FAILED", 300, "the failure")
    found = pod.client.service("web")
    assert "group decode: " in found.reason and "exited with code 3" in found.reason and found.stalled
    assert [one.state for one in found.groups] == ["READY", "READY", "FAILED"]
    kept = {one.number for one in found.replicas if one.state == "READY"}
    pod.client.apply_service(file(PD))
    settled(pod)
    assert kept < {one.number for one in pod.client.service("web").replicas}
    ended(pod)


@needs_networks
@pytest.mark.long
@pytest.mark.parametrize("point", ["service.replica-row", "service.before-down"])
def test_killed_in_the_middle_of_an_update(pod: Podway, point: str) -> None:
    """kill -9 of the server: the next one goes on with the same group, and the others are left alone."""
    pod.start()
    pod.client.apply_service(file(PD))
    settled(pod)
    kept = {one.number for one in of_group(pod, "prefill") + of_group(pod, "0")}
    pod.kill_server()
    pod.start(crash_at=point)
    pod.client.apply_service(file(PD, then="later"))
    wait_until(lambda: pod.child.poll() is not None, 120, "the crash")
    pod.start()
    wait_until(lambda: [one.revision for one in of_group(pod, "decode")] == [2], 120, "the new decode worker")
    settled(pod)
    gateway_knows(pod)
    wait_until(lambda: ask(pod) == ["first", "later"], 60, "an answer of the new one")
    assert {one.number for one in of_group(pod, "prefill") + of_group(pod, "0")} == kept
    assert len(pod.client.clusters()) == 3
    ended(pod)


@needs_networks
@pytest.mark.long
def test_workers_are_told_where_their_router_is(pod: Podway) -> None:
    """A router that its workers find by its address: replaced, it has other workers."""
    word = "@worker $DSTACK_ROUTER_INTERNAL_IP"
    dynamo = {"type: smg": "type: dynamo", "@router": "@worker router", "@worker first": word, "@worker then": word}
    pod.start()
    pod.client.apply_service(file(PD, **dynamo))
    settled_without_list(pod)
    (router,) = of_group(pod, "0")
    assert [one.id for one in pod.client.gateway_routes().services[0].backends] == [router.cluster]
    workers = {one.number for one in of_group(pod, "prefill") + of_group(pod, "decode")}
    assert {said(one) for one in of_group(pod, "prefill")} == {(router.address or "").rpartition(":")[0]}
    with pytest.raises(UserError, match="cannot be replaced while it runs"):
        pod.client.apply_service(file(PD, **{**dynamo, "@router": "@worker other"}))
    pod.kill_all_in(pod.home / "local" / router.cluster, only=str(PROGRAMS / "worker_program.py"))
    wait_until(lambda: [one.number for one in of_group(pod, "0")] not in ([], [router.number]), 120, "another router")
    settled_without_list(pod)
    assert not workers & {one.number for one in of_group(pod, "prefill") + of_group(pod, "decode")}
    (router,) = of_group(pod, "0")
    assert {said(one) for one in of_group(pod, "decode")} == {(router.address or "").rpartition(":")[0]}
    ended(pod)


def settled_without_list(pod: Podway) -> None:
    wait_until(lambda: pod.client.service("web").state == "READY", 120, "the service")
    wait_until(lambda: all(one.state == "READY" for one in pod.client.service("web").replicas), 120, "its replicas")


def said(replica: ReplicaView) -> str:
    """What a worker says when it is asked itself."""
    with urllib.request.urlopen(f"http://{replica.address}/v1/chat/completions", b"{}", timeout=30) as answer:
        return str(json.loads(answer.read())["said"][0])


@pytest.mark.long
def test_groups_on_machines_of_ones_own(pod: Podway) -> None:
    """Behind a real sshd each: the router reaches its workers at their addresses, the gateway the router through ssh."""
    if why_not := why_no_hosts() or why_no_namespaces():
        pytest.skip(why_not)
    with make_hosts(3, separate=True) as machines:
        (pod.home / "ssh").mkdir()
        (pod.home / "ssh" / "lab.yaml").write_text(pool_text(machines, None, "v5litepod-1", "v6e-1"))
        pod.start()
        plain = file(PD)
        assert plain.task.service is not None
        groups = tuple(
            msgspec.structs.replace(
                one,
                run=brought(one.run),
                resources=tuple(
                    msgspec.structs.replace(each, placement=Placement(provider="ssh", region="lab"))
                    for each in one.resources
                ),
            )
            for one in plain.task.service.groups
        )
        spec = msgspec.structs.replace(plain.task.service, groups=groups)
        task = msgspec.structs.replace(plain.task, service=spec, resources=groups[0].resources)
        pod.client.apply_service(LaunchRequest(task=task, options=LaunchOptions(provider="ssh")))
        settled(pod, 240)
        gateway_knows(pod)
        assert ask(pod) == ["first", "then"]
        assert all(one.tunnel for one in pod.client.gateway_routes().services[0].backends)
        pod.client.end_service("web")
        wait_until(lambda: pod.client.service("web").state == "GONE", 120, "the end of the service")
        wait_until(lambda: pod.client.clusters() == [], 60, "the end of its clusters")


def brought(run: str) -> str:
    """The program comes with its command: another machine has no checkout."""
    for program in ("router_program.py", "worker_program.py"):
        if program in run:
            words = run.split(program, 1)[1]
            return f"cat > program.py <<'END'\n{(PROGRAMS / program).read_text()}\nEND\nexec python3 program.py{words}"
    raise AssertionError(run)
