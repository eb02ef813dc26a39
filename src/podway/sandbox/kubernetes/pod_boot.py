"""The first process of a pod: gives it a root of its own, and becomes the container's command.

`unshare` runs it in new mount, pid and uts namespaces. The root is a fresh one into which this machine's directories are bound read
only: a pod reads them as an image's, and writes into its volumes and /tmp alone. Volumes are bound at their mount paths.
"""

import contextlib
import json
import os
import socket
import sys
from pathlib import Path

from podway.sandbox.hosts.boot import BIND, NODEV, NOEXEC, NOSUID, RDONLY, REC, REMOUNT, mount

# What containers have in /dev; everything else there is this machine's.
_DEVICES = ("fd", "full", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout", "tty", "urandom", "zero")
_OWN = ("proc", "tmp", "run", "dev", "sys", "podway")


def boot(spec: dict[str, object]) -> None:
    """All steps; does not return."""
    root = Path(str(spec["root"]))
    root.mkdir(parents=True, exist_ok=True)
    mount("tmpfs", str(root), "tmpfs", NOSUID | NODEV, "mode=755")
    for entry in sorted(Path("/").iterdir()):
        target = root / entry.name
        if entry.name in _OWN:
            target.mkdir(exist_ok=True)
        elif entry.is_symlink():
            target.symlink_to(entry.readlink())
        elif entry.is_dir():
            _bind_read_only(entry, target)
    mount("proc", str(root / "proc"), "proc", NOSUID | NODEV | NOEXEC)
    mount("/sys", str(root / "sys"), None, BIND | REC)
    _make_devices(root / "dev")
    for name in ("tmp", "run"):
        mount("tmpfs", str(root / name), "tmpfs", NOSUID | NODEV, "mode=1777")
    if Path(sys.prefix).parts[1] in ("tmp", "run"):  # the image's Python, in a checkout that somebody keeps there
        _bind_read_only(Path(sys.prefix), root / sys.prefix.lstrip("/"))
    for source, target_path, read_only in spec["mounts"]:  # type: ignore[attr-defined]
        place = root / str(target_path).lstrip("/")
        if Path(source).is_dir():
            place.mkdir(parents=True, exist_ok=True)
        elif not place.exists():
            place.touch()
        mount(str(source), str(place), None, BIND)
        if read_only:
            mount("none", str(place), None, REMOUNT | BIND | RDONLY)
    socket.sethostname(str(spec["hostname"]))
    os.chroot(root)
    os.chdir("/")
    env = {str(key): str(value) for key, value in spec["env"].items()}  # type: ignore[attr-defined]
    command = [str(word) for word in spec["command"]]  # type: ignore[attr-defined]
    os.execvpe(command[0], command, env)


def _bind_read_only(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    mount(str(source), str(target), None, BIND | REC)
    with contextlib.suppress(OSError):  # a mount that is locked read-write stays so
        mount("none", str(target), None, REMOUNT | BIND | RDONLY)


def _make_devices(place: Path) -> None:
    mount("tmpfs", str(place), "tmpfs", NOSUID, "mode=755")
    for name in _DEVICES:
        device = Path("/dev") / name
        if device.is_symlink():
            (place / name).symlink_to(device.readlink())
        elif device.exists():
            (place / name).mkdir() if device.is_dir() else (place / name).touch()
            mount(str(device), str(place / name), None, BIND | REC)


if __name__ == "__main__":
    try:
        boot(json.loads(Path(sys.argv[1]).read_text()))
    except OSError as problem:
        print(f"the container cannot be started: {problem}", file=sys.stderr)
        sys.exit(128)
