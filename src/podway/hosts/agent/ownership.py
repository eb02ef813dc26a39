"""What root wrote into a task's directories becomes the host's own user's again: root in a container is root on the host.

The directories are remembered on disk before a container may write to them, so that whoever ends a phase (its runner, a cancel, the
clean-up after a killed runner) can give them back.
"""

from __future__ import annotations

import contextlib
import os

from . import phase
from .container_spec import IN_USE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .wire import Fields


def remember(state: str, enter: Fields) -> None:
    """Keep that containers were used on this host, and which directories of it they may write to."""
    path = os.path.join(state, IN_USE)
    known = (phase.read_json(path) or {}).get("folders") or []
    folders = [source for source, _, read_only in enter["container"]["mounts"] if not read_only]
    phase.write_json(path, {"folders": sorted({*known, *folders})})


def take_back(state: str) -> None:
    """Make what is not this user's in those directories this user's; nothing to do for root, who can change everything."""
    if os.geteuid() == 0:
        return
    folders = (phase.read_json(os.path.join(state, IN_USE)) or {}).get("folders") or []
    folders = [folder for folder in folders if os.path.isdir(folder)]
    if not folders:
        return
    mine = f"{os.geteuid()}:{os.getegid()}"
    command = [
        "sudo",
        "-n",
        "find",
        *folders,
        "-xdev",
        "!",
        "-uid",
        str(os.geteuid()),
        "-exec",
        "chown",
        "-h",
        mine,
        "{}",
        "+",
    ]
    quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    with contextlib.suppress(OSError):  # no sudo here; or (ECHILD) it was buried by the loop that buries all children
        os.waitpid(os.posix_spawnp("sudo", command, os.environ, file_actions=quiet), 0)
