"""Where a pod is that stands for a host: what a client needs to find it with its own rights."""

import msgspec


class PodAddress(msgspec.Struct, frozen=True, kw_only=True):
    """One pod of a JobSet, by its place in it: the pod's own name changes when it is replaced."""

    context: str  # of KUBECONFIG
    namespace: str
    jobset: str
    slice: int
    worker: int
