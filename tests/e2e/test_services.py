"""Services on simulated slices, with real processes: replicas come, answer, fail, are replaced, roll, scale and go; kill -9 of the
server at every named point leaves nothing forgotten."""

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import msgspec
import pytest

from podway import crash
from podway.errors import UserError
from podway.gateway.report import GatewayReport, ServiceLoad
from podway.launch_options import LaunchOptions, LaunchRequest
from podway.providers.local import networks
from podway.server.service_api import ReplicaView, ServiceView
from podway.task.task import Accelerator, Probe, Resources, Scaling, ServiceSpec, Task
from tests.conftest import wait_until
from tests.e2e.harness import Podway, files_with
from tests.long import every

needs_networks = pytest.mark.skipif(networks.refusal() is not None, reason=str(networks.refusal()))
SERVICE_POINTS = [p for p in crash.POINTS if p.startswith("service.")]
UP_POINTS = [p for p in SERVICE_POINTS if "down" not in p]
# Answers with its revision's word; /health can be broken by a file in the home.
PROGRAM = """
import http.server, os, pathlib
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        broken = pathlib.Path.home() / "broken"
        self.send_response(500 if broken.exists() and self.path == "/health" else 200)
        self.end_headers()
        self.wfile.write(os.environ.get("WORD", "").encode())
http.server.ThreadingHTTPServer(("", int(os.environ["PODWAY_PORT"])), Handler).serve_forever()
"""
FIXED_PORT = PROGRAM.replace('int(os.environ["PODWAY_PORT"])', "18080")


def answer(replica: ReplicaView) -> str:
    with urllib.request.urlopen(f"http://{replica.address}/", timeout=10) as reply:
        return str(reply.read().decode())


def spec(low: int = 1, high: int | None = None, **changes: object) -> ServiceSpec:
    scaling = Scaling(min_replicas=low, max_replicas=low if high is None else high, target_qps=1.0)
    probe = Probe(path="/health", interval_s=0.5, timeout_s=5, initial_delay_s=120)
    plain = ServiceSpec(port=18080, probes=(probe,), scaling=scaling, auth=False)
    return msgspec.structs.replace(plain, **changes)


def request(name: str = "web", *, word: str = "one", run: str = PROGRAM, **changes: object) -> LaunchRequest:
    task = Task(
        name=name,
        kind="service",
        run=f"exec python3 -c '{run}'",
        env={"WORD": word},
        resources=(Resources(accelerator=Accelerator(type="v5litepod-1")),),
        service=spec(**changes),  # type: ignore[arg-type]
        stop_duration_s=5,
    )
    return LaunchRequest(task=task, options=LaunchOptions(provider="local"))


def ready(pod: Podway, count: int, revision: int | None = None, name: str = "web", seconds: float = 60) -> ServiceView:
    def there() -> bool:
        found = [one for one in pod.client.service(name).replicas if one.state == "READY"]
        return len(found) == count and (revision is None or {one.revision for one in found} <= {revision})

    wait_until(there, seconds, f"{count} ready replicas")
    return pod.client.service(name)


def alive(pod: Podway) -> list[ReplicaView]:
    return [one for one in pod.client.service("web").replicas if one.state not in ("SHUTTING_DOWN", "DRAINING")]


def ended(pod: Podway, name: str = "web") -> None:
    """Take it down, and check that nothing of it lives."""
    pod.client.end_service(name)
    wait_until(lambda: pod.client.service(name).state == "GONE", 90, "the end of the service")
    wait_until(lambda: pod.client.clusters() == [], 30, "the end of its clusters")
    assert pod.host_processes() == []


def test_one_replica_from_apply_to_the_end(pod: Podway) -> None:
    pod.start()
    shown = pod.client.preview_service(request())
    assert shown.change == "create" and shown.launch is not None and shown.launch.offers
    assert pod.client.apply_service(request()).change == "create"
    found = ready(pod, 1)
    assert (found.state, found.revision, found.replicas[0].cluster) == ("READY", 1, "web-1")
    routed = pod.client.gateway_routes().services[0]
    assert [one.id for one in routed.backends] == ["web-1"] and not routed.auth
    assert pod.client.apply_service(request()).change == "none"
    (pod.home / "local" / "web-1" / "host-0" / "broken").touch()
    wait_until(lambda: alive(pod)[0].state == "NOT_READY", 60, "the failed probe")
    assert pod.client.gateway_routes().services[0].backends == ()
    assert "/health answered 500" in alive(pod)[0].reason
    (pod.home / "local" / "web-1" / "host-0" / "broken").unlink()
    ready(pod, 1)
    texts = [event.text for event in pod.client.service_events("web")]
    assert "created" in texts and "replica 1 is READY" in texts
    ended(pod)


def test_a_killed_replica_is_replaced(pod: Podway) -> None:
    pod.start()
    pod.client.apply_service(request())
    ready(pod, 1)
    pod.kill_all_in(pod.home / "local" / "web-1")
    wait_until(lambda: any(one.number == 2 and one.state == "READY" for one in alive(pod)), 120, "the second replica")
    past = pod.client.service("web", past=True).replicas
    assert past[0].number == 1 and past[0].state in ("FAILED", "SHUTTING_DOWN")
    ended(pod)


def test_a_program_that_cannot_start_is_given_up_in_words(pod: Podway) -> None:
    pod.start()
    pod.client.apply_service(request(run="import sys; sys.exit(3)"))
    wait_until(lambda: pod.client.service("web").state == "FAILED", 240, "the failure")
    assert "exited with code 3" in pod.client.service("web").reason
    wait_until(lambda: pod.client.clusters() == [], 60, "the end of its clusters")
    pod.client.apply_service(request())  # a repaired one is tried again
    ready(pod, 1)
    ended(pod)


@pytest.mark.parametrize("point", every(3, UP_POINTS))
def test_killed_while_coming_up(pod: Podway, point: str) -> None:
    """The next server finds or finishes what was begun: one service, one replica, one cluster, one job."""
    pod.start(crash_at=point)
    pod.client.apply_service(request())
    wait_until(lambda: pod.child.poll() is not None, 60, "the crash")
    assert pod.child.returncode == -signal.SIGKILL
    found = ready(pod, 1)
    assert [one.number for one in found.replicas] == [1]
    assert [one.name for one in pod.client.clusters()] == ["web-1"]
    assert [job.number for job in pod.client.jobs("web-1")] == [1]
    ended(pod)


@pytest.mark.parametrize("point", every(3, [p for p in SERVICE_POINTS if p not in UP_POINTS]))
def test_killed_while_going_down(pod: Podway, point: str) -> None:
    pod.start(crash_at=point)
    pod.client.apply_service(request())
    ready(pod, 1)
    pod.client.end_service("web")
    wait_until(lambda: pod.child.poll() is not None, 60, "the crash")
    ended_by_itself(pod)


def ended_by_itself(pod: Podway) -> None:
    wait_until(lambda: pod.client.service("web").state == "GONE", 90, "the end of the service")
    assert pod.client.clusters() == [] and pod.host_processes() == []


@needs_networks
def test_two_replicas_roll_without_a_gap_and_scale(pod: Podway) -> None:
    """Both listen on the same fixed port; a server killed in the middle of the roll changes nothing."""
    pod.start()
    pod.client.apply_service(request(low=2, run=FIXED_PORT))
    first = ready(pod, 2)
    assert [answer(one) for one in first.replicas] == ["one", "one"]
    changed = request(low=2, run=FIXED_PORT, word="two")
    shown = pod.client.preview_service(changed)
    assert shown.change == "roll" and [one.path for one in shown.differences] == ["env.WORD"]
    assert pod.client.apply_service(changed).change == "roll"
    wait_until(lambda: any(one.revision == 2 for one in pod.client.service("web").replicas), 60, "the roll")
    pod.kill_server()
    pod.start()
    fewest = len(pod.client.gateway_routes().services[0].backends)
    while any(one.revision == 1 for one in pod.client.service("web").replicas):
        fewest = min(fewest, len(pod.client.gateway_routes().services[0].backends))
    assert fewest == 2
    rolled = ready(pod, 2, revision=2)
    assert {answer(one) for one in rolled.replicas} == {"two"}
    assert pod.client.apply_service(request(low=1, run=FIXED_PORT, word="two")).change == "in-place"
    ready(pod, 1, revision=2)
    pod.client.scale_service("web", 3)
    assert ready(pod, 3).revision == 2
    pod.client.rollback_service("web")
    wait_until(lambda: pod.client.service("web").revision == 1, 10, "the way back")
    pod.client.end_service("web")  # deleted while it rolls back
    ended(pod)


@needs_networks
def test_a_canary_gets_its_share_and_is_promoted(pod: Podway) -> None:
    pod.start()
    pod.client.apply_service(request())
    ready(pod, 1)
    pod.client.apply_service(request(word="two"), canary=0.25)
    found = ready(pod, 2)
    assert (found.revision, found.canary) == (1, 2)
    backends = pod.client.gateway_routes().services[0].backends
    share = {one.revision: one.weight for one in backends}
    assert share[2] / sum(share.values()) == pytest.approx(0.25, abs=0.001)
    pod.client.set_canary("web")
    promoted = ready(pod, 1, revision=2)
    assert promoted.canary is None
    ended(pod)


def test_from_zero_and_back(pod: Podway) -> None:
    """A request that a gateway holds brings the first replica; without load it goes again."""
    pod.start()
    changed = request(low=0, high=2)
    scaling = Scaling(min_replicas=0, max_replicas=2, target_qps=1.0, window_s=2, up_delay_s=1, down_delay_s=2)
    spec = msgspec.structs.replace(changed.task.service, scaling=scaling)
    task = msgspec.structs.replace(changed.task, service=spec)
    pod.client.apply_service(msgspec.structs.replace(changed, task=task))
    wait_until(lambda: pod.client.service("web").state == "NO_REPLICA", 60, "the state")
    assert pod.client.clusters() == [] and pod.client.gateway_routes().services[0].hold_s > 0
    sequence = report(pod, 0, waiting=1)
    ready(pod, 1)

    def gone() -> bool:
        nonlocal sequence
        sequence = report(pod, sequence)
        return pod.client.service("web").state == "NO_REPLICA" and pod.client.clusters() == []

    wait_until(gone, 90, "the end of the last replica")
    ended(pod)


def report(pod: Podway, sequence: int, waiting: int = 0) -> int:
    load = ServiceLoad(service="web", window_s=0.5, waiting=waiting)
    pod.client.gateway_report(GatewayReport(gateway="g", sequence=sequence + 1, services=(load,)))
    return sequence + 1


LOCKED = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.headers.get("Authorization") == "Bearer " + os.environ["AUTH"]
        self.send_response(200 if known else 401)
        self.end_headers()
    def log_message(self, *said): pass
http.server.ThreadingHTTPServer(("", int(os.environ["PODWAY_PORT"])), Handler).serve_forever()
"""


def test_a_probe_sends_the_secret_that_its_file_names(pod: Podway) -> None:
    pod.start()
    probe = Probe(path="/", headers={"Authorization": "Bearer ${AUTH}"}, interval_s=0.5, initial_delay_s=120)
    asked = request(run=LOCKED, probes=(probe,))
    secret = "only-the-replica-knows-it"
    task = msgspec.structs.replace(asked.task, secrets={"AUTH": secret})
    pod.client.apply_service(msgspec.structs.replace(asked, task=task))
    ready(pod, 1)
    assert files_with(pod.home, secret) == []
    ended(pod)


def test_a_probe_that_hangs_is_a_failure(pod: Podway) -> None:
    """The program accepts connections and never answers: it is not ready, and ends within its time."""
    pod.start()
    silent = 'import socket, time, os; s = socket.create_server(("", int(os.environ["PODWAY_PORT"]))); time.sleep(1000)'
    probe = Probe(path="/", timeout_s=1, interval_s=1, initial_delay_s=6)
    pod.client.apply_service(request(run=silent, probes=(probe,)))
    wait_until(lambda: "no answer within 1 s" in str(pod.client.service("web").replicas), 60, "the failed probe")
    wait_until(lambda: "replica 1 is FAILED" in str(pod.client.service_events("web")), 90, "the end of the replica")
    ended(pod)


SEED = """type: service
name: llama31-service-optimum-tpu
image: dstackai/optimum-tpu:llama31
env:
  - HF_TOKEN
  - MODEL_ID=meta-llama/Meta-Llama-3.1-8B-Instruct
  - MAX_TOTAL_TOKENS=4096
  - MAX_BATCH_PREFILL_TOKENS=4095
commands:
  - text-generation-launcher --port 8000
port: 8000
model:
  format: tgi
  type: chat
  name: meta-llama/Meta-Llama-3.1-8B-Instruct
resources:
  gpu: v5litepod-4
"""


def podway(pod: Podway, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PODWAY_HOME": str(pod.home), **env}
    command = [sys.executable, "-m", "podway.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_a_seed_from_the_command_line(pod: Podway, tmp_path: Path) -> None:
    """dstack's own file, with a small program in the place of its server; its verbs by habit, and SkyPilot's."""
    launcher = tmp_path / "bin" / "text-generation-launcher"
    launcher.parent.mkdir()
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} -m http.server "$2"\n')
    launcher.chmod(0o755)
    file = tmp_path / "service.dstack.yml"
    file.write_text(SEED.replace("text-generation-launcher --port 8000", f"exec {launcher} --port 8000"))
    pod.start()
    name = "llama31-service-optimum-tpu"
    made = podway(pod, "apply", "-f", str(file), "-y", "--ignore-image", HF_TOKEN="t")
    assert made.returncode == 0, made.stdout + made.stderr
    assert "replica 1 is READY" in made.stdout and "no effect: replicas" not in made.stderr
    (listed,) = json.loads(podway(pod, "services", "-o", "json").stdout)
    assert (listed["name"], listed["state"]) == (name, "READY")
    assert listed["model"] == "meta-llama/Meta-Llama-3.1-8B-Instruct"
    assert [one["state"] for one in listed["replicas"]] == ["READY"]
    again = podway(pod, "apply", "-f", str(file), "-y", "--ignore-image", HF_TOKEN="t")
    assert again.returncode == 0 and "is as the file says" in again.stdout
    assert name in podway(pod, "ps").stdout and name in podway(pod, "serve", "status").stdout
    assert podway(pod, "logs", name, "--no-follow").returncode == 0
    wrong = podway(pod, "service", "scale", name, "many")
    assert wrong.returncode != 0 and "is not a number of replicas" in wrong.stderr and "Traceback" not in wrong.stderr
    scaled = podway(pod, "service", "scale", name, "0", "-o", "json")
    assert scaled.returncode == 0 and json.loads(scaled.stdout)["target_replicas"] == 0
    stopped = podway(pod, "stop", name, "-y")
    assert stopped.returncode == 0 and "is ended" in stopped.stdout, stopped.stderr
    assert pod.client.clusters() == [] and pod.host_processes() == []
    assert "there is no service" in podway(pod, "service", "status", "nope").stderr


SLOW = PROGRAM.replace(
    'self.wfile.write(os.environ.get("WORD", "").encode())',
    """for part in range(int(self.path.partition("=")[2] or 1)):
            self.wfile.write(os.environ["WORD"].encode())
            self.wfile.flush()
            time.sleep(0.2)""",
).replace("import http.server,", "import time, http.server,")


@needs_networks
def test_a_request_under_way_outlives_its_replica_s_retirement(pod: Podway) -> None:
    """A stream that began before a rolling update ends whole, though its replica was taken out meanwhile."""
    pod.start()
    first = request(run=SLOW)
    long = msgspec.structs.replace(first.task, stop_duration_s=120)
    pod.client.apply_service(msgspec.structs.replace(first, task=long))
    ready(pod, 1)
    wait_until(lambda: bool(pod.client.service("web").url), 90, "the gateway")
    url = pod.client.service("web").url
    wait_until(lambda: fetch(f"{url}?n=1") == "one", 60, "the first answer")
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(fetch(f"{url}?n=60")))
    reader.start()
    changed = msgspec.structs.replace(long, env={"WORD": "two"})
    pod.client.apply_service(msgspec.structs.replace(first, task=changed))
    wait_until(lambda: fetch(f"{url}?n=1") == "two", 90, "the new revision")
    reader.join(120)
    assert found == ["one" * 60]
    ended(pod)


def fetch(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=100) as reply:
            return str(reply.read().decode())
    except OSError as error:
        return str(error)


def test_two_servers_on_one_database_make_one_replica(pod: Podway, tmp_path: Path) -> None:
    """Whichever of them drives it: nothing is made twice."""
    database = f"sqlite:///{tmp_path / 'shared.db'}"
    pod.start(PODWAY_DB=database)
    other = Podway(tmp_path / "other")
    key = {"PODWAY_SECRET_KEY": base64.urlsafe_b64encode(b"k" * 32).decode()}
    other.start(PODWAY_HOME=str(tmp_path / "other"), PODWAY_DB=database, **key)
    try:
        pod.client.apply_service(request())
        found = ready(pod, 1)
        assert [one.number for one in found.replicas] == [1]
        assert [one.name for one in pod.client.clusters()] == ["web-1"]
        assert len(pod.client.jobs("web-1")) == 1
        ended(pod)
    finally:
        other.kill_server()
        other.close()


def test_replicas_that_share_the_machine_s_ports(pod: Podway) -> None:
    """Without networks of their own: a program that listens on $PODWAY_PORT gets a free one, and a taken port is refused in words."""
    pod.start(PODWAY_SHARED_NETWORK="1")
    pod.client.apply_service(request(low=2))
    found = ready(pod, 2)
    assert len({one.port for one in found.replicas}) == 2
    assert [answer(one) for one in found.replicas] == ["one", "one"]
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        fixed = request("fixed", run=FIXED_PORT.replace("18080", str(port)), port=port)
        with pytest.raises(UserError, match=f"port {port} is in use on this machine") as refused:
            pod.client.apply_service(fixed)
        assert "PODWAY_PORT" in refused.value.hint
    ended(pod)
