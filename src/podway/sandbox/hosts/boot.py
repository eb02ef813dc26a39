"""The first process of a confined machine: builds its root, gives up this machine's rights, and becomes its init.

`unshare` runs it as a plain script (`python -I boot.py SPEC`) in new mount, uts, ipc, pid and network namespaces. Nothing of
the machine's own files is executed or followed before the rights are given up.

1. The root is an overlay over a skeleton (skeleton.py); /usr and the package database are overlays over this machine's. Of
   /proc, what concerns the whole kernel is hidden or read-only; /sys is read-only; /dev holds a few harmless nodes.
2. `pivot_root`; then this machine's own root is unmounted.
3. A user namespace, in which root has capabilities over nothing outside of it, and a mount namespace within it, in which
   none of the mounts above can be undone. Mounts made later in the outer one (a data disk) appear in the inner one.
4. System calls that make namespaces or reach kernel-wide state are refused; capabilities that no machine needs are dropped.

User ids are the same inside and outside, so that files keep their owners and sudo works. Root is therefore user 0 to the
kernel, though without capabilities: that is why /proc/sys and /sys must be read-only.
"""

import contextlib
import ctypes
import errno
import json
import os
import platform
import shutil
import struct
import sys
from pathlib import Path

# linux/mount.h, linux/sched.h, linux/prctl.h
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, MOVE, REC = 1, 2, 4, 8, 32, 4096, 8192, 16384
PRIVATE, SHARED = 1 << 18, 1 << 20
MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
NAMESPACE_FLAGS = 0x7E020000  # of clone: NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
PR_SET_SECCOMP, PR_CAPBSET_DROP, SECCOMP_MODE_FILTER = 22, 24, 2
# linux/capability.h: files and their owners, signals, ids, ports, chroot, ptrace, mounts, priorities, audit messages.
KEPT_CAPABILITIES = {0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 15, 18, 19, 21, 23, 24, 29, 31}
LAST_CAPABILITY = 63
HIDDEN = ("kcore", "keys", "key-users", "kallsyms", "kmsg", "timer_list", "sched_debug", "sysrq-trigger")
READ_ONLY = ("sys", "irq", "bus", "fs", "acpi", "scsi")
DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
FUSE = Path("/dev/fuse")
# Numbers of system calls (asm/unistd.h). Refused: unshare, setns, pivot_root, swapon, swapoff, kexec_load, kexec_file_load,
# init_module, finit_module, delete_module, bpf, perf_event_open, add_key, request_key, keyctl, open_by_handle_at, userfaultfd,
# reboot. Absent, so that programs take the older ones, which can be looked at: clone3 and the calls around fsopen.
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
CLONE = {"x86_64": 56, "aarch64": 220}
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
REFUSED = {
    "x86_64": (272, 308, 155, 167, 168, 246, 320, 175, 313, 176, 321, 298, 248, 249, 250, 304, 323, 169),
    "aarch64": (97, 268, 41, 224, 225, 104, 294, 105, 273, 106, 280, 241, 217, 218, 219, 265, 282, 142),
}
_NAMESPACE_CALLS = 3  # the first of each: unshare, setns, pivot_root
ABSENT = (435, 428, 429, 430, 431, 432, 433, 442)
X32_BIT = 0x40000000  # x86_64 has a second table of calls above it
INIT = """while :; do
  [ -e /run/pw/no-sshd ] || /usr/sbin/sshd -D -f /run/pw/sshd_config -E /run/pw/sshd.log; sleep 0.05; done"""
_libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    """Raise what a system call failed with."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    """mount(2)."""
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind)]
    options = None if data is None else os.fsencode(data)
    check(_libc.mount(*words, ctypes.c_ulong(flags), options), f"mount {kind or source} at {target}")


def enter(namespace: str) -> None:
    """setns(2) to a file of /proc/PID/ns."""
    with open(namespace) as handle:
        check(_libc.setns(handle.fileno(), 0), f"enter {namespace}")


def boot(spec: dict[str, str], shares: list[str]) -> None:
    """All steps; does not return."""
    place, root = spec["place"], f"{spec['place']}/root"
    # Ports below 1024 and ping for everybody: the network belongs to a user namespace in which the machine's root is nobody.
    Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").write_text("0")
    Path("/proc/sys/net/ipv4/ping_group_range").write_text("0 2147483647")
    mount("none", "/", None, REC | PRIVATE)
    _overlay(spec["skeleton"], root, f"{place}/layers/root", f"{place}/work/root")
    for layer in spec["layers"].split(":"):
        name = layer.replace("/", "-")
        _overlay(f"/{layer}", f"{root}/{layer}", f"{place}/layers/{name}", f"{place}/work/{name}")
    _kernel_files(root)
    _devices(f"{root}/dev")
    mount("tmpfs", f"{root}/tmp", "tmpfs", NOSUID | NODEV, "mode=1777")
    mount("tmpfs", f"{root}/run", "tmpfs", NOSUID | NODEV, "mode=755")
    if spec["homes"]:
        mount(spec["homes"], f"{root}/root", None, BIND)
    elif spec["home_size"]:
        mount("tmpfs", f"{root}/root", "tmpfs", NOSUID | NODEV, f"mode=700,size={spec['home_size']}")
    _sshd_files(place, f"{root}/run")
    for number, share in enumerate(shares):
        os.mkdir(f"{root}/run/share{number}")
        mount(share, f"{root}/run/share{number}", None, BIND)
    check(_libc.sethostname(os.fsencode(spec["name"]), len(os.fsencode(spec["name"]))), "sethostname")
    _pivot(root)
    for number, share in enumerate(shares):  # only now: in the machine's root, links lead nowhere else
        os.makedirs(share, exist_ok=True)
        mount(f"/run/share{number}", share, None, MOVE)
        mount("none", share, None, REMOUNT | BIND | RDONLY | NOSUID | NODEV)
        os.rmdir(f"/run/share{number}")
    _give_up_rights(bool(spec["containers"]))
    os.execve("/bin/sh", ["sh", "-c", INIT], {"PATH": os.defpath + ":/usr/sbin:/sbin"})


def _overlay(lower: str, target: str, upper: str, work: str) -> None:
    for path in (upper, work):
        os.makedirs(path, exist_ok=True)
    mount("overlay", target, "overlay", NODEV, f"lowerdir={lower},upperdir={upper},workdir={work}")


def _kernel_files(root: str) -> None:
    mount("proc", f"{root}/proc", "proc", NOSUID | NODEV | NOEXEC)
    for name in READ_ONLY:
        path = f"{root}/proc/{name}"
        if os.path.exists(path):
            mount(path, path, None, BIND)
            mount("none", path, None, REMOUNT | BIND | RDONLY | NOSUID | NODEV | NOEXEC)
    for name in HIDDEN:
        if os.path.exists(f"{root}/proc/{name}"):
            mount("/dev/null", f"{root}/proc/{name}", None, BIND)
    mount("sysfs", f"{root}/sys", "sysfs", RDONLY | NOSUID | NODEV | NOEXEC)
    # Of this machine's disks it sees none, until one is attached.
    mount("tmpfs", f"{root}/sys/block", "tmpfs", NOSUID | NODEV | NOEXEC, "mode=755")


def _devices(dev: str) -> None:
    mount("tmpfs", dev, "tmpfs", NOSUID | NOEXEC, "mode=755")
    nodes = {name: os.makedev(*number) for name, number in DEVICES.items()}
    if FUSE.exists():
        nodes["fuse"] = FUSE.stat().st_rdev
    for name, number in nodes.items():
        os.mknod(f"{dev}/{name}", 0o020666, number)
        os.chmod(f"{dev}/{name}", 0o666)
    for name in ("pts", "shm"):
        os.mkdir(f"{dev}/{name}")
    mount("devpts", f"{dev}/pts", "devpts", NOSUID | NOEXEC, "newinstance,ptmxmode=0666,mode=620,gid=5")
    mount("tmpfs", f"{dev}/shm", "tmpfs", NOSUID | NODEV, "mode=1777")
    links = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd"}
    links |= {name: f"/proc/self/fd/{number}" for number, name in enumerate(("stdin", "stdout", "stderr"))}
    for name, target in links.items():
        os.symlink(target, f"{dev}/{name}")


def _sshd_files(place: str, run: str) -> None:
    for folder in ("sshd", "lock", "pw", "pw/keys"):
        os.mkdir(f"{run}/{folder}")
    for name in ("sshd_config", "host_key", "authorized"):
        shutil.copy(f"{place}/{name}", f"{run}/pw/{name}")
    os.chmod(f"{run}/pw/host_key", 0o600)


def _pivot(root: str) -> None:
    """Make `root` the root of this mount namespace, also where this process was in a chroot; nothing of the old one stays."""
    handle = os.open(root, os.O_PATH | os.O_DIRECTORY)
    enter("/proc/self/ns/mnt")  # leaves a chroot: its root is the namespace's own
    os.fchdir(handle)
    os.close(handle)
    check(_libc.syscall(PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
    check(_libc.umount2(b".", MNT_DETACH), "unmount the old root")
    os.chdir("/")


def _give_up_rights(containers: bool = False) -> None:
    mount("none", "/", None, REC | SHARED)
    _own_user_namespace()
    for number in range(LAST_CAPABILITY + 1):
        if number not in KEPT_CAPABILITIES and _libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) < 0:
            break  # the kernel knows no more of them
    os.umask(0o022)
    refuse_calls(containers)


def _own_user_namespace() -> None:
    """New user and mount namespaces; ids are mapped by a child that stayed outside, which alone may map them all."""
    started, begin = os.pipe()
    me = os.getpid()
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(OSError):
            os.read(started, 1)
            for kind in ("uid_map", "gid_map"):
                Path(f"/proc/{me}/{kind}").write_text("0 0 4294967295\n")
            code = 0
        os._exit(code)
    check(_libc.unshare(CLONE_NEWUSER | CLONE_NEWNS), "make a user namespace")
    os.write(begin, b"1")
    if os.waitpid(child, 0)[1]:
        raise OSError(errno.EPERM, "the user ids of the machine cannot be mapped")
    os.close(started)
    os.close(begin)


def refuse_calls(containers: bool = False) -> None:
    """A seccomp filter for this process and all that come of it; `containers`: namespaces may be made and entered."""
    machine = platform.machine()
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06  # linux/bpf_common.h
    allow, kill = 0x7FFF0000, 0x80000000
    refuse, lack = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    steps = [(load, 0, 0, 4), (equal, 1, 0, AUDIT[machine]), (answer, 0, 0, kill), (load, 0, 0, 0)]
    steps += [(at_least, 0, 1, X32_BIT), (answer, 0, 0, refuse)]
    for calls, outcome in ((REFUSED[machine][_NAMESPACE_CALLS if containers else 0 :], refuse), (ABSENT, lack)):
        for call in calls:
            steps += [(equal, 0, 1, call), (answer, 0, 0, outcome)]
    if not containers:
        steps += [
            (equal, 0, 3, CLONE[machine]),
            (load, 0, 0, 16),
            (any_bit, 0, 1, NAMESPACE_FLAGS),
            (answer, 0, 0, refuse),
        ]
    steps.append((answer, 0, 0, allow))
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(buffer := ctypes.create_string_buffer(code)))
    check(_libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0), "refuse system calls")
    del buffer


def probe() -> None:
    """Whether all of it is allowed here: an overlay for a root, and a user namespace in it."""
    mount("none", "/", None, REC | PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", 0)
    for folder in ("lower", "root"):
        os.mkdir(f"/tmp/{folder}")
    _overlay("/tmp/lower", "/tmp/root", "/tmp/upper", "/tmp/work")
    for name in ("proc", "tmp"):
        os.mkdir(f"/tmp/root/{name}")
    mount("proc", "/tmp/root/proc", "proc")
    _pivot("/tmp/root")
    _give_up_rights()


if __name__ == "__main__":
    try:
        if sys.argv[1:] == ["--probe"]:
            probe()
        else:
            _spec = json.loads(sys.argv[1])
            boot(_spec["machine"], _spec["shares"])
    except OSError as error:
        sys.exit(str(error))
