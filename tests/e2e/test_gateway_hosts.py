"""Services whose replicas listen on the loopback of real machines: the gateway reaches them through sshd, whatever the server does."""

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from podway.launch_options import LaunchOptions, LaunchRequest
from podway.sandbox.hosts import HostSet, make_hosts, pool_text, why_no_hosts, why_no_namespaces
from podway.sandbox.running import Running, running_sandbox
from podway.task.task import Accelerator, Placement, Resources
from tests.conftest import wait_until
from tests.e2e.harness import Podway
from tests.e2e.test_gateway import REPLICA, gateway_url, request
from tests.e2e.test_services import ready

QUESTION = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def machines() -> Iterator[HostSet]:
    if why_not := why_no_hosts() or why_no_namespaces():
        pytest.skip(why_not)
    with make_hosts(2, separate=True) as made:
        yield made


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    if why_not := why_no_hosts() or why_no_namespaces():
        pytest.skip(why_not)
    with running_sandbox(tmp_path_factory.mktemp("sandbox")) as running:
        yield running


def on(provider: str, accelerator: str, *, low: int, region: str | None = None) -> LaunchRequest:
    run = f"cat > replica.py <<'END'\n{REPLICA.read_text()}\nEND\n"
    plain = request(f"{run}LISTEN_ON=127.0.0.1 exec python3 replica.py $PODWAY_PORT $PODWAY_CLUSTER", low=low)
    where = (
        Resources(accelerator=Accelerator(type=accelerator), placement=Placement(provider=provider, region=region)),
    )
    task = msgspec.structs.replace(plain.task, resources=where)
    return LaunchRequest(task=task, options=LaunchOptions(provider=provider))


def whole_stream(url: str, key: str, events: int) -> bool:
    body = {**QUESTION, "stream": True, "max_tokens": events}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=_with(key), timeout=200)
    return f"<{events - 1}>" in answer.text and answer.text.endswith("data: [DONE]\n\n")


def _with(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def asked_through_restarts(pod: Podway, count: int, **environment: str) -> None:
    """Answers, and a stream that flows while the server is killed and started again."""
    ready(pod, count, seconds=150)
    url, key = gateway_url(pod), pod.client.make_gateway_key("k")

    def answers() -> bool:
        return httpx.post(f"{url}/v1/chat/completions", json=QUESTION, headers=_with(key)).status_code == 200

    wait_until(answers, 60, "an answer")
    backends = pod.client.gateway_routes().services[0].backends
    assert len(backends) == count and all(one.tunnel for one in backends)
    ends: list[bool] = []
    stream = threading.Thread(target=lambda: ends.append(whole_stream(url, key, 500)))
    stream.start()
    pod.kill_server()
    assert answers()
    pod.start(**environment)
    stream.join()
    assert ends == [True] and answers()
    pod.client.end_service("web")
    wait_until(lambda: pod.client.service("web").state == "GONE", 90, "the end of the service")
    wait_until(lambda: pod.client.clusters() == [], 60, "the end of its clusters")


@pytest.mark.long
def test_replicas_on_machines_of_ones_own(pod: Podway, machines: HostSet) -> None:
    (pod.home / "ssh").mkdir()
    (pod.home / "ssh" / "lab.yaml").write_text(pool_text(machines, "v6e-1"))
    pod.start()
    pod.client.apply_service(on("ssh", "v6e-1", low=2, region="lab"))
    asked_through_restarts(pod, 2)


def test_replicas_in_the_cloud(pod: Podway, sandbox: Running, tmp_path: Path) -> None:
    """One on spot capacity and one on demand, made together and in two zones."""
    environment = sandbox.environment(tmp_path)
    pod.start(**environment)
    plain = on("gcp", "v6e-1", low=2, region="us-east5")
    spot = tuple(msgspec.structs.replace(one, spot="yes") for one in plain.task.resources)
    spec = msgspec.structs.replace(plain.task.service, spot_fallback=1)  # type: ignore[type-var]
    task = msgspec.structs.replace(plain.task, resources=spot, service=spec)
    pod.client.apply_service(msgspec.structs.replace(plain, task=task))
    found = ready(pod, 2, seconds=150).replicas
    assert sorted(one.spot for one in found) == [False, True]
    assert len({one.zone for one in found}) == 2
    asked_through_restarts(pod, 2, **environment)
    assert sandbox.command("GET", "ledger")["living"] == []
