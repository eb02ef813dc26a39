"""A chaos run: random operations, faults among them, then quiet, then the truth is asked for.

`plan` makes the operations from a seed alone, so that the same seed gives the same run; which cluster or host one of them meets depends
on what there is by then. Every provider has launches, jobs, cancels, downs, kill -9 of the server, jumps of its clock and a full
disk under its home; `test_chaos.py` adds what can befall the hosts of each provider.
"""

import contextlib
import os
import random
import struct
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from podway.errors import UserError
from podway.task.task import Task
from tests.conftest import wait_until
from tests.e2e.harness import Podway

MOST = 5  # clusters at a time
DISK_MB = 96
# Everything that reads the clock through the C library sees it moved by the seconds that stand in a file, and a jump the moment it
# is written there.
CLOCK = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile long long *offset;
static long long seconds(void) {
    if (!offset) {
        const char *path = getenv("PODWAY_TEST_CLOCK");
        int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        if (file < 0) return 0;
        void *found = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
        close(file);
        if (found == MAP_FAILED) return 0;
        offset = found;
    }
    return *offset;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += seconds();
    return failed;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    now->tv_sec = t.tv_sec; now->tv_usec = t.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *into) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (into) *into = t.tv_sec;
    return t.tv_sec;
}
"""


class Operation(NamedTuple):
    """One of a plan: `at` (0 to 1) chooses what it meets, `which` a variant of it, `pause` how long until the next."""

    number: int
    name: str
    at: float
    which: float
    pause: float


def plan(seed: int, count: int, weights: Mapping[str, int]) -> list[Operation]:
    """The operations of a seed."""
    dice = random.Random(seed)
    names = dice.choices([*weights], weights=[*weights.values()], k=count)
    return [
        Operation(number, name, dice.random(), dice.random(), dice.uniform(0.0, 0.8))
        for number, name in enumerate(names)
    ]


class Clock:
    """A clock for processes started with `env`, which can be made to jump."""

    def __init__(self, place: Path) -> None:
        place.mkdir()
        (place / "clock.c").write_text(CLOCK)
        self._file = place / "offset"
        self.jump(0)
        command = ["cc", "-shared", "-fPIC", "-o", str(place / "clock.so"), str(place / "clock.c")]
        subprocess.run(command, check=True, capture_output=True)
        self.env = {"LD_PRELOAD": str(place / "clock.so"), "PODWAY_TEST_CLOCK": str(self._file)}

    def jump(self, seconds: int) -> None:
        """From now on it is that far from the true time."""
        with open(self._file, "r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("=q", seconds))


class SmallDisk:
    """A disk that can be filled."""

    def __init__(self, place: Path) -> None:
        self._filler = place / "filler"

    def fill(self) -> None:
        """To the last block."""
        with contextlib.suppress(OSError), open(self._filler, "wb", buffering=0) as file:
            for size in (1 << 20, 4096):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)):
                        pass

    def free(self) -> None:
        """As it was."""
        self._filler.unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[SmallDisk]:
    """A disk of its own at `place`, where this user may mount one."""
    place.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m,mode=700", "podway-chaos", str(place)], check=True)
    try:
        yield SmallDisk(place)
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


class Chaos:
    """One run; a provider's own says what to launch, what else befalls, and what must be gone at the end."""

    weights: Mapping[str, int] = {
        "launch": 8, "execute": 4, "cancel": 3, "down": 4, "kill_server": 2, "jump": 1, "fill_disk": 1, "look": 2,
    }  # fmt: skip

    def __init__(self, pod: Podway, place: Path, disk: SmallDisk, seed: int, env: Mapping[str, str]) -> None:
        self.pod, self.disk, self.seed = pod, disk, seed
        self.clock = Clock(place / "clock")
        self.env = {**env, **self.clock.env}
        self.done: dict[str, int] = {}
        self._full_until = -1

    def run(self, count: int) -> None:
        """All of it, to the verdict."""
        print(f"PODWAY_CHAOS_SEED={self.seed}: {count} operations", flush=True)
        begun = time.monotonic()
        self.pod.start(**self.env)
        try:
            for operation in plan(self.seed, count, self.weights):
                if operation.number > self._full_until >= 0:
                    self._free()
                self.done[operation.name] = self.done.get(operation.name, 0) + 1
                with contextlib.suppress(UserError):  # refused: a name that is going, a disk that is full
                    getattr(self, operation.name)(operation)
                time.sleep(operation.pause)
            self.calm()
            self.judge()
        finally:
            print(f"seed {self.seed}: {self.done} in {time.monotonic() - begun:.0f} s; {self.summary()}", flush=True)

    # operations

    def task(self, operation: Operation) -> Task:
        """What is launched."""
        raise NotImplementedError

    def launch(self, operation: Operation) -> None:
        live = sorted(view.name for view in self.pod.client.clusters())
        if len(live) >= MOST:
            self.down(operation)
        else:
            self.pod.client.launch(self.task(operation), cluster=f"c{operation.number}")

    def execute(self, operation: Operation) -> None:
        run = f"echo operation {operation.number}; sleep {(0, 0.3, 3)[int(3 * operation.which)]}"
        self.pod.client.exec(self._name(operation), Task(run=run))

    def cancel(self, operation: Operation) -> None:
        self.pod.client.cancel(self._name(operation))

    def down(self, operation: Operation) -> None:
        self.pod.client.down(self._name(operation))

    def look(self, operation: Operation) -> None:
        self.pod.client.clusters()

    def kill_server(self, operation: Operation) -> None:
        self.pod.kill_server()
        self._free()  # a server that finds no room at its start says so and ends
        self.pod.start(**self.env)

    def jump(self, operation: Operation) -> None:
        """An hour or a few seconds, forth or back."""
        self.clock.jump((3600, -3600, 20, -20, 0)[int(5 * operation.which)])

    def fill_disk(self, operation: Operation) -> None:
        """For a few operations."""
        self.disk.fill()
        self._full_until = operation.number + 1 + int(3 * operation.which)

    def _free(self) -> None:
        self.disk.free()
        self._full_until = -1

    def _name(self, operation: Operation) -> str:
        known = sorted(cluster.name for cluster in self.pod.client.clusters())
        return known[int(operation.at * len(known))] if known else "nobody"

    # the end

    def calm(self) -> None:
        """No more faults: everything comes to rest."""
        self._free()
        self.clock.jump(0)
        if self.pod.child.poll() is not None:
            self.pod.start(**self.env)
        wait_until(self._at_rest, 240, "rest")

    def _at_rest(self) -> bool:
        time.sleep(0.5)
        views = self.pod.client.clusters()
        return all(view.state in ("UP", "GONE") and view.open_jobs == 0 for view in views)

    def judge(self) -> None:
        """Who is UP runs a job; after `down` of all, nothing is left anywhere."""
        client = self.pod.client
        up = sorted(view.name for view in client.clusters() if view.state == "UP")
        for name in up:
            job = client.exec(name, Task(run="echo alive on $PODWAY_NUM_HOSTS")).job
            assert job is not None
            assert self.pod.finished(name, job, 60) == "SUCCEEDED", (name, client.job(name, job))
        for name in up:
            client.down(name)
        wait_until(lambda: client.clusters() == [], 120, "the end of all clusters")
        self.nothing_is_left()

    def nothing_is_left(self) -> None:
        """Of the provider's hosts."""
        raise NotImplementedError

    def summary(self) -> str:
        """What the provider has to say of the run."""
        return ""


def wanted_seed(usual: int) -> int:
    """Of PODWAY_CHAOS_SEED, or the usual one."""
    return int(os.environ.get("PODWAY_CHAOS_SEED", str(usual)))


def wanted_operations(usual: int) -> int:
    """Of PODWAY_CHAOS_OPERATIONS, or the usual number."""
    return int(os.environ.get("PODWAY_CHAOS_OPERATIONS", str(usual)))
