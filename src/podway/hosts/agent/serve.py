"""The agent itself: one per home, a unix socket, a thread per connection.

Flow: 1. take the home's lock, so that there is one agent; a second one asked to be a daemon just answers the first's pid.
2. Become a child subreaper, take over what an earlier agent left, listen. 3. The main thread waits for connections, for
runners ringing the bell, and for dead children; each connection has a thread that reads requests and answers them.
4. SIGTERM ends the agent and not one job: their runners go on, and the next agent finds them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import sys
import threading
import time

from . import files, linux, processes, wire
from .connections import someone_is_connected
from .idle_shutdown import IdleShutdown
from .jobs import Jobs
from .packs import FilesError
from .phase import RequestRefused
from .probe import probe
from .relay import connect
from .runner import BELL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO

    from .wire import Fields

    Answer = tuple[Fields, bytes | BinaryIO | None]

MAX_CONNECTIONS = 200
LOG_LIMIT = 1 << 20
_ORPHAN_RUNNERS_EVERY_S = 1.0
_LOCK_WAIT_S = 10.0
_NO_ROOM_S = 0.05


class Identity:
    """Which host this is, and which agent: its home and address, the bundle it runs from and that one's version."""

    def __init__(self, home: str, address: str, bundle: str, version: str) -> None:
        self.home = os.path.abspath(home)
        self.state = os.path.join(self.home, wire.STATE)
        self.address = address
        self.bundle = os.path.abspath(bundle)  # now, because a daemon leaves the directory it began in
        self.version = version


class Agent:
    """One host's agent, from its socket to its answers."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._state = identity.state
        self._connections = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._stop = False
        # Runners are started from this descriptor: the very file this agent runs, whatever lies at its path by then.
        bundle = os.open(identity.bundle, os.O_RDONLY | os.O_CLOEXEC)
        self._jobs = Jobs(identity.state, identity.home, bundle)
        self._idle_shutdown = IdleShutdown(identity.state, self._jobs.busy, identity.address)
        self._operations: dict[str, Callable[[Fields], Answer]] = {
            "hello": self._hello,
            "shutdown": self._shutdown,
            "start": self._jobs.start,
            "status": self._jobs.status,
            "follow": self._jobs.follow,
            "cancel": self._jobs.cancel,
            "jobs": self._jobs.jobs,
            "usage": self._jobs.usage,
            "forget": self._jobs.forget,
            "chips": self._jobs.chips,
            "sweep": self._jobs.sweep,
            "probe": probe,
            "idle_shutdown": self._set_idle_shutdown,
            "connected": self._connected,
        }

    def run(self, ready: Callable[[], None]) -> None:
        """Serve until told to stop; `ready` is called once requests are answered."""
        linux.become(processes.AGENT_NAME)
        bell = self._open_bell()
        self._woken, self._wake = os.pipe()
        for fd in (self._woken, self._wake):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)
        listener = self._listen()
        self._jobs.adopt()
        ready()
        poll = select.poll()
        for fd in (listener.fileno(), bell, self._woken):
            poll.register(fd, select.POLLIN)
        orphan_runners = self._jobs.supervise()
        while not self._stop:
            waits = [_ORPHAN_RUNNERS_EVERY_S] if orphan_runners else []
            idle_check = self._idle_shutdown.check()
            waits += [] if idle_check is None else [idle_check]
            events = {fd for fd, _ in poll.poll(min(waits) * 1000 if waits else None)}
            if listener.fileno() in events:
                self._accept(listener)
            for fd in events & {bell, self._woken}:
                _discard(fd)
            if self._woken in events or not events:
                orphan_runners = self._jobs.supervise()
            if events != {listener.fileno()}:
                self._jobs.bell.ring()
        os.unlink(os.path.join(self._state, wire.SOCKET))

    def _on_stop(self, number: int, frame: object) -> None:
        self._stop = True

    def _open_bell(self) -> int:
        path = os.path.join(self._state, BELL)
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        # For writing too: else it reads as ended whenever no runner has it open.
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self._state, wire.SOCKET))
        directory = os.open(self._state, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        listener.bind(f"/proc/self/fd/{directory}/{wire.SOCKET}")  # see `connect`
        os.close(directory)
        os.chmod(os.path.join(self._state, wire.SOCKET), 0o600)
        listener.listen(128)
        listener.setblocking(False)
        return listener

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:
            time.sleep(_NO_ROOM_S)  # out of descriptors, most likely; the caller stays in the queue
            return
        connection.setblocking(True)
        if not self._connections.acquire(blocking=False):
            connection.close()
            return
        threading.Thread(target=self._converse, args=(connection,), daemon=True).start()

    def _converse(self, connection: socket.socket) -> None:
        """Answer one connection's requests, in order, until it ends."""
        try:
            with connection, connection.makefile("rb") as incoming, connection.makefile("wb") as outgoing:
                try:
                    while self._exchange(incoming, outgoing):
                        pass
                except wire.WireError as error:
                    wire.write(outgoing, {"ok": False, "error": str(error), "code": "bad-request"})
        except OSError:
            pass  # the caller has gone
        finally:
            self._connections.release()

    def _exchange(self, incoming: BinaryIO, outgoing: BinaryIO) -> bool:
        message = wire.read(incoming)
        if message is None:
            return False
        request, body = message
        reply, answer = self._answer(request, body)
        body.drain()
        wire.write(outgoing, reply, answer)
        if answer is not None and not isinstance(answer, bytes):
            answer.close()
        if request.get("op") == "shutdown" and reply["ok"]:
            self._stop = True
            os.write(self._wake, b"\n")
        return True

    def _answer(self, request: Fields, body: wire.MessageBody) -> Answer:
        """Do what is asked. Whatever goes wrong is an answer, and the agent lives on."""
        op = request.get("op")
        try:
            if not isinstance(op, str):
                raise RequestRefused("no op is named")
            if op in files.OPS:
                reply, answer = files.OPS[op](self._state, request, body)  # type: ignore[arg-type]  # they only `read`
            elif op in self._operations:
                reply, answer = self._operations[op](request)
            else:
                raise RequestRefused(f"no operation {op!r:.100}", "unknown-op")
        except RequestRefused as error:
            return {"ok": False, "error": str(error), "code": error.code}, None
        except FilesError as error:
            return {"ok": False, "error": str(error), "code": "files"}, None
        except wire.WireError:
            raise
        except OSError as error:
            return {"ok": False, "error": str(error), "code": "io"}, None
        except Exception as error:
            sys.excepthook(*sys.exc_info())  # what `traceback` would print, without its import
            return {"ok": False, "error": f"{type(error).__name__}: {error}", "code": "internal"}, None
        return dict(reply, ok=True), answer

    def _hello(self, request: Fields) -> Answer:
        return {
            "protocol": wire.PROTOCOL,
            "version": self._identity.version,
            "pid": os.getpid(),
            "python": ".".join(map(str, sys.version_info[:3])),
            "hostname": os.uname().nodename,
            "boot_id": _line("/proc/sys/kernel/random/boot_id"),
            "time": time.time(),
            "home": self._identity.home,
            "address": self._identity.address,
        }, None

    def _connected(self, request: Fields) -> Answer:
        """Whether a person is logged in to this host."""
        return {"connected": someone_is_connected(self._identity.address)}, None

    def _set_idle_shutdown(self, request: Fields) -> Answer:
        """The rule for a host that idles without a server; the main loop must learn of it."""
        answer = self._idle_shutdown.operation(request)
        os.write(self._wake, b"\n")
        return answer

    def _shutdown(self, request: Fields) -> Answer:
        """End all jobs (unless `keep_jobs`), then, once this is answered, the agent."""
        return ({}, None) if request.get("keep_jobs") else self._jobs.cancel_all(request)


def serve(identity: Identity, daemon: bool) -> int:
    """Run the agent of a home until it is told to stop; as a daemon, print its pid and return once it answers."""
    home, state = identity.home, identity.state
    os.makedirs(state, 0o700, exist_ok=True)
    os.chmod(state, 0o700)
    lock, other = _take_lock(home)
    if lock < 0:
        if daemon:
            print(other)
            return 0
        print(f"an agent already serves {home} (pid {other})", file=sys.stderr)
        return 3
    ready = _daemonize(state, lock) if daemon else -1

    def on_ready() -> None:
        with open(os.path.join(state, "agent.pid"), "w") as file:
            file.write(f"{os.getpid()}\n")
        if ready >= 0:
            os.write(ready, b"%d\n" % os.getpid())
            os.close(ready)

    Agent(identity).run(on_ready)
    return 0


def _take_lock(home: str) -> tuple[int, int]:
    """The home's lock, and 0; or -1, and the pid of the agent that has it and answers."""
    lock = os.open(os.path.join(home, wire.STATE, "agent.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock, 0
        except OSError:
            pass
        try:
            with connect(home) as connection, connection.makefile("rwb") as stream:
                wire.write(stream, {"op": "hello"})
                reply = wire.read(stream)
            if reply is not None:
                return -1, int(reply[0]["pid"])
        except (OSError, wire.WireError):
            pass  # it is just starting, or just ending
        if time.monotonic() > until:
            raise SystemExit(f"another agent of {home} has the lock and does not answer")
        time.sleep(0.02)


def _daemonize(state: str, lock: int) -> int:
    """Go on as a daemon, in the background of nobody. The process that was called prints the daemon's pid and ends."""
    readable, writable = os.pipe()
    if os.fork() > 0:
        os.close(writable)
        with open(readable) as pipe:
            pid = pipe.read()
        sys.stdout.write(pid)
        sys.stdout.flush()
        if not pid:
            sys.stderr.write(f"the agent did not start; see {state}/agent.log\n")
        os._exit(0 if pid else 1)
    os.setsid()
    if os.fork() > 0:
        os._exit(0)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in (lock, writable):
            _close(int(name))  # what the caller left open: jobs of days must not hold it
    path = os.path.join(state, "agent.log")
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    if os.fstat(log).st_size > LOG_LIMIT:
        os.ftruncate(log, 0)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.dup2(log, 2)
    os.chdir("/")
    return writable


def _line(path: str) -> str:
    try:
        with open(path) as file:
            return file.readline().strip()
    except OSError:
        return ""


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)


def _discard(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(fd, 65536)
