"""Where a pod is that stands for a host: what a client needs to find it with its own rights, and how it enters it."""

import shlex

import msgspec

from podway.hosts.agent.connections import ATTACHED_VARIABLE


class PodAddress(msgspec.Struct, frozen=True, kw_only=True):
    """One pod of a JobSet, by its place in it: the pod's own name changes when it is replaced."""

    context: str  # of KUBECONFIG
    namespace: str
    jobset: str
    slice: int
    worker: int


def attached_command(command: str) -> list[str]:
    """Words that run a command of the shell in a pod. The outer shell tells the pod's agent that somebody is connected."""
    inner = f"env -u {ATTACHED_VARIABLE} sh -c {shlex.quote(command)}"
    outer = f'{ATTACHED_VARIABLE}="$PODWAY_HOST_ID" exec sh -c {shlex.quote(f"trap : INT; {inner}; exit $?")}'
    return ["sh", "-c", outer]
