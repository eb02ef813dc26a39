"""Chaos: random launches, jobs, cancels and downs on a pretend Google Cloud that fails at random, while the server is killed.

At the end the faults stop, and three things must hold: every resource in the cloud's ledger belongs to a cluster that Podway shows;
every cluster is what it is said to be (one that is UP runs a job, one that is GONE has nothing); and after `down` of all of
them the ledger is empty. The seed is printed with a failure, and makes the same run again.
"""

import contextlib
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podway.errors import UserError
from podway.sandbox.hosts import why_no_hosts
from podway.sandbox.hosts.netns import why_no_namespaces
from podway.sandbox.running import Running, SandboxError, running_sandbox
from podway.task.task import Accelerator, Placement, Recovery, Resources, Task
from tests.conftest import wait_until
from tests.e2e.harness import Podway

MOST = 6  # clusters at a time
REGIONS = {"v6e": "us-east5", "v5e": "us-west4"}
METHODS = ("Create*", "Delete*", "List*", "Get*", "firewalls.*", "*")
KINDS = ("error", "drop", "lost", "lro", "slow")


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    why_not = why_no_hosts() or why_no_namespaces()
    if why_not:
        pytest.skip(why_not)
    with running_sandbox(tmp_path_factory.mktemp("sandbox"), speed=1200) as running:
        yield running


class Chaos:
    """One run of so many deeds; what is done follows from the seed alone."""

    def __init__(self, pod: Podway, cloud: Running, place: Path, seed: int) -> None:
        self.pod, self.cloud, self.seed = pod, cloud, seed
        self.dice = random.Random(seed)
        self.env = cloud.environment(place)
        self.done: dict[str, int] = {}
        self.struck = self.launched = 0

    def run(self, deeds: int) -> None:
        self.pod.start(**self.env)
        for number in range(deeds):
            self._fault()
            deed = self.dice.choices(
                (self.launch, self.execute, self.cancel, self.down, self.preempt, self.dry_up, self.kill),
                weights=(8, 3, 3, 5, 2, 2, 2),
            )[0]
            self.done[deed.__name__] = self.done.get(deed.__name__, 0) + 1
            with contextlib.suppress(UserError, SandboxError):  # refused: a name that is going, a node that is not spot
                deed(number)
            time.sleep(self.dice.uniform(0.0, 0.8))

    def launch(self, number: int) -> None:
        kind, slices = self.dice.choice((("v6e-1", 1), ("v6e-8", 1), ("v5litepod-4", 2), ("v6e-16", 1)))
        region = REGIONS["v5e" if "v5" in kind else "v6e"]
        resources = Resources(
            accelerator=Accelerator(type=kind),
            placement=Placement(provider="gcp", region=region),
            spot=self.dice.choice(("no", "yes")),
            ports=self.dice.choice(((), ("8080",))),
        )
        recovery = self.dice.choice((None, Recovery()))
        task = Task(run=f"echo deed {number}; sleep 0.3", resources=(resources,), slices=slices, recovery=recovery)
        live = sorted(view.name for view in self.pod.client.clusters())
        if len(live) >= MOST or (live and self.dice.random() < 0.2):
            self.down(number)
        else:
            self.pod.client.launch(task, cluster=f"c{number}")
            self.launched += 1

    def execute(self, number: int) -> None:
        self.pod.client.exec(self._name(), Task(run=f"echo deed {number}"))

    def cancel(self, number: int) -> None:
        self.pod.client.cancel(self._name())

    def down(self, number: int) -> None:
        self.pod.client.down(self._name())

    def preempt(self, number: int) -> None:
        nodes = [one for one in self.living() if one["kind"] == "node" and one["tier"] == "spot"]
        if nodes:
            self.cloud.command("POST", "preempt", {"node": self.dice.choice(nodes)["name"]})

    def dry_up(self, number: int) -> None:
        zone = self.dice.choice(("us-east5-a", "us-east5-b", "us-east5-c", "us-west4-a"))
        self.cloud.command("POST", "stock", {"zone": zone, "chips": self.dice.choice((0, None))})

    def kill(self, number: int) -> None:
        self.pod.kill_server()
        self.pod.start(**self.env)

    def _name(self) -> str:
        known = sorted(cluster.name for cluster in self.pod.client.clusters())
        return self.dice.choice(known or ["nobody"])

    def _fault(self) -> None:
        if self.dice.random() < 0.15:
            self._clear()
        if self.dice.random() < 0.5:
            fault = {
                "kind": self.dice.choice(KINDS),
                "method": self.dice.choice(METHODS),
                "status": self.dice.choice(("UNAVAILABLE", "RESOURCE_EXHAUSTED", "INTERNAL")),
                "seconds": 1.0,
                "times": self.dice.randint(1, 2),
            }
            self.cloud.command("POST", "faults", fault)

    def _clear(self) -> None:
        self.struck += sum(one["struck"] for one in self.cloud.command("GET", "faults")["faults"])
        self.cloud.command("DELETE", "faults")

    def living(self) -> list[dict[str, Any]]:
        return list(self.cloud.command("GET", "ledger")["living"])

    # the end

    def calm(self) -> None:
        """No more faults: everything comes to rest."""
        self._clear()
        zones = ("us-east5-a", "us-east5-b", "us-east5-c", "us-west4-a")
        for body in ({"chips": None}, *({"zone": zone, "chips": None} for zone in zones)):
            self.cloud.command("POST", "stock", body)
        wait_until(self._at_rest, 240, "rest")

    def _at_rest(self) -> bool:
        time.sleep(0.5)
        views = self.pod.client.clusters()
        return all(view.state in ("UP", "GONE") and view.open_jobs == 0 for view in views)

    def judge(self) -> None:
        known = {view.name: view for view in self.pod.client.clusters()}
        up = {name for name, view in known.items() if view.state == "UP"}
        orphans = self.pod.client.orphans(look=True)
        assert [one.name for one in orphans.orphans] == []
        owners = {one["labels"].get("podway-cluster") for one in self.living() if one["labels"]}
        assert owners <= up, f"the cloud has {owners}, Podway shows {up}"
        for name in sorted(up):
            job = self.pod.client.exec(name, Task(run="echo alive on $PODWAY_NUM_HOSTS")).job
            assert job is not None
            assert self.pod.finished(name, job, 60) == "SUCCEEDED"
        for name in sorted(up):
            self.pod.client.down(name)
        wait_until(lambda: self.pod.client.clusters() == [], 120, "the end of all clusters")
        assert self.living() == []


def chaos(pod: Podway, sandbox: Running, place: Path, seed: int, deeds: int) -> None:
    run = Chaos(pod, sandbox, place, seed)
    began = time.monotonic()
    try:
        run.run(deeds)
        run.calm()
        run.judge()
    finally:
        nodes = [one for one in sandbox.command("GET", "ledger")["gone"] if one["kind"] == "node"]
        made = f"{run.launched} clusters asked for, {len(nodes)} nodes came and went, {run.struck} calls failed"
        print(f"seed {seed}: {run.done} in {time.monotonic() - began:.0f} s; {made}")


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_two_hundred_deeds(pod: Podway, sandbox: Running, tmp_path: Path) -> None:
    chaos(pod, sandbox, tmp_path, int(os.environ.get("PODWAY_CHAOS_SEED", "1")), 200)


@pytest.mark.timeout(300)
def test_a_dozen_deeds(pod: Podway, sandbox: Running, tmp_path: Path) -> None:
    chaos(pod, sandbox, tmp_path, 7, 12)
