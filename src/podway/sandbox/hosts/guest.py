"""Changes inside confined machines, made from outside: users with their keys, and the nodes of attached disks.

A plain script (`python -I guest.py`) that reads what to do as JSON. It enters each machine before it touches a file there: a
link that the machine's root has put in the way leads to the machine's own files. Users are written into /etc as `useradd` would:
a process less for each of many machines.
"""

import contextlib
import ctypes
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

SUDOERS = "google-sudoers"  # the group a guest agent puts people into: they may do all, without a password
SUDOERS_ID = 3000
FIRST_USER_ID = 2000  # above those that this machine may have given its own people
Keys = dict[str, list[str]]  # user -> public keys
_libc = ctypes.CDLL(None, use_errno=True)


def let_in(keys: Keys) -> None:
    """These users with these keys, and nobody else; who is new gets a home and may sudo."""
    known = {line.partition(":")[0] for line in Path("/etc/passwd").read_text().splitlines()}
    for user in keys:
        if user not in known:
            _add_user(user)
    folder = Path("/run/pw/keys")
    for user, lines in keys.items():
        (folder / user).write_text("\n".join(lines) + "\n")
    for file in folder.iterdir():
        if file.name not in keys:
            file.unlink()


def _add_user(user: str) -> None:
    passwd, group = Path("/etc/passwd"), Path("/etc/group")
    taken = [int(line.split(":")[2]) for line in passwd.read_text().splitlines() if line.count(":") >= 6]
    number = max([FIRST_USER_ID - 1, *(one for one in taken if one < 60000)]) + 1
    lines = [line for line in group.read_text().splitlines() if not line.startswith(f"{SUDOERS}:")]
    sudoers = [line.rpartition(":")[2] for line in group.read_text().splitlines() if line.startswith(f"{SUDOERS}:")]
    members = ",".join(filter(None, [*sudoers, user]))
    group.write_text("\n".join([*lines, f"{user}:x:{number}:", f"{SUDOERS}:x:{SUDOERS_ID}:{members}"]) + "\n")
    _append(passwd, f"{user}:x:{number}:{number}::/home/{user}:/bin/bash")
    # No password, and not locked: sshd refuses locked users.
    _append(Path("/etc/shadow"), f"{user}:*:19000:0:99999:7:::")
    home = Path("/home") / user
    shutil.copytree("/etc/skel", home, symlinks=True)
    for path in [home, *home.rglob("*")]:
        os.chown(path, number, number, follow_symlinks=False)
    home.chmod(0o750)


def _append(file: Path, line: str) -> None:
    with open(file, "a") as out:
        out.write(f"{line}\n")


def attach(devices: dict[str, int]) -> None:
    """Let the machine see these block devices, by name and number."""
    for name, number in devices.items():
        os.mknod(f"/dev/{name}", 0o060660, number)
        os.symlink(f"../devices/virtual/block/{name}", f"/sys/block/{name}")


def detach(names: list[str]) -> None:
    """Take block devices away."""
    for name in names:
        for path in (f"/dev/{name}", f"/sys/block/{name}"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def inside(pid: int, namespaces: tuple[str, ...], work: Callable[[], None]) -> int:
    """Do `work` in a child that has entered the namespaces of a process; its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            handles = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in namespaces]
            for handle in handles:
                if _libc.setns(handle, 0) < 0:
                    raise OSError(ctypes.get_errno(), "setns")
            os.umask(0o022)
            work()
            code = 0
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> int:
    """One JSON object on standard input: {"pids": [...], "let_in" | "attach" | "detach": ...}."""
    asked = json.load(sys.stdin)
    codes = []
    for pid in asked["pids"]:
        if "let_in" in asked:
            # As the machine's own root, which has no rights outside.
            codes.append(inside(pid, ("mnt", "user"), lambda: let_in(asked["let_in"])))
        elif "attach" in asked:
            codes.append(inside(pid, ("mnt",), lambda: attach(asked["attach"])))
        else:
            codes.append(inside(pid, ("mnt",), lambda: detach(asked["detach"])))
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
