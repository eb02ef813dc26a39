"""What a phase of a job is on disk; the only thing the agent and a runner share.

    STATE/jobs/JOB/cancel.json          the job was cancelled: nothing of it may start any more
    STATE/jobs/JOB/PHASE/lock           flock'd by the runner as long as it lives
    STATE/jobs/JOB/PHASE/script         what is run
    STATE/jobs/JOB/PHASE/runner.json    begun: written by the runner just before, and again just after, it starts the script
    STATE/jobs/JOB/PHASE/output, .idx   what it printed (output.py)
    STATE/jobs/JOB/PHASE/exit.json      ended, and nothing of it runs any more

The state follows from these files alone, so whoever was killed, the next one to look sees the truth: no runner.json and
no lock held: never begun, may be started. Lock held: running. Lock free, exit.json: ended. Lock free, no exit.json: the
runner was killed, and the agent has to clean up after it (ending.py) before it writes exit.json in its stead.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .wire import Fields

JOBS = "jobs"
_CANCEL = "cancel.json"
_TRASH = "trash"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
_LOOK_S = 0.1  # `runs` holds the lock for microseconds; what holds it for longer is a runner


class RequestRefused(Exception):
    """The request cannot be done; `code` tells programs why."""

    def __init__(self, what: str, code: str = "bad-request") -> None:
        super().__init__(what)
        self.code = code


def is_word(value: object) -> bool:
    """Whether this can be given to a program: as an argument, in its environment, as a path."""
    try:
        return isinstance(value, str) and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:  # half a surrogate pair, which stands for no bytes
        return False


def checked_name(kind: str, value: object) -> str:
    """`value` if it can name a job or a phase, which is to say a directory."""
    if not isinstance(value, str) or not _NAME.match(value):
        raise RequestRefused(f"{kind} must be 1 to 128 of A-Z a-z 0-9 . _ -, not {value!r:.100}")
    return value


def write_json(path: str, value: Fields) -> None:
    """Put `value` at `path`, whole or not at all."""
    temporary = f"{path}.{os.getpid()}.{threading.get_ident()}"
    try:
        write_file(temporary, json.dumps(value).encode("ascii"))
        os.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_file(path: str, data: bytes) -> None:
    """Put `data` at `path`, for nobody else to read; an error if the disk takes only a part of it."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)


def read_json(path: str) -> Fields | None:
    """What `write_json` put there; None if nothing was."""
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


class Phase:
    """One phase of one job, as the files tell it."""

    def __init__(self, state: str, job: str, name: str) -> None:
        self.job = checked_name("job", job)
        self.name = checked_name("phase", name)
        self.dir = os.path.join(state, JOBS, job, name)

    def path(self, name: str) -> str:
        return os.path.join(self.dir, name)

    def begun(self) -> Fields | None:
        """Who runs it: pid, start, user_pid, user_start, started; None if it never began."""
        return read_json(self.path("runner.json"))

    def ended(self) -> Fields | None:
        """How it ended: code or signal, started, ended, and what it used; None if it has not."""
        return read_json(self.path("exit.json"))

    def runs(self) -> bool:
        """Whether its runner lives. Ask this before `ended`: the runner writes that, then dies."""
        fd = self._open_lock(os.O_RDONLY)
        if fd < 0:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
        return False

    def unfinished(self) -> bool:
        """Whether there is, or may be, something of it to end."""
        return (self.runs() or self.begun() is not None) and self.ended() is None

    def try_lock(self) -> int:
        """The lock, taken for a runner to inherit; -1 if a runner has it."""
        fd = self._open_lock(os.O_RDWR | os.O_CREAT)
        until = time.monotonic() + _LOOK_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            except OSError:
                if time.monotonic() > until:
                    os.close(fd)
                    return -1
            time.sleep(0.002)

    def _open_lock(self, flags: int) -> int:
        try:
            return os.open(self.path("lock"), flags | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            return -1


def job_dir(state: str, job: str) -> str:
    return os.path.join(state, JOBS, job)


def job_names(state: str) -> list[str]:
    """All jobs this host knows, sorted."""
    return _names(os.path.join(state, JOBS))


def phases(state: str, job: str) -> list[Phase]:
    """All phases of a job, begun or not."""
    return [Phase(state, job, name) for name in _names(job_dir(state, job))]


def _names(directory: str) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in entries if _NAME.match(entry.name) and entry.is_dir())
    except FileNotFoundError:
        return []


def cancel_request(state: str, job: str) -> Fields | None:
    """The job's cancel, if it was asked for: `grace` seconds, the monotonic `deadline` of it, and whether it is `done`."""
    return read_json(os.path.join(job_dir(state, job), _CANCEL))


def write_cancel_request(state: str, job: str, mark: Fields) -> None:
    os.makedirs(job_dir(state, job), 0o700, exist_ok=True)
    write_json(os.path.join(job_dir(state, job), _CANCEL), mark)


def cancel_deadline(mark: Fields | None) -> float:
    """When, on this boot's monotonic clock, the grace of a cancel ends; at once, if the mark is of an earlier boot."""
    now = time.monotonic()
    if mark is None or mark["deadline"] - now > mark["grace"]:
        return now
    return float(mark["deadline"])


def to_trash(state: str, directory: str) -> str:
    """Take a directory out of sight in one step; where it is now, for `delete_tree`."""
    trash = os.path.join(state, f"{_TRASH}.{time.time_ns()}")
    os.rename(directory, trash)
    return trash


def empty_trash(state: str) -> None:
    """Delete what a crash between `to_trash` and `delete_tree` left."""
    for name in os.listdir(state):
        if name.startswith(_TRASH + "."):
            delete_tree(os.path.join(state, name))


def delete_tree(directory: str) -> None:
    """Delete a directory made by the agent and all in it (shutil would cost its import)."""
    for where, directories, files in os.walk(directory, topdown=False):
        for name in files:
            os.unlink(os.path.join(where, name))
        for name in directories:
            os.rmdir(os.path.join(where, name))
    os.rmdir(directory)
