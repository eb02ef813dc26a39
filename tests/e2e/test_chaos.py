"""Chaos on every provider (chaos.py): what can befall its hosts and its cloud, while operations go on and the server is killed.

At the end the faults stop, and must hold: every resource that a cloud bills belongs to a cluster that Podway shows; every cluster is what
it is said to be (one that is UP runs a job, one that is GONE has nothing); after `down` of all of them no resource, no process and no
claim is left. PODWAY_CHAOS_SEED and PODWAY_CHAOS_OPERATIONS choose another run of `make soak`; the seed is printed first.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from podway.sandbox.hosts import make_hosts, pool_text, why_no_hosts
from podway.sandbox.hosts.netns import NetnsHosts, why_no_namespaces
from podway.sandbox.running import Running, SandboxError, running_sandbox
from podway.task.task import Accelerator, Placement, Recovery, Resources, Task
from tests.conftest import wait_until
from tests.e2e.chaos import Chaos, Operation, SmallDisk, plan, small_disk, wanted_operations, wanted_seed
from tests.e2e.harness import Podway

REGIONS = {"v6e": "us-east5", "v5e": "us-west4"}
ZONES = ("us-east5-a", "us-east5-b", "us-east5-c", "us-west4-a")
METHODS = ("Create*", "Delete*", "List*", "Get*", "firewalls.*", "*")
KINDS = ("error", "drop", "lost", "lro", "slow")
STATUSES = ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "INTERNAL")


@pytest.fixture
def disk(podway_home: Path) -> Iterator[SmallDisk]:
    if os.geteuid() != 0:
        pytest.skip("only root mounts a small disk")
    with small_disk(podway_home) as found:
        yield found


@pytest.fixture
def pod(disk: SmallDisk, podway_home: Path) -> Iterator[Podway]:
    """As everywhere, on the small disk."""
    podway = Podway(podway_home)
    yield podway
    disk.free()
    podway.close()


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    why_not = why_no_hosts() or why_no_namespaces()
    if why_not:
        pytest.skip(why_not)
    with running_sandbox(tmp_path_factory.mktemp("sandbox"), speed=1200) as running:
        yield running


@pytest.fixture(scope="module")
def machines() -> Iterator[NetnsHosts]:
    why_not = why_no_hosts() or why_no_namespaces()
    if why_not:
        pytest.skip(why_not)
    with make_hosts(4, separate=True) as hosts:
        assert isinstance(hosts, NetnsHosts)
        yield hosts


def one_of(operation: Operation, choices: tuple[Any, ...]) -> Any:
    return choices[int(operation.which * len(choices))]


class LocalChaos(Chaos):
    """Simulated hosts: their agents, runners and all of them are killed."""

    weights: ClassVar = {**Chaos.weights, "kill_agent": 2, "kill_runner": 1, "kill_host": 1}

    def task(self, operation: Operation) -> Task:
        where = Placement(provider="local")
        resources = Resources(accelerator=Accelerator(type=one_of(operation, ("v6e-1", "v4-16"))), placement=where)
        return Task(run=f"echo operation {operation.number}; sleep 0.5", resources=(resources,))

    def kill_agent(self, operation: Operation) -> None:
        self._kill(operation, lambda words: "serve" in words)

    def kill_runner(self, operation: Operation) -> None:
        self._kill(operation, lambda words: "run" in words)

    def kill_host(self, operation: Operation) -> None:
        homes = sorted((self.pod.home / "local").glob("*/host-*"))
        if homes:
            self.pod.kill_all_in(homes[int(operation.at * len(homes))])

    def _kill(self, operation: Operation, wanted: Callable[[list[str]], bool]) -> None:
        found = sorted(
            (one for one in self.pod.host_processes() if wanted(one.info["cmdline"])), key=lambda one: one.pid
        )
        if found:
            with contextlib.suppress(psutil.NoSuchProcess):
                found[int(operation.at * len(found))].kill()

    def nothing_is_left(self) -> None:
        with contextlib.suppress(AssertionError):
            wait_until(lambda: self.pod.host_processes() == [], 15, "the end of all processes")
        assert [(one.pid, one.info["cmdline"]) for one in self.pod.host_processes()] == []
        assert list((self.pod.home / "local").glob("*/host-*")) == []


class SshChaos(Chaos):
    """A person's own machines: agents are killed, a machine's network is cut for a while, its disk is full for a while."""

    weights: ClassVar = {**Chaos.weights, "kill_agents": 2, "cut": 1, "fill_machine": 1, "mend": 3}

    def __init__(self, machines: NetnsHosts, *more: Any) -> None:
        super().__init__(*more)
        self.machines = machines
        (self.pod.home / "ssh").mkdir(exist_ok=True)
        (self.pod.home / "ssh" / "lab.yaml").write_text(pool_text(machines, "v6e-16"))
        self._cut: set[int] = set()

    def task(self, operation: Operation) -> Task:
        where = Placement(provider="ssh", region="lab")
        resources = Resources(accelerator=Accelerator(type="v6e-16"), placement=where)
        return Task(run=f"echo operation {operation.number}; sleep 0.5", resources=(resources,))

    def kill_agents(self, operation: Operation) -> None:
        """Every process of Podway's on one machine."""
        index = int(operation.at * 4)
        self.machines.run(index, "pkill -9 -f '[a]gent-' || true")

    def cut(self, operation: Operation) -> None:
        index = int(operation.at * 4)
        if index not in self._cut:
            self.machines.cut_off(index)
            self._cut.add(index)

    def fill_machine(self, operation: Operation) -> None:
        self.machines.run(int(operation.at * 4), "head -c 200m /dev/zero > /root/filler 2>/dev/null || true")

    def mend(self, operation: Operation) -> None:
        for index in sorted(self._cut):
            self.machines.reconnect(index)
        self._cut.clear()
        for index in range(4):
            self.machines.run(index, "rm -f /root/filler")

    def calm(self) -> None:
        self.mend(Operation(0, "mend", 0, 0, 0))
        super().calm()

    def nothing_is_left(self) -> None:
        for index in range(4):
            wait_until(lambda index=index: self.machines.processes(index) == [], 30, f"the end of machine {index}")


class CloudChaos(Chaos):
    """The pretend Google Cloud fails, preempts and runs out of chips."""

    weights: ClassVar = {**Chaos.weights, "fault": 9, "clear": 2, "preempt": 2, "dry_up": 2}

    def __init__(self, cloud: Running, *more: Any) -> None:
        super().__init__(*more)
        self.cloud = cloud
        self.struck = 0

    def task(self, operation: Operation) -> Task:
        kind, slices = one_of(operation, (("v6e-1", 1), ("v6e-8", 1), ("v5litepod-4", 2), ("v6e-16", 1)))
        half = int(operation.at * 8)
        resources = Resources(
            accelerator=Accelerator(type=kind),
            placement=Placement(provider="gcp", region=REGIONS["v5e" if "v5" in kind else "v6e"]),
            spot="yes" if half & 1 else "no",
            ports=("8080",) if half & 2 else (),
        )
        run = f"echo operation {operation.number}; sleep 0.3"
        return Task(run=run, resources=(resources,), slices=slices, recovery=Recovery() if half & 4 else None)

    def fault(self, operation: Operation) -> None:
        wanted = {
            "kind": one_of(operation, KINDS),
            "method": METHODS[int(operation.at * len(METHODS))],
            "status": STATUSES[operation.number % len(STATUSES)],
            "seconds": 1.0,
            "times": 1 + operation.number % 2,
        }
        self.cloud.command("POST", "faults", wanted)

    def clear(self, operation: Operation | None = None) -> None:
        self.struck += sum(one["struck"] for one in self.cloud.command("GET", "faults")["faults"])
        self.cloud.command("DELETE", "faults")

    def preempt(self, operation: Operation) -> None:
        nodes = [one["name"] for one in self.living() if one["kind"] == "node" and one["tier"] == "spot"]
        if nodes:
            with contextlib.suppress(SandboxError):  # gone a moment before
                self.cloud.command("POST", "preempt", {"node": nodes[int(operation.at * len(nodes))]})

    def dry_up(self, operation: Operation) -> None:
        zone = ZONES[int(operation.at * len(ZONES))]
        self.cloud.command("POST", "stock", {"zone": zone, "chips": one_of(operation, (0, None))})

    def living(self) -> list[dict[str, Any]]:
        return list(self.cloud.command("GET", "ledger")["living"])

    def calm(self) -> None:
        self.clear()
        for body in ({"chips": None}, *({"zone": zone, "chips": None} for zone in ZONES)):
            self.cloud.command("POST", "stock", body)
        super().calm()

    def judge(self) -> None:
        up = {view.name for view in self.pod.client.clusters() if view.state == "UP"}
        orphans = self.pod.client.orphans(look=True)
        assert [one.name for one in orphans.orphans] == []
        owners = {one["labels"].get("podway-cluster") for one in self.living() if one["labels"]}
        assert owners <= up, f"the cloud has {owners}, Podway shows {up}"
        super().judge()

    def nothing_is_left(self) -> None:
        assert self.living() == []

    def summary(self) -> str:
        nodes = [one for one in self.cloud.command("GET", "ledger")["gone"] if one["kind"] == "node"]
        return f"{len(nodes)} nodes came and went, {self.struck} calls failed"


def test_a_seed_is_a_run() -> None:
    assert plan(7, 500, CloudChaos.weights) == plan(7, 500, CloudChaos.weights) != plan(8, 500, CloudChaos.weights)
    for kind in (LocalChaos, SshChaos, CloudChaos):
        names = {operation.name for operation in plan(1, 500, kind.weights)}
        assert names == set(kind.weights) and all(callable(getattr(kind, name)) for name in names)
        assert {"kill_server", "jump", "fill_disk"} < names


@pytest.mark.timeout(600)
def test_a_few_operations_on_simulated_hosts(pod: Podway, disk: SmallDisk, tmp_path: Path) -> None:
    LocalChaos(pod, tmp_path, disk, 3, {}).run(14)


@pytest.mark.timeout(600)
def test_a_few_operations_on_a_cloud(pod: Podway, disk: SmallDisk, sandbox: Running, tmp_path: Path) -> None:
    CloudChaos(sandbox, pod, tmp_path, disk, 7, sandbox.environment(tmp_path)).run(16)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_operations_on_simulated_hosts(pod: Podway, disk: SmallDisk, tmp_path: Path) -> None:
    LocalChaos(pod, tmp_path, disk, wanted_seed(1), {}).run(wanted_operations(500))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_operations_on_machines(pod: Podway, disk: SmallDisk, machines: NetnsHosts, tmp_path: Path) -> None:
    SshChaos(machines, pod, tmp_path, disk, wanted_seed(1), {}).run(wanted_operations(500))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_operations_on_a_cloud(pod: Podway, disk: SmallDisk, sandbox: Running, tmp_path: Path) -> None:
    CloudChaos(sandbox, pod, tmp_path, disk, wanted_seed(1), sandbox.environment(tmp_path)).run(wanted_operations(500))
