"""`make bench-scale`: 64 real hosts on this machine, and 1,000 endpoints of which only the protocol is real.

1. 64 namespace hosts, each with its own network, root and sshd, as the ssh provider finds a person's machines. What this machine, the
   laptop, sends to them goes over an uplink shaped to 100 Mbit/s (tc-tbf(8)); from host to host it does not. From `launch` to the
   first line of output, a command on all hosts, and the end;
2. a 200 MB working directory, by Podway and by one rsync for each host at once, in the same run: all of it, nothing new, and one
   file changed; and 100,000 small files to one host, by both;
3. a log of 64 x 10,000 lines followed by the command line, and read again from the archive;
4. 1,000 endpoints (endpoints.py): what the control plane alone takes.

The predictions were written before the first run and are left as they were; the tables hold them beside what was measured.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from tools.bench import endpoints, report
from tools.bench.spine import PODWAY, first_output

from podway.sandbox.hosts import pool_text
from podway.sandbox.hosts.netns import NetnsHosts

HOSTS = 64
ACCELERATOR = "v6e-256"  # 64 hosts of 4 chips
MEGABYTES = 200
FEW = 20  # rsync sends all of it to each of 64 hosts over one uplink: 100 s
UPLINK = "100mbit"
LINES = 10_000
MANY = 100_000
NOTE_ONE = "from typing to the last host, by the file's change time there; goal: rsync's time"
CHANGES = 5  # how often a file is changed and sent, by either
PARTS = ("files", "endpoints")
WIDTH = 96
PREDICTIONS = {
    # Login, claim and start of an agent are about 0.4 s of CPU for a host, and all of them share two cores here.
    "launch": "13 s",
    "run": "2.5 s",
    "down": "6 s",
    # 200 MB at 12.5 MB/s are 16 s; then each host reads, hashes and writes it, about 1.5 s of CPU, on two cores.
    "sync": "65 s",
    "rsync": "1,070 s",
    "sync-same": "2 s",
    "sync-one": "3 s",
    "rsync-one": "12 s",
    # The renderer alone does 370,000 lines per CPU second; ssh, JSON and the terminal's end take as much again, twice.
    "follow": "100,000 lines/s",
    "archive": "150,000 lines/s",
    "endpoints": "3 s",
}


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """What the server has used so far."""

    cpu_s: float
    peak_mb: float


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the page."""

    key: str
    what: str
    seconds: float
    result: str
    note: str = ""

    def row(self) -> list[str]:
        return [self.what, PREDICTIONS.get(self.key, "-"), self.result, self.note]


class Lab:
    """The hosts, and a Podway that knows them."""

    def __init__(self, made: NetnsHosts, home: Path) -> None:
        self.made = made
        self.home = home
        self.env = {**os.environ, "PODWAY_HOME": str(home), "NO_COLOR": "1"}

    def podway(self, *words: str) -> float:
        """Seconds a command takes; what it prints is looked at only when it fails."""
        begun = time.perf_counter()
        done = subprocess.run([PODWAY, *words], env=self.env, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"podway {' '.join(words)} failed: {(done.stdout + done.stderr)[-2000:]}")
        return time.perf_counter() - begun

    def server(self) -> Spent:
        """Of the server's whole life."""
        return spent(json.loads((self.home / "server.json").read_text())["pid"])


def spent(pid: int) -> Spent:
    """CPU and peak memory of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    ticks = int(fields[11]) + int(fields[12])
    status = Path(f"/proc/{pid}/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    return Spent(cpu_s=ticks / os.sysconf("SC_CLK_TCK"), peak_mb=peak / 1024)


@contextmanager
def lab(hosts: int, accelerator: str) -> Iterator[Lab]:
    """The hosts and the server for as long as the block lasts; nothing is left of either."""
    home = Path(tempfile.mkdtemp(prefix="podway-scale-"))
    homes = Path(tempfile.mkdtemp(prefix="podway-scale-homes-"))
    made = NetnsHosts(hosts, homes)
    here = Lab(made, home)
    try:
        (home / "ssh").mkdir(mode=0o700)
        (home / "ssh" / "lab.yaml").write_text(pool_text(made, accelerator))
        made.shape(UPLINK)
        here.podway("status")  # starts the server
        yield here
    finally:
        subprocess.run([PODWAY, "down", "-a", "-y"], env=here.env, capture_output=True)
        subprocess.run([PODWAY, "server", "stop"], env=here.env, capture_output=True)
        made.close()
        shutil.rmtree(homes, ignore_errors=True)
        shutil.rmtree(home, ignore_errors=True)


# 1. launch, run, down


def launching(here: Lab, accelerator: str) -> list[Measured]:
    """The cluster comes up, and a command runs on all of it."""
    hosts = len(here.made.hosts)
    before = here.server().cpu_s
    base = [PODWAY, "launch", "-y", "-c", "scale", "--infra", "ssh/lab", "--tpus", accelerator, "echo user output"]
    first = first_output(base, here.env, "user output")
    cpu = here.server().cpu_s - before
    runs = [here.podway("run", "scale", "--all-hosts", "true") for _ in range(3)]
    return [
        seconds("launch", f"launch on {hosts} hosts, to the first line", first, f"server: {cpu:.1f} s of CPU"),
        spread("run", "run --all-hosts true, to its end", runs),
    ]


def seconds(key: str, what: str, value: float, note: str = "") -> Measured:
    """A line whose result is a time."""
    return Measured(key=key, what=what, seconds=value, result=f"{value:,.1f} s", note=note)


def spread(key: str, what: str, values: Sequence[float], note: str = "") -> Measured:
    """The median of several times, and between what they lay."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return seconds(key, what, middle, f"of {len(values)}: {low:.1f} to {high:.1f} s" + (note and f"; {note}"))


# 2. files


def make_workdir(place: Path, megabytes: int) -> Path:
    """Files that do not compress: nine tenths in files of 10 MB, the rest in sources of 4 to 40 KB."""
    chance = random.Random(megabytes)
    place.mkdir()
    large = max(1, megabytes * 9 // 100)
    for number in range(large):
        (place / f"data{number}.bin").write_bytes(chance.randbytes(10_000_000))
    left, number = max(0, megabytes - 10 * large) * 1_000_000, 0
    while left > 0:
        folder = place / f"package{number % 40}"
        folder.mkdir(exist_ok=True)
        size = min(left, chance.randrange(4_000, 40_000))
        (folder / f"module{number}.py").write_bytes(chance.randbytes(size))
        left, number = left - size, number + 1
    return place


def syncing(here: Lab, workdir: Path) -> list[Measured]:
    """The working directory to all hosts: the time of `podway exec` of a command that does nothing, sync and all."""
    hosts = len(here.made.hosts)
    before = here.server()
    whole = here.podway("exec", "scale", "--workdir", str(workdir), "true")
    note = f"server: {here.server().cpu_s - before.cpu_s:.1f} s of CPU, at most {here.server().peak_mb:.0f} MB"
    same = here.podway("exec", "scale", "--workdir", str(workdir), "true")
    there, ended = zip(*[changing(here, workdir) for _ in range(CHANGES)], strict=True)
    check(here, workdir, "/root/sky_workdir")
    return [
        seconds("sync", f"Podway: {size_of(workdir)} to {hosts} hosts", whole, note),
        seconds("sync-same", "Podway: nothing new", same),
        spread(
            "sync-one", "Podway: one file of 10 MB changed in 100 bytes, until it is on every host", there, NOTE_ONE
        ),
        spread("sync-one-run", "Podway: the same, until a command has run on every host", ended),
    ]


def changing(here: Lab, workdir: Path) -> tuple[float, float]:
    """Seconds from typing until a changed file is in its place on the last host, by its own change time, and to the command's end."""
    change(workdir)
    begun = time.time()
    took = here.podway("exec", "scale", "--workdir", str(workdir), "true")
    homes = [here.made.files(number) for number in range(len(here.made.hosts))]
    return max((home / "root/sky_workdir/data0.bin").stat().st_ctime for home in homes) - begun, took


def many_files(here: Lab, place: Path) -> list[Measured]:
    """Small files by the hundred thousand, to one host."""
    for folder in range(MANY // 1000):
        (place / f"d{folder}").mkdir(parents=True)
        for number in range(1000):
            (place / f"d{folder}" / f"f{number}.py").write_bytes(b"%d %d " % (folder, number) * 100)
    here.podway("launch", "-y", "-d", "-c", "many", "--infra", "local", "--tpus", "v6e-1", "true")
    took = here.podway("exec", "many", "--workdir", str(place), "true")
    same = here.podway("exec", "many", "--workdir", str(place), "true")
    here.podway("down", "-y", "many")
    ssh, host = ssh_command(here), here.made.hosts[0].address
    begun = time.perf_counter()
    subprocess.run(["rsync", "-a", "-e", ssh, f"{place}/", f"root@{host}:/root/many/"], check=True)
    theirs = time.perf_counter() - begun
    return [
        seconds("many", f"Podway: {MANY:,} files to a host of this machine", took, "goal: 60 s; by way of the server"),
        seconds("many-same", f"Podway: {MANY:,} files, nothing new", same),
        seconds("rsync-many", f"rsync: {MANY:,} files to a host", theirs),
    ]  # fmt: skip


def ssh_command(here: Lab) -> str:
    """What rsync logs in with."""
    return f"ssh -i {here.made.key} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"


def change(workdir: Path) -> None:
    """A few bytes of one large file."""
    with open(workdir / "data0.bin", "r+b") as file:
        file.seek(4_000_000)
        file.write(os.urandom(100))


def check(here: Lab, workdir: Path, target: str) -> None:
    """Every host has what was sent."""
    for number, name in itertools.product(range(len(here.made.hosts)), ("data0.bin", "package0/module0.py")):
        there = here.made.files(number) / target.lstrip("/") / name
        if (workdir / name).exists() and there.read_bytes() != (workdir / name).read_bytes():
            raise RuntimeError(f"{name} on host {number} is not what was sent")


def size_of(workdir: Path) -> str:
    """In words."""
    files = [path for path in workdir.rglob("*") if path.is_file()]
    return f"{sum(path.stat().st_size for path in files) / 1e6:.0f} MB in {len(files):,} files"


def rsyncing(here: Lab, workdir: Path) -> list[Measured]:
    """The same by one rsync for each host, all at once, as scripts do it from a laptop."""
    hosts = here.made.hosts
    ssh = ssh_command(here)

    def all_hosts() -> float:
        begun = time.perf_counter()
        children = [
            subprocess.Popen(
                ["rsync", "-a", "--delete", "-e", ssh, f"{workdir}/", f"root@{host.address}:/root/rsync_workdir/"]
            )
            for host in hosts
        ]
        codes = [child.wait() for child in children]
        if any(codes):
            raise RuntimeError(f"rsync exited with {codes}")
        return time.perf_counter() - begun

    print(f"rsync of {size_of(workdir)} to {len(hosts)} hosts begins ...", flush=True)
    whole = all_hosts()
    again = []
    for _ in range(CHANGES):
        change(workdir)
        again.append(all_hosts())
    check(here, workdir, "/root/rsync_workdir")
    return [
        seconds("rsync", f"rsync: {size_of(workdir)} to {len(hosts)} hosts", whole, f"{len(hosts)} at once"),
        spread("rsync-one", "rsync: one file of 10 MB changed in 100 bytes", again, "it compares blocks"),
    ]


# 3. logs


def logging(here: Lab) -> list[Measured]:
    """Every line of every host, as they come and again from the archive."""
    hosts = len(here.made.hosts)
    script = f"seq -f \"$(printf 'host %2d step %%7.0f' $PODWAY_RANK) {'.' * (WIDTH - 24)}\" {LINES}"
    rows = []
    for key, words, what in (
        ("follow", ["exec", "scale", "--raw", script], "followed as it is written"),
        ("archive", ["logs", "scale", "--raw", "--no-follow"], "read again from the archive"),
    ):
        before = here.server()
        lines, took, peak = read_log([PODWAY, *words], here.env)
        after = here.server()
        if lines != hosts * LINES:
            raise RuntimeError(f"{lines:,} lines came of {hosts * LINES:,}")
        note = (
            f"{lines:,} lines; server {after.cpu_s - before.cpu_s:.1f} s of CPU, at most {after.peak_mb:.0f} MB; "
            f"command at most {peak:.0f} MB"
        )
        rate = f"{lines / took:,.0f} lines/s ({took:.1f} s)"
        rows.append(
            Measured(key=key, what=f"log of {hosts} x {LINES:,} lines, {what}", seconds=took, result=rate, note=note)
        )
    return rows


def read_log(command: list[str], env: dict[str, str]) -> tuple[int, float, float]:
    """(lines, seconds from typing to the last of them, peak MB of the command)."""
    begun, last, lines, peak = time.perf_counter(), 0.0, 0, 0.0
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, bufsize=1 << 20) as child:
        assert child.stdout is not None
        stop = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not stop.wait(0.2):
                try:
                    peak = max(peak, spent(child.pid).peak_mb)
                except (OSError, StopIteration):
                    return

        watcher = threading.Thread(target=watch)
        watcher.start()
        for line in child.stdout:
            if b" step " in line:
                lines += 1
                last = time.perf_counter()
        stop.set()
        watcher.join()
    return lines, last - begun, peak


# the page


def page(parts: Sequence[tuple[str, list[Measured]]]) -> str:
    """The section of docs/benchmarks.md."""
    text = [
        "## Scale (`make bench-scale`)",
        f"Machine: {report.machine()}. All hosts share its cores, with everything else that runs there.",
        f"What goes from this machine to the hosts goes at {UPLINK.replace('mbit', ' Mbit/s')}; from host to host it is not held back.",
    ]
    for title, rows in parts:
        text += [f"### {title}", report.table(["what", "predicted", "measured", "note"], [row.row() for row in rows])]
        found = {row.key: row.seconds for row in rows}
        if "rsync" in found and "sync" in found:
            text.append(
                f"rsync takes {found['rsync'] / found['sync']:.1f} times as long as Podway for all of it (goal: 5), "
                f"{found['rsync-one'] / found['sync-one']:.1f} times as long after one change. rsync logs in to every host; "
                "Podway is logged in, and starts a command on every host when the files are there."
            )
    return "\n\n".join(text)


def on_hosts(hosts: int, accelerator: str, megabytes: int, only: str = "") -> list[tuple[str, list[Measured]]]:
    """Parts 1 to 3; with `only`, without the logs."""
    with tempfile.TemporaryDirectory(prefix="podway-scale-work-") as folder, lab(hosts, accelerator) as here:
        workdir = make_workdir(Path(folder) / "workdir", megabytes)
        first = launching(here, accelerator)
        show(first)
        logs = [] if only else logging(here)
        show(logs)
        files = syncing(here, workdir)
        show(files)
        first.append(seconds("down", "down, to the end of the cluster", here.podway("down", "-y", "scale")))
        show(first[-1:])
        files += rsyncing(here, workdir)
        show(files[-2:])
        files += many_files(here, Path(folder) / "many")
        show(files[-3:])
    return [
        (f"{hosts} namespace hosts over ssh", first),
        ("Files", files),
        (f"Logs of {hosts} hosts", logs),
    ]


def show(rows: Sequence[Measured]) -> None:
    """On the terminal, as it is known."""
    for row in rows:
        print(" | ".join(row.row()), flush=True)


def main(argv: list[str] | None = None) -> int:
    """Measure everything; leave nothing running."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.scale")
    parser.add_argument("--hosts", type=int, default=HOSTS, help="Namespace hosts (8 or 64).")
    parser.add_argument(
        "--megabytes", type=int, help=f"Size of the working directory ({MEGABYTES}; of files alone {FEW})."
    )
    parser.add_argument("--endpoints", type=int, default=endpoints.COUNT, help="Endpoints for the control plane alone.")
    parser.add_argument("--only", choices=PARTS, default="", help="One part: it is shown, and no page is written.")
    options = parser.parse_args(argv)
    report.end_cleanly()
    megabytes = options.megabytes or (FEW if options.only else MEGABYTES)
    parts = []
    if options.hosts and options.only != "endpoints":
        parts += on_hosts(options.hosts, f"v6e-{4 * options.hosts}", megabytes, options.only)
    if options.endpoints and options.only in ("", "endpoints"):
        rows = [seconds(*row) for row in endpoints.measure(options.endpoints)]
        show(rows)
        parts.append((f"{options.endpoints:,} endpoints, the control plane alone", rows))
    usual = (HOSTS, MEGABYTES, endpoints.COUNT, "")
    if (options.hosts, megabytes, options.endpoints, options.only) == usual:
        report.write_section("scale", page(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
