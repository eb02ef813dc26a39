"""Volumes on Kubernetes: a PersistentVolumeClaim, in the namespace of the pods that name it.

It carries Podway's mark and no cluster's, so that taking clusters down passes it over. A claim may be bound only
when a pod wants it (the storage class decides), so nothing waits for that here.
"""

import asyncio
import re
import time

from podway.errors import ProviderError, UserError
from podway.providers import CreatedVolume, OwnedResource
from podway.providers.gke.api import FORBIDDEN, Conflict, Fields, KubernetesApi, NotFound
from podway.providers.gke.clusters import Clusters, Where, created_at
from podway.providers.gke.manifests import MANAGED_BY, OWNER, PODWAY, JobSetContext, Manifest, object_name
from podway.providers.gke.pod_volumes import VOLUMES_AT
from podway.task.volumes import VolumeSpec

CLAIMS = "/api/v1/namespaces/{}/persistentvolumeclaims"
CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
VOLUME = "podway.dev/volume"
CLAIM_KIND = "volume claim"
MODES = ("ReadWriteOnce", "ReadWriteOncePod", "ReadOnlyMany", "ReadWriteMany")
ONE_NODE = ("ReadWriteOnce", "ReadWriteOncePod")
GONE_S = 60.0
_SCALE = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_SCALE |= {f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTP", 1)}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kKMGTP]?i?)")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


class Claims:
    """The volumes of one Podway home, in the contexts that hold them."""

    def __init__(self, clusters: Clusters) -> None:
        self._clusters = clusters

    async def create(self, spec: VolumeSpec) -> CreatedVolume:
        """Make the claim, or look at the one to register."""
        target = self._clusters.render_context(spec.placement.region)
        api, path = self._clusters.api(target.context), CLAIMS.format(target.namespace)
        if spec.disk_id is not None:
            return _created(spec, target, await _registered(api, path, spec.disk_id, target))
        claim = render_claim(target, spec)
        if spec.disk_type is not None:
            await _check_class(api, spec.disk_type)
        try:
            return _created(spec, target, await api.create(path, claim))
        except Conflict:  # of an interrupted call, or of somebody else
            found = await api.get(f"{path}/{claim['metadata']['name']}")
        if (found["metadata"].get("annotations") or {}).get(VOLUME) != spec.name:
            raise UserError(
                f"the claim {claim['metadata']['name']} exists, and is not this volume's", "use another name"
            )
        return _created(spec, target, found)

    async def owned(self, where: Where) -> list[OwnedResource]:
        """Every claim that Podway made for a volume; what it costs is the storage class's to say."""
        path = CLAIMS.format(where.namespace)
        try:
            found = await self._clusters.api(where.context).items(path, labelSelector=f"{MANAGED_BY}={PODWAY}")
        except UserError as error:
            if error.code != FORBIDDEN:
                raise
            return []  # who may not see claims has made none
        return [_owned(one, where) for one in found if VOLUME in (one["metadata"].get("annotations") or {})]

    async def purge(self, resource: OwnedResource) -> None:
        """Begin to delete a claim, and what it holds as its storage class says."""
        for where in await asyncio.to_thread(self._clusters.everywhere):
            if where.context == resource.zone:
                path = CLAIMS.format(where.namespace)
                await self._clusters.api(where.context).delete(f"{path}/{resource.name}")

    async def delete(self, spec: VolumeSpec) -> None:
        """Delete the claim, and wait until it is gone: Kubernetes keeps it for as long as a pod has it."""
        target = self._clusters.render_context(spec.placement.region)
        api = self._clusters.api(target.context)
        path = f"{CLAIMS.format(target.namespace)}/{_claim_name(target, spec)}"
        until = time.monotonic() + GONE_S
        await api.delete(path)
        while await api.exists(path):
            if time.monotonic() > until:
                raise ProviderError(f"the claim of volume {spec.name} is still there: a pod has it", transient=False)
            await asyncio.sleep(0.5)


def _owned(claim: Fields, where: Where) -> OwnedResource:
    facts, phase = claim["metadata"], (claim.get("status") or {}).get("phase")
    return OwnedResource(
        cluster="",
        volume=facts["annotations"][VOLUME],
        owner=(facts.get("labels") or {}).get(OWNER, ""),
        kind=CLAIM_KIND,
        name=facts["name"],
        zone=where.context,
        condition="deleting" if facts.get("deletionTimestamp") else "failed" if phase == "Lost" else "ready",
        created=created_at(facts),
    )


def render_claim(target: JobSetContext, spec: VolumeSpec) -> Manifest:
    """The claim of a volume. Pure; golden-tested."""
    if not spec.size_gb:
        raise UserError(f"volume {spec.name} has no size", "give one: --size 100GB")
    mode = spec.access_mode or MODES[0]
    if mode not in MODES:
        raise UserError(f"{mode!r} is not an access mode", f"use one of: {', '.join(MODES)}")
    if spec.disk_type is not None and not _NAME.fullmatch(spec.disk_type):
        raise UserError(f"{spec.disk_type!r} cannot be a storage class", "see: kubectl get storageclass")
    wanted: Manifest = {"accessModes": [mode], "resources": {"requests": {"storage": f"{spec.size_gb}Gi"}}}
    if spec.disk_type is not None:
        wanted["storageClassName"] = spec.disk_type
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {
            "name": _claim_name(target, spec),
            "namespace": target.namespace,
            "labels": {MANAGED_BY: PODWAY, OWNER: target.owner},
            "annotations": {VOLUME: spec.name},
        },
        "spec": wanted,
    }


def _claim_name(target: JobSetContext, spec: VolumeSpec) -> str:
    return object_name(target.owner, f"volume {spec.name}")


async def _registered(api: KubernetesApi, path: str, name: str, target: JobSetContext) -> Fields:
    missing = UserError(
        f"namespace {target.namespace} of context {target.context} has no claim {name}",
        f"see: kubectl get pvc -n {target.namespace}",
    )
    if not _NAME.fullmatch(name):  # it becomes part of a path
        raise missing
    try:
        return await api.get(f"{path}/{name}")
    except NotFound:
        raise missing from None


async def _check_class(api: KubernetesApi, name: str) -> None:
    """A claim of a class that nobody has would wait for ever; whoever may not see classes is not refused."""
    try:
        if await api.exists(f"{CLASSES}/{name}"):
            return
        known = sorted(one["metadata"]["name"] for one in await api.items(CLASSES))
    except UserError as error:
        if error.code != FORBIDDEN:
            raise
        return
    raise UserError(
        f"context {api.context.name} has no storage class {name}", f"use one of: {', '.join(known) or 'none is there'}"
    )


def _created(spec: VolumeSpec, target: JobSetContext, claim: Fields) -> CreatedVolume:
    wanted = claim.get("spec") or {}
    asked = ((wanted.get("resources") or {}).get("requests") or {}).get("storage")
    size = ((claim.get("status") or {}).get("capacity") or {}).get("storage") or asked
    return CreatedVolume(
        disk=str(claim["metadata"]["name"]),
        directory=f"{VOLUMES_AT}/{spec.name}",
        region=target.context,
        size_gb=_gigabytes(str(size)) if size else None,
        disk_type=wanted.get("storageClassName"),
        shared=any(mode not in ONE_NODE for mode in wanted.get("accessModes") or ()),
    )


def _gigabytes(quantity: str) -> int | None:
    """Of Kubernetes' way to write a size, in GiB."""
    match = _QUANTITY.fullmatch(quantity)
    scale = _SCALE.get(match[2]) if match else None
    return None if match is None or scale is None else int(float(match[1]) * scale / 1024**3)
