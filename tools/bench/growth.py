"""`make bench-growth`: what the control plane costs for 100, 1,000 and 10,000 hosts.

The hosts are the sockets of endpoints.py: the store, the server, the gangs, the links and the protocol are real, and a host costs
nothing. Clusters of 100 hosts each are launched, one after the other, each with a job that runs on. Measured are the server's CPU until
all jobs run, its CPU while they run and nobody asks anything, its memory, and how soon `podway status` ends. A cost per host that
grows with their number is what this table is there to show.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from tools.bench import endpoints, report
from tools.bench.spine import PODWAY

from podway.server.client import Client

SIZES = (100, 1_000, 10_000)
CLUSTER_HOSTS = 100
WATCHED_S = 20.0
STATUS_RUNS = 5


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table."""

    hosts: int
    clusters: int
    launch_s: float
    launch_cpu_s: float
    idle_cpu: float
    memory_mb: float
    status_s: float
    down_cpu_s: float

    def row(self) -> list[str]:
        """As the page shows it."""
        return [
            f"{self.hosts:,} in {self.clusters}",
            f"{self.launch_s:.1f} s",
            f"{1000 * self.launch_cpu_s / self.hosts:.2f} ms",
            f"{100 * self.idle_cpu:.1f} %",
            f"{1e6 * self.idle_cpu / self.hosts:.0f} µs",
            f"{self.memory_mb:.0f} MB",
            f"{1000 * self.down_cpu_s / self.hosts:.2f} ms",
            f"{self.status_s:.2f} s",
        ]


HEADS = [
    "hosts, and clusters",
    "launched, until all jobs run",
    "server CPU for it, a host",
    "server CPU afterwards",
    "of it, a host and second",
    "server memory",
    "server CPU to delete, a host",
    "`podway status`",
]


def measure(hosts: int, cluster_hosts: int = CLUSTER_HOSTS, watched_s: float = WATCHED_S) -> Growth:
    """Launch, watch and delete so many hosts."""
    names = [f"g{number}" for number in range(hosts // cluster_hosts)]
    with endpoints.own_server(hosts) as (client, pid, home):
        cpu, begun = endpoints.server_cpu(pid), time.perf_counter()
        for name in names:
            task = endpoints.task(cluster_hosts // endpoints.HOSTS_PER_SLICE, "hold 36000")
            client.launch(task, cluster=name, provider="endpoints")
        endpoints.until(lambda: _running(client) == len(names), 1800)
        launched, used = time.perf_counter() - begun, endpoints.server_cpu(pid) - cpu
        cpu, begun = endpoints.server_cpu(pid), time.perf_counter()
        time.sleep(watched_s)
        idle = (endpoints.server_cpu(pid) - cpu) / (time.perf_counter() - begun)
        memory, status = _memory(pid), _status(home)
        cpu = endpoints.server_cpu(pid)
        for name in names:
            client.down(name)
        endpoints.until(lambda: not client.clusters(), 1800)
        return Growth(
            hosts=hosts,
            clusters=len(names),
            launch_s=launched,
            launch_cpu_s=used,
            idle_cpu=idle,
            memory_mb=memory,
            status_s=status,
            down_cpu_s=endpoints.server_cpu(pid) - cpu,
        )


def _running(client: Client) -> int:
    time.sleep(0.5)
    return sum(1 for view in client.clusters() if view.open_jobs and client.job(view.name, 1).state == "RUNNING")


def _memory(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")) / 1024


def _status(home: Path) -> float:
    """The median of a few runs of the command, from typing to its end."""
    env = {**os.environ, "PODWAY_HOME": str(home)}
    took = []
    for _ in range(STATUS_RUNS):
        begun = time.perf_counter()
        subprocess.run([PODWAY, "status"], env=env, check=True, capture_output=True)
        took.append(time.perf_counter() - begun)
    return sorted(took)[len(took) // 2]


def page(rows: Sequence[Growth]) -> str:
    """The section of docs/benchmarks.md."""
    text = [
        "## Growth (`make bench-growth`)",
        f"Machine: {report.machine()}.",
        f"The control plane alone, over hosts that are sockets of one process: clusters of {CLUSTER_HOSTS} hosts, each with a job "
        "that runs on. The cost of a host must not grow with their number; `podway status` has 0.3 s.",
        report.table(HEADS, [row.row() for row in rows]),
    ]
    return "\n\n".join(text)


def main(argv: list[str] | None = None) -> int:
    """Measure each size; leave nothing running."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.growth")
    parser.add_argument("--hosts", type=int, nargs="*", default=[*SIZES], help="How many hosts, one after the other.")
    options = parser.parse_args(argv)
    report.end_cleanly()
    rows = []
    for hosts in options.hosts:
        rows.append(measure(hosts))
        print(" | ".join(rows[-1].row()), flush=True)
    if tuple(options.hosts) == SIZES:
        report.write_section("growth", page(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
