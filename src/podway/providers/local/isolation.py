"""Hosts as an operating-system user of their own, for a server that a team shares.

A cluster whose order says `isolated` has a numeric user id that no other cluster and no account has. Its hosts' agents, and so all jobs,
run as that user; their homes lie outside PODWAY_HOME, which belongs to the server's user and which nobody else can enter:

    HOMES/OWNER/CLUSTER/         the server's user's, mode 0711: nobody else can put or replace anything in it
    HOMES/OWNER/CLUSTER/host-I/  the home of host I, mode 0700, the cluster's user's

The server never writes into such a home once its user may run: what a host starts with is laid down while the home is still the
server's own, and then given away (`make_home`). It believes an agent only when the process that listens is that user's.
"""

import os
import pwd
import random
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path

import msgspec

from podway.errors import UserError

DEFAULT_HOMES = Path("/var/lib/podway/hosts")
HOMES_VARIABLE = "PODWAY_LOCAL_HOMES"
# Numbers that no distribution hands out (systemd.io/UIDS-GIDS); within a container that has 65,536 of them, systemd's for
# services of passing users.
_RANGES = (range(1_900_000_000, 2_100_000_000), range(61_184, 65_520))
_ENOUGH = 10.0  # seconds for a Python that does nothing


@cache
def why_not_isolated() -> str | None:
    """Why hosts cannot run as other users here, or None when they can."""
    if os.geteuid() != 0:
        return "only root can run hosts as another user"
    user = next((numbers[0] for numbers in _RANGES if _is_mapped(numbers)), None)
    if user is None:
        return "this container has no user ids to give away"
    try:
        tried = run_as(user, "pass")
    except OSError as error:
        return f"other users cannot run {os.path.realpath(sys.executable)} ({error.strerror})"
    if tried.returncode:
        said = tried.stderr.decode(errors="replace").strip().splitlines()
        return f"other users cannot run {os.path.realpath(sys.executable)} ({said[-1] if said else tried.returncode})"
    return None


def check_isolation() -> None:
    """Refuse, where hosts cannot run as other users."""
    refusal = why_not_isolated()
    if refusal:
        raise UserError(
            f"simulated hosts cannot run as users of their own: {refusal}",
            "run the server as root, from a Python that all users can run (in /opt, say), or leave --allow-local out",
        )


def run_as(user: int, program: str) -> subprocess.CompletedProcess[bytes]:
    """A Python program as that user, with none of this process' environment."""
    command = [sys.executable, "-S", "-E", "-c", program]
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}  # Python may need it
    return subprocess.run(
        command, user=user, group=user, extra_groups=[], env=kept, cwd="/", capture_output=True, timeout=_ENOUGH
    )


def choose_user(taken: Collection[int]) -> int:
    """A user id that nobody has; seldom one that somebody had, so that what a former cluster left in /tmp is not the next one's."""
    numbers = next(numbers for numbers in _RANGES if _is_mapped(numbers))
    while True:
        user = random.choice(numbers)
        if user not in taken and not _has_account(user):
            return user


def kill_user(user: int) -> None:
    """SIGKILL every process of the user, in one step that no fork can escape, whatever they did to hide."""
    run_as(user, "import os; os.kill(-1, 9)")


class HostUser(msgspec.Struct, frozen=True, kw_only=True):
    """Whose an isolated cluster's hosts are, and where their homes are: as it was decided when it was created."""

    number: int
    homes: str


def homes_root() -> Path:
    """Where the homes of new clusters go."""
    return Path(os.environ.get(HOMES_VARIABLE) or DEFAULT_HOMES)


def make_folders(place: Path) -> Path:
    """The folder and those above it that are missing, which all may pass through and only this user may change."""
    missing = [folder for folder in (place, *place.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o711)
        folder.chmod(0o711)  # whatever the umask
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise UserError(
            f"{place} can be changed by others", "remove it, or name another directory in PODWAY_LOCAL_HOMES"
        )
    return place


def make_home(home: Path, user: int, furnish: Callable[[Path], None]) -> None:
    """The home of a host, if it is not there: filled by `furnish`, and then, all at once, its user's."""
    if home.exists():
        if home.lstat().st_uid == user:
            return
        shutil.rmtree(home)  # an interrupted try
    home.mkdir(mode=0o700)
    furnish(home)
    for folder, folders, files in os.walk(home):
        for name in (*folders, *files):
            os.lchown(Path(folder, name), user, user)
    os.chown(home, user, user)


def _has_account(user: int) -> bool:
    try:
        pwd.getpwuid(user)
    except KeyError:
        return False
    return True


def _is_mapped(numbers: range) -> bool:
    """Whether this user namespace has these ids, as users and as groups."""
    for kind in ("uid_map", "gid_map"):
        lines = [[int(word) for word in line.split()] for line in Path(f"/proc/self/{kind}").read_text().splitlines()]
        if not any(first <= numbers[0] and numbers[-1] < first + count for first, _, count in lines):
            return False
    return True
