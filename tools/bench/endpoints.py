"""A provider whose hosts are sockets of a few processes: what the control plane costs when hosts cost nothing.

    PODWAY_HOME/endpoints/sockets/N         where endpoint N answers; all of them are of a few processes, started before anything is timed
    PODWAY_HOME/endpoints/clusters/NAME     which of them a cluster has: its hosts, as JSON

The store, the server, the gang, the links and the protocol (hosts/agent/wire.py) are the real ones; only what an agent would do with a
job is missing. An endpoint answers hello, start, status, follow and cancel from memory: a script is not run but read, as
`print N; hold SECONDS`, so that output and duration are known.

`measure` starts a server of its own with this provider added to its table and times jobs over all endpoints. The server is
`python -m tools.bench.endpoints server`, the processes of the sockets `... serve DIRECTORY FIRST END`.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from podway.decoding import from_json
from podway.errors import UserError
from podway.hosts.agent import wire
from podway.hosts.link import Connect, Reader, Writer
from podway.order import Host, Order
from podway.provider_table import ProviderRow, register
from podway.providers import Observation, Offer, Provider, Request, Step
from podway.server.client import Client
from podway.server.main import main as serve_podway
from podway.task.task import Accelerator, Resources, Task

COUNT = 1000
PROCESS_ENDPOINTS = 2500  # a process may not have any number of sockets open
SLICE, HOSTS_PER_SLICE = "v6e-16", 4
LEDGER = "PODWAY_ENDPOINTS_LEDGER"  # a directory: each endpoint writes there what it has really started
_MARK = re.compile(r"mark (\w+)")
_PRINT, _HOLD = re.compile(r"print (\d+)"), re.compile(r"hold ([0-9.]+)")


# The provider


def open_provider(root: Path) -> Provider:
    """The provider with its clusters under `root`/endpoints."""
    return EndpointsProvider(root)


class EndpointsProvider:
    """See the module docstring; each verb's contract is in `podway.providers.Provider`."""

    name = "endpoints"

    def __init__(self, root: Path) -> None:
        self.sockets = root / "endpoints" / "sockets"
        self.clusters = root / "endpoints" / "clusters"
        self._all: list[str] = []
        self._taken: dict[str, set[str]] = {}

    def offers(self, resources: Resources, slices: int) -> list[Offer]:
        """As many as are asked for, for nothing."""
        wanted = resources.accelerator
        return [
            Offer(provider=self.name, accelerator_type=wanted.type if wanted else None, slices=slices, hourly_cost=0.0)
        ]

    def render(self, name: str, order: Order) -> Request:
        """So many of the sockets."""
        body = {"hosts": order.hosts, "hosts_per_slice": order.hosts_per_slice}
        return Request(provider=self.name, name=name, steps=(Step(verb="take", target=name, body=body),))

    async def submit(self, request: Request) -> None:
        """Take endpoints that no cluster has. Two servers may do so at once."""
        self.clusters.mkdir(exist_ok=True)
        with open(self.clusters.parent / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (self.clusters / request.name).exists():
                self._take(request)

    def _take(self, request: Request) -> None:
        self._all = self._all or [str(path) for path in sorted(self.sockets.iterdir(), key=lambda path: int(path.name))]
        names = {place.name for place in self.clusters.iterdir()}
        self._taken = {name: homes for name, homes in self._taken.items() if name in names}
        for name in names - set(self._taken):
            self._taken[name] = {host.home for host in _hosts(self.clusters / name)}
        taken = set().union(*self._taken.values())
        free = [path for path in self._all if path not in taken]
        wanted, each = int(request.steps[0].body["hosts"]), int(request.steps[0].body["hosts_per_slice"])
        if len(free) < wanted:
            raise UserError(f"{wanted} endpoints are asked for, and {len(free)} are free", "take a cluster down")
        hosts = [
            Host(
                rank=rank,
                slice=rank // each,
                worker=rank % each,
                address=f"10.{rank >> 16}.{rank >> 8 & 255}.{rank & 255}",
                home=free[rank],
                id=f"{request.name}-{rank}",
            )
            for rank in range(wanted)
        ]
        (self.clusters / request.name).write_bytes(msgspec.json.encode(hosts))

    async def observe(self, name: str) -> Observation:
        """Which endpoints it has."""
        place = self.clusters / name
        if not place.exists():
            return Observation(condition="absent")
        return Observation(condition="ready", hosts=tuple(_hosts(place)))

    async def destroy(self, name: str) -> None:
        """Give the endpoints back."""
        (self.clusters / name).unlink(missing_ok=True)

    async def ensure_agent(self, host: Host) -> None:
        """They answer, or they are gone."""
        _, writer = await self.connect(host)()
        writer.close()

    def connect(self, host: Host) -> Connect:
        """A stream to the endpoint's socket."""

        async def opener() -> tuple[Reader, Writer]:
            return await asyncio.open_unix_connection(host.home)

        return opener


def _hosts(place: Path) -> list[Host]:
    return from_json(place.read_bytes(), list[Host])


# The process behind the sockets


class Endpoint:
    """One host's agent, as far as jobs go."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.phases: dict[tuple[str, str], tuple[bytes, float, list[list[int]]]] = {}
        self.cancelled: set[str] = set()
        self.changed = asyncio.Event()  # set and replaced when something is cancelled

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection until it ends."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, wire.WireError):
            while line := await reader.readline():
                request, size = wire.decode(line)
                await reader.readexactly(size)
                fields, body = await self.answer(request)
                writer.write(wire.encode({"ok": True, **fields}, len(body)) + body)
                await writer.drain()
        writer.close()

    async def answer(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """As the agent answers the same request."""
        job, key = str(request.get("job")), (str(request.get("job")), str(request.get("phase")))
        match request.get("op"):
            case "hello":
                return {"protocol": wire.PROTOCOL, "pid": os.getpid(), "time": time.time(), "version": ""}, b""
            case "start":
                if key not in self.phases:
                    self.phases[key] = self._read(str(request.get("script")))
                return {"state": "running", "pid": 1000 + self.rank, "started": time.time()}, b""
            case "status":
                return await self._status(key, float(request.get("wait") or 0.0)), b""
            case "follow":
                return await self._follow(key, int(request.get("offset") or 0), float(request.get("wait") or 0.0))
            case "cancel":
                self.cancelled.add(job)
                self.changed.set()
                self.changed = asyncio.Event()
                return {"gone": True, "left": []}, b""
            case _:
                return {}, b""

    def _read(self, script: str) -> tuple[bytes, float, list[list[int]]]:
        lines, hold, mark = _PRINT.search(script), _HOLD.search(script), _MARK.search(script)
        if mark and LEDGER in os.environ:
            with open(Path(os.environ[LEDGER]) / str(self.rank), "a") as ledger:
                ledger.write(f"{mark[1]}\n")
        text = "".join(f"endpoint {self.rank} line {n}\n" for n in range(int(lines[1]) if lines else 0)).encode()
        return text, time.monotonic() + (float(hold[1]) if hold else 0.0), [[len(text), time.time_ns()]]

    def _state(self, key: tuple[str, str]) -> dict[str, Any]:
        if key not in self.phases:
            return {"state": "absent"}
        pid = {"pid": 1000 + self.rank}
        if key[0] in self.cancelled:
            return {"state": "exited", "code": None, "signal": 15, **pid}
        if time.monotonic() >= self.phases[key][1]:
            return {"state": "exited", "code": 0, **pid}
        return {"state": "running", **pid}

    async def _ended(self, key: tuple[str, str], wait: float) -> dict[str, Any]:
        until = time.monotonic() + wait
        while (state := self._state(key))["state"] == "running" and (left := until - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), max(0.0, min(left, self.phases[key][1] - time.monotonic())))
        return state

    async def _status(self, key: tuple[str, str], wait: float) -> dict[str, Any]:
        return {**await self._ended(key, wait), "output_size": len(self.phases.get(key, (b"",))[0])}

    async def _follow(self, key: tuple[str, str], offset: int, wait: float) -> tuple[dict[str, Any], bytes]:
        text, _, times = self.phases.get(key, (b"", 0.0, []))
        data = text[offset:]
        state = self._state(key) if data else await self._ended(key, wait)
        end = state["state"] == "exited"
        return {**state, "times": times if data else [], "next": len(text), "output_size": len(text), "end": end}, data


async def listen(place: Path, first: int, end: int) -> None:
    """The sockets of these ranks, until killed; a line on the output when they answer."""
    for rank in range(first, end):
        await asyncio.start_unix_server(Endpoint(rank).serve, place / str(rank))
    print("ready", flush=True)
    await asyncio.Event().wait()


# Measuring


@contextlib.contextmanager
def own_server(count: int) -> Iterator[tuple[Client, int, Path]]:
    """The endpoints, and a server with this provider in its table; its client, its pid and its home."""
    home = Path(tempfile.mkdtemp(prefix="podway-endpoints-"))
    sockets = home / "endpoints" / "sockets"
    sockets.mkdir(parents=True)
    own = [sys.executable, "-m", "tools.bench.endpoints"]
    env = {**os.environ, "PODWAY_HOME": str(home)}
    with contextlib.ExitStack() as ending:
        ending.callback(shutil.rmtree, home, ignore_errors=True)
        for first in range(0, count, PROCESS_ENDPOINTS):
            words = ["serve", str(sockets), str(first), str(min(count, first + PROCESS_ENDPOINTS))]
            answering = ending.enter_context(subprocess.Popen([*own, *words], stdout=subprocess.PIPE))
            ending.callback(answering.kill)
            assert answering.stdout is not None and answering.stdout.readline()
        server = ending.enter_context(subprocess.Popen([*own, "server"], env=env))
        ending.callback(server.terminate)
        until((home / "server.json").exists)
        place = json.loads((home / "server.json").read_text())
        yield Client(url=place["url"], token=place["token"]), server.pid, home


def server_cpu(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(count: int) -> list[tuple[str, str, float, str]]:
    """(key, what, seconds, note) of each: one cluster over all endpoints, then many small ones."""
    with own_server(count) as (client, pid, _):
        rows = [*_one_cluster(client, pid, count), *_many_clusters(client, pid, count)]
        status = Path(f"/proc/{pid}/status").read_text()
        peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) / 1024
    key, what, took, note = rows[-1]
    return [*rows[:-1], (key, what, took, f"{note}; the server had at most {peak:.0f} MB over all of this")]


def task(slices: int, run: str) -> Task:
    """A task over so many slices; `run` is as the module docstring says."""
    return Task(run=run, slices=slices, resources=(Resources(accelerator=Accelerator(type=SLICE)),))


def _one_cluster(client: Client, pid: int, count: int) -> list[tuple[str, str, float, str]]:
    slices = count // HOSTS_PER_SLICE
    cpu, begun = [server_cpu(pid)], time.perf_counter()
    job = client.launch(task(slices, "print 1; hold 0.5"), cluster="all", provider="endpoints").job
    first, lines = _watch(client, "all", job or 0)
    first, ended = first - begun, time.perf_counter() - begun
    if lines != count:
        raise RuntimeError(f"{lines} lines came from {count} endpoints")
    cpu.append(server_cpu(pid))
    begun = time.perf_counter()
    job = client.run("all", "print 1").job
    _watch(client, "all", job or 0)
    command = time.perf_counter() - begun
    cpu.append(server_cpu(pid))
    job = client.exec("all", task(slices, "hold 600")).job
    until(lambda: client.job("all", job or 0).state == "RUNNING")
    cpu.append(server_cpu(pid))
    begun = time.perf_counter()
    client.cancel("all")
    until(lambda: bool(client.job("all", job or 0).ended))
    cancelled = time.perf_counter() - begun
    cpu.append(server_cpu(pid))
    client.down("all")
    until(lambda: not client.clusters())
    used = [f"server: {after - before:.1f} s of CPU" for before, after in pairwise(cpu)]
    return [
        ("endpoints", f"launch on one cluster of {count:,}, to the first line", first, f"job's end after {ended:.1f} s; {used[0]}"),
        ("endpoints-run", "run --all-hosts, to its end", command, used[1]),
        ("endpoints-cancel", "cancel, until every rank is known to be gone", cancelled, used[3]),
    ]  # fmt: skip


def _many_clusters(client: Client, pid: int, count: int) -> list[tuple[str, str, float, str]]:
    slices = 5
    names = [f"c{number}" for number in range(count // HOSTS_PER_SLICE // slices)]
    cpu, begun = server_cpu(pid), time.perf_counter()
    for name in names:
        client.launch(task(slices, "print 1; hold 0.5"), cluster=name, provider="endpoints")
    launched = time.perf_counter() - begun
    for name in names:
        while not client.job(name, 1, wait=5).ended:
            pass
    ended = time.perf_counter() - begun
    used = server_cpu(pid) - cpu
    begun = time.perf_counter()
    client.clusters()
    listed = time.perf_counter() - begun
    note = f"accepted after {launched:.1f} s; server: {used:.1f} s of CPU; listing them takes {1000 * listed:.0f} ms"
    what = f"{len(names)} launches of {slices * HOSTS_PER_SLICE} each at once, until all jobs have ended"
    return [("endpoints-many", what, ended, note)]


def _watch(client: Client, cluster: str, job: int) -> tuple[float, int]:
    """(when the first line of the log came, how many came)."""
    first, lines = 0.0, 0
    for frame in client.watch(cluster, job, raw=True):
        if frame.kind == "log":
            first = first or time.perf_counter()
            lines += frame.text.count("endpoint ")
    return first, lines


def until(true: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait for it."""
    until = time.monotonic() + seconds
    while not true():
        if time.monotonic() > until:
            raise RuntimeError("it did not happen in time")
        time.sleep(0.02)


def main(argv: list[str]) -> int:
    """`serve DIRECTORY FIRST END`, or `server` with the arguments of podway.server.main."""
    if argv[0] == "serve":
        asyncio.run(listen(Path(argv[1]), int(argv[2]), int(argv[3])))
        return 0
    register(ProviderRow(name="endpoints", opens="tools.bench.endpoints:open_provider", simulated=True))
    return serve_podway(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
