"""The process of a job becomes one whose root directory is the image's; run as root, between the runner and the script.

1. Read what to do from stdin (a memory file: the environment with its secrets never touches a disk or an argument).
2. Have the container ready (container.py). 3. Enter its files: a mount namespace of this process' own, in which the host's home,
/dev, /proc, /sys and the task's mounts are bound into the image's root. Nothing else of the host changes: network, processes and IPC
are the host's own, and so are devices and rights, as with a privileged container. 4. Become the image's user, and exec the script.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import stat
import sys

from .container import HOST_ROOT, HostContainer, NoContainer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from .container import Image
    from .wire import Fields

FAILED = 125  # as `docker run` answers when the container itself could not be had
_CANNOT_RUN, _NOT_FOUND = 126, 127
_NEW_MOUNTS = 0x20000  # CLONE_NEWNS, linux/sched.h
_BIND, _RECURSIVE, _SLAVE, _REMOUNT, _READ_ONLY = 4096, 16384, 1 << 19, 32, 1  # MS_*, linux/mount.h
_DETACH = 2  # MNT_DETACH
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SYSTEM = ("/proc", "/sys", "/dev", "/etc/resolv.conf", "/etc/hosts")


def main() -> NoReturn:
    """Do it; does not return."""
    with open(0, "rb", closefd=False) as told:
        spec: Fields = json.loads(told.read())
    try:
        _enter(spec)
    except NoContainer as error:
        _end(str(error), FAILED)
    except OSError as error:
        _end(f"cannot enter the container of {spec['container']['image']}: {error}", FAILED)


def _enter(spec: Fields) -> NoReturn:
    wanted = spec["container"]
    image, place = HostContainer(wanted["image"], spec["host"], wanted.get("registry")).ready()
    binds, volumes = _binds(spec), _volumes(spec)
    devnull = os.open(os.devnull, os.O_RDWR)
    _change_root(place)
    _bind_system()
    user = User(wanted.get("user") or image.user)
    home = spec["home"]
    if (
        user.uid
    ):  # the home is closed to others, and stays so: such a user sees the task's own directories of it, and no more
        binds = [one for one in binds if one[1] != home]
        home = user.home
    for source, target, read_only in [*binds, *volumes]:
        _bind(source, target, read_only)
    _call("umount2", HOST_ROOT.encode(), _DETACH)
    env = {"PATH": _PATH, **image.env, "HOME": home, **spec["env"]}
    cwd = spec["cwd"] or image.cwd
    made = not os.path.isdir(cwd)
    os.makedirs(cwd, exist_ok=True)
    if user.uid:
        _hand_over(cwd, user, made, [target for _, target, read_only in binds if not read_only])
    user.become()
    try:
        os.chdir(cwd)
    except OSError as error:
        raise NoContainer(f"the user {user.name} of the image cannot enter {cwd}: {error.strerror}") from None
    os.dup2(devnull, 0)
    _exec(spec, image, env)


def _binds(spec: Fields) -> list[tuple[str, str, bool]]:
    """(on the host, in the container, read-only): the home, and each directory of the task that is there."""
    home = spec["home"]
    binds = [(home, home, False)]
    for source, target, read_only in spec["container"].get("mounts") or ():
        if os.path.exists(source):
            binds.append((source, target, bool(read_only)))
    return [(os.path.realpath(source), target, read_only) for source, target, read_only in binds]


def _volumes(spec: Fields) -> list[tuple[str, str, bool]]:
    """The host's directories that the task names, made if need be. They stay whose they are."""
    found = []
    for source, target, read_only in spec["container"].get("volumes") or ():
        try:
            if not os.path.exists(source):
                os.makedirs(source, exist_ok=True)
        except OSError as error:
            raise NoContainer(f"volumes: {source} cannot be made on this host: {error.strerror}") from None
        found.append((os.path.realpath(source), target, bool(read_only)))
    return found


def _change_root(place: int | str) -> None:
    """Into the container's files, with the host's own root seen in them at HOST_ROOT."""
    if isinstance(place, int):
        root = os.open(f"/proc/{place}/root", os.O_RDONLY)
        namespace = os.open(f"/proc/{place}/ns/mnt", os.O_RDONLY)
        _call("setns", namespace, _NEW_MOUNTS)
        os.fchdir(root)
        os.chroot(".")
        _call("unshare", _NEW_MOUNTS)
        _mount(None, "/", _RECURSIVE | _SLAVE)
        os.close(root)
        os.close(namespace)
        return
    _call("unshare", _NEW_MOUNTS)
    _mount(None, "/", _RECURSIVE | _SLAVE)
    window = place + HOST_ROOT
    with contextlib.suppress(FileExistsError):
        os.mkdir(window)
    if not stat.S_ISDIR(os.lstat(window).st_mode):
        raise NoContainer(f"the image has a file {HOST_ROOT}, which Podway needs for itself")
    _mount(place, place, _BIND | _RECURSIVE)
    os.chdir(place)
    _mount("/", window, _BIND | _RECURSIVE)
    os.chroot(".")
    os.chdir("/")


def _bind_system() -> None:
    for path in _SYSTEM:
        source = os.path.realpath(HOST_ROOT + path)
        if not source.startswith(HOST_ROOT):  # a link that leads on from the host's root, as resolv.conf often is
            source = HOST_ROOT + source
        if os.path.exists(source):
            _bind(source[len(HOST_ROOT) :], path, False)


def _bind(source: str, target: str, read_only: bool) -> None:
    """Show a directory or file of the host in the container, creating its place there if needed."""
    here = HOST_ROOT + source
    if os.path.isdir(here):
        os.makedirs(target, exist_ok=True)
    else:
        if os.path.islink(target) and not os.path.exists(target):
            os.unlink(target)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
    _mount(here, target, _BIND | _RECURSIVE)
    if read_only:
        _mount(None, target, _BIND | _REMOUNT | _READ_ONLY)


class User:
    """Whom a container's processes run as, by its own files: `name`, `uid`, either with `:group`."""

    def __init__(self, text: str) -> None:
        self.name, _, group = (text or "0").partition(":")
        account = _entry("/etc/passwd", self.name, "user")
        self.uid, self.gid = int(account[2]), int(account[3] or 0)
        self.home = account[5] or "/"
        self.groups = _groups_of(account[0])
        if group:
            self.gid = int(_entry("/etc/group", group, "group")[2])

    def become(self) -> None:
        if self.uid or self.gid:
            os.setgroups([self.gid, *self.groups])
            os.setgid(self.gid)
            os.setuid(self.uid)


def _entry(path: str, word: str, kind: str) -> list[str]:
    """The fields of a name's or number's line; a number needs none."""
    for line in _lines(path):
        fields = line.split(":")
        if len(fields) > 3 and word in (fields[0], fields[2]) and fields[2].isdigit():
            return [*fields, "", "", ""]
    if word.isdigit():
        return ["", "", word, "", "", ""]
    raise NoContainer(f"the image has no {kind} {word!r}")


def _groups_of(name: str) -> list[int]:
    """The further groups of a user."""
    lines = [line.split(":") for line in _lines("/etc/group") if line.count(":") == 3]
    return [int(fields[2]) for fields in lines if name and name in fields[3].split(",") and fields[2].isdigit()]


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return [line for line in file.read(4 << 20).splitlines() if line and not line.startswith("#")]
    except OSError:
        return []


def _hand_over(folder: str, user: User, made: bool, targets: list[str]) -> None:
    """The working directory, if it is the task's and not the image's own, becomes the image's user's, and can be reached by them."""
    above = [target for target in targets if folder == target or folder.startswith(target + "/")]
    if made:
        os.chown(folder, user.uid, user.gid)
    elif not above:
        return
    parent = os.path.dirname(min(above, key=len, default=folder))
    while parent not in ("", "/"):  # these are directories of the container, never of the host
        mode = os.stat(parent).st_mode
        if not mode & stat.S_IXOTH:
            os.chmod(parent, stat.S_IMODE(mode) | stat.S_IXOTH)
        parent = os.path.dirname(parent)
    if above:
        _give(folder, user.uid, user.gid)


def _give(folder: str, uid: int, gid: int) -> None:
    """Make a directory and all in it, on its own file system, another user's."""
    device = os.stat(folder).st_dev
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if os.lstat(os.path.join(place, name)).st_dev == device]
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        for path in (place, *(os.path.join(place, name) for name in (*files, *links))):
            with contextlib.suppress(FileNotFoundError):  # somebody removed it meanwhile
                if os.lstat(path).st_uid != uid:
                    os.chown(path, uid, gid, follow_symlinks=False)


def _exec(spec: Fields, image: Image, env: dict[str, str]) -> NoReturn:
    command = list(image.command)
    if spec["script"]:
        shell = spec["shell"]
        if not _find(shell, env) and shell == "bash" and _find("sh", env):
            print("podway: the image has no bash; the script runs with sh", flush=True)
            shell = "sh"
        script = os.memfd_create("script", 0)  # every user may read it, and no disk holds it
        with open(script, "wb", closefd=False) as file:
            file.write(os.fsencode(spec["script"]))
        command = [shell, f"/proc/self/fd/{script}"]
    if not command:
        raise NoContainer(f"the image {image.name} has no command of its own, and the task has none")
    program = _find(command[0], env)
    if not program:
        _end(f"the image {image.name} has no {command[0]}", _NOT_FOUND)
    try:
        os.execve(program, command, env)
    except OSError as error:
        _end(f"cannot run {command[0]} in the image {image.name}: {error.strerror}", _CANNOT_RUN)


def _find(program: str, env: dict[str, str]) -> str:
    """The program's path in the container; '' if there is none."""
    if "/" in program:
        return program if os.access(program, os.X_OK) else ""
    paths = [os.path.join(folder or ".", program) for folder in env.get("PATH", _PATH).split(":")]
    return next((path for path in paths if os.path.isfile(path) and os.access(path, os.X_OK)), "")


def _mount(source: str | None, target: str, flags: int) -> None:
    _call(
        "mount", None if source is None else os.fsencode(source), os.fsencode(target), None, ctypes.c_ulong(flags), None
    )


def _call(name: str, *arguments: object) -> None:
    if getattr(_LIBC, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


_LIBC = ctypes.CDLL(None, use_errno=True)


def _end(why: str, code: int) -> NoReturn:
    sys.stdout.write(f"podway: {why}\n")
    sys.stdout.flush()
    os._exit(code)
