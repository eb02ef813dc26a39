"""What happens inside a machine of its own without anybody logging in: a guest agent's work, and disks that appear.

What is changed inside is changed by guest.py, a process that enters the machine first.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec

from podway.sandbox.hosts import disk_mounts, guest
from podway.sandbox.hosts.guest import Keys

_USER = re.compile(r"^[a-z_][a-z0-9_.-]{0,31}$")


class DiskRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A disk that is to be attached."""

    number: int  # tells it from an earlier disk of the same name
    size_gb: int
    read_only: bool


def users_of(*metadata: dict[str, str]) -> Keys:
    """Who may log in, by all the metadata given."""
    users: Keys = {}
    for items in metadata:
        for line in (items.get("ssh-keys") or items.get("sshKeys") or "").splitlines():
            user, colon, key = line.strip().partition(":")
            if colon and _USER.match(user) and key.strip():
                users.setdefault(user, []).append(key.strip())
    return users


def change_inside(pids: list[int], **what: object) -> None:
    """One of the changes of guest.py, in each of these machines."""
    asked = msgspec.json.encode({"pids": pids, **what})
    done = subprocess.run([sys.executable, "-I", guest.__file__], input=asked, capture_output=True, timeout=60)
    if done.returncode:
        raise RuntimeError(f"{', '.join(what)} failed on a host: {done.stderr.decode(errors='replace').strip()}")


class Disks:
    """Data disks: sparse files of the size asked for, seen as loop devices."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._attached: dict[int, dict[int, str]] = {}  # a host's index -> a disk's number -> its device
        self._mounters: dict[int, subprocess.Popen[bytes]] = {}  # a host's index -> disk_mounts.py
        for image in place.glob("*.img"):  # what a sandbox left that was killed
            for line in _losetup("-j", str(image)).stdout.splitlines():
                _losetup("-d", line.partition(":")[0])
            image.unlink()

    def attach(self, host: int, keeper: int, disks: list[DiskRequest]) -> None:
        """Let a host see these disks, and no other; `keeper` is a process in the host's outer mount namespace."""
        have = self._attached.setdefault(host, {})
        gone = [have.pop(number) for number in list(have) if number not in {disk.number for disk in disks}]
        if gone:
            change_inside([keeper], detach=gone)
            for device in gone:
                _losetup("-d", f"/dev/{device}")
        new: dict[str, int] = {}
        for disk in disks:
            if disk.number not in have:
                device = self._device(disk)
                have[disk.number] = device
                new[device] = Path(f"/dev/{device}").stat().st_rdev
        if new:
            change_inside([keeper], attach=new)
        if new and host not in self._mounters:
            command = [sys.executable, "-I", disk_mounts.__file__, str(keeper)]
            self._mounters[host] = mounter = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
            )
            assert mounter.stdout is not None
            mounter.stdout.readline()  # it listens, or has ended and said why
            mounter.stdout.close()

    def detach_all(self, host: int) -> None:
        """The host is down: nothing of it holds a disk any more."""
        mounter = self._mounters.pop(host, None)
        if mounter is not None:
            mounter.kill()
            mounter.wait(10)
        for device in self._attached.pop(host, {}).values():
            _losetup("-d", f"/dev/{device}")

    def wipe(self, number: int) -> None:
        """A disk is deleted."""
        (self._place / f"{number}.img").unlink(missing_ok=True)

    def close(self) -> None:
        """All of them."""
        for host in list(self._attached):
            self.detach_all(host)
        shutil.rmtree(self._place, ignore_errors=True)

    def _device(self, disk: DiskRequest) -> str:
        self._place.mkdir(parents=True, exist_ok=True)
        image = self._place / f"{disk.number}.img"
        if not image.exists():
            with open(image, "wb") as file:
                file.truncate(disk.size_gb << 30)
        made = _losetup("-f", "--show", *(["-r"] if disk.read_only else []), str(image))
        if made.returncode:
            raise RuntimeError(f"no loop device can be made here for a data disk: {made.stderr.strip()}")
        return made.stdout.strip().removeprefix("/dev/")


def _losetup(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["losetup", *arguments], capture_output=True, text=True, timeout=20)
