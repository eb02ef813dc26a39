"""`make bench-postgres`: two servers on one PostgreSQL, under load, killed at random; no job runs twice and none is lost.

The hosts are the sockets of endpoints.py. Each writes down every phase that it really started, with the job's own mark: the ledger. Jobs
are sent to either server while a third process, chance, kills one of them (SIGKILL) every few seconds and starts it again. At the end
every job must have succeeded, the ledger must hold each mark once for every host, and the log of each job must have every line.
The servers share the directories of logs and contents, as two machines of a team share a disk.
"""

import argparse
import contextlib
import json
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
from tools.bench import endpoints, report
from tools.bench.own_postgres import binaries, own_postgres

from podway.errors import UserError
from podway.server.client import Client

CLUSTERS, JOBS = 200, 2_000
SENDERS = 8
LINES = 5
KILL_EVERY_S = (2.0, 6.0)


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a run."""

    clusters: int
    jobs: int
    kills: int
    seconds: float
    twice: int
    lost: int
    cut: int

    def rows(self) -> list[list[str]]:
        """As the page shows it."""
        return [
            ["clusters, and hosts", f"{self.clusters}, {self.clusters * endpoints.HOSTS_PER_SLICE:,}"],
            ["jobs, and jobs a second", f"{self.jobs:,}, {self.jobs / self.seconds:.1f}"],
            ["servers killed", str(self.kills)],
            ["jobs that ran twice on some host", str(self.twice)],
            ["jobs that were lost, or did not succeed", str(self.lost)],
            ["jobs whose log lacks a line or has one twice", str(self.cut)],
        ]


class Servers:
    """Two servers on one database and the same hosts."""

    def __init__(self, place: Path, database: str, hosts: int) -> None:
        self.homes = [place / "one", place / "two"]
        self._env = [{**os.environ, "PODWAY_HOME": str(home), "PODWAY_DB": database} for home in self.homes]
        self._children: list[subprocess.Popen[bytes] | None] = [None, None]
        self._ports = [_free_port(), _free_port()]  # of the server's whole life: clients come back to it
        self.kills = 0
        self.token = ""
        shared = place / "shared"
        for name in ("endpoints/sockets", "logs", "blobs"):
            (shared / name).mkdir(parents=True)
        for home in self.homes:
            home.mkdir(mode=0o700)
            for name in ("endpoints", "logs", "blobs"):
                (home / name).symlink_to(shared / name)
        self.ledger = shared / "ledger"
        self.ledger.mkdir()
        self.sockets = shared / "endpoints" / "sockets"
        self.hosts = hosts

    def start(self, which: int) -> None:
        """Start one, and wait until it answers."""
        place = self.homes[which] / "server.json"
        before = place.stat().st_mtime_ns if place.exists() else 0
        command = [sys.executable, "-m", "tools.bench.endpoints", "server", "--port", str(self._ports[which])]
        with open(self.homes[which] / "server.out", "ab") as out:
            self._children[which] = subprocess.Popen(command, env=self._env[which], stdout=out, stderr=out)
        endpoints.until(lambda: place.exists() and place.stat().st_mtime_ns != before)
        if which == 0 and not (self.homes[1] / "secret.key").exists():
            shutil.copy(self.homes[0] / "secret.key", self.homes[1] / "secret.key")

    def kill(self, which: int) -> None:
        """SIGKILL."""
        child = self._children[which]
        if child is not None:
            child.kill()
            child.wait()
            self._children[which] = None

    def client(self, which: int) -> Client:
        """A client of one of them; it repeats what is safe while the server is away."""
        place = json.loads((self.homes[which] / "server.json").read_text())
        return Client(url=place["url"], token=self.token or place["token"], retry_s=120.0)

    def make_token(self) -> None:
        """One that both servers know, and know again after a restart: it stands in the database."""
        self.token = self.client(0).make_token("bench", "admin")
        endpoints.until(lambda: all(self._knows(which) for which in (0, 1)))

    def _knows(self, which: int) -> bool:
        try:
            self.client(which).clusters()
        except UserError:
            return False
        return True

    def strike(self, dice: random.Random, stop: threading.Event) -> None:
        """Kill one or the other every few seconds, until told to stop."""
        while not stop.wait(dice.uniform(*KILL_EVERY_S)):
            which = dice.randrange(2)
            self.kill(which)
            self.kills += 1
            time.sleep(dice.uniform(0.0, 1.0))
            self.start(which)


def _free_port() -> int:
    """One below those that the kernel gives to connections."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def running(hosts: int, database: str) -> Iterator[Servers]:
    """Both servers and all hosts; nothing is left of them."""
    with contextlib.ExitStack() as ending:
        place = Path(tempfile.mkdtemp(prefix="podway-two-"))
        ending.callback(shutil.rmtree, place, ignore_errors=True)
        servers = Servers(place, database, hosts)
        env = {**os.environ, endpoints.LEDGER: str(servers.ledger)}
        command = [sys.executable, "-m", "tools.bench.endpoints", "serve", str(servers.sockets), "0", str(hosts)]
        answering = ending.enter_context(subprocess.Popen(command, env=env, stdout=subprocess.PIPE))
        ending.callback(answering.kill)
        assert answering.stdout is not None and answering.stdout.readline()
        for which in (0, 1):
            ending.callback(servers.kill, which)
            servers.start(which)
        servers.make_token()
        yield servers


class Sender:
    """Sends jobs from several threads, each to either server."""

    def __init__(self, servers: Servers, clusters: int, seed: int) -> None:
        self._servers, self._clusters, self._seed = servers, clusters, seed
        self._clients = [servers.client(0), servers.client(1)]
        self._lock = threading.Lock()
        self.sent: dict[int, tuple[str, int]] = {}
        self.failures: list[Exception] = []

    def send(self, first: int, end: int) -> None:
        """The jobs of these numbers; the first of each cluster launches it."""
        numbers = iter(range(first, end))
        threads = [
            threading.Thread(target=self._work, args=(numbers, random.Random(self._seed + n))) for n in range(SENDERS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failures:
            raise self.failures[0]

    def _work(self, numbers: Iterator[int], dice: random.Random) -> None:
        while not self.failures:
            with self._lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                self.sent[number] = self._one(number, dice)
            except Exception as error:
                self.failures.append(error)

    def _one(self, number: int, dice: random.Random) -> tuple[str, int]:
        name, client = f"p{number % self._clusters}", dice.choice(self._clients)
        task = endpoints.task(1, f"mark m{number}; print {LINES}; hold {dice.choice((0, 0.1, 1))}")
        if number < self._clusters:
            made = client.launch(task, cluster=name, provider="endpoints")
        else:
            made = client.exec(name, task)
        return name, made.job or 0


def measure(clusters: int, jobs: int, seed: int, database: str) -> LoadResult:
    """Send the jobs, kill servers meanwhile, and judge."""
    with running(clusters * endpoints.HOSTS_PER_SLICE, database) as servers:
        sender = Sender(servers, clusters, seed)
        begun, stop = time.perf_counter(), threading.Event()
        killer = threading.Thread(target=servers.strike, args=(random.Random(seed), stop))
        killer.start()
        try:
            sender.send(0, clusters)
            sender.send(clusters, jobs)
            unfinished = _wait(servers, sender.sent)
        finally:
            stop.set()
            killer.join()
        seconds = time.perf_counter() - begun
        client = servers.client(0)
        states = {number: client.job(name, job).state for number, (name, job) in sender.sent.items()}
        lost = {number for number in range(jobs) if states.get(number) != "SUCCEEDED"} | unfinished
        cut = [number for number in sorted(set(sender.sent) - lost) if not _is_whole(client, *sender.sent[number])]
        return LoadResult(
            clusters=clusters,
            jobs=jobs,
            kills=servers.kills,
            seconds=seconds,
            twice=_twice(servers.ledger),
            lost=len(lost),
            cut=len(cut),
        )


def _wait(servers: Servers, sent: dict[int, tuple[str, int]], limit_s: float = 1800.0) -> set[int]:
    """Until every job has ended; those that have not when the time is over."""
    until, left = time.monotonic() + limit_s, dict(sent)
    while left and time.monotonic() < until:
        for number, (name, job) in list(left.items()):
            with contextlib.suppress(UserError, OSError):
                if servers.client(number % 2).job(name, job, wait=2).ended:
                    del left[number]
    return set(left)


def _is_whole(client: Client, name: str, job: int) -> bool:
    text = "".join(frame.text for frame in client.watch(name, job, raw=True) if frame.kind == "log")
    lines = Counter(line.split(") ", 1)[1] for line in text.splitlines() if ") endpoint " in line)
    return len(lines) == LINES * endpoints.HOSTS_PER_SLICE and set(lines.values()) == {1}


def _twice(ledger: Path) -> int:
    """How many marks some host has more than once."""
    twice = set()
    for path in ledger.iterdir():
        counts = Counter(path.read_text().split())
        twice |= {mark for mark, count in counts.items() if count > 1}
    return len(twice)


def page(result: LoadResult) -> str:
    """The section of docs/benchmarks.md."""
    text = [
        "## Two servers on one PostgreSQL (`make bench-postgres`)",
        f"Machine: {report.machine()}.",
        "Jobs are sent to either of two servers, while one of them at random is killed with SIGKILL every 2 to 6 s and started again.",
        report.table(["what", "measured"], result.rows()),
    ]
    return "\n\n".join(text)


def main(argv: list[str] | None = None) -> int:
    """Measure, and fail if a job ran twice, was lost or lost a line; nothing is left running."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.postgres")
    parser.add_argument("--clusters", type=int, default=CLUSTERS, help="Clusters of 4 hosts.")
    parser.add_argument("--jobs", type=int, default=JOBS, help="Jobs over all of them.")
    parser.add_argument("--seed", type=int, default=1, help="Random seed.")
    options = parser.parse_args(argv)
    report.end_cleanly()
    programs = binaries()
    if programs is None:
        print("PostgreSQL is not installed (tools/system-packages installs it for root)", file=sys.stderr)
        return 1
    print(f"seed {options.seed}: {options.jobs:,} jobs on {options.clusters} clusters ...", flush=True)
    with own_postgres(programs) as database:
        result = measure(options.clusters, options.jobs, options.seed, database)
    print(report.table(["what", "measured"], result.rows()))
    if (options.clusters, options.jobs) == (CLUSTERS, JOBS):
        report.write_section("postgres", page(result))
    return 1 if result.twice or result.lost or result.cut else 0


if __name__ == "__main__":
    sys.exit(main())
