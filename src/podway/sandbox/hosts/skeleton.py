"""The root that every confined machine starts from: empty but for the system's settings that programs cannot do without.

Of this machine's /etc only what is listed here is copied, and of that only what everybody may read: no keys, passwords, package
indexes or settings of its people. Accounts are the system's own, each without a password.
"""

import contextlib
import shutil
import stat
from pathlib import Path

SETTINGS = (
    *(
        "adduser.conf",
        "alternatives",
        "bash.bashrc",
        "ca-certificates",
        "ca-certificates.conf",
        "debian_version",
        "default",
    ),
    *(
        "deluser.conf",
        "dpkg",
        "fuse.conf",
        "gai.conf",
        "group",
        "host.conf",
        "inputrc",
        "ld.so.cache",
    ),
    *("ld.so.conf", "ld.so.conf.d", "locale.alias", "locale.conf", "localtime", "login.defs", "magic", "mime.types"),
    *("mke2fs.conf", "mtab", "networks", "nsswitch.conf", "os-release", "pam.conf", "pam.d", "passwd", "perl", "pki"),
    *(
        "profile",
        "protocols",
        "python3",
        "python3.11",
        "python3.12",
        "python3.13",
        "rpc",
        "security",
        "selinux",
        "services",
    ),
    *("shells", "skel", "ssl/certs", "ssl/openssl.cnf", "sudo.conf", "terminfo", "timezone", "xattr.conf"),
)
DIRECTORIES = {
    **dict.fromkeys(("dev", "home", "media", "mnt", "opt", "proc", "run", "srv", "sys", "usr", "var/cache"), 0o755),
    **dict.fromkeys(
        ("var/lib/dpkg", "var/lib/misc", "var/lib/sudo", "var/local", "var/log", "var/mail", "var/spool"), 0o755
    ),
    **dict.fromkeys(("tmp", "var/tmp"), 0o1777),
    "root": 0o700,
}
MERGED = (
    "bin",
    "sbin",
    "lib",
    "lib32",
    "lib64",
    "libx32",
)  # links into /usr, or directories of their own on older systems
FIRST_PERSON, NOBODY = 1000, 65534
SUDOERS = (
    "Defaults env_reset\n"
    'Defaults secure_path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"\n'
    "root ALL=(ALL:ALL) ALL\n@includedir /etc/sudoers.d\n"
)


def make_skeleton(root: Path) -> list[str]:
    """Write it; the directories of this machine that each machine sees through a layer of its own."""
    layers = ["usr"]
    for name, mode in DIRECTORIES.items():
        (root / name).mkdir(parents=True)
        (root / name).chmod(mode)
    for name in MERGED:
        here = Path("/") / name
        if here.is_symlink():
            (root / name).symlink_to(here.readlink())
        elif here.is_dir():
            (root / name).mkdir()
            layers.append(name)
    for name, target in (("run", "/run"), ("lock", "/run/lock")):
        (root / "var" / name).symlink_to(target)
    if Path("/var/lib/dpkg").is_dir():
        layers.append("var/lib/dpkg")
    for name in SETTINGS:
        _copy(Path("/etc") / name, root / "etc" / name)
    _accounts(root / "etc")
    (root / "etc/sudoers.d").mkdir(mode=0o755)
    (root / "etc/sudoers").write_text(SUDOERS)
    (root / "etc/sudoers").chmod(0o440)
    return layers


def _copy(source: Path, target: Path) -> None:
    """A file, a link or a directory; without what is not everybody's to read."""
    with contextlib.suppress(FileNotFoundError):
        about = source.lstat()
        target.parent.mkdir(parents=True, exist_ok=True)
        if stat.S_ISLNK(about.st_mode):
            target.symlink_to(source.readlink())
        elif stat.S_ISDIR(about.st_mode) and about.st_mode & stat.S_IXOTH:
            target.mkdir()
            for child in source.iterdir():
                _copy(child, target / child.name)
        elif stat.S_ISREG(about.st_mode) and about.st_mode & stat.S_IROTH:
            shutil.copy2(source, target)


def _accounts(etc: Path) -> None:
    """Those of the system; this machine's people stay unknown."""
    names = []
    for file, fields in (("group", 4), ("passwd", 7)):
        kept = []
        for line in (etc / file).read_text().splitlines():
            parts = line.split(":")
            if len(parts) == fields and (int(parts[2]) < FIRST_PERSON or int(parts[2]) == NOBODY):
                kept.append(line if file == "passwd" else ":".join([*parts[:3], ""]))
                names += [parts[0]] if file == "passwd" else []
        (etc / file).write_text("\n".join(kept) + "\n")
    (etc / "shadow").write_text("".join(f"{name}:*:19000:0:99999:7:::\n" for name in names))
    (etc / "shadow").chmod(0o640)
