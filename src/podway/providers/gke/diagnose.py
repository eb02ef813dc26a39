"""Kubernetes for `podway doctor`: the context, its API, JobSet, Kueue, the caller's rights, what gke.yaml names, and nodes with TPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from podway.errors import ProviderError, UserError
from podway.providers.diagnosis import Finding, ask
from podway.providers.gke.kubeconfig import KubeContext, find_context
from podway.providers.gke.settings import GkeSettings, read_settings

if TYPE_CHECKING:
    from podway.providers.gke.api import KubernetesApi

LOOK_S = 5.0
JOBSET = "install it: podway gke prepare (which shows what it does first)"
KUEUE = "install it: podway gke prepare; or leave `queue` out of gke.yaml"
_TPUS = "cloud.google.com/gke-tpu-accelerator"


def diagnose(root: Path) -> Iterator[Finding]:
    """Each as soon as it is known. Nothing is made and nothing is changed."""
    try:
        settings = read_settings(root)
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
    namespace = settings.namespace or context.namespace
    version = _kueue(api)
    if version is not None or settings.queue:
        yield from ask("Kueue", lambda: _queue(api, version, namespace, settings.queue))
    yield from ask("rights", lambda: _rights(api, namespace, version is not None))
    for what, path in _named(settings, namespace):
        yield from ask(what, lambda path=path: _there(api, path))  # type: ignore[misc]
    yield from ask("buckets", lambda: _driver(api))
    yield from ask("TPU nodes", lambda: _nodes(api))


def _jobset(api: KubernetesApi, context: KubeContext) -> str:
    try:
        api.call("GET", "/apis/jobset.x-k8s.io/v1alpha2", timeout=LOOK_S)
    except ProviderError:
        raise UserError(f"{context.name} has no JobSet", JOBSET) from None
    return "installed"


def _kueue(api: KubernetesApi) -> str | None:
    """Its version; None where it is not installed."""
    try:
        group = api.call("GET", "/apis/kueue.x-k8s.io", timeout=LOOK_S)
    except (ProviderError, UserError):
        return None
    return str((group.get("preferredVersion") or {}).get("version"))


def _queue(api: KubernetesApi, version: str | None, namespace: str, queue: str | None) -> str:
    if version is None:
        raise UserError(f"gke.yaml names the queue {queue}, and Kueue is not installed", KUEUE)
    if queue is None:
        return f"{version}; gke.yaml names no queue, so launches do not wait for quota"
    path = f"/apis/kueue.x-k8s.io/{version}"
    try:
        found = api.call("GET", f"{path}/namespaces/{namespace}/localqueues/{queue}", timeout=LOOK_S)
    except ProviderError:
        raise UserError(
            f"namespace {namespace} has no LocalQueue {queue}", "make it, or name another in gke.yaml: queue"
        ) from None
    return f"{version}, queue {queue} of {(found.get('spec') or {}).get('clusterQueue')}"


def _rights(api: KubernetesApi, namespace: str, kueue: bool) -> str:
    from podway.providers.gke.rights import missing_rights

    missing = missing_rights(api, namespace, kueue=kueue, timeout=LOOK_S)
    if missing:
        raise UserError(
            f"you may not {', '.join(missing)} in namespace {namespace}",
            "ask for the Role of docs/kubernetes.md, the least that is needed",
        )
    return f"those that are needed in namespace {namespace}"


def _named(settings: GkeSettings, namespace: str) -> Iterator[tuple[str, str]]:
    """What gke.yaml names that must be there."""
    if settings.priority_class:
        name = settings.priority_class
        yield f"priority class {name}", f"/apis/scheduling.k8s.io/v1/priorityclasses/{name}"
    if settings.service_account:
        name = settings.service_account
        yield f"service account {name}", f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}"
    if settings.pull_secret:
        yield f"pull secret {settings.pull_secret}", f"/api/v1/namespaces/{namespace}/secrets/{settings.pull_secret}"


def _there(api: KubernetesApi, path: str) -> str:
    try:
        api.call("GET", path, timeout=LOOK_S)
    except UserError:
        return "no right to see whether it is there"
    except ProviderError as error:
        if error.transient:
            raise
        raise UserError("gke.yaml names it, and it is not there", "make it, or change gke.yaml") from None
    return "there"


def _driver(api: KubernetesApi) -> str:
    from podway.providers.gke.bucket_driver import ENABLE, PATH

    try:
        api.call("GET", PATH, timeout=LOOK_S)
    except UserError:
        return "no right to see whether the gcsfuse driver is there"
    except ProviderError as error:
        if error.transient:
            raise
        return f"copied, not mounted: the gcsfuse driver is not there (to have it: {ENABLE})"
    return "can be mounted: the gcsfuse driver is there"


def _nodes(api: KubernetesApi) -> str:
    nodes = api.read_items("/api/v1/nodes", {"labelSelector": _TPUS}, LOOK_S)
    kinds = sorted({str(node.get("metadata", {}).get("labels", {}).get(_TPUS)) for node in nodes})
    return f"{len(nodes)} of {', '.join(kinds)}" if nodes else "none now (a node pool that scales from zero has none)"
