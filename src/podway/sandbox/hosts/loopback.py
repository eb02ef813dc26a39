"""Hosts for those who are not root: one sshd of this user on a loopback address of its own for each.

They share this machine's file system and processes, but sshd gives each a HOME of its own; they cannot be cut off or lost one by
one. Processes of a host are told by the directory of its home in their environment or arguments.
"""

import contextlib
import getpass
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TypedDict

from podway.sandbox.hosts.sshd import SSHD, SSHD_NAMES, SshHost, make_key, sshd_config

READY_S = 60.0  # seconds; it takes one, where nobody else needs the processor
PLAIN_USER = "podway-sandbox"
_made = itertools.count()  # so that no two hosts of one process have the same address


class _AsUser(TypedDict, total=False):
    """Arguments of `subprocess` that make a child somebody else's."""

    user: int
    group: int
    extra_groups: list[int]


class LoopbackHosts:
    """See the module docstring; the verbs are told in `HostSet`."""

    separate = False

    def __init__(self, count: int, user: str | None = None) -> None:
        """`user` is who the hosts run as, where that is not this process's own."""
        self._place = Path(tempfile.mkdtemp(prefix="podway-loopback-"))
        self.user = user or getpass.getuser()
        self._other = pwd.getpwnam(user) if user and user != getpass.getuser() else None
        self._sshds: dict[int, subprocess.Popen[bytes]] = {}
        try:
            self.key = make_key(self._place / "key")
            self.hosts = tuple(self._host(index) for index in range(count))
            for index in range(count):
                self._prepare(index)
            self._give_away()
            for index in range(count):
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
            user=self.user,
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
            authorized=f"{self.key}.pub {self._place}/authorized {host.home}/.ssh/authorized_keys",
        )
        (place / "sshd_config").write_text(f"{config}SetEnv HOME={host.home}\n")
        if os.geteuid() == 0 and self._other is None:
            Path("/run/sshd").mkdir(exist_ok=True)  # where an sshd of root keeps its unprivileged part

    def _give_away(self) -> None:
        """All files are the user's whose sshds read them."""
        if self._other is not None:
            for path in [self._place, *self._place.rglob("*")]:
                os.chown(path, self._other.pw_uid, self._other.pw_gid, follow_symlinks=False)

    def let_in(self, keys: str) -> None:
        """These public keys too, a line each, instead of those given before."""
        (self._place / "authorized").write_text(keys)
        self._give_away()

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
                **self._as_user(),
            )
        until = time.monotonic() + READY_S
        while True:
            try:
                socket.create_connection((host.address, host.port), 1.0).close()
                return
            except OSError:
                if time.monotonic() > until or self._sshds[index].poll() is not None:
                    log_text = (place / "sshd.log").read_text(errors="replace")
                    ended = self._sshds[index].poll()
                    how = "does not listen" if ended is None else f"ended with code {ended}"
                    raise RuntimeError(f"sshd of host {index} {how}: {log_text[-500:]}") from None
                time.sleep(0.02)

    def _as_user(self) -> _AsUser:
        if self._other is None:
            return {}
        return {"user": self._other.pw_uid, "group": self._other.pw_gid, "extra_groups": []}

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
        shell = ["sh", "-c", command]
        return subprocess.run(
            shell, env=env, cwd="/", capture_output=True, text=True, check=True, timeout=30, **self._as_user()
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
    """The sshds that serve connections: children of the listener, and (privilege separation) their children of such names."""
    found: list[int] = []
    todo = [listener]
    while todo:
        parent = todo.pop()
        with contextlib.suppress(OSError):
            for word in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
                if Path(f"/proc/{word}/comm").read_text().strip() in SSHD_NAMES:
                    found.append(int(word))
                    todo.append(int(word))
    return found


def plain_user() -> str:
    """Who hosts on loopback run as: this user; for root somebody without rights, made where there is nobody yet."""
    if os.geteuid() != 0:
        return getpass.getuser()
    sudo_user = os.environ.get("SUDO_USER", "")
    if sudo_user not in ("", "root"):
        return sudo_user
    with contextlib.suppress(KeyError):
        return pwd.getpwnam(PLAIN_USER).pw_name
    make = ["useradd", "--system", "--no-create-home", "--home-dir", "/nonexistent", "--shell", "/bin/sh", PLAIN_USER]
    try:
        subprocess.run(make, capture_output=True, timeout=30)
        return pwd.getpwnam(PLAIN_USER).pw_name
    except (OSError, KeyError):
        raise RuntimeError(f"hosts of root need a plain user, which cannot be made here: {' '.join(make)}") from None
