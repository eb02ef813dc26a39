"""Pools and job groups where hosts are reached over a network: the pretend Google Cloud, Kubernetes, and a person's own machines.

The same is asked of each: workers come, run setup once and jobs one after the other, a lost one is replaced, and all of it goes; the
tasks of a group start together and reach each other by name.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from podway.launch_options import LaunchOptions, LaunchRequest
from podway.sandbox.hosts import make_hosts, pool_text, why_no_hosts
from podway.sandbox.hosts.netns import NetnsHosts, why_no_namespaces
from podway.sandbox.kubernetes.nodes import NodePool
from podway.sandbox.kubernetes.running import RunningKubernetes, running_kubernetes
from podway.sandbox.running import Running, running_sandbox
from podway.server.group_api import GroupTaskBody
from podway.task.pools import PoolSize
from podway.task.task import Accelerator, Placement, Resources, Task
from tests.conftest import wait_until
from tests.e2e.harness import Podway
from tests.e2e.test_gcp import living

pytestmark = pytest.mark.long
PORT = 18431
# The one serves a word until it was fetched; the other fetches it by the name of the one's first host.
GIVES = f"""
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"word-of-the-learner"); self.server.done = True
server = http.server.HTTPServer(("", {PORT}), Handler)
server.done = False
while not server.done: server.handle_request()
"""
TAKES = f"""
import time, urllib.request
while True:
    try:
        print(urllib.request.urlopen("http://learner-0.pair:{PORT}/", timeout=10).read().decode()); break
    except OSError:
        time.sleep(0.2)
"""


def task(run: str, kind: str, where: str, **more: object) -> LaunchRequest:
    provider, _, region = where.partition("/")
    place = Placement(provider=provider, region=region or None)
    resources = (Resources(accelerator=Accelerator(type=kind), placement=place),)
    return LaunchRequest(task=Task(run=run, resources=resources, **more), options=LaunchOptions())  # type: ignore[arg-type]


def finished(pod: Podway, count: int) -> bool:
    jobs = pod.client.pool("demo").jobs
    assert not any(one.state.startswith("FAILED") for one in jobs), jobs
    return [one.state for one in jobs] == ["SUCCEEDED"] * count


def a_pool_lives(pod: Podway, kind: str, where: str) -> None:
    one = PoolSize(workers=1, max_workers=1)
    pod.client.apply_pool("demo", one, task("", kind, where, setup="echo made >> ~/made"))
    job = task('[ "$PODWAY_RANK" != 0 ] || echo "setup ran $(wc -l < ~/made) times"', kind, where)
    assert pod.client.submit_to_pool("demo", job, 2) == [1, 2]
    wait_until(lambda: finished(pod, 2), 180, "two jobs on one worker")
    done = pod.client.pool("demo")
    assert {job.cluster for job in done.jobs} == {done.workers[0].cluster}
    assert all("setup ran 1 times" in pod.log_text(str(job.cluster), job.job or 0) for job in done.jobs)
    pod.client.down(
        done.workers[0].cluster
    )  # somebody deletes it: the pool replaces it, and the next job waits for that
    pod.client.submit_to_pool("demo", job)
    wait_until(lambda: finished(pod, 3), 180, "a job on another worker")
    pod.client.end_pool("demo")
    wait_until(lambda: pod.client.pools() == [] and pod.client.clusters() == [], 120, "the end of the pool")


def a_group_lives(pod: Podway, kind: str, where: str) -> None:
    give = task(f"[ $PODWAY_RANK != 0 ] || exec python3 -c '{GIVES}'", kind, where, name="learner")
    take = task(f"[ $PODWAY_RANK != 0 ] || exec python3 -c '{TAKES}'", kind, where, name="actor")
    pod.client.launch_group("pair", tuple(GroupTaskBody(request=one) for one in (give, take)))
    wait_until(lambda: pod.client.group("pair").state not in ("STARTING", "RUNNING"), 240, "the end of the group")
    found = pod.client.group("pair")
    assert found.state == "SUCCEEDED", found
    actor = next(one for one in found.tasks if one.name == "actor")
    assert "word-of-the-learner" in pod.log_text(actor.cluster, actor.job or 0)
    wait_until(lambda: pod.client.clusters() == [], 120, "the end of its clusters")


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    why_not = why_no_hosts() or why_no_namespaces()
    if why_not:
        pytest.skip(why_not)
    with running_sandbox(tmp_path_factory.mktemp("sandbox"), speed=600) as running:
        yield running


def test_on_google_cloud(pod: Podway, sandbox: Running, tmp_path: Path) -> None:
    pod.start(**sandbox.environment(tmp_path))
    a_pool_lives(pod, "v6e-1", "gcp")
    a_group_lives(pod, "v6e-1", "gcp")
    wait_until(lambda: living(sandbox) == [], 120, "an empty cloud")


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningKubernetes]:
    why_not = why_no_namespaces()
    if why_not:
        pytest.skip(why_not)
    pools = (NodePool(name="pool-0", accelerator_type="v6e-8"), NodePool(name="pool-1", accelerator_type="v6e-8"))
    with running_kubernetes(tmp_path_factory.mktemp("kubernetes"), pools, network=99) as running:
        yield running


def test_on_kubernetes(pod: Podway, kubernetes: RunningKubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubernetes.kubeconfig))
    pod.start()
    a_pool_lives(pod, "v6e-8", "gke")
    a_group_lives(pod, "v6e-8", "gke")
    wait_until(lambda: kubernetes.left() == {}, 120, "an empty cluster")


def test_on_machines_of_ones_own(pod: Podway) -> None:
    why_not = why_no_hosts() or why_no_namespaces()
    if why_not:
        pytest.skip(why_not)
    with make_hosts(2, separate=True) as hosts:
        assert isinstance(hosts, NetnsHosts)
        (pod.home / "ssh").mkdir()
        (pod.home / "ssh" / "lab.yaml").write_text(pool_text(hosts, "v6e-1"))
        pod.start()
        a_pool_lives(pod, "v6e-1", "ssh/lab")
        a_group_lives(pod, "v6e-1", "ssh/lab")
        assert [hosts.processes(index) for index in range(2)] == [[], []]
