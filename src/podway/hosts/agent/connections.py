"""Whether a person is logged in to this host: an ssh session, however it came (a terminal, an editor, scp, `podway attach`).

On a machine of its own those are the children of sshd. What such a session left running when it ended (a daemon, tmux) is nobody's
child any more and does not count, and neither do the commands that Podway itself runs over ssh (CONTROL_VARIABLE). On a simulated host
and in a pod they are the processes that hold a connection (ATTACHED_VARIABLE). A bare tunnel (`ssh -N`) to a real machine runs nothing
there and is not seen.
"""

from __future__ import annotations

import os
import time

from . import processes
from .records import CONFINED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .processes import Known

ATTACHED_VARIABLE = "PODWAY_ATTACHED"
CONTROL_VARIABLE = "PODWAY_CONTROL"
SSHD = ("sshd", "sshd-session")
_SETTLE_S = 1.0


def someone_is_connected(address: str) -> bool:
    """Whether a person has a session on this host, whose own address is `address`. Takes a moment where it seems so."""
    found = sessions(address)
    if not found:
        return False
    time.sleep(_SETTLE_S)
    return bool(found & sessions(address))


def sessions(address: str) -> Known:
    """What looks like a session, by process. Only what is there at the next look too is one: a command of Podway's own bears its mark
    no sooner than the login shell has started it."""
    procs = processes.snapshot()
    host = os.environ.get(processes.HOST_ID_VARIABLE, "")
    found = set()
    if host:
        found = {(pid, procs[pid].start) for pid in processes.with_variable(procs, ATTACHED_VARIABLE, host)}
    if os.environ.get(CONFINED):
        return found
    for pid, process in procs.items():
        parent = procs.get(process.ppid)
        if parent is None or parent.name not in SSHD or process.name in SSHD:
            continue
        environment = processes.environ(pid)
        words = environment.get("SSH_CONNECTION", "").split()
        # Hosts that share a loopback have an sshd each; anywhere else the machine has one.
        elsewhere = len(words) == 4 and words[2].startswith("127.") and words[2] != address
        if words and not elsewhere and CONTROL_VARIABLE not in environment:
            found.add((pid, process.start))
    return found
