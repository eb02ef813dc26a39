"""Which processes belong to a job, and how to end them for sure; all of it read from /proc.

A process belongs to a job if it descends from one of the job's runners (runners are child subreapers, so a daemon's
double fork does not lead out of the tree), if its environment carries the job's mark (found even when its runner was
killed), if it was seen to belong before, or if it descends from one that belongs.

Ending them is a race against forks. What wins it: whole process groups are killed at once where all of the group is
ours (the kernel makes that atomic against fork), children of a runner are killed in a tight loop over the kernel's own
list of them, and it is repeated until nothing is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    Snapshot = dict[int, "Process"]
    Known = set[tuple[int, int]]  # (pid, start): a pid alone may be another process tomorrow

JOB_ID_VARIABLE = "PODWAY_JOB"
HOST_ID_VARIABLE = "PODWAY_HOST_ID"
AGENT_NAME = "podway-agent"
RUNNER_NAME = "podway-runner"

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PF_KTHREAD = 0x00200000  # linux/sched.h
_ENVIRON_LIMIT = 4 << 20
_TIGHT_LOOP_S = 0.05


class Process:
    """One line of /proc/PID/stat (proc(5)); `start` is in ticks since boot and never changes for a process."""

    __slots__ = (
        "cpu_s",
        "kernel",
        "name",
        "pgrp",
        "pid",
        "ppid",
        "rss",
        "session",
        "start",
        "state",
        "threads",
        "waited_s",
    )

    def __init__(self, pid: int, stat: bytes) -> None:
        name_end = stat.rindex(b")")
        field = stat[name_end + 2 :].split()
        self.pid = pid
        self.name = stat[stat.index(b"(") + 1 : name_end].decode("utf-8", "replace")
        self.state = field[0]
        self.ppid = int(field[1])
        self.pgrp = int(field[2])
        self.session = int(field[3])
        self.kernel = bool(int(field[6]) & _PF_KTHREAD)
        self.cpu_s = (int(field[11]) + int(field[12])) * _TICK_S
        self.waited_s = (int(field[13]) + int(field[14])) * _TICK_S
        self.threads = int(field[17])
        self.start = int(field[19])
        self.rss = int(field[21]) * _PAGE

    @property
    def alive(self) -> bool:
        # A zombie runs nothing, unless only its first thread has ended and others go on.
        return self.state not in (b"Z", b"X") or self.threads > 1


def read(pid: int) -> Process | None:
    """The process `pid` as it is now, zombies included; None if there is none."""
    data = _slurp(f"/proc/{pid}/stat", 4096)
    try:
        return Process(pid, data) if data else None
    except (ValueError, IndexError):
        return None


def is_running(pid: int, start: int) -> bool:
    """Whether the very process that began at `start` runs under `pid`."""
    process = read(pid)
    return process is not None and process.start == start and process.alive


def snapshot() -> Snapshot:
    """All living processes but the kernel's own."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            process = read(int(name))
            if process is not None and process.alive and not process.kernel:
                found[process.pid] = process
    return found


def descendants(procs: Snapshot, roots: Iterable[int]) -> set[int]:
    """The children, and theirs, of the processes `roots`; the roots themselves only if another root is above them."""
    children: dict[int, list[int]] = {}
    for process in procs.values():
        children.setdefault(process.ppid, []).append(process.pid)
    found: set[int] = set()
    todo = list(roots)
    while todo:
        for pid in children.get(todo.pop(), ()):
            if pid not in found:
                found.add(pid)
                todo.append(pid)
    return found


def environ(pid: int) -> dict[str, str]:
    """The environment `pid` began with; empty where it may not be read."""
    found = {}
    for entry in _slurp(f"/proc/{pid}/environ", _ENVIRON_LIMIT).split(b"\0"):
        name, equals, value = entry.partition(b"=")
        if equals:
            found[os.fsdecode(name)] = os.fsdecode(value)
    return found


def with_variable(procs: Snapshot, name: str, *values: str) -> set[int]:
    """Those of `procs` whose environment says name=value, for one of the values."""
    marks = [b"\0" + os.fsencode(f"{name}={value}") + b"\0" for value in values]
    found = set()
    for pid in procs:
        environment = b"\0" + _slurp(f"/proc/{pid}/environ", _ENVIRON_LIMIT) + b"\0"
        if any(mark in environment for mark in marks):
            found.add(pid)
    return found


def ancestors(procs: Snapshot, pid: int) -> set[int]:
    """`pid` and the processes above it: what a killer must temp_name, itself above all."""
    found: set[int] = set()
    while pid in procs and pid not in found:
        found.add(pid)
        pid = procs[pid].ppid
    return found


def of_job(procs: Snapshot, job: str, runners: set[int], spared: set[int], known: Known) -> set[int]:
    """All living processes of a job. `runners` are the roots of its trees, `spared` is what is never part of a job.

    `known` is what an earlier look found; it is read and added to, so that a process once seen is never lost sight of.
    """
    seeds = with_variable(procs, JOB_ID_VARIABLE, job)
    host = os.environ.get(HOST_ID_VARIABLE)
    if host:  # the hosts of a simulated slice share this machine and the job's mark: a rank on another host is not ours
        seeds = with_variable({pid: procs[pid] for pid in seeds}, HOST_ID_VARIABLE, host)
    seeds |= {pid for pid, start in known if pid in procs and procs[pid].start == start}
    found = (seeds | descendants(procs, runners | (seeds - spared))) - spared - runners
    known.update((pid, procs[pid].start) for pid in found)
    return found


def send(pids: Iterable[int], number: int) -> None:
    """Signal each process; one that is gone is passed over, one that is root's is signalled through sudo."""
    refused = []
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
        except PermissionError:
            refused.append(pid)
    if refused:
        _send_as_root(refused, number)


def _send_as_root(pids: list[int], number: int) -> None:
    """What a job started by `sudo` (docker on a TPU VM, most often) only root may end, and who may sudo may be root."""
    command = ["sudo", "-n", "kill", f"-{int(number)}", *map(str, pids)]
    quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    try:
        os.waitpid(os.posix_spawnp("sudo", command, os.environ, file_actions=quiet), 0)
    except OSError:
        pass  # no sudo here; or (ECHILD) it was buried by the loop that buries all children


def warn(procs: Snapshot, pids: set[int], warned: Known) -> None:
    """SIGTERM to those of `pids` not yet in `warned`, which is added to.

    What a process starts after it was warned is how it cleans up (saving, uploading): left alone as long as it lives.
    """
    cleaning = descendants(procs, {pid for pid in pids if (pid, procs[pid].start) in warned})
    new = {pid for pid in pids - cleaning if (pid, procs[pid].start) not in warned}
    send(new, signal.SIGTERM)
    send(new, signal.SIGCONT)  # a stopped process acts on SIGTERM only once it goes on
    warned.update((pid, procs[pid].start) for pid in new)


def kill(procs: Snapshot, pids: set[int], runners: Iterable[int] = ()) -> None:
    """One round of SIGKILL for `pids`, and for what the trees under `runners` fork in the meantime."""
    groups: dict[int, set[int]] = {}
    for process in procs.values():
        groups.setdefault(process.pgrp, set()).add(process.pid)
    for pgrp in {procs[pid].pgrp for pid in pids if pid in procs}:
        if pgrp > 1 and groups[pgrp] <= pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pgrp, signal.SIGKILL)
    send(pids, signal.SIGKILL)
    for runner in runners:
        kill_children(runner)


def kill_children(parent: int) -> None:
    """SIGKILL the direct children of a single-threaded process, as they appear, until none is left or 50 ms passed.

    A process that forks and exits, over and over, is gone before a scan of /proc is done; this loop takes microseconds.
    """
    listing = f"/proc/{parent}/task/{parent}/children"
    until = time.monotonic() + _TIGHT_LOOP_S
    while time.monotonic() < until:
        children = _slurp(listing, 1 << 20).split()
        if not children:
            return
        send((int(pid) for pid in children), signal.SIGKILL)


class Usage:
    """What some processes use now, and what the dead among them have used."""

    def __init__(self, procs: Snapshot, pids: Iterable[int], runners: Iterable[int]) -> None:
        members = [procs[pid] for pid in pids]
        self.processes = len(members)
        self.rss = sum(process.rss for process in members)
        self.max_rss = max([_peak_rss(process.pid) for process in members], default=0)
        reaped = sum(procs[pid].waited_s for pid in runners if pid in procs)
        self.cpu_s = round(sum(process.cpu_s + process.waited_s for process in members) + reaped, 3)


def _peak_rss(pid: int) -> int:
    for line in _slurp(f"/proc/{pid}/status", 16384).split(b"\n"):
        if line.startswith(b"VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def device_holders(prefixes: tuple[str, ...]) -> list[tuple[int, str]]:
    """(pid, device) for every open file whose path begins with one of `prefixes`, as far as /proc may be read."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            opened = os.listdir(f"/proc/{name}/fd")
        except OSError:
            continue
        devices = set()
        for fd in opened:
            try:
                target = os.readlink(f"/proc/{name}/fd/{fd}")
            except OSError:
                continue
            if target.startswith(prefixes):
                devices.add(target)
        found += [(int(name), device) for device in sorted(devices)]
    return found


def kill_hosts(host_ids: Iterable[str], timeout: float) -> list[int]:
    """SIGKILL all that carries one of the hosts' marks, and its descendants; what is left after `timeout` seconds.

    Agents are stopped first, so that they start nothing new, and runners are kept to the last: while they live, no
    process of theirs, even one with an empty environment, can leave their trees.
    """
    ids = list(host_ids)
    known: Known = set()
    until = time.monotonic() + timeout
    pause = 0.002
    while True:
        procs = snapshot()
        spared = ancestors(procs, os.getpid())
        seeds = with_variable(procs, HOST_ID_VARIABLE, *ids)
        seeds |= {pid for pid, start in known if pid in procs and procs[pid].start == start}
        found = (seeds | descendants(procs, seeds - spared)) - spared
        known.update((pid, procs[pid].start) for pid in found)
        if not found or time.monotonic() > until:
            return sorted(found)
        agents = {pid for pid in found if procs[pid].name == AGENT_NAME}
        runners = {pid for pid in found if procs[pid].name == RUNNER_NAME}
        work = found - agents - runners
        if work:
            send(agents, signal.SIGSTOP)
            kill(procs, work, runners)
        else:
            send(found, signal.SIGKILL)
        time.sleep(pause)
        pause = min(pause * 2, 0.1)


def _slurp(path: str, limit: int) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        data = os.read(fd, limit)
        # /proc hands out long files (a large environment) a page at a time.
        while len(data) < limit:
            more = os.read(fd, limit - len(data))
            if not more:
                break
            data += more
        return data
    except OSError:
        return b""
    finally:
        os.close(fd)
