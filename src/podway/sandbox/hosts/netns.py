"""Confined machines: each a network namespace on one bridge, with its own root, home, /tmp, process ids and host name, and an
sshd on port 22. Of this machine they see its programs (/usr) and nothing else; boot.py says how that is held.

1. A bridge is made under a free number N; that it cannot exist twice is the claim on 10.213.N.0/24.
2. Each host gets a namespace and a veth pair; there is no default route, so hosts reach each other and this machine's end
   of the bridge, and nothing else.
3. `unshare` starts boot.py, which becomes each host's init: a shell loop that keeps sshd running unless told not to, and reaps
   orphans.

More hosts may be added later, one may be lost and booted again with the files it had, or removed. `close` ends the inits
(the kernel ends all in their pid namespace) and removes namespaces, bridge and files. A set whose maker was killed is removed
by the next one who makes hosts.
"""

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path

from podway.sandbox.hosts import boot, disk_mounts
from podway.sandbox.hosts.skeleton import make_skeleton
from podway.sandbox.hosts.sshd import SSHD_NAMES, SshHost, make_key, sshd_config

PLACE = Path("/run/podway-hosts")  # where nobody but root can put anything
NETWORK = "10.213"  # inside 10.0.0.0/8 and rarely anyone's
OUTSIDE = "198.18"  # RFC 2544: for tests between networks, so never anyone's; a host's address as the outside calls it
METADATA_ADDRESS = "169.254.169.254"  # where a machine of Google Cloud asks who it is; one of its own here
MOST_SETS = 200
FIRST, LAST = 10, 254  # of a host's last number
READY_S = 60.0  # seconds; it takes one, where nobody else needs the processor
HOME_SIZE = "64m"
_HOSTS = "127.0.0.1 localhost\n@ADDRESS@ @NAME@\n"
_ISOLATE = ["unshare", "--mount", "--uts", "--pid", "--ipc"]


@cache
def why_no_namespaces() -> str | None:
    """Why machines of their own cannot be made here, or None when they can."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    missing = [tool for tool in ("ip", "unshare", "nsenter", "mount", "ps", "pkill") if shutil.which(tool) is None]
    if missing:
        return f"{missing[0]} is not installed (Debian: iproute2, util-linux, procps)"
    # Root of a container may lack what it takes.
    probe = [*_ISOLATE, "--net", "--fork", sys.executable, "-I", boot.__file__, "--probe"]
    tried = subprocess.run(probe, capture_output=True, text=True, timeout=20)
    return f"namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else None


class NetnsHosts:
    """See the module docstring; the verbs are told in `HostSet`."""

    separate = True

    def __init__(
        self,
        count: int,
        homes: Path | None = None,
        *,
        home_size: str | None = HOME_SIZE,
        shares: tuple[str, ...] = (),
        containers: bool = False,
    ) -> None:
        """Homes lie in memory up to a size; or in a directory of this machine; or (no size) in memory with all else.

        `shares` are directories of this machine that the hosts may read, at the same place. `containers`: the hosts' root may make
        namespaces, as a container runtime needs.
        """
        PLACE.mkdir(mode=0o755, exist_ok=True)
        _remove_orphans()
        self._number = _claim()
        self._place = PLACE / str(self._number)
        self._homes, self._home_size, self._shares, self._containers = homes, home_size, shares, containers
        self._inits: dict[int, subprocess.Popen[bytes]] = {}
        self._growing = threading.Lock()
        self._free = list(range(FIRST, LAST + 1))
        self.hosts: tuple[SshHost, ...] = ()
        try:
            self._make()
            self.add([f"h{index}" for index in range(count)])
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        self._place.mkdir()
        (self._place / "maker").write_text(f"{os.getpid()} {_start_of(os.getpid())}")
        # The upper layers must not lie on the file system that is the lower one (overlayfs refuses).
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", self._place], check=True)
        (self._place / "maker").write_text(f"{os.getpid()} {_start_of(os.getpid())}")
        self._layers = make_skeleton(self._place / "skeleton")
        self.key = make_key(self._place / "key")
        bridge, n = f"pwb{self._number}", self._number
        _ip([f"addr add {net}.{n}.1/24 dev {bridge}" for net in (NETWORK, OUTSIDE)] + [f"link set {bridge} up"])

    def add(self, names: list[str], files: dict[str, str] | None = None) -> list[int]:
        """More hosts, ready when this returns; `files` are on each of them from the start, with @ADDRESS@ and @NAME@. Their indexes."""
        with self._growing:
            if len(names) > len(self._free):
                raise RuntimeError(f"a network holds {LAST - FIRST + 1} hosts; {len(self._free)} are left")
            first = len(self.hosts)
            ends, self._free = self._free[: len(names)], self._free[len(names) :]
            more = [self._host(name, end) for name, end in zip(names, ends, strict=True)]
            self.hosts = (*self.hosts, *more)
        added = list(range(first, first + len(more)))
        self._network(added)
        for index in added:
            self._furnish(index, files or {})
            self._start_init(index)
        self._await_all(added)
        return added

    def _await_all(self, indexes: list[int]) -> None:
        until = time.monotonic() + READY_S
        for index in indexes:
            self._await_sshd(index, until)

    def _host(self, name: str, end: int) -> SshHost:
        return SshHost(name=name, address=f"{NETWORK}.{self._number}.{end}", port=22, user="root", home="/root")

    def _network(self, indexes: list[int]) -> None:
        n = self._number
        _ip([f"netns add pw{n}h{i}" for i in indexes])
        _ip(
            [
                line
                for i in indexes
                for line in (
                    f"link add pw{n}v{i} type veth peer name eth0 netns pw{n}h{i}",
                    f"link set pw{n}v{i} master pwb{n} up",
                )
            ]
        )
        for i in indexes:
            address = self.hosts[i].address
            lines = [f"addr add {one}/24 dev eth0" for one in (address, outside(address))]
            lines.append(f"addr add {METADATA_ADDRESS}/32 dev lo")
            _ip([*lines, "link set lo up", "link set eth0 up"], namespace=f"pw{n}h{i}")

    def _furnish(self, index: int, files: dict[str, str]) -> None:
        host, place = self.hosts[index], self._place / f"h{index}"
        (place / "root").mkdir(parents=True)
        own = {f"root/{name}": text for name, text in {"etc/hosts": _HOSTS, **files}.items()}
        own |= {f"usr/local/bin/{verb}": disk_mounts.MOUNT for verb in ("mount", "umount")}
        for name, text in own.items():
            file = place / "layers" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace("@ADDRESS@", host.address).replace("@NAME@", host.name))
            file.chmod(0o755 if name.startswith("usr/") else 0o644)
        make_key(place / "host_key")
        shutil.copy(self._place / "key.pub", place / "authorized")
        config = sshd_config(
            address=host.address,
            port=22,
            host_key="/run/pw/host_key",
            authorized="/run/pw/authorized /run/pw/keys/%u .ssh/authorized_keys",
        )
        (place / "sshd_config").write_text(f"{config}ListenAddress {outside(host.address)}\n")

    def _start_init(self, index: int) -> None:
        host, place = self.hosts[index], self._place / f"h{index}"
        home = self._homes / host.name if self._homes else None
        if home is not None:
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
        machine = {
            "place": str(place),
            "skeleton": str(self._place / "skeleton"),
            "layers": ":".join(self._layers),
            "name": host.name,
            "homes": str(home or ""),
            "home_size": self._home_size or "",
            "containers": "yes" if self._containers else "",
        }
        spec = json.dumps({"machine": machine, "shares": self._shares})
        start = [*_ISOLATE, "--fork", "--kill-child", sys.executable, "-I", boot.__file__, spec]
        with open(place / "init.log", "wb") as log:
            self._inits[index] = subprocess.Popen(
                ["ip", "netns", "exec", f"pw{self._number}h{index}", *start],
                env={"PATH": os.defpath + ":/usr/sbin:/sbin"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def namespace(self, index: int) -> str:
        """The name of the machine's network, as `ip netns` knows it."""
        return f"pw{self._number}h{index}"

    def host_key(self, index: int) -> str:
        """The public key that sshd shows, "TYPE BASE64"."""
        return " ".join((self._place / f"h{index}" / "host_key.pub").read_text().split()[:2])

    def boot(self, indexes: list[int]) -> None:
        """Hosts that were lost come back with their files; what was in memory, /tmp and /run is gone."""
        for index in indexes:
            self._start_init(index)
        self._await_all(indexes)

    def remove(self, index: int) -> None:
        """A host goes for good; its address may be another's later."""
        self.lose(index)
        n = self._number
        _ip([f"link del pw{n}v{index}", f"netns del pw{n}h{index}"], force=True)
        shutil.rmtree(self._place / f"h{index}", ignore_errors=True)
        with self._growing:
            self._free.append(int(self.hosts[index].address.rpartition(".")[2]))

    def _await_sshd(self, index: int, until: float) -> None:
        while True:
            try:
                socket.create_connection((self.hosts[index].address, 22), 1.0).close()
                return
            except OSError:
                if time.monotonic() > until or self._inits[index].poll() is not None:
                    log = (self._place / f"h{index}" / "init.log").read_text(errors="replace")
                    raise RuntimeError(f"host {index} did not come up: {log[-500:]}") from None
                time.sleep(0.02)

    def init_pid(self, index: int) -> int:
        """The machine's first process, as this machine counts."""
        parent = self._inits[index].pid
        until = time.monotonic() + READY_S
        while time.monotonic() < until:
            # Processes below `unshare`: the one it forked is pid 1 in there.
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
            if children:
                return int(children[0])
            time.sleep(0.01)
        raise RuntimeError(f"host {index} has no process")

    def keeper_pid(self, index: int) -> int:
        """A process of this machine in the host's outer mount namespace, for as long as the host runs."""
        return self._inits[index].pid

    def files(self, index: int) -> Path:
        return Path(f"/proc/{self.init_pid(index)}/root")

    def written(self, index: int) -> Path:
        """What the machine has written, apart from its home, /tmp and /run."""
        return self._place / f"h{index}" / "layers"

    def run(self, index: int, command: str, given: str = "") -> str:
        pid = str(self.init_pid(index))
        # The user namespace too: what runs there is the machine's, also where its root has replaced the shell.
        enter = ["nsenter", "--target", pid, "--user", "--mount", "--uts", "--pid", "--ipc", "--net", "--root"]
        shell = [*enter, "sh", "-c", f"cd /; {command}"]
        done = subprocess.run(shell, input=given, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise RuntimeError(f"{command!r} on host {index}: {done.stderr.strip()}")
        return done.stdout

    def processes(self, index: int) -> list[str]:
        lines = self.run(index, "ps -eo pid=,comm=,args=").splitlines()
        found = []
        for line in lines:
            pid, name, arguments = (*line.split(None, 2), "", "")[:3]
            ours = (
                pid == "1"
                or name in (*SSHD_NAMES, "ps")
                or arguments.strip() in ("sleep 0.05", "sh -c cd /; ps -eo pid=,comm=,args=")
            )
            if not ours:
                found.append(arguments)
        return found

    def kill_sshd(self, index: int) -> None:
        self.run(index, f"touch /run/pw/no-sshd; pkill -KILL -x '{'|'.join(SSHD_NAMES)}'; true")

    def start_sshd(self, index: int) -> None:
        self.run(index, "rm -f /run/pw/no-sshd")
        self._await_sshd(index, time.monotonic() + READY_S)

    def cut_off(self, index: int) -> None:
        _ip([f"link set pw{self._number}v{index} down"])

    def reconnect(self, index: int) -> None:
        _ip([f"link set pw{self._number}v{index} up"])

    def shape(self, rate: str) -> None:
        """What this machine sends to the hosts leaves at this rate, as by a laptop's uplink; from host to host stays free."""
        uplink = ["tc", "qdisc", "replace", "dev", f"pwb{self._number}", "root", "tbf"]
        subprocess.run([*uplink, "rate", rate, "burst", "256kb", "latency", "100ms"], check=True, timeout=10)

    def lose(self, index: int) -> None:
        """The machine dies at once: all its processes, and what was in memory, /tmp and /run."""
        init = self._inits[index]
        below = Path(f"/proc/{init.pid}/task/{init.pid}/children")
        with contextlib.suppress(OSError):
            children = below.read_text().split()
            init.kill()
            until = time.monotonic() + READY_S
            # The machine's first process is the last to go; until then its sshd may still answer.
            while any(_lives(int(child)) for child in children) and time.monotonic() < until:
                time.sleep(0.005)
        init.wait(10)

    def close(self) -> None:
        for init in self._inits.values():
            init.kill()
        for init in self._inits.values():
            init.wait(10)
        _remove(self._number)


def outside(address: str) -> str:
    """A host's other address, by which the world outside its network would know it."""
    return address.replace(NETWORK, OUTSIDE, 1)


def _claim() -> int:
    for step in range(MOST_SETS):
        # Not always from the first on: a number just given back is not at once another's.
        number = (os.getpid() + step) % MOST_SETS
        # In one step with a mark of its maker: one that is killed right after it leaves a bridge that can be told for its own.
        add = ["ip", "link", "add", f"pwb{number}", "address", _address_of(os.getpid()), "type", "bridge"]
        made = subprocess.run(add, capture_output=True, text=True, timeout=10)
        if made.returncode == 0:
            return number
        if "exists" not in made.stderr:
            raise RuntimeError(f"cannot make a bridge: {made.stderr.strip()}")
    raise RuntimeError("all test networks are taken")


def _remove(number: int) -> None:
    place = PLACE / str(number)
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.split()
    mine = [space for space in spaces if space.startswith(f"pw{number}h")]
    for space in mine:
        for pid in subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True).stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    # Links by themselves: a namespace may live on for minutes, held by a TCP connection that waits for its last packet.
    links = [path.name for path in Path("/sys/class/net").glob(f"pw{number}v*")]
    _ip([f"link del {link}" for link in links], force=True)
    _ip([f"netns del {space}" for space in mine], force=True)
    until = time.monotonic() + 5.0
    while place.is_mount() and subprocess.run(["umount", place], capture_output=True).returncode:
        if time.monotonic() > until:
            subprocess.run(["umount", "-l", place], capture_output=True)
        time.sleep(0.05)
    shutil.rmtree(place, ignore_errors=True)
    _ip(
        [f"link del pwb{number}"], force=True
    )  # last: it is the claim, and whoever takes the number makes this place again


def _remove_orphans() -> None:
    """What a killed maker left."""
    for place in PLACE.iterdir():
        try:
            pid, start = (place / "maker").read_text().split()
        except (OSError, ValueError):
            continue  # just being made
        if _start_of(int(pid)) != start:
            _remove(int(place.name))
    for bridge in Path("/sys/class/net").glob(
        "pwb*"
    ):  # without a place: killed before that was made, or after it was removed
        number = bridge.name.removeprefix("pwb")
        if number.isdigit() and not (PLACE / number).exists() and not _maker_lives(bridge):
            _ip([f"link del {bridge.name}"], force=True)


def _address_of(pid: int) -> str:
    """A hardware address that names a process: locally administered, its id, and the end of the time that it began at."""
    number = pid.to_bytes(3, "big") + (int(_start_of(pid) or 0) & 0xFFFF).to_bytes(2, "big")
    return ":".join(f"{byte:02x}" for byte in (2, *number))


def _maker_lives(bridge: Path) -> bool:
    try:
        address = (bridge / "address").read_text().strip()
    except OSError:
        return True  # just gone
    pid = int(address.replace(":", "")[2:8], 16)
    return not address.startswith("02:") or _address_of(pid) == address


def _lives(pid: int) -> bool:
    """Whether a process runs; one that only waits to be buried does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _start_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        return ""


def _ip(lines: list[str], *, namespace: str = "", force: bool = False) -> None:
    if not lines:
        return
    command = ["ip", *(["-n", namespace] if namespace else []), *(["-force"] if force else []), "-batch", "-"]
    done = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=60)
    if done.returncode and not force:
        raise RuntimeError(f"ip {shlex.join(lines[:1])} ...: {done.stderr.strip()}")
