"""Kubernetes for `podway doctor`: the context, its API, JobSet, and nodes with TPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from podway.errors import ProviderError, UserError
from podway.providers.diagnosis import Finding, ask
from podway.providers.gke.kubeconfig import KubeContext, find_context
from podway.providers.gke.settings import read_settings

if TYPE_CHECKING:
    from podway.providers.gke.api import KubernetesApi

LOOK_S = 5.0
JOBSET = "install JobSet: https://jobset.sigs.k8s.io/docs/installation"
_TPUS = "cloud.google.com/gke-tpu-accelerator"


def diagnose(root: Path) -> Iterator[Finding]:
    """Each as soon as it is known. Nothing is made and nothing is changed."""
    try:
        read_settings(root)
        context = find_context(None)
    except UserError as error:
        yield Finding(what="context", ok=False, note=error.what, fix=error.hint)
        return
    yield Finding(what="context", ok=True, note=context.name)
    from podway.providers.gke.api import KubernetesApi  # a person without a cluster need not wait for it

    api = KubernetesApi(context)
    answer = next(ask("API", lambda: str(api.call("GET", "/version", timeout=LOOK_S).get("gitVersion", "answers"))))
    yield answer
    if not answer.ok:
        return
    yield from ask("JobSet", lambda: _jobset(api, context))
    yield from ask("TPU nodes", lambda: _nodes(api))


def _jobset(api: KubernetesApi, context: KubeContext) -> str:
    try:
        api.call("GET", "/apis/jobset.x-k8s.io/v1alpha2", timeout=LOOK_S)
    except ProviderError:
        raise UserError(f"{context.name} has no JobSet", JOBSET) from None
    return "installed"


def _nodes(api: KubernetesApi) -> str:
    nodes = api.read_items("/api/v1/nodes", {"labelSelector": _TPUS}, LOOK_S)
    kinds = sorted({str(node.get("metadata", {}).get("labels", {}).get(_TPUS)) for node in nodes})
    return f"{len(nodes)} of {', '.join(kinds)}" if nodes else "none now (a node pool that scales from zero has none)"
