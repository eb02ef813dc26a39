"""Hosts for those who are not root: one sshd of this user on a loopback address of its own for each.

They share this machine's file system and processes, but sshd gives each a HOME of its own; they cannot be cut off or lost one by
one. Processes of a host are told by the directory of its home in their environment or arguments.
"""

import contextlib
import getpass
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from podway.sandbox.hosts.sshd import SSHD, SshHost, make_key, sshd_config

READY_S = 15.0
_made = itertools.count()  # so that no two hosts of one process have the same address


class LoopbackHosts:
    """See the module docstring; the verbs are told in `HostSet`."""

    separate = False

    def __init__(self, count: int) -> None:
        self._place = Path(tempfile.mkdtemp(prefix="podway-loopback-"))
        self._sshds: dict[int, subprocess.Popen[bytes]] = {}
        try:
            self.key = make_key(self._place / "key")
            self.hosts = tuple(self._host(index) for index in range(count))
            for index in range(count):
                self._prepare(index)
                self.start_sshd(index)
        except BaseException:
            self.close()
            raise

    def _host(self, index: int) -> SshHost:
        number = next(_made)
        address = f"127.{77 + os.getpid() % 100}.{number // 250 % 250}.{number % 250 + 1}"
        with socket.create_server((address, 0)) as free:
            port = free.getsockname()[1]
        home = self._place / f"h{index}" / "home"
        return SshHost(
            name=f"h{index}",
            address=address,
            port=port,
            user=getpass.getuser(),
            home=str(home),
        )

    def _prepare(self, index: int) -> None:
        host, place = self.hosts[index], self._place / f"h{index}"
        Path(host.home).mkdir(parents=True)
        make_key(place / "host_key")
        config = sshd_config(
            address=host.address,
            port=host.port,
            host_key=place / "host_key",
            authorized=f"{self.key}.pub {self._place}/authorized",
        )
        (place / "sshd_config").write_text(f"{config}SetEnv HOME={host.home}\n")
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # where an sshd of root keeps its unprivileged part

    def let_in(self, keys: str) -> None:
        """These public keys too, a line each, instead of those given before."""
        (self._place / "authorized").write_text(keys)

    def host_key(self, index: int) -> str:
        """The public key that sshd shows, "TYPE BASE64"."""
        return " ".join((self._place / f"h{index}" / "host_key.pub").read_text().split()[:2])

    def start_sshd(self, index: int) -> None:
        place, host = self._place / f"h{index}", self.hosts[index]
        with open(place / "sshd.log", "ab") as log:
            self._sshds[index] = subprocess.Popen(
                [str(SSHD), "-D", "-e", "-f", str(place / "sshd_config")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until = time.monotonic() + READY_S
        while True:
            try:
                socket.create_connection((host.address, host.port), 1.0).close()
                return
            except OSError:
                if time.monotonic() > until or self._sshds[index].poll() is not None:
                    log_text = (place / "sshd.log").read_text(errors="replace")
                    raise RuntimeError(f"sshd of host {index} did not start: {log_text[-500:]}") from None
                time.sleep(0.02)

    def kill_sshd(self, index: int) -> None:
        listener = self._sshds.pop(index, None)
        if listener is None:
            return
        for pid in [*_sessions(listener.pid), listener.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        listener.wait(10)

    def cut_off(self, index: int) -> None:
        raise RuntimeError("hosts on loopback cannot be cut off: they have no link of their own")

    def reconnect(self, index: int) -> None:
        raise RuntimeError("hosts on loopback cannot be cut off: they have no link of their own")

    def files(self, index: int) -> Path:
        return Path("/")

    def run(self, index: int, command: str) -> str:
        env = {**os.environ, "HOME": self.hosts[index].home}
        return subprocess.run(
            ["sh", "-c", command], env=env, cwd="/", capture_output=True, text=True, check=True, timeout=30
        ).stdout

    def processes(self, index: int) -> list[str]:
        return [arguments for _, arguments in self._of_home(self.hosts[index].home)]

    def _of_home(self, home: str) -> list[tuple[int, str]]:
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                arguments = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                environment = (entry / "environ").read_bytes().split(b"\0")
                if f"HOME={home}".encode() in environment or f"--home {home}" in arguments:
                    found.append((int(entry.name), arguments))
        return found

    def close(self) -> None:
        for index in list(self._sshds):
            self.kill_sshd(index)
        for host in getattr(self, "hosts", ()):
            for pid, _ in self._of_home(host.home):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self._place, ignore_errors=True)


def _sessions(listener: int) -> list[int]:
    """The sshds that serve connections: children of the listener, and (privilege separation) their children called sshd."""
    found: list[int] = []
    todo = [listener]
    while todo:
        parent = todo.pop()
        with contextlib.suppress(OSError):
            for word in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
                if Path(f"/proc/{word}/comm").read_text().strip() == "sshd":
                    found.append(int(word))
                    todo.append(int(word))
    return found
