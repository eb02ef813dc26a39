"""Replicas are killed, updated and scaled, and the gateway is replaced, under load: no request fails.

The only requests that end early are streams of a replica that was killed, and those say so.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from podway.gateway.table import Backend, RoutedService
from tests.conftest import free_port, wait_until

from .load_run import load
from .test_command import gateway, put

PROGRAM = Path(__file__).with_name("replica_program.py")


class Replicas:
    """Processes that answer, and the table that names those that take traffic."""

    def __init__(self, routes: Path) -> None:
        self.routes = routes
        self.processes: dict[str, tuple[subprocess.Popen[bytes], int]] = {}
        self.count = 0

    def start(self) -> str:
        name, port = f"r{self.count}", free_port()
        self.count += 1
        command = [sys.executable, str(PROGRAM), str(port), name]
        self.processes[name] = (subprocess.Popen(command), port)
        wait_until(lambda: _answers(port), 60, f"replica {name}")
        return name

    def route(self, *names: str) -> None:
        backends = tuple(Backend(id=name, address=f"127.0.0.1:{self.processes[name][1]}") for name in names)
        put(self.routes, RoutedService(name="chat", model="m", auth=False, hold_s=120.0, backends=backends))

    def end(self, name: str, number: int = signal.SIGTERM) -> None:
        process, _ = self.processes.pop(name)
        process.send_signal(number)
        process.wait(60)


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
        return True
    return False


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[Replicas]:
    made = Replicas(tmp_path / "routes.json")
    yield made
    for name in list(made.processes):
        made.end(name, signal.SIGKILL)


async def faults(replicas: Replicas, rounds: int) -> None:
    """What happens to a service in its life, `rounds` times."""
    start = asyncio.to_thread
    first, second = await start(replicas.start), await start(replicas.start)
    replicas.route(first, second)
    with gateway("--routes", str(replicas.routes)) as (process, url):
        async with load(url) as run:
            for _ in range(rounds):
                await run.more()
                cut = run.outcomes["cut"]
                replicas.end(second, signal.SIGKILL)  # the table still names it
                await run.more()
                assert run.outcomes["cut"] - cut <= 6  # one for each client at most
                replicas.route(first)
                third = await start(replicas.start)  # a rolling update: the new one beside the old, then alone
                replicas.route(first, third)
                await run.more()
                replicas.route(third)
                await run.more(40)  # every stream of before is over: a client has one at a time
                replicas.end(first)
                four = [third, *[await start(replicas.start) for _ in range(3)]]  # 1 -> 4 -> 1 -> 0 -> 1
                replicas.route(*four)
                run.names.clear()
                await run.more(40)
                await run.until(lambda: len(run.names) > 1)  # a machine may be slow to tell the gateway
                replicas.route(third)
                await run.more(40)
                for name in four[1:]:
                    replicas.end(name)
                replicas.route()
                await run.pause()  # they wait
                replicas.end(third)
                first, second = await start(replicas.start), await start(replicas.start)
                replicas.route(first)
                await run.more()
                replicas.route(first, second)
                await run.more()
            os.kill(process.pid, signal.SIGHUP)
            await run.more(60)
        assert run.failures == []
        assert run.outcomes["stream"] and run.outcomes["small"]


@pytest.mark.e2e
def test_no_request_fails(replicas: Replicas) -> None:
    asyncio.run(asyncio.wait_for(faults(replicas, 1), 400))


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_no_request_fails_for_long(replicas: Replicas) -> None:
    asyncio.run(asyncio.wait_for(faults(replicas, 20), 2900))
