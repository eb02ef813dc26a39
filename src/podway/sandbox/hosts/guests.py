"""What happens inside a machine of its own without anybody logging in: a guest agent's work, and disks that appear.

Everything is done through /proc/PID/root, the machine's file system as its first process sees it. Users are written into
the machine's /etc files as `useradd` would: a process less for each of many machines.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import msgspec

SUDOERS = "google-sudoers"  # the group a guest agent puts people into: they may do all, without a password
SUDOERS_ID = 3000
FIRST_USER_ID = 2000  # above those that this machine may have given its own people
_USER = re.compile(r"^[a-z_][a-z0-9_.-]{0,31}$")
Keys = dict[str, list[str]]  # user -> public keys


class DiskWish(msgspec.Struct, frozen=True, kw_only=True):
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


def let_in(root: Path, keys: Keys) -> None:
    """These users with these keys, and nobody else; who is new gets a home and may sudo."""
    known = {line.partition(":")[0] for line in (root / "etc/passwd").read_text().splitlines()}
    for user in keys:
        if user not in known:
            _add_user(root, user)
    folder = root / "run/pw/keys"
    for user, lines in keys.items():
        (folder / user).write_text("\n".join(lines) + "\n")
    for file in folder.iterdir():
        if file.name not in keys:
            file.unlink()


def _add_user(root: Path, user: str) -> None:
    passwd, group = root / "etc/passwd", root / "etc/group"
    taken = [int(line.split(":")[2]) for line in passwd.read_text().splitlines() if line.count(":") >= 6]
    number = max([FIRST_USER_ID - 1, *(one for one in taken if one < 60000)]) + 1
    lines = [line for line in group.read_text().splitlines() if not line.startswith(f"{SUDOERS}:")]
    sudoers = [line.rpartition(":")[2] for line in group.read_text().splitlines() if line.startswith(f"{SUDOERS}:")]
    members = ",".join(filter(None, [*sudoers, user]))
    group.write_text("\n".join([*lines, f"{user}:x:{number}:", f"{SUDOERS}:x:{SUDOERS_ID}:{members}"]) + "\n")
    _append(passwd, f"{user}:x:{number}:{number}::/home/{user}:/bin/bash")
    _append(
        root / "etc/shadow", f"{user}:*:19000:0:99999:7:::"
    )  # no password, and not locked: sshd refuses locked users
    home = root / "home" / user
    shutil.copytree(root / "etc/skel", home, symlinks=True)
    for path in [home, *home.rglob("*")]:
        os.chown(path, number, number, follow_symlinks=False)
    home.chmod(0o750)


def _append(file: Path, line: str) -> None:
    with open(file, "a") as out:
        out.write(f"{line}\n")


class Disks:
    """Data disks: sparse files of the size asked for, seen as loop devices."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._attached: dict[int, dict[int, str]] = {}  # a host's index -> a disk's number -> its device
        for image in place.glob("*.img"):  # what a sandbox left that was killed
            for line in _losetup("-j", str(image)).stdout.splitlines():
                _losetup("-d", line.partition(":")[0])
            image.unlink()

    def attach(self, host: int, root: Path, disks: list[DiskWish]) -> None:
        """Let a host see these disks, and no other."""
        have = self._attached.setdefault(host, {})
        for number in [one for one in have if one not in {disk.number for disk in disks}]:
            self._let_go(root, have.pop(number))
        for disk in disks:
            if disk.number not in have:
                device = self._device(disk)
                have[disk.number] = device
                (root / "sys/block" / device).symlink_to(f"../devices/virtual/block/{device}")

    def detach_all(self, host: int) -> None:
        """The host is down: nothing of it holds a disk any more."""
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

    def _device(self, disk: DiskWish) -> str:
        self._place.mkdir(parents=True, exist_ok=True)
        image = self._place / f"{disk.number}.img"
        if not image.exists():
            with open(image, "wb") as file:
                file.truncate(disk.size_gb << 30)
        made = _losetup("-f", "--show", *(["-r"] if disk.read_only else []), str(image))
        if made.returncode:
            raise RuntimeError(f"no loop device can be made here for a data disk: {made.stderr.strip()}")
        return made.stdout.strip().removeprefix("/dev/")

    def _let_go(self, root: Path, device: str) -> None:
        (root / "sys/block" / device).unlink(missing_ok=True)
        _losetup("-d", f"/dev/{device}")


def _losetup(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["losetup", *arguments], capture_output=True, text=True, timeout=20)
