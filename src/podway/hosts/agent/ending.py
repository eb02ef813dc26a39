"""How the processes of jobs are ended by the agent: cancel, clean-up after a killed runner, sweep.

Cancel: the mark is on disk before the first signal, so a restarted agent goes on with it. SIGTERM to each process, once,
SIGKILL to all from the deadline on, until neither a process nor a runner is left.
Clean-up: a runner that was killed leaves orphans. They come to the agent, if it is the one that started the runner (it is
a subreaper too), and are else found by their mark; all are killed, then exit.json says that the phase was lost.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time

from . import phase, processes
from .ownership import take_back

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .phase import Phase

LOST_SIGNAL = 9
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.25
_STUCK_RUNNER_S = 1.0


class Bell:
    """Threads wait on it for "something has changed"; a change between a look and the wait is not missed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    def ring(self) -> None:
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def count(self) -> int:
        with self._changed:
            return self._count

    def wait(self, seen: int, seconds: float) -> None:
        """Until it has rung since `seen` was its count, or `seconds` have passed."""
        with self._changed:
            if self._count == seen:
                self._changed.wait(max(0.0, seconds))


class Endings:
    """What is being ended now, one thread for each; `children` are the runners this agent started itself."""

    def __init__(self, state: str, bell: Bell, unfinished: dict[str, Phase]) -> None:
        self._state = state
        self._bell = bell
        self._unfinished = unfinished  # shared with Jobs: all phases of this host that have not ended
        self._lock = threading.Lock()
        self._cancelling: dict[str, set[int]] = {}
        self._recovering: set[str] = set()
        self._spawning = threading.Lock()  # held while a child is there, or gone, and `children` does not say so yet
        self.children: set[int] = set()

    def spawn(self, command: list[str], environment: dict[str, str], descriptors: dict[int, int]) -> int:
        """Start a runner with these descriptors (here -> there) and no others; its pid."""
        with self._spawning:
            pid = os.posix_spawn(command[0], command, environment, file_actions=_moves(descriptors))
            self.children.add(pid)
        return pid

    def reap(self) -> None:
        """Bury the dead among the agent's children: runners, and what they left to it."""
        with self._spawning:
            while True:
                try:
                    pid, _ = os.waitpid(-1, os.WNOHANG)
                except ChildProcessError:
                    return
                if pid == 0:
                    return
                self.children.discard(pid)

    def kill_child(self, pid: int) -> None:
        """Kill a runner that failed to start, and wait until it is gone and its lock with it."""
        until = time.monotonic() + _STUCK_RUNNER_S
        while pid in self.children and time.monotonic() < until:
            processes.send([pid], signal.SIGKILL)
            time.sleep(0.002)
            self.reap()

    def cancel(self, job: str) -> None:
        """Begin, or go on, to end a job whose mark is written."""
        with self._lock:
            if job in self._cancelling:
                return
            self._cancelling[job] = set()
        threading.Thread(target=self._cancel, args=(job,), daemon=True).start()

    def left(self, job: str) -> list[int] | None:
        """The processes a cancel still has to end; None once it is done."""
        with self._lock:
            left = self._cancelling.get(job)
            return None if left is None else sorted(left)

    def recover(self, suspect: Phase) -> None:
        """Clean up after a phase whose runner died without an exit.json, if it is one."""
        if suspect.runs() or not suspect.unfinished():
            return
        with self._lock:
            if suspect.dir in self._recovering:
                return
            self._recovering.add(suspect.dir)
        threading.Thread(target=self._recover, args=(suspect,), daemon=True).start()

    def _cancel(self, job: str) -> None:
        warned: processes.Known = set()
        known: processes.Known = set()
        pause = _FIRST_PAUSE_S
        try:
            while True:
                seen = self._bell.count()
                pause = self._cancel_round(job, warned, known, pause)
                if not pause:
                    break
                time.sleep(pause / 5)  # the bell of a job that floods its output must not make this a loop of scans
                self._bell.wait(seen, pause)
            take_back(self._state)
            with contextlib.suppress(OSError):  # a full disk: the next agent will look once more, that is all
                phase.write_cancel_request(self._state, job, {"grace": 0.0, "deadline": 0.0, "done": True})
        finally:
            with self._lock:
                del self._cancelling[job]
            self._bell.ring()

    def _cancel_round(self, job: str, warned: processes.Known, known: processes.Known, pause: float) -> float:
        """Look once, signal what is there; how long to wait before the next look, 0 if nothing is left."""
        deadline = phase.cancel_deadline(phase.cancel_request(self._state, job))
        unfinished = [each for each in phase.phases(self._state, job) if each.runs() or each.unfinished()]
        runners = live_runners(unfinished)
        procs = processes.snapshot()
        found = processes.of_job(procs, job, runners, self._spared(procs), known)
        if not found and not unfinished:
            return 0.0
        with self._lock:
            self._cancelling[job] = found | runners
        processes.send(runners, signal.SIGCONT)  # a job may have stopped its own runner
        for each in unfinished:
            self.recover(each)
        longer = min(pause * 2, _LONGEST_PAUSE_S)
        now = time.monotonic()
        if now < deadline:
            processes.warn(procs, found, warned)
            return min(longer, deadline - now)
        processes.kill(procs, found, runners)
        if not found and now > deadline + _STUCK_RUNNER_S:
            processes.send(runners, signal.SIGKILL)
        return longer

    def _recover(self, lost: Phase) -> None:
        begun = lost.begun() or {}
        known: processes.Known = {(begun.get("user_pid", 0), begun.get("user_start", 0))}
        pause = _FIRST_PAUSE_S
        empty = 0
        try:
            while empty < 2:  # a process that forks and exits may slip through one look
                procs, found = self._orphans(lost.job, known)
                empty = 0 if found else empty + 1
                processes.kill(procs, found)
                time.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE_S)
            take_back(self._state)
            told = {"code": None, "signal": LOST_SIGNAL, "lost": True, "ended": time.time()}
            told.update(started=begun.get("started"), pid=begun.get("user_pid"))
            phase.write_json(lost.path("exit.json"), told)
        except OSError as error:
            sys.stderr.write(f"cannot write that {lost.dir} was lost: {error}\n")  # the next look tries again
        finally:
            with self._lock:
                self._recovering.discard(lost.dir)
            self._bell.ring()

    def _orphans(self, job: str, known: processes.Known) -> tuple[processes.Snapshot, set[int]]:
        """The processes of a job, and the agent's adopted children, that no living runner answers for."""
        with self._spawning:
            procs = processes.snapshot()
            children = set(self.children)
        me = os.getpid()
        runners = children | self._runners()
        spared = processes.ancestors(procs, me) | runners | processes.descendants(procs, runners)
        adopted = {pid for pid, each in procs.items() if each.ppid == me} - spared
        known.update((pid, procs[pid].start) for pid in adopted)
        return procs, processes.of_job(procs, job, set(), spared, known)

    def _spared(self, procs: processes.Snapshot) -> set[int]:
        return processes.ancestors(procs, os.getpid()) | self.children | self._runners()

    def _runners(self) -> set[int]:
        """All living runners of this host, whichever agent started them."""
        return live_runners(list(self._unfinished.values()))

    def sweep(self, host_id: str) -> list[int]:
        """Kill what is marked as this host's but is of no job that runs; what was found."""
        procs = processes.snapshot()
        spared = self._spared(procs)
        spared |= processes.descendants(procs, self._runners())
        found = set()
        for pid in processes.with_variable(procs, processes.HOST_ID_VARIABLE, host_id) - spared:
            job = processes.environ(pid).get(processes.JOB_ID_VARIABLE)
            if job and not any(each.runs() for each in phase.phases(self._state, job)):
                found.add(pid)
        found |= processes.descendants(procs, found) - spared
        processes.kill(procs, found)
        return sorted(found)


def live_runners(unfinished: list[Phase]) -> set[int]:
    """The pids of the runners that live, of those phases."""
    found = set()
    for each in unfinished:
        begun = each.begun()
        if begun and processes.is_running(begun["pid"], begun["start"]):
            found.add(begun["pid"])
    return found


def _moves(descriptors: dict[int, int]) -> list[tuple[int, ...]]:
    """File actions that put descriptors where they belong, through numbers nobody uses: the two sets may overlap."""
    free = 1 + max([*descriptors, *descriptors.values()])
    parked = [(os.POSIX_SPAWN_DUP2, here, free + number) for number, here in enumerate(descriptors)]
    placed = [(os.POSIX_SPAWN_DUP2, free + number, there) for number, there in enumerate(descriptors.values())]
    closed = [(os.POSIX_SPAWN_CLOSE, free + number) for number in range(len(descriptors))]
    return [*parked, *placed, *closed]
