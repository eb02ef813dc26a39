"""Runs one phase of one job, and outlives the agent that started it.

Flow: 1. leave the agent's session, become a child subreaper, read what to run from the agent's pipe (secrets come this
way and no other). 2. Write runner.json, start the script in a session of its own, tell the agent its pid. 3. Until it
ends: read the pipe, hide secrets, append to the output, ring the agent's bell. 4. When the main process has ended, the
rest of its tree gets a grace, then SIGKILL; a subreaper without children has no descendants, so "no child left" is the
kernel's word that all is over. 5. Write exit.json.

One thread, so that fork is safe. All signals that could end a runner politely are ignored.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import select
import signal
import sys
import time

from . import linux, phase, processes
from .container_spec import VARIABLES
from .mask import Masker
from .output import OutputWriter
from .ownership import take_back

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from .wire import Fields

BELL = "bell"
READY_FD = 1
LOCK_FD = 3
BUNDLE_FD = 4
GRACE_S = 2.0
STRAGGLERS_EVERY_S = 0.05
PIPE_SIZE = 1 << 20
READ_SIZE = 256 << 10
_F_SETPIPE_SZ = 1031  # linux/fcntl.h; Python names it from 3.10 on
_EXIT_FILE_SIZE = 1024
_EXIT_RETRY_S = 30.0
_NO_CONTAINER = 125  # as `docker run` answers when the container itself could not be had
_CANNOT_RUN = 126  # as shells answer for a command that is there but cannot be run,
_NOT_FOUND = 127  # and for one that is not there
# What a process of root needs of the environment that sudo cleans: the job's marks, and where the libraries and runtimes are.
PASSED_BY_SUDO = (processes.JOB_ID_VARIABLE, processes.HOST_ID_VARIABLE, "LD_LIBRARY_PATH", *VARIABLES)
NO_ROOT = (
    "podway: an image needs root on the host: log in there as root, or as a user who may run sudo without a password\n"
)


def main(state: str, job: str, name: str) -> None:
    """Run the phase whose description is on stdin."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTTOU, signal.SIGTTIN):
        signal.signal(number, signal.SIG_IGN)
    linux.become(processes.RUNNER_NAME)
    for fd in (READY_FD, LOCK_FD, BUNDLE_FD):
        os.set_inheritable(fd, False)
    with open(0, "rb", closefd=False) as pipe:
        line = pipe.read()
    if not line.endswith(b"\n"):
        return  # the agent was killed while it wrote; nothing has begun, and the next agent may start it again
    try:
        runner = Runner(state, phase.Phase(state, job, name), json.loads(line))
    except OSError as error:
        os.write(READY_FD, b"cannot start: " + str(error).encode("utf-8", "backslashreplace") + b"\n")
        return
    runner.run()


class Runner:
    """One phase from its start to its exit.json."""

    def __init__(self, state: str, this: phase.Phase, spec: Fields) -> None:
        self._state = state
        self._phase = this
        self._spec = spec
        self._writer = OutputWriter(this.dir)
        self._masker = Masker(map(os.fsencode, spec["secrets"].values()))
        self._bell = -1
        self._main = 0
        self._status: int | None = None
        self._exit_file = self._reserve_exit_file()
        self._warned: processes.Known = set()
        self._cancelled = False
        self._kill_at = 0.0
        self._look_at = 0.0
        self._about = self._begin()

    def _begin(self) -> Fields:
        """From here on the phase has begun, and will not be started again."""
        me = processes.read(os.getpid())
        about: Fields = {"pid": os.getpid(), "start": me.start if me else 0, "started": time.time()}
        phase.write_json(self._phase.path("runner.json"), about)
        return about

    def run(self) -> None:
        """From the script's start to the end of all it left behind; does not return."""
        woken = self._watch_children()
        pipe, gate = self._spawn()
        user = processes.read(self._main)
        about = dict(self._about, user_pid=self._main, user_start=user.start if user else 0)
        with contextlib.suppress(OSError):  # a full disk; then nobody is told the pid, and all else works
            phase.write_json(self._phase.path("runner.json"), about)
        with contextlib.suppress(OSError):  # the agent was killed; its successor reads runner.json
            os.write(READY_FD, b"%d\n" % self._main)
        os.dup2(os.open(os.devnull, os.O_RDWR), READY_FD)
        # Only now may the script run: one that stops or kills this runner at once was told as a start that failed.
        with contextlib.suppress(OSError):  # somebody killed it while it waited
            os.write(gate, b"1")
        os.close(gate)
        self._pump(pipe, woken)
        self._append(self._masker.finish())
        self._writer.note_time()
        if "enter" in self._spec:
            take_back(self._state)
        self._write_exit()
        self._ring()
        os._exit(0)  # nothing is left to tidy, and a cancel waits for this process too

    def _watch_children(self) -> int:
        """A descriptor that becomes readable when a child has ended."""
        readable, writable = os.pipe()
        os.set_blocking(readable, False)
        os.set_blocking(writable, False)
        signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        return readable

    def _spawn(self) -> tuple[int, int]:
        """Start the script's process: the read end of its output, and what must be written to before it runs the script."""
        readable, writable = os.pipe()
        waits, gate = os.pipe()
        with contextlib.suppress(OSError):  # a user's pipes are limited in all (pipe(7)); the usual 64 KiB will do
            fcntl.fcntl(readable, _F_SETPIPE_SZ, PIPE_SIZE)
        # A SIGTERM that comes before the child has left this runner's ignoring of it must wait, not be lost.
        signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
        self._main = os.fork()
        if self._main == 0:
            os.close(gate)
            if not os.read(waits, 1):
                os._exit(_CANNOT_RUN)  # the runner is gone, and nobody would read the output
            self._become_user_process(writable)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.close(waits)
        os.close(writable)
        os.set_blocking(readable, False)
        return readable, gate

    def _become_user_process(self, output: int) -> NoReturn:
        """In the child: exec, or say why not where the user will read it."""
        spec = self._spec
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in signal.valid_signals():
                # Python ignores SIGPIPE and this runner more; a script must find all signals as a login leaves them.
                if signal.getsignal(number) == signal.SIG_IGN:
                    signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.makedirs(spec["cwd"], exist_ok=True)
            os.chdir(spec["cwd"])
            command = [*spec["interpreter"], self._phase.path("script")] if "enter" not in spec else self._entering()
            os.execvpe(command[0], command, spec["env"])
        except BaseException as error:
            os.write(output, (f"podway: cannot start the script: {error}\n").encode("utf-8", "backslashreplace"))
            os._exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _CANNOT_RUN)

    def _entering(self) -> list[str]:
        """In the child: the command that becomes a process of a container, with what it needs on its stdin, in memory alone."""
        given = os.memfd_create("container", 0)
        with open(given, "wb", closefd=False) as file:
            file.write(json.dumps(self._spec["enter"]).encode("ascii"))
        os.lseek(given, 0, os.SEEK_SET)
        os.dup2(given, 0)
        os.close(given)
        if os.geteuid() != 0 and os.spawnvpe(os.P_WAIT, "sudo", ["sudo", "-n", "true"], self._spec["env"]) != 0:
            os.write(1, NO_ROOT.encode())
            os._exit(_NO_CONTAINER)
        return self._as_root("enter")

    def _as_root(self, *arguments: str) -> list[str]:
        """The agent's own file, run by root; sudo closes descriptors and cleans the environment, so both go another way."""
        command = [sys.executable, "-S", "-E", f"/proc/{self._about['pid']}/fd/{BUNDLE_FD}", *arguments]
        if os.geteuid() == 0:
            return command
        kept = [f"{name}={value}" for name, value in self._spec["env"].items() if name in PASSED_BY_SUDO]
        return ["sudo", "-n", "env", *kept, *command]

    def _pump(self, pipe: int, woken: int) -> None:
        """Copy output until the main process and all it left behind have ended."""
        poll = select.poll()
        poll.register(woken, select.POLLIN)
        poll.register(pipe, select.POLLIN)
        while True:
            waiting = None if self._status is None else STRAGGLERS_EVERY_S * 1000
            ready = [fd for fd, _ in poll.poll(waiting)]
            if pipe in ready and self._copy(pipe) == 0:
                poll.unregister(pipe)
            if woken in ready:
                _discard(woken)
            if self._reap():
                break
            if self._status is not None:
                self._end_stragglers()
        while self._copy(pipe) > 0:
            pass

    def _copy(self, pipe: int) -> int:
        """Copy one piece of what is there; how much it was, 0 if all writers have closed, -1 if nothing is there now."""
        try:
            data = os.read(pipe, READ_SIZE)
        except BlockingIOError:
            return -1
        self._append(self._masker.feed(data))
        return len(data)

    def _append(self, data: bytes) -> None:
        if data:
            self._writer.append(data)
            self._ring()

    def _reap(self) -> bool:
        """Bury the dead; True once no child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid == self._main:
                self._status = status

    def _end_stragglers(self) -> None:
        """SIGTERM to what the main process left, once each; SIGKILL after the grace."""
        if not self._kill_at:
            mark = phase.cancel_request(self._state, self._phase.job)
            # In a cancel the agent has sent SIGTERM already, and its grace is the one that counts.
            self._cancelled = mark is not None
            self._kill_at = phase.cancel_deadline(mark) if mark else time.monotonic() + GRACE_S
        now = time.monotonic()
        if now < self._look_at:
            return  # a flood of output must not become a flood of scans
        self._look_at = now + STRAGGLERS_EVERY_S
        procs = processes.snapshot()
        left = processes.descendants(procs, [os.getpid()])
        if now >= self._kill_at:
            processes.kill(procs, left, [os.getpid()])
        elif not self._cancelled:
            processes.warn(procs, left, self._warned)

    def _ring(self) -> None:
        """Tell the agent, if one listens, that there is something to see."""
        try:
            if self._bell < 0:
                self._bell = os.open(os.path.join(self._state, BELL), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.write(self._bell, b"\n")
        except OSError as error:
            # EAGAIN: it is ringing already. Anything else: no agent now; the next one has the same bell.
            if error.errno != errno.EAGAIN and self._bell >= 0:
                os.close(self._bell)
                self._bell = -1

    def _reserve_exit_file(self) -> int:
        """Room for exit.json, taken now, so that a full disk does not swallow the exit code."""
        path = self._phase.path("exit.tmp")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):
            os.write(fd, b" " * _EXIT_FILE_SIZE)
        return fd

    def _write_exit(self) -> None:
        status = self._status or 0
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        signalled = os.WIFSIGNALED(status)
        value = {
            "code": None if signalled else os.WEXITSTATUS(status),
            "signal": os.WTERMSIG(status) if signalled else None,
            "started": self._about["started"],
            "ended": time.time(),
            "cpu_s": round(used.ru_utime + used.ru_stime, 3),
            "max_rss": used.ru_maxrss * 1024,
            "pid": self._main,
            "output_lost": self._writer.lost,
            "lost": False,
        }
        data = json.dumps(value).encode("ascii").ljust(_EXIT_FILE_SIZE)
        until = time.monotonic() + _EXIT_RETRY_S
        while True:
            try:
                if os.pwrite(self._exit_file, data, 0) == len(data):
                    os.rename(self._phase.path("exit.tmp"), self._phase.path("exit.json"))
                    return
            except FileNotFoundError:
                return  # the job's directory was deleted under us
            except OSError:
                pass
            if time.monotonic() > until:
                return
            time.sleep(0.25)


def _discard(fd: int) -> None:
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        pass
