"""`make bench-server`: how soon the server answers while thousands of requests are open. Writes docs/benchmarks.md.

A server of its own drives one simulated slice of two hosts with a job that prints and sleeps. This process opens, one after the
other, the loads below, and at each measures the time of `GET /v1/clusters` (new connection, request, answer), one request at a time,
and the server's CPU while nothing happens. Waiters ask again when their minute is over, as a client does.
"""

import asyncio
import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from tools.bench import report
from tools.bench.endpoints import server_cpu

from podway.server.client import Client
from podway.task.task import Accelerator, Resources, Task

WAITERS, FOLLOWERS, DEAF = 2000, 200, 60
REQUESTS, IDLE_S, SETTLE_S = 500, 60.0, 5.0  # a minute, so that every waiter asks again once in it
WAIT = "/v1/clusters/bench/jobs/1?wait=60"
WATCH = "/v1/clusters/bench/jobs/1/watch"


class Target:
    """Where the server is."""

    def __init__(self, home: Path) -> None:
        found = json.loads((home / "server.json").read_text())
        self.host, self.port = found["url"].removeprefix("http://").split(":")
        self.token, self.pid = found["token"], found["pid"]

    async def ask(self, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A request that is sent; its answer is still to be read."""
        reader, writer = await asyncio.open_connection(self.host, int(self.port), limit=1 << 16)
        head = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self.token}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode())
        await writer.drain()
        return reader, writer

    async def timed(self, path: str) -> float:
        """Seconds until the whole answer is here."""
        begun = time.perf_counter()
        reader, writer = await self.ask(path)
        answer = await reader.read(-1)
        writer.close()
        if b" 200 " not in answer[:20]:
            raise RuntimeError(answer[:200].decode())
        return time.perf_counter() - begun


@contextlib.asynccontextmanager
async def held(target: Target, path: str, count: int, *, read: bool) -> AsyncIterator[None]:
    """So many requests open; with `read`, what comes is read and an ended one is asked again."""

    async def one() -> None:
        while True:
            reader, writer = await target.ask(path)
            try:
                if not read:
                    await asyncio.Event().wait()
                while await reader.read(1 << 16):
                    pass
            finally:
                writer.close()

    tasks = []
    for _ in range(count):
        tasks.append(asyncio.create_task(one()))
        if len(tasks) % 50 == 0:
            await asyncio.sleep(0.05)
    await asyncio.sleep(SETTLE_S)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def row(target: Target, what: str) -> list[str]:
    """One line of the table: the answers' times, and the CPU of the server while it is left alone."""
    times = sorted([await target.timed("/v1/clusters") for _ in range(REQUESTS)])
    before, begun = server_cpu(target.pid), time.perf_counter()
    await asyncio.sleep(IDLE_S)
    idle = (server_cpu(target.pid) - before) / (time.perf_counter() - begun)
    cells = [f"{1000 * times[int(part * (REQUESTS - 1))]:.1f}" for part in (0.5, 0.99, 1.0)]
    found = [what, *cells, f"{100 * idle:.1f} %"]
    print(" | ".join(found), flush=True)
    return found


async def measure(target: Target) -> list[list[str]]:
    """All loads."""
    rows = [await row(target, "nothing else")]
    async with held(target, WAIT, WAITERS, read=True):
        rows.append(await row(target, f"{WAITERS:,} waiters"))
        async with held(target, WATCH, FOLLOWERS, read=True):
            rows.append(await row(target, f"{WAITERS:,} waiters and {FOLLOWERS} log followers"))
    async with held(target, "/v1/clusters/bench/jobs/2/watch", DEAF, read=False):
        rows.append(await row(target, f"{DEAF} followers of a log of 200,000 lines that do not read"))
    return rows


def main() -> int:
    """Measure; leave nothing running."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(most, 16384)), most))
    home = Path(tempfile.mkdtemp(prefix="podway-bench-"))
    os.environ["PODWAY_HOME"] = str(home)
    client = Client()
    slice_ = (Resources(accelerator=Accelerator(type="v4-16")),)
    try:
        client.launch(Task(run="echo begun; sleep 3600", resources=slice_), cluster="bench")
        while client.job("bench", 1).state != "RUNNING":
            time.sleep(0.1)
        client.exec("bench", Task(run="seq 100000"))
        while client.job("bench", 2, wait=30).state != "SUCCEEDED":
            pass
        rows = asyncio.run(measure(Target(home)))
    finally:
        podway = str(Path(sys.executable).parent / "podway")
        subprocess.run([podway, "down", "-a", "-y"], capture_output=True)
        subprocess.run([podway, "server", "stop"], capture_output=True)
        shutil.rmtree(home, ignore_errors=True)
    headers = ["open at the same time", "median ms", "p99 ms", "most ms", "server CPU when idle"]
    text = (
        f"## Server (`make bench-server`)\n\nMachine: {report.machine()}.\n\n"
        f"`GET /v1/clusters`, {REQUESTS} times one after the other, each on a connection of its own (budget: p99 50 ms with "
        f"{WAITERS:,} waiters and {FOLLOWERS} followers; 5 % of a core for the waiters), and the server's CPU over {IDLE_S:g} s "
        "in which nothing is asked and nothing happens.\n\n" + report.table(headers, rows)
    )
    report.write_section("server", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
