"""Chaos: launches, cancels, downs and preemptions at random, with faults at every call of the cloud and kill -9 of the server.

At the end the cloud holds nothing, no row is left open, and no run is in a false state: what succeeded has printed its last line.
PODWAY_CHAOS_RUNS (200) and PODWAY_CHAOS_SEED (1) choose another storm.
"""

import contextlib
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podway.control.records import ENDED
from podway.errors import UserError
from podway.sandbox.running import Running, SandboxError, running_sandbox
from podway.task.task import Accelerator, Placement, Recovery, Resources, Task
from tests.conftest import wait_until
from tests.e2e.harness import Podway

RUNS = int(os.environ.get("PODWAY_CHAOS_RUNS", "200"))
SEED = int(os.environ.get("PODWAY_CHAOS_SEED", "1"))
AT_ONCE = 5
FAULTS: list[dict[str, Any]] = [
    {"kind": "error", "status": "UNAVAILABLE", "probability": 0.08},
    {"kind": "error", "status": "INTERNAL", "probability": 0.04},
    {"kind": "drop", "probability": 0.05},
    {"kind": "lost", "probability": 0.05},
    {"kind": "slow", "seconds": 2, "probability": 0.03},
    {"kind": "lro", "status": "INTERNAL", "method": "Create*", "probability": 0.05},
    {"kind": "lro", "status": "INTERNAL", "method": "Delete*", "probability": 0.05},
]


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Running]:
    with running_sandbox(tmp_path / "sandbox", speed=600) as running:
        yield running


class Storm:
    """One server, one cloud, and a die."""

    def __init__(self, pod: Podway, cloud: Running, place: Path) -> None:
        self.pod, self.cloud, self.place = pod, cloud, place
        self.dice = random.Random(SEED)
        self.begun: list[str] = []
        self.jobs: list[tuple[str, int]] = []
        self.kills = self.struck = 0

    def start(self) -> None:
        self.pod.start(**self.cloud.environment(self.place))

    def faults(self) -> None:
        for number, fault in enumerate(FAULTS):
            self.cloud.command("POST", "faults", {"service": "*", "method": "*", **fault, "seed": SEED + number})

    def task(self) -> Task:
        dice = self.dice
        resources = Resources(
            accelerator=Accelerator(type=dice.choice(["v6e-1", "v6e-1", "v6e-4", "v6e-16"])),
            placement=Placement(provider="gcp", region=dice.choice(["us-east5", "us-central1"])),
            spot=dice.choice(["no", "yes"]),
        )
        recovery = Recovery(strategy=dice.choice(["next-region", "failover"])) if dice.random() < 0.5 else None
        run = f"echo begun; sleep {dice.choice([0, 0.2, 2])}; echo the last line"
        return Task(run=run, resources=(resources,), recovery=recovery, stop_duration_s=1)

    def launch(self) -> None:
        name = f"x{len(self.begun)}"
        self.begun.append(name)
        made = self.pod.client.launch(self.task(), cluster=name, retry_until_up=self.dice.random() < 0.3)
        self.jobs.append((name, made.job or 0))

    def strike(self) -> None:
        """One random thing to what there is."""
        live = self.pod.client.clusters()
        deed = self.dice.choice(["cancel", "down", "down", "preempt", "kill", "kill", "wait", "wait"])
        if deed == "kill":
            self.pod.kill_server()
            self.kills += 1
            self.start()
        elif deed == "wait" or not live:
            time.sleep(self.dice.random())
        elif deed == "preempt":
            nodes = [one["name"] for one in self.cloud.command("GET", "ledger")["living"] if one["kind"] == "node"]
            if nodes:
                with contextlib.suppress(SandboxError):  # on demand, or not there any more
                    self.cloud.command("POST", "preempt", {"node": self.dice.choice(nodes)})
        else:
            name = self.dice.choice(live).name
            with contextlib.suppress(UserError):  # it was gone a moment before
                self.pod.client.cancel(name, every=True) if deed == "cancel" else self.pod.client.down(name)

    def make_room(self) -> None:
        """So that not more than a few are alive: the machine is small."""
        while len(live := self.pod.client.clusters()) >= AT_ONCE:
            done = [c for c in live if c.goal == "up" and c.state == "UP" and not c.open_jobs]
            for cluster in done or (live[:1] if self.dice.random() < 0.05 else []):
                with contextlib.suppress(UserError):
                    self.pod.client.down(cluster.name)
            time.sleep(0.2)

    def check(self) -> dict[str, int]:
        """The end: calm weather, everything down, and the truth."""
        client = self.pod.client
        self.struck = sum(one["struck"] for one in self.cloud.command("GET", "faults")["faults"])
        self.cloud.command("DELETE", "faults")
        for cluster in client.clusters():
            with contextlib.suppress(UserError):
                client.down(cluster.name)
        wait_until(lambda: client.clusters() == [], 180, "the end of every cluster")
        assert client.orphans().orphans == []
        wait_until(lambda: self.cloud.command("GET", "ledger")["living"] == [], 60, "an empty cloud")
        states: dict[str, int] = {}
        for name, number in self.jobs:
            job = client.job(name, number)
            assert job.state in ENDED, (name, job)
            states[job.state] = states.get(job.state, 0) + 1
            if job.state == "SUCCEEDED":
                assert "the last line" in self.pod.log_text(name, number), name
        return states


@pytest.mark.soak
def test_a_storm_leaves_nothing_behind(pod: Podway, cloud: Running, tmp_path: Path) -> None:
    storm = Storm(pod, cloud, tmp_path)
    storm.start()
    storm.faults()
    for _ in range(RUNS):
        storm.make_room()
        storm.launch()
        storm.strike()
    states = storm.check()
    print(f"{RUNS} launches, {storm.kills} kills, {storm.struck} faults, jobs: {states}")
    assert sum(states.values()) == RUNS
