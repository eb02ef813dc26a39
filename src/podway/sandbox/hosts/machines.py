"""The machines behind nodes: of their own (network namespaces), sshds on loopback, or none at all.

Machines of a node are kept by the node's number. What a guest agent does in them is in guests.py.
"""

from pathlib import Path
from typing import Protocol

from podway.sandbox.hosts.guest import SUDOERS, Keys
from podway.sandbox.hosts.guests import DiskRequest, Disks, change_inside
from podway.sandbox.hosts.loopback import LoopbackHosts, plain_user
from podway.sandbox.hosts.netns import NetnsHosts, outside, why_no_namespaces
from podway.sandbox.hosts.sshd import why_no_hosts
from podway.sandbox.tpu.nodes import Host

_FILES = {
    "etc/hosts": "127.0.0.1 localhost\n169.254.169.254 metadata.google.internal metadata\n@ADDRESS@ @NAME@\n",
    "etc/sudoers.d/google_sudoers": f"%{SUDOERS} ALL=(ALL:ALL) NOPASSWD:ALL\n",
}


class Machines(Protocol):
    """What can be done to machines; all of it may take its time."""

    kind: str
    note: str  # why they are not of the best kind; nothing when they are
    login: str  # the only user that can log in; nothing where all can

    def boot(self, number: int, names: list[str]) -> tuple[Host, ...]:
        """Make them, or start those that were halted."""

    def reboot(self, number: int, workers: tuple[int, ...]) -> None:
        """Off and on again, with the files they had."""

    def halt(self, number: int) -> None:
        """Off."""

    def remove(self, number: int) -> None:
        """Off and gone."""

    def let_in(self, number: int, keys: Keys) -> None:
        """These users with these keys, and nobody else."""

    def attach(self, number: int, disks: list[DiskRequest]) -> None:
        """Each sees these disks, and no other."""

    def wipe(self, disk: int) -> None:
        """A disk is deleted."""

    def start_script(self, number: int, script: str) -> None:
        """Begin to run a script on each as root, as a machine does when it has booted."""

    def namespaces(self, number: int) -> list[str]:
        """The names of their networks, where they have some of their own."""

    def inject(self, number: int, worker: int, what: str) -> None:
        """cut-off, reconnect, kill-sshd, start-sshd, lose."""

    def close(self) -> None:
        """All gone."""


def make_machines(kind: str, place: Path, home_size: str | None = None, shares: tuple[str, ...] = ()) -> Machines:
    """Of the kind asked for; `auto` is the best that is available here."""
    note = ""
    if kind == "auto":
        no_hosts, no_namespaces = why_no_hosts(), why_no_namespaces()
        kind = "none" if no_hosts else "loopback" if no_namespaces else "netns"
        if no_hosts:
            note = f"nodes have addresses but no machines behind them: {no_hosts}"
        elif no_namespaces:
            note = f"workers are not confined, but sshds of one plain user on loopback: {no_namespaces}"
    if kind == "none":
        return NoMachines(note)
    why = why_no_hosts() or (why_no_namespaces() if kind == "netns" else None)
    if why:
        raise RuntimeError(why)
    return NetnsMachines(place, home_size, shares) if kind == "netns" else LoopbackMachines(note)


class NoMachines:
    """Addresses that lead nowhere: for the API alone."""

    kind = "none"
    login = ""

    def __init__(self, note: str = "") -> None:
        self.note = note
        self._given = 0
        self._hosts: dict[int, tuple[Host, ...]] = {}

    def boot(self, number: int, names: list[str]) -> tuple[Host, ...]:
        if number not in self._hosts:
            ends = range(self._given, self._given + len(names))
            self._given += len(names)
            self._hosts[number] = tuple(
                Host(
                    address=f"10.128.{i // 250 % 250}.{i % 250 + 2}",
                    external=f"198.19.{i // 250 % 250}.{i % 250 + 2}",
                    name=n,
                )
                for i, n in zip(ends, names, strict=True)
            )
        return self._hosts[number]

    def reboot(self, number: int, workers: tuple[int, ...]) -> None:
        """There is nothing."""

    def halt(self, number: int) -> None:
        """There is nothing."""

    def remove(self, number: int) -> None:
        self._hosts.pop(number, None)

    def let_in(self, number: int, keys: Keys) -> None:
        """There is nothing."""

    def attach(self, number: int, disks: list[DiskRequest]) -> None:
        """There is nothing."""

    def wipe(self, disk: int) -> None:
        """There is nothing."""

    def start_script(self, number: int, script: str) -> None:
        """There is nothing."""

    def namespaces(self, number: int) -> list[str]:
        return []

    def inject(self, number: int, worker: int, what: str) -> None:
        raise RuntimeError("this sandbox has no machines")

    def close(self) -> None:
        """There is nothing."""


class NetnsMachines:
    """Each a network namespace with its own root and sshd on port 22."""

    kind = "netns"
    note = login = ""

    def __init__(self, place: Path, home_size: str | None = None, shares: tuple[str, ...] = ()) -> None:
        self._disks = Disks(place / "disks")
        self._set = NetnsHosts(0, home_size=home_size, shares=shares)
        self._of: dict[int, list[int]] = {}
        self._down: set[int] = set()

    def boot(self, number: int, names: list[str]) -> tuple[Host, ...]:
        if number in self._of:
            self._up(self._of[number])
        else:
            self._of[number] = self._set.add(names, _FILES)
        return tuple(self._host(index) for index in self._of[number])

    def _host(self, index: int) -> Host:
        host = self._set.hosts[index]
        return Host(address=host.address, external=outside(host.address), name=host.name, key=self._set.host_key(index))

    def _up(self, indexes: list[int]) -> None:
        down = [index for index in indexes if index in self._down]
        self._set.boot(down)
        self._down -= set(down)

    def reboot(self, number: int, workers: tuple[int, ...]) -> None:
        chosen = [index for worker, index in enumerate(self._of[number]) if not workers or worker in workers]
        self._lose(chosen)
        self._up(chosen)

    def halt(self, number: int) -> None:
        self._lose(self._of.get(number, []))

    def _lose(self, indexes: list[int]) -> None:
        for index in indexes:
            if index not in self._down:
                self._set.lose(index)
                self._disks.detach_all(index)
                self._down.add(index)

    def remove(self, number: int) -> None:
        gone = self._of.pop(number, [])
        self._lose(gone)
        for index in gone:
            self._set.remove(index)
            self._down.discard(index)

    def let_in(self, number: int, keys: Keys) -> None:
        up = [self._set.init_pid(index) for index in self._of.get(number, []) if index not in self._down]
        change_inside(up, let_in=keys)

    def attach(self, number: int, disks: list[DiskRequest]) -> None:
        for index in self._of.get(number, []):
            if index not in self._down:
                self._disks.attach(index, self._set.keeper_pid(index), disks)

    def wipe(self, disk: int) -> None:
        self._disks.wipe(disk)

    def start_script(self, number: int, script: str) -> None:
        for index in self._of.get(number, []):
            self._set.run(index, "cat > /run/pw/startup-script; chmod 755 /run/pw/startup-script", script)
            self._set.run(index, "setsid /run/pw/startup-script </dev/null >/var/log/startup-script.log 2>&1 &")

    def namespaces(self, number: int) -> list[str]:
        return [self._set.namespace(index) for index in self._of.get(number, [])]

    def inject(self, number: int, worker: int, what: str) -> None:
        index = self._of[number][worker]
        actions = {
            "cut-off": self._set.cut_off,
            "reconnect": self._set.reconnect,
            "kill-sshd": self._set.kill_sshd,
            "start-sshd": self._set.start_sshd,
        }
        if what == "lose":
            self._lose([index])
        else:
            actions[what](index)

    def close(self) -> None:
        self._set.close()
        self._disks.close()


class LoopbackMachines:
    """sshds of one plain user on loopback addresses. Their ports are not 22: the guest attribute `sandbox/ssh-port` tells them."""

    kind = "loopback"

    def __init__(self, note: str = "") -> None:
        self.note, self.login = note, plain_user()
        self._sets: dict[int, LoopbackHosts] = {}

    def boot(self, number: int, names: list[str]) -> tuple[Host, ...]:
        if number not in self._sets:
            self._sets[number] = LoopbackHosts(len(names), self.login)
        else:
            self.inject_all(number, "start-sshd")
        made = self._sets[number]
        return tuple(
            Host(address=h.address, external=h.address, name=name, key=made.host_key(i), port=h.port)
            for i, (name, h) in enumerate(zip(names, made.hosts, strict=True))
        )

    def inject_all(self, number: int, what: str) -> None:
        """The same for each."""
        for worker in range(len(self._sets[number].hosts)):
            self.inject(number, worker, what)

    def reboot(self, number: int, workers: tuple[int, ...]) -> None:
        for worker in workers or range(len(self._sets[number].hosts)):
            self.inject(number, worker, "kill-sshd")
            self.inject(number, worker, "start-sshd")

    def halt(self, number: int) -> None:
        if number in self._sets:
            self.inject_all(number, "kill-sshd")

    def remove(self, number: int) -> None:
        made = self._sets.pop(number, None)
        if made is not None:
            made.close()

    def let_in(self, number: int, keys: Keys) -> None:
        # Whatever user a key is for, it is this one who is let in: there is no other here.
        text = "".join(f"{key}\n" for user in keys for key in keys[user])
        self._sets[number].let_in(text)

    def attach(self, number: int, disks: list[DiskRequest]) -> None:
        """This machine is not theirs to change."""

    def wipe(self, disk: int) -> None:
        """There is nothing."""

    def start_script(self, number: int, script: str) -> None:
        """This machine is not theirs to change."""

    def namespaces(self, number: int) -> list[str]:
        return []

    def inject(self, number: int, worker: int, what: str) -> None:
        made = self._sets[number]
        actions = {
            "cut-off": made.cut_off,
            "reconnect": made.reconnect,
            "kill-sshd": made.kill_sshd,
            "start-sshd": made.start_sshd,
            "lose": made.kill_sshd,
        }
        actions[what](worker)

    def close(self) -> None:
        for number in list(self._sets):
            self.remove(number)
