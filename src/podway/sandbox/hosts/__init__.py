"""Hosts with a real sshd, made here and removed afterwards, whatever happens in between.

`make_hosts(n)` yields a `HostSet`: as root n machines, each in a network, mount, pid and uts namespace of its own
(netns.py); else, or when asked to, n sshds of this user on loopback addresses (loopback.py). Both let in one key made for
the set and show the same faults: sshd dies, sshd comes back; a machine is cut off or lost only where it is one of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from podway.sandbox.hosts.loopback import LoopbackHosts
from podway.sandbox.hosts.netns import NetnsHosts, why_no_namespaces
from podway.sandbox.hosts.sshd import HostSet, make_key, pool_text, why_no_hosts

__all__ = ["HostSet", "make_hosts", "make_key", "pool_text", "why_no_hosts", "why_no_namespaces"]


@contextmanager
def make_hosts(count: int, *, separate: bool | None = None) -> Iterator[HostSet]:
    """`count` machines for as long as the block lasts; `separate` None takes the better kind that is available."""
    if separate is None:
        separate = why_no_namespaces() is None
    made: HostSet = NetnsHosts(count) if separate else LoopbackHosts(count)
    try:
        yield made
    finally:
        made.close()
