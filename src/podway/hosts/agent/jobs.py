"""The operations on jobs: start, status, follow, cancel and the rest, each a method that takes a request's fields.

The agent holds nothing that is not on disk: each answer is read from the phase's files (phase.py), each start ends in
a runner process (runner.py) that needs the agent no more, and each cancel leaves a mark that a next agent goes on from.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time

from . import output, phase, processes
from .container_spec import container_spec
from .ending import Bell, Endings
from .ownership import remember
from .phase import Phase, RequestRefused, is_word
from .runner import BUNDLE_FD, LOCK_FD, READY_FD

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .wire import Fields

    Answer = tuple[Fields, bytes]

TPU_DEVICES = ("/dev/accel", "/dev/vfio/")
LIBTPU_LOCK = "/tmp/libtpu_lockfile"
MAX_SECONDS = 86400
MAX_WAIT_S = 600.0  # so that the thread of a caller who vanished is not kept for long
DEFAULT_GRACE_S = 10.0
_RUNNER_START_S = 30.0
_LOOK_AGAIN_S = 1.0  # how late a long poll may learn of what rings no bell, such as a killed runner
# What jobs and runners inherit from the agent; LD_LIBRARY_PATH, because the Python that runs this may need it; VIRTUAL_ENV is a
# simulated host's own.
_INHERITED = "PATH VIRTUAL_ENV USER LOGNAME LANG LC_ALL SHELL TMPDIR LD_LIBRARY_PATH".split()
_BASE_ENVIRONMENT = [*_INHERITED, processes.HOST_ID_VARIABLE]


class Jobs:
    """The jobs of one host. `bundle` is a descriptor of the agent's own file, which runners are started from."""

    def __init__(self, state: str, home: str, bundle: int) -> None:
        self._state = state
        self._home = home
        self._bundle = bundle
        self._open: dict[str, Phase] = {}
        self.bell = Bell()
        self._endings = Endings(state, self.bell, self._open)
        self._starting = threading.Lock()  # one start or cancel mark at a time: a cancelled job starts nothing
        os.makedirs(os.path.join(state, phase.JOBS), 0o700, exist_ok=True)

    def adopt(self) -> None:
        """Take over what an earlier agent of this home left: running phases, cancels half done, trash."""
        phase.empty_trash(self._state)
        jobs = phase.job_names(self._state)
        for each in [each for job in jobs for each in phase.phases(self._state, job)]:
            if each.unfinished():
                self._open[each.dir] = each
        for job in jobs:
            mark = phase.cancel_request(self._state, job)
            if mark and not mark.get("done"):
                self._endings.cancel(job)

    def supervise(self) -> bool:
        """Bury dead children and see to phases whose runner is gone; whether there are runners that are not children."""
        self._endings.reap()
        orphan_runners = False
        for key, each in list(self._open.items()):
            if each.runs():
                begun = each.begun()
                orphan_runners = orphan_runners or (begun is not None and begun["pid"] not in self._endings.children)
            elif each.unfinished():
                self._endings.recover(each)
            else:
                self._open.pop(key, None)
        return orphan_runners

    def busy(self) -> bool:
        """Whether a phase of any job is under way."""
        return any(each.unfinished() for each in list(self._open.values()))

    # -- operations ------------------------------------------------------------------------------------------------

    def start(self, request: Fields) -> Answer:
        """Run a script as a phase of a job, once; asked again, answer how it stands."""
        this = Phase(self._state, request.get("job", ""), request.get("phase", ""))
        spec = self._spec(request, this)
        if not is_word(request.get("script")):
            raise RequestRefused("script must be a text without NUL")
        with self._starting:
            begun = this.begun()  # what was begun is answered for, cancelled or not: the caller may be asking again
            if not begun and phase.cancel_request(self._state, this.job):
                raise RequestRefused(f"job {this.job} was cancelled", "cancelled")
            os.makedirs(this.dir, 0o700, exist_ok=True)
            lock = -1 if begun else this.try_lock()
            existing = lock < 0
            if not existing:
                try:
                    # A runner that an agent killed since had just started may have come and gone until the lock was free.
                    existing = this.begun() is not None
                    if not existing:
                        phase.write_file(this.path("script"), os.fsencode(request["script"]))
                        if "enter" in spec:  # before the first container: `remove` must know that there may be one
                            remember(self._state, spec["enter"])
                        self._spawn(this, lock, json.dumps(spec).encode("ascii") + b"\n")
                finally:
                    os.close(lock)
        return dict(self._describe(this), existing=existing), b""

    def status(self, request: Fields) -> Answer:
        """How a phase stands; with `wait`, once it has ended or after that many seconds."""
        this = Phase(self._state, request.get("job", ""), request.get("phase", ""))
        until = _wait_until(request)
        while True:
            seen = self.bell.count()
            answer = self._describe(this)
            left = until - time.monotonic()
            if answer["state"] in ("exited", "lost") or left <= 0:
                break
            self.bell.wait(seen, min(left, _LOOK_AGAIN_S))
        answer["output_size"] = output.size(this.dir, answer["state"] in ("exited", "lost"))
        if answer["state"] == "running":
            answer.update(self._usage([this]))
        return answer, b""

    def follow(self, request: Fields) -> Answer:
        """What a phase printed from `offset` on; with `wait`, as soon as there is something, or its end."""
        this = Phase(self._state, request.get("job", ""), request.get("phase", ""))
        offset = _whole_number(request, "offset", 0)
        limit = min(_whole_number(request, "limit", output.MAX_READ), output.MAX_READ)
        until = _wait_until(request)
        while True:
            seen = self.bell.count()
            answer = self._describe(this)
            ended = answer["state"] in ("exited", "lost")
            piece = output.read(this.dir, offset, limit, ended)
            left = until - time.monotonic()
            if piece.data or ended or left <= 0:
                break
            self.bell.wait(seen, min(left, _LOOK_AGAIN_S))
        after = offset + len(piece.data)
        answer.update(times=piece.times, next=after, output_size=piece.size, end=ended and after >= piece.size)
        return answer, piece.data

    def cancel(self, request: Fields) -> Answer:
        """End all of a job, and let nothing of it start any more."""
        job = phase.checked_name("job", request.get("job"))
        until = _wait_until(request)
        self._begin_cancel(job, _seconds(request, "grace", DEFAULT_GRACE_S))
        left = self._await_cancel(job, until)
        return {"gone": left is None, "left": left or []}, b""

    def jobs(self, request: Fields) -> Answer:
        """All phases this host knows, and how they stand."""
        found = []
        for job in phase.job_names(self._state):
            cancelled = phase.cancel_request(self._state, job) is not None
            for each in phase.phases(self._state, job):
                found.append(dict(self._describe(each), job=job, phase=each.name, cancelled=cancelled))
        return {"jobs": found}, b""

    def usage(self, request: Fields) -> Answer:
        """What all phases of a job use, and have used."""
        job = phase.checked_name("job", request.get("job"))
        found = phase.phases(self._state, job)
        answer = self._usage([each for each in found if each.unfinished()])
        for each in found:
            ended = each.ended() or {}
            answer["cpu_s"] = round(answer["cpu_s"] + ended.get("cpu_s", 0.0), 3)
            answer["max_rss"] = max(answer["max_rss"], ended.get("max_rss", 0))
        return answer, b""

    def forget(self, request: Fields) -> Answer:
        """Delete what is kept of a job that has ended."""
        job = phase.checked_name("job", request.get("job"))
        directory = phase.job_dir(self._state, job)
        with self._starting:
            if self._endings.left(job) is not None or any(p.unfinished() for p in phase.phases(self._state, job)):
                raise RequestRefused(f"job {job} still runs", "running")
            if not os.path.isdir(directory):
                return {"forgotten": False}, b""
            trash = phase.to_trash(self._state, directory)
        phase.delete_tree(trash)
        return {"forgotten": True}, b""

    def chips(self, request: Fields) -> Answer:
        """Who has a TPU open, and whether libtpu's lock file is there."""
        holders = [{"pid": pid, "device": path} for pid, path in processes.device_holders(TPU_DEVICES)]
        return {"holders": holders, "lockfile": LIBTPU_LOCK if os.path.exists(LIBTPU_LOCK) else None}, b""

    def sweep(self, request: Fields) -> Answer:
        """Kill what jobs that have ended left on this host."""
        host_id = os.environ.get(processes.HOST_ID_VARIABLE)
        return {"killed": self._endings.sweep(host_id) if host_id else []}, b""

    def cancel_all(self, request: Fields) -> Answer:
        """The first half of `shutdown`: end every job that runs."""
        grace = _seconds(request, "grace", DEFAULT_GRACE_S)
        until = time.monotonic() + grace + 5.0
        busy = [
            job for job in phase.job_names(self._state) if any(p.unfinished() for p in phase.phases(self._state, job))
        ]
        for job in busy:
            self._begin_cancel(job, grace)
        left = [pid for job in busy for pid in self._await_cancel(job, until) or ()]
        return {"gone": not left, "left": left}, b""

    # -- parts -----------------------------------------------------------------------------------------------------

    def _spec(self, request: Fields, this: Phase) -> Fields:
        """What the runner is told: the whole environment, where, and with what."""
        given = _environment(request, "env")
        secrets = _environment(request, "secrets")
        base = {**_base_environment(), "HOME": self._home}
        marks = {processes.JOB_ID_VARIABLE: this.job}
        if processes.HOST_ID_VARIABLE in base:
            marks[processes.HOST_ID_VARIABLE] = base[processes.HOST_ID_VARIABLE]
        interpreter = request.get("interpreter") or ["bash"]
        if not isinstance(interpreter, list) or not all(map(is_word, interpreter)):
            raise RequestRefused("interpreter must be a list of words")
        cwd = request.get("cwd") or "~"
        if not is_word(cwd):
            raise RequestRefused("cwd must be a path")
        if cwd == "~" or cwd.startswith("~/"):
            cwd = self._home + cwd[1:]
        if request.get("container") is not None:
            return container_spec(request, self._home, base, {**given, **secrets, **marks}, secrets)
        return {
            "env": {**base, **given, **secrets, **marks},
            "secrets": secrets,
            "interpreter": interpreter,
            "cwd": os.path.join(self._home, cwd),
        }

    def _spawn(self, this: Phase, lock: int, spec: bytes) -> None:
        """Start the runner and wait until it has started the script."""
        self._open[this.dir] = this
        spec_end, spec_pipe = os.pipe()
        ready_pipe, ready_end = os.pipe()
        with open(spec_pipe, "wb") as told, open(ready_pipe, "rb") as heard:
            try:
                command = [sys.executable, "-S", "-E", f"/proc/self/fd/{BUNDLE_FD}", "runner"]
                command += [self._state, this.job, this.name]
                descriptors = {spec_end: 0, ready_end: READY_FD, lock: LOCK_FD, self._bundle: BUNDLE_FD}
                pid = self._endings.spawn(command, _base_environment(), descriptors)
            finally:
                os.close(spec_end)
                os.close(ready_end)
            try:
                told.write(spec)
                told.close()
            except BrokenPipeError:
                pass  # it died; told by the silence on the other pipe
            answer = heard.readline() if select.select([heard], [], [], _RUNNER_START_S)[0] else b""
            if not answer.strip().isdigit():
                self._endings.kill_child(pid)
                why = answer.decode("utf-8", "replace").strip() or f"see {self._state}/agent.log"
                raise RequestRefused(f"the runner did not start: {why}", "io")

    def _describe(self, this: Phase) -> Fields:
        ended = this.ended()
        runs = ended is None and this.runs()
        begun = this.begun()
        if ended is None and not runs:
            ended = this.ended()  # it may have ended between the two looks
        if ended is not None:
            return dict(ended, state="lost" if ended.get("lost") else "exited")
        if begun is None and not runs:
            return {"state": "absent"}
        if not runs:
            self._open[this.dir] = this
            self._endings.recover(this)
        begun = begun or {}
        return {"state": "running", "pid": begun.get("user_pid"), "started": begun.get("started")}

    def _usage(self, running: list[Phase]) -> Fields:
        runners = {begun["pid"] for begun in [each.begun() for each in running] if begun}
        procs = processes.snapshot()
        used = processes.Usage(procs, processes.descendants(procs, runners), runners)
        return {"cpu_s": used.cpu_s, "rss": used.rss, "max_rss": used.max_rss, "processes": used.processes}

    def _begin_cancel(self, job: str, grace: float) -> None:
        """Mark the job; a second cancel may shorten the grace of the first, never lengthen it."""
        with self._starting:
            mark = phase.cancel_request(self._state, job)
            if mark and mark.get("done"):
                return
            deadline = time.monotonic() + grace
            if mark is None or deadline < phase.cancel_deadline(mark):
                phase.write_cancel_request(self._state, job, {"grace": grace, "deadline": deadline, "done": False})
            self._endings.cancel(job)

    def _await_cancel(self, job: str, until: float) -> list[int] | None:
        while True:
            seen = self.bell.count()
            left = self._endings.left(job)
            remaining = until - time.monotonic()
            if left is None or remaining <= 0:
                return left
            self.bell.wait(seen, min(remaining, _LOOK_AGAIN_S))


def _base_environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _BASE_ENVIRONMENT if name in os.environ}


def _whole_number(request: Fields, name: str, default: int) -> int:
    value = request.get(name, default)
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise RequestRefused(f"{name} must be a whole number, not {value!r:.50}")
    return value


def _seconds(request: Fields, name: str, default: float) -> float:
    value = request.get(name, default)
    if type(value) not in (int, float) or not 0 <= value <= MAX_SECONDS:
        raise RequestRefused(f"{name} must be a number of seconds up to {MAX_SECONDS}, not {value!r:.50}")
    return float(value)


def _wait_until(request: Fields) -> float:
    """When, on the monotonic clock, a long poll has to answer at the latest."""
    return time.monotonic() + min(_seconds(request, "wait", 0.0), MAX_WAIT_S)


def _environment(request: Fields, name: str) -> dict[str, str]:
    value = request.get(name) or {}
    if not isinstance(value, dict):
        raise RequestRefused(f"{name} must map names to texts")
    for key, text in value.items():
        if not is_word(key) or not key or "=" in key or not is_word(text):
            raise RequestRefused(f"{name}: {key!r:.100} cannot be an environment variable")
    return value
