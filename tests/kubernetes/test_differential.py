"""The same requests to the real servers and to the small Kubernetes of `make test`: both give the same answers.

Statuses, reasons and messages of refusals are compared word for word; of JobSets that ran to an end, and of Workloads that wait, the
conditions. What the two do not share is left out here and named in docs/kubernetes.md.
"""

import copy
import http.client
import json
import ssl
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
from tools.bench.own_kubernetes import QUEUE, OwnKubernetes

from podway.order import Order
from podway.providers.gke.api import Fields
from podway.providers.gke.manifests import Container, JobSetContext, Restarts, jobset
from podway.providers.gke.settings import GkeSettings
from podway.sandbox.kubernetes.nodes import NodePool
from podway.sandbox.kubernetes.running import RunningKubernetes, running_kubernetes
from tests.conftest import wait_until

pytestmark = pytest.mark.kubernetes

JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets"
WORKLOADS = "/apis/kueue.x-k8s.io/v1beta2/namespaces/default/workloads"
CONFIG_MAPS = "/api/v1/namespaces/default/configmaps"
ORDER = Order(accelerator_type="v6e-16", topology="4x4", provider="gke", hosts_per_slice=4, chips_per_host=4)


class Answer(NamedTuple):
    status: int
    reason: str
    message: str


class Server(NamedTuple):
    """One of the two."""

    url: str
    token: str
    secured: ssl.SSLContext | None

    def ask(self, method: str, path: str, body: object = None, token: str | None = None) -> tuple[int, Fields]:
        parts = urlsplit(self.url)
        kind = http.client.HTTPConnection if self.secured is None else http.client.HTTPSConnection
        more = {} if self.secured is None else {"context": self.secured}
        connection = kind(parts.hostname or "", parts.port, timeout=60, **more)  # type: ignore[arg-type]
        media = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Authorization": f"Bearer {token or self.token}", "Content-Type": media}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            data = answer.read()
            plain = not (answer.getheader("Content-Type") or "").startswith("application/json")
            return answer.status, {"message": data.decode()} if plain else json.loads(data)
        finally:
            connection.close()

    def answer(self, method: str, path: str, body: object = None, token: str | None = None) -> Answer:
        status, said = self.ask(method, path, body, token)
        if status < 300:
            return Answer(status, "", "")
        return Answer(status, said.get("reason", ""), said.get("message", ""))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningKubernetes]:
    pools = tuple(NodePool(name=f"pool-{number}", accelerator_type="v6e-16") for number in range(2))
    with running_kubernetes(tmp_path_factory.mktemp("small"), pools, kueue="v1beta2", network=96) as running:
        running.set_quota(32)
        yield running


@pytest.fixture(scope="module")
def both(kubernetes: OwnKubernetes, small: RunningKubernetes) -> tuple[Server, Server]:
    """The real one and ours."""
    if not isinstance(kubernetes, OwnKubernetes):
        pytest.skip("it is compared with servers of known versions")
    trusting = ssl.create_default_context(cafile=str(kubernetes.ca))
    return Server(kubernetes.url, kubernetes.token, trusting), Server(small.server.url, small.token, None)


def made(
    name: str = "diff",
    script: str = "exit 0",
    *,
    queue: str | None = None,
    restarts: Restarts = Restarts(),
    slices: int = 1,
) -> Fields:
    context = JobSetContext(owner="o", context="c", namespace="default", settings=GkeSettings(queue=queue))
    order = Order(**{**{f: getattr(ORDER, f) for f in ORDER.__struct_fields__}, "slices": slices})
    body = jobset(
        context, name, order, Container(image="python:3.12", command=("bash", "-c", script), grace_s=1), restarts
    )
    body["metadata"]["name"] = name
    return body


def changed(**paths: object) -> Fields:
    """A JobSet with some fields otherwise: `spec__network` for spec.network; None: without it."""
    body = copy.deepcopy(made())
    for path, value in paths.items():
        at = body
        *way, last = [int(word) if word.isdigit() else word for word in path.split("__")]
        for word in way:
            at = at[word]  # type: ignore[index]
        if value is None:
            del at[last]  # type: ignore[arg-type]
        else:
            at[last] = value  # type: ignore[index]
    return body


FIRST_JOB = "spec__replicatedJobs__0"
REQUESTS: dict[str, tuple[str, str, object]] = {
    "no such jobset": ("GET", f"{JOBSETS}/nope", None),
    "no such config map": ("GET", f"{CONFIG_MAPS}/nope", None),
    "no such pod": ("GET", "/api/v1/namespaces/default/pods/nope", None),
    "no such group": ("GET", "/apis/nobody.example/v1", None),
    "no such version": ("GET", "/apis/jobset.x-k8s.io/v9/namespaces/default/jobsets", None),
    "patch of none": ("PATCH", f"{JOBSETS}/nope", {"metadata": {"labels": {"a": "b"}}}),
    "delete of none": ("DELETE", f"{JOBSETS}/nope", None),
    "a type that is wrong": ("POST", JOBSETS, changed(**{f"{FIRST_JOB}__replicas": "two"})),
    "a value that is unknown": ("POST", JOBSETS, changed(spec__failurePolicy__restartStrategy="Sometimes")),
    "a rule without a name": ("POST", JOBSETS, changed(spec__failurePolicy__rules=[{"action": "FailJobSet"}])),
    "a rule's name": (
        "POST",
        JOBSETS,
        changed(spec__failurePolicy__rules=[{"action": "FailJobSet", "name": "no-retry"}]),
    ),
    "a name that is too long": ("POST", JOBSETS, changed(metadata__name="x" * 70)),
    "a name that cannot be one": ("POST", JOBSETS, changed(metadata__name="A_b")),
    "no name": ("POST", JOBSETS, changed(metadata__name=None)),
    "a label that cannot be one": ("POST", JOBSETS, changed(metadata__labels={"team": "a b"})),
    "a config map that is too large": (
        "POST",
        CONFIG_MAPS,
        {"metadata": {"name": "large"}, "data": {"a": "x" * ((1 << 20) + 1)}},
    ),
    "no right": ("GET", "/api/v1/namespaces/kube-system/secrets", None),
    "no right to create": ("POST", "/api/v1/namespaces/default/pods", {"metadata": {"name": "x"}}),
    "exec in no pod": ("POST", "/api/v1/namespaces/default/pods/nope/exec?command=true&stdout=1", None),
}


# JobSet's webhook decodes what is sent before the schema is applied, and refuses in the words of Go's decoder.
TAKEN = {"a rule without a name"}
OTHER_WORDS = {"a type that is wrong"}


@pytest.mark.parametrize("case", REQUESTS)
def test_refusals(case: str, both: tuple[Server, Server], small: RunningKubernetes) -> None:
    method, path, body = REQUESTS[case]
    small.api.forbidden = lambda method, plural: case.startswith("no right")
    try:
        real, ours = (server.answer(method, path, body) for server in both)
    finally:
        small.api.forbidden = lambda method, plural: False
        for server in both:
            server.ask("DELETE", f"{JOBSETS}/diff", {"propagationPolicy": "Background"})
    assert ours == real or (case in OTHER_WORDS and ours.status >= 400)
    assert real.status >= 400 or case in TAKEN


def test_a_token_that_nobody_has(both: tuple[Server, Server]) -> None:
    real, ours = (server.answer("GET", JOBSETS, token="nobody") for server in both)
    assert ours == real


NO_RETRY = Restarts(most=2, exit_codes=(42,))
ENDS = {
    "completed": made("completed"),
    "failed-at-once": made("failed-at-once", "exit 1", restarts=NO_RETRY),
    "failed-without-rules": made("failed-without-rules", "exit 1"),
    "restarts-used-up": made("restarts-used-up", "exit 42", restarts=NO_RETRY),
}


def outcome(server: Server, name: str) -> tuple[object, ...] | None:
    """How a JobSet ended: its state, restarts and the conditions that hold; None while it goes on."""
    status: Fields = server.ask("GET", f"{JOBSETS}/{name}")[1].get("status") or {}
    if not status.get("terminalState"):
        return None
    hold = [one for one in status["conditions"] if one["status"] == "True"]
    told = sorted((one["type"], one["reason"], one["message"]) for one in hold)
    return status["terminalState"], status.get("restarts", 0), told


@pytest.mark.parametrize("case", ENDS)
def test_how_jobsets_end(case: str, both: tuple[Server, Server]) -> None:
    found = []
    for server in both:
        status, said = server.ask("POST", JOBSETS, ENDS[case])
        assert status == 201, said
    try:
        for server in both:
            found.append(wait_until(lambda server=server: outcome(server, case), 90, f"the end of {case}"))
    finally:
        for server in both:
            server.ask("DELETE", f"{JOBSETS}/{case}", {"propagationPolicy": "Background"})
    real, ours = found
    assert ours == real


@pytest.mark.parametrize(("slices", "queue"), [(3, QUEUE), (1, "no-such-queue")])
def test_why_a_workload_waits(slices: int, queue: str, both: tuple[Server, Server]) -> None:
    """More than the whole quota, and a queue that is not there."""
    name = f"waits-{slices}"
    found = []
    for server in both:
        status, said = server.ask("POST", JOBSETS, made(name, queue=queue, slices=slices))
        assert status == 201, said
    try:
        for server in both:
            found.append(wait_until(lambda server=server: waits(server, name), 90, "a reason"))
    finally:
        for server in both:
            server.ask("DELETE", f"{JOBSETS}/{name}", {"propagationPolicy": "Background"})
    real, ours = found
    assert ours == real


def waits(server: Server, name: str) -> tuple[str, str] | None:
    for one in server.ask("GET", WORKLOADS)[1].get("items") or ():
        if any(owner["name"] == name for owner in one["metadata"]["ownerReferences"]):
            for condition in (one.get("status") or {}).get("conditions") or ():
                if condition["type"] == "QuotaReserved":
                    return condition["status"], condition["message"]
    return None
