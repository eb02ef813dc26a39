"""`make bench`: what the spine costs, beside SkyPilot and dstack in the same run.

1. CPU seconds of the commands everybody types; 2. from `launch` and `exec` to the first line of user output on simulated hosts;
3. merging the logs of 64 ranks; 4. `status` over 10,000 past runs. Prints the tables and writes them into docs/benchmarks.md.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.bench import logmerge, peers, report

from podway.control import transitions
from podway.control.records import Cluster, ClusterState, Event, Job, JobState
from podway.control.store import open_store, sqlite_url
from podway.order import Order
from podway.task.task import Task

RUNS = 7
PODWAY = str(Path(sys.executable).parent / "podway")


def cpu_of(command: list[str], env: dict[str, str], runs: int = RUNS) -> tuple[float, float, int]:
    """(median CPU seconds, median wall seconds, exit code) of a command, the first run thrown away."""
    cpu, wall, code = [], [], 0
    for turn in range(runs + 1):
        begun = time.perf_counter()
        child = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = code = os.waitstatus_to_exitcode(status)
        if turn:
            wall.append(time.perf_counter() - begun)
            cpu.append(usage.ru_utime + usage.ru_stime)
    return statistics.median(cpu), statistics.median(wall), code


def cli_rows(env: dict[str, str]) -> list[list[str]]:
    """CPU of each command for the three tools."""
    commands = {
        "--version": (["podway", "--version"], ["sky", "--version"], ["dstack", "--version"]),
        "--help": (["podway", "--help"], ["sky", "--help"], ["dstack", "--help"]),
        "status": (["podway", "status"], ["sky", "status"], ["dstack", "ps"]),
        "tpus": (["podway", "tpus"], ["sky", "gpus", "list", "tpu-v6e"], ["dstack", "offer", "--gpu", "tpu"]),
    }
    found: dict[str, dict[str, str]] = {name: {} for name in commands}
    numbers: dict[str, dict[str, float]] = {name: {} for name in commands}
    for name, (ours, _, _) in commands.items():
        cpu, wall, code = cpu_of([PODWAY, *ours[1:]], env)
        numbers[name]["podway"] = cpu
        found[name]["podway"] = _cell(cpu, wall, code)
    for index, peer in enumerate(("sky", "dstack"), 1):
        bin_dir = peers.install(peer)
        if bin_dir is None:
            continue
        with peers.home_of(peer, bin_dir) as there:
            for name, triple in commands.items():
                command = triple[index]
                cpu, wall, code = cpu_of([str(bin_dir / command[0]), *command[1:]], there, runs=3)
                numbers[name][peer] = cpu
                found[name][peer] = _cell(cpu, wall, code)
        print(f"measured {peer} {peers.version(peer, bin_dir)}", flush=True)
    rows = []
    for name, cells in found.items():
        own = numbers[name]["podway"]
        least = min((value for peer, value in numbers[name].items() if peer != "podway"), default=None)
        rows.append(
            [
                name,
                *(cells.get(tool, "-") for tool in ("podway", "sky", "dstack")),
                f"{least / own:.0f}x" if least else "-",
            ]
        )
    return rows


def _cell(cpu: float, wall: float, code: int) -> str:
    return f"{cpu:.3f} ({wall:.2f} wall)" + (f", exit {code}" if code else "")


def first_output(command: list[str], env: dict[str, str], mark: str, begins: str = "(") -> float:
    """Seconds from starting a command until a line with the mark is on its output: of a job, or one that begins otherwise."""
    begun = time.perf_counter()
    seen = 0.0
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if not seen and mark in line and line.startswith(begins):
                seen = time.perf_counter() - begun
    if not seen:
        raise RuntimeError(f"{command} never printed {mark!r}")
    return seen


def launch_rows(env: dict[str, str]) -> list[list[str]]:
    """Launch and exec on 8 simulated hosts."""
    base = [PODWAY, "launch", "-y", "-c", "bench", "--tpus", "v6e-32", "echo user output"]
    cold, warm, execs = [], [], []
    for _ in range(3):
        subprocess.run([PODWAY, "server", "stop"], env=env, capture_output=True)
        cold.append(first_output(base, env, "user output"))
        subprocess.run([PODWAY, "down", "-y", "bench"], env=env, capture_output=True, check=True)
    for _ in range(RUNS):
        warm.append(first_output(base, env, "user output"))
        execs.append(first_output([PODWAY, "exec", "bench", "echo user output"], env, "user output"))
        subprocess.run([PODWAY, "down", "-y", "bench"], env=env, capture_output=True, check=True)
    rows = []
    for name, values, limit in (
        ("launch on 8 hosts, server not yet running", cold, "-"),
        ("launch on 8 hosts, server running", warm, "2.0"),
        ("exec on 8 warm hosts", execs, "0.5"),
    ):
        rows.append([name, f"{statistics.median(values):.2f}", f"{min(values):.2f}", f"{max(values):.2f}", limit])
    return rows


def status_row(env: dict[str, str], home: Path, past: int = 10_000) -> list[str]:
    """`podway status` over a database with many past runs."""
    subprocess.run(
        [PODWAY, "server", "stop"], env=env, capture_output=True, check=True
    )  # it would drive what is written here
    store = open_store(sqlite_url(home / "podway.db"))
    order = Order(accelerator_type="v6e-16", provider="local", hosts_per_slice=4, chips_per_host=4)
    for number in range(past):
        cluster = Cluster(
            id=f"past{number}", name=f"p{number}", user="b", state=ClusterState.INIT, goal="gone", order=order, created=1.0 + number,
            active_at=1.0,
        )  # fmt: skip
        store.add_cluster(cluster)
        job = store.add_job(
            Job(
                cluster_id=cluster.id, number=0, name=None, user="b", state=JobState.PENDING, task=Task(), submitted=1.0
            )
        )
        store.save_job(_ended(job))
        event = Event(time=1.0, cluster_id=cluster.id, text="is gone")
        store.save_cluster(_gone(cluster), events=(event,))
    store.engine.dispose()
    cpu, wall, _ = cpu_of([PODWAY, "status"], env)
    return [f"status with {past:,} past runs", f"{wall:.3f}", f"{cpu:.3f} CPU", "-", "0.3"]


def merge_table() -> str:
    """Log merging, each log in a process of its own."""
    rows = [
        [case.name, f"{case.lines:,}", f"{case.shown:,}", f"{case.lines_per_s:,.0f}", f"{case.peak_mb:.0f}"]
        for case in logmerge.run().cases
    ]
    return report.table(["log", "lines in", "lines shown", "lines per CPU second", "peak MB"], rows)


def _ended(job: Job) -> Job:
    return transitions.mark_ended(job, JobState.SUCCEEDED, "", 2.0)


def _gone(cluster: Cluster) -> Cluster:
    return transitions.mark_gone(cluster, "", 2.0)


def main() -> int:
    """Measure everything; leave nothing running."""
    home = Path(tempfile.mkdtemp(prefix="podway-bench-"))
    env = {**os.environ, "PODWAY_HOME": str(home), "NO_COLOR": "1"}
    try:
        subprocess.run([PODWAY, "status"], env=env, capture_output=True, check=True)  # starts the server
        parts = [f"Machine: {report.machine()}."]
        cli = report.table(["command", "podway CPU s", "SkyPilot CPU s", "dstack CPU s", "least ratio"], cli_rows(env))
        parts += ["### CPU of the command line (median; podway of 7 runs, peers of 3)", cli]
        print("\n".join(parts[1:]), flush=True)
        rows = [*launch_rows(env), status_row(env, home)]
        parts += ["### Overhead (seconds, from typing to the first line of user output)",
                  report.table(["what", "median", "least", "most", "budget"], rows)]  # fmt: skip
        print("\n".join(parts[-2:]), flush=True)
        parts += [
            "### Merging logs of 64 ranks x 10,000 lines (budget: 200,000 lines per second of one core, 150 MB)",
            merge_table(),
        ]
        print("\n".join(parts[-2:]), flush=True)
        report.write_section("spine", "## Spine (`make bench`)\n\n" + "\n\n".join(parts))
        return 0
    finally:
        subprocess.run([PODWAY, "down", "-a", "-y"], env=env, capture_output=True)
        subprocess.run([PODWAY, "server", "stop"], env=env, capture_output=True)
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
