"""Which contexts there are, which of them each cluster is in, and the calls that read and change a cluster's objects there.

The API is the truth. What is kept here, in PODWAY_HOME/gke/clusters/NAME.json, is only where to look: `--infra gke/CONTEXT` may name
a context that is in no settings. A cluster without such a file is looked for in every context of the settings.
"""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from podway.decoding import from_json
from podway.errors import ProviderError, UserError
from podway.files import write_atomically
from podway.providers.gke.api import Fields, KubernetesApi, NotFound
from podway.providers.gke.kubeconfig import find_context
from podway.providers.gke.manifests import (
    CLUSTER,
    JOBSET_NAME,
    MANAGED_BY,
    PODWAY,
    JobSetContext,
    labels_of,
    object_name,
    pull_secret_name,
)
from podway.providers.gke.pool_render import POOLS, gke_cluster_of
from podway.providers.gke.settings import GkeSettings, read_settings
from podway.providers.gke.state import STOPPED, Seen
from podway.providers.owner import owner_of

JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{}/jobsets"
CONFIG_MAPS = "/api/v1/namespaces/{}/configmaps"
SECRETS = "/api/v1/namespaces/{}/secrets"
PODS = "/api/v1/namespaces/{}/pods"
EVENTS = "/api/v1/namespaces/{}/events"
KUEUE = "/apis/kueue.x-k8s.io"
_FILE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,61}")


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """Where a cluster is."""

    context: str
    namespace: str
    pools: str = ""  # the GKE cluster that may hold node pools made for it


def created_at(metadata: Fields) -> float | None:
    """When Kubernetes made an object."""
    made = metadata.get("creationTimestamp")
    return datetime.fromisoformat(made.replace("Z", "+00:00")).timestamp() if made else None


class Clusters:
    """The contexts of one Podway home, and what Podway has there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "gke"
        self._apis: dict[str, KubernetesApi] = {}
        self._kueue: dict[str, str | None] = {}  # context -> Kueue's API version; None: it is not installed

    @property
    def settings(self) -> GkeSettings:
        """Read each time: the file may be edited while a server runs."""
        return read_settings(self.root)

    @property
    def owner(self) -> str:
        """Marks what this Podway makes."""
        return self.settings.owner or owner_of(self.folder)[:8]

    def names(self) -> list[str]:
        """The contexts that offers come from, where none is named."""
        return list(self.settings.contexts) or [find_context(None).name]

    def api(self, context: str | None) -> KubernetesApi:
        """The API of a context."""
        found = find_context(context)
        known = self._apis.get(found.name)
        if known is None or known.context != found:
            known = self._apis[found.name] = KubernetesApi(found)
        return known

    def render_context(self, context: str | None) -> JobSetContext:
        """What requests for this context depend on."""
        found, settings = find_context(context), self.settings
        return JobSetContext(
            owner=self.owner,
            context=found.name,
            namespace=settings.namespace or found.namespace,
            settings=settings,
        )

    # where a cluster is

    def remember(self, name: str, where: Where) -> None:
        """Before anything is made there."""
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(path, msgspec.json.encode(where))

    def forget(self, name: str) -> None:
        """Nothing is left of it there."""
        self._path(name).unlink(missing_ok=True)

    async def where(self, name: str) -> Where | None:
        """By the file, else by looking; None where it is in none of the contexts."""
        known = self.remembered(name)
        if known is not None:
            return known
        contexts = await asyncio.to_thread(self._known_names)
        for context in contexts:
            target = await asyncio.to_thread(self.render_context, context)
            api = self.api(context)
            selector = ",".join(f"{key}={value}" for key, value in labels_of(target, name).items())
            with contextlib.suppress(UserError):  # a cluster without JobSet has none of ours
                for found in await api.items(JOBSETS.format(target.namespace), labelSelector=selector):
                    pools = (found["metadata"].get("annotations") or {}).get(POOLS, "")
                    return Where(context=target.context, namespace=target.namespace, pools=pools)
        return None

    def everywhere(self) -> list[Where]:
        """Each context and namespace that may hold something of ours."""
        found = []
        with contextlib.suppress(UserError):
            for context in self.names():
                target = self.render_context(context)
                found.append(Where(context=target.context, namespace=target.namespace))
        folder = self.folder / "clusters"
        for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
            with contextlib.suppress(OSError, msgspec.DecodeError):
                found.append(msgspec.structs.replace(from_json(path.read_bytes(), Where), pools=""))
        return list(dict.fromkeys(found))

    def gke_clusters(self) -> set[str]:
        """Those in which launches may make node pools now."""
        if self.settings.node_pools is None:
            return set()
        found = (gke_cluster_of(self.settings, context) for context in self._known_names())
        return {one for one in found if one}

    def _known_names(self) -> list[str]:
        try:
            return self.names()
        except UserError:
            return []  # no KUBECONFIG at all: nothing of ours can be there

    def remembered(self, name: str) -> Where | None:
        """By the file alone."""
        try:
            return from_json(self._path(name).read_bytes(), Where)
        except FileNotFoundError:
            return None

    def _path(self, name: str) -> Path:
        if not _FILE_NAME.fullmatch(name):
            raise UserError(f"{name!r} cannot be a cluster name", "use letters, digits, '.', '_' and '-'")
        return self.folder / "clusters" / f"{name}.json"

    # a cluster's objects

    async def look(self, name: str, where: Where) -> Seen:
        """Everything that tells how the cluster is."""
        api, ident = self.api(where.context), object_name(self.owner, name)
        jobset, pods, config = await asyncio.gather(
            _or_none(api.get(f"{JOBSETS.format(where.namespace)}/{ident}")),
            api.items(PODS.format(where.namespace), labelSelector=f"{JOBSET_NAME}={ident}"),
            api.exists(f"{CONFIG_MAPS.format(where.namespace)}/{ident}"),
        )
        if jobset is None:
            return Seen(jobset=None, pods=tuple(pods), leftovers=config)
        workload, workloads, events = None, [], []
        if not all((pod.get("status") or {}).get("phase") == "Running" for pod in pods) or not pods:
            workloads = await self._workloads(where)
            workload = _workload_of(jobset, workloads)
            events = await self._events(api, where.namespace, ident)
        return Seen(
            jobset=jobset,
            pods=tuple(pods),
            workload=workload,
            workloads=tuple(workloads),
            events=tuple(events),
            leftovers=True,
        )

    async def _workloads(self, where: Where) -> list[Fields]:
        """Kueue's records of the namespace; none without Kueue."""
        version = await self.kueue_version(where.context)
        if version is None:
            return []
        with contextlib.suppress(UserError, NotFound):  # no right to read them: the pods say the rest
            return await self.api(where.context).items(f"{KUEUE}/{version}/namespaces/{where.namespace}/workloads")
        return []

    async def kueue_version(self, context: str) -> str | None:
        """v1beta1 or v1beta2, as the cluster prefers; None where Kueue is not installed."""
        if context not in self._kueue:
            try:
                group = await self.api(context).get(KUEUE)
                self._kueue[context] = (group.get("preferredVersion") or {}).get("version")
            except (NotFound, UserError):
                self._kueue[context] = None
        return self._kueue[context]

    async def suspend(self, name: str, where: Where, *, stopped: bool) -> None:
        """Stop or start the pods: by Kueue's Workload where there is one, which else would start them again."""
        api, ident = self.api(where.context), object_name(self.owner, name)
        path = f"{JOBSETS.format(where.namespace)}/{ident}"
        jobset = await _or_none(api.get(path))
        if jobset is None:
            return
        mark = {"metadata": {"annotations": {STOPPED: "true" if stopped else None}}}
        workload = _workload_of(jobset, await self._workloads(where))
        if workload is None:
            await api.patch(path, {**mark, "spec": {"suspend": stopped}})
            return
        await api.patch(path, mark)
        version = await self.kueue_version(where.context)
        target = f"{KUEUE}/{version}/namespaces/{where.namespace}/workloads/{workload['metadata']['name']}"
        await api.patch(target, {"spec": {"active": not stopped}})

    async def remove(self, name: str, where: Where) -> None:
        """Begin to delete everything of the cluster; the ConfigMap last, so that an interrupted removal is seen."""
        api, ident = self.api(where.context), object_name(self.owner, name)
        namespace = where.namespace
        await api.delete(f"{JOBSETS.format(namespace)}/{ident}")
        if not await api.items(PODS.format(namespace), labelSelector=f"{JOBSET_NAME}={ident}"):
            for secret in (ident, pull_secret_name(ident)):
                await api.delete(f"{SECRETS.format(namespace)}/{secret}")
            await api.delete(f"{CONFIG_MAPS.format(namespace)}/{ident}")

    async def owned(self, where: Where) -> list[tuple[Fields, list[Fields]]]:
        """Every JobSet that carries Podway's mark, with its pods; a ConfigMap without one stands for itself."""
        api, marked = self.api(where.context), f"{MANAGED_BY}={PODWAY}"
        try:
            jobsets = await api.items(JOBSETS.format(where.namespace), labelSelector=marked)
        except UserError:
            jobsets = []
        pods = await api.items(PODS.format(where.namespace), labelSelector=marked)
        configs = await api.items(CONFIG_MAPS.format(where.namespace), labelSelector=marked)
        names = {one["metadata"]["name"] for one in jobsets}
        by_cluster: dict[str, list[Fields]] = {}
        for pod in pods:
            by_cluster.setdefault(pod["metadata"]["labels"].get(CLUSTER, ""), []).append(pod)
        found = [({"kind": "JobSet", **one}, by_cluster.get(one["metadata"]["name"], [])) for one in jobsets]
        left: list[tuple[Fields, list[Fields]]] = [
            ({"kind": "ConfigMap", **one}, []) for one in configs if one["metadata"]["name"] not in names
        ]
        return [*found, *left]

    async def _events(self, api: KubernetesApi, namespace: str, ident: str) -> list[Fields]:
        """The latest events about the JobSet, its Jobs and its pods, oldest first."""
        try:
            events = await api.items(EVENTS.format(namespace), fieldSelector="type!=Audit")
        except (UserError, ProviderError):
            return []
        about = [one for one in events if str((one.get("involvedObject") or {}).get("name", "")).startswith(ident)]
        return sorted(about, key=lambda one: str(one.get("lastTimestamp") or one.get("eventTime") or ""))[-50:]


def _workload_of(jobset: Fields, workloads: Sequence[Fields]) -> Fields | None:
    """Kueue's record of the JobSet; None before it has made one."""
    uid = jobset["metadata"].get("uid")
    owned = (one for one in workloads if any(o.get("uid") == uid for o in one["metadata"].get("ownerReferences") or ()))
    return next(owned, None)


async def _or_none(call: Awaitable[Fields]) -> Fields | None:
    try:
        return await call
    except NotFound:
        return None
