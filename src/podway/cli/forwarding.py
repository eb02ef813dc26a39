"""Ports of a cluster's first host on this machine, while somebody is attached: one ssh of the person's own, kept up in the background.

The ssh runs a command that ends with it, so that the host's agent sees that somebody is there. A connection that breaks is made again until
`stop`; what cannot be mended by that (a local port that is taken) is told once.
"""

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence

import msgspec

from podway.errors import UserError
from podway.home import home
from podway.hosts.ssh.config import SshFiles
from podway.server.client import Client

READY = b"podway-attached"
RETRY_S = 2.0
END_S = 5.0
ALIVE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3", "-o", "ExitOnForwardFailure=yes")


class Forward(msgspec.Struct, frozen=True, kw_only=True):
    """One port here, one there."""

    local: int
    remote: int

    def __str__(self) -> str:
        return f"localhost:{self.local} -> {self.remote}"


def choose_ports(mappings: Sequence[str]) -> list[Forward]:
    """The local ports of `LOCAL:REMOTE` mappings (task/ports.py); a fixed one that is taken is an error."""
    found: list[Forward] = []
    for mapping in mappings:
        asked, _, remote = mapping.rpartition(":")
        number = asked.rstrip("?")
        local = _free(int(number)) if number != "*" else _free(0)
        if local is None and asked.endswith("?"):
            local = _free(0)
        if local is None or local in (one.local for one in found):
            raise UserError(
                f"port {number} of this machine is taken, and port {remote} of the host is to be forwarded to it",
                f"end what has it, or write '*:{remote}' for any free port",
            )
        found.append(Forward(local=local, remote=int(remote)))
    return found


def _free(port: int) -> int | None:
    """The port, or (for 0) some port, if nobody has it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return None
        return int(probe.getsockname()[1])


class PortForwarding:
    """The background ssh to a cluster's first host, once that is up; use with `with`. `say` is told when it is there and when it is not."""

    def __init__(self, client: Client, cluster: str, forwards: Sequence[Forward], say: Callable[[str], None]) -> None:
        self._client = client.fork()
        self._cluster = cluster
        self._forwards = forwards
        self._say = say
        self._stop = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep, name="podway-attach", daemon=True)
        self._last: str | None = None  # the last problem that was told; nothing yet
        self.up = threading.Event()

    def __enter__(self) -> "PortForwarding":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._end()
        self._thread.join(END_S)

    def _command(self) -> list[str]:
        ways = [word for one in self._forwards for word in ("-L", f"127.0.0.1:{one.local}:localhost:{one.remote}")]
        config = SshFiles(home()).config
        # Not to be shared with another ssh of the person: it would outlive this one.
        words = ["ssh", "-F", str(config), "-T", "-S", "none", *ALIVE, *ways, f"{self._cluster}-worker0"]
        return [*words, f"echo {READY.decode()}; exec cat >/dev/null"]

    def _keep(self) -> None:
        while not self._stop.is_set():
            try:
                if self._has_entry():
                    self._connect()
            except UserError:  # the server is away; it is asked again
                pass
            except OSError as error:
                self._tell(f"ssh cannot be started: {error.strerror}")
            self.up.clear()
            self._stop.wait(RETRY_S if self._last else 0.2)

    def _has_entry(self) -> bool:
        """Whether ssh knows the cluster: this machine's own server writes its entry when the hosts are up, a team's does not."""
        if self._client.own_server:
            return SshFiles(home()).entry(self._cluster).exists()
        from podway.cli.ssh_names import write_team_entry  # only at a team's server

        found = self._client.cluster(self._cluster)
        if found.state == "UP":
            write_team_entry(found)
        return found.state == "UP"

    def _connect(self) -> None:
        pipe = subprocess.PIPE
        # A session of its own: Ctrl-C is for us, and we end it.
        child = subprocess.Popen(self._command(), stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        self._child = child
        assert child.stdout is not None and child.stderr is not None
        if self._stop.is_set():
            self._end()
        for line in child.stdout:
            if line.strip() == READY:
                self._tell("")
                self.up.set()
        said = child.stderr.read().decode(errors="replace").strip().splitlines()
        child.wait()
        if not self._stop.is_set():
            self._tell(said[-1] if said else "the connection ended")

    def _tell(self, problem: str) -> None:
        """Once for each change."""
        if problem != self._last:
            if problem:
                self._say(f"No connection to {self._cluster} ({problem}); trying again.")
            elif self._last is not None:
                self._say(f"Connected to {self._cluster} again.")
        if not problem and self._last is None and self._forwards:
            self._say("Forwarded ports (local -> remote):\n" + "\n".join(f"  {one}" for one in self._forwards))
        self._last = problem

    def _end(self) -> None:
        child = self._child
        if child is None or child.poll() is not None:
            return
        with contextlib.suppress(OSError):
            if child.stdin is not None:
                child.stdin.close()
        try:
            child.wait(1.0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, 15)
