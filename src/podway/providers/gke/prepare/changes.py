"""What a cluster lacks: each wanted object compared with the one that is there, by a dry run of the cluster itself.

A server-side apply says what an object would become, defaults and other people's fields included; where that is what it is already,
nothing is to be done. Controllers that somebody else installed are left alone, whatever their version, and so is every object of
another's making. An installation of ours that was interrupted is known by an annotation of its namespace, and goes on.
"""

import difflib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import msgspec
import yaml

from podway.errors import UserError
from podway.providers.gke.api import FORBIDDEN, Fields, KubernetesApi, NoJobSet, NotFound
from podway.providers.gke.manifests import TPU, Manifest
from podway.providers.gke.prepare import wanted
from podway.providers.gke.prepare.releases import RELEASES, Release, ReleaseFile, download, read_files
from podway.providers.gke.rights import AT_ONCE, AccessRight, denied
from podway.providers.gke.settings import GkeSettings

CALL_S = 30.0
ADMINISTRATOR = "ask its administrator to run podway gke prepare, or for GKE's role roles/container.admin"
RELEASE, INSTALLED = "podway.dev/release", "podway.dev/installed"
APPLY = "application/apply-patch+yaml"
_WHO = {"fieldManager": "podway", "force": "true"}
_VARYING = ("managedFields", "resourceVersion", "generation", "uid", "creationTimestamp")

# kind -> the word of the API's paths, and whether objects of it belong to a namespace
PATHS = {
    "APIService": ("apiservices", False),
    "ClusterQueue": ("clusterqueues", False),
    "ClusterRole": ("clusterroles", False),
    "ClusterRoleBinding": ("clusterrolebindings", False),
    "ConfigMap": ("configmaps", True),
    "CustomResourceDefinition": ("customresourcedefinitions", False),
    "Deployment": ("deployments", True),
    "LocalQueue": ("localqueues", True),
    "MutatingWebhookConfiguration": ("mutatingwebhookconfigurations", False),
    "Namespace": ("namespaces", False),
    "PriorityClass": ("priorityclasses", False),
    "ResourceFlavor": ("resourceflavors", False),
    "Role": ("roles", True),
    "RoleBinding": ("rolebindings", True),
    "Secret": ("secrets", True),
    "Service": ("services", True),
    "ServiceAccount": ("serviceaccounts", True),
    "ValidatingWebhookConfiguration": ("validatingwebhookconfigurations", False),
}


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One object that is created, or becomes something else."""

    action: Literal["create", "change"]
    body: Manifest
    diff: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """`ClusterQueue podway`."""
        return f"{self.body['kind']} {self.body['metadata']['name']}"


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Changes that belong together: a release, or Podway's own objects."""

    title: str
    changes: tuple[Change, ...]
    release: Release | None = None


class Preparation(msgspec.Struct, frozen=True, kw_only=True):
    """All that is to be done, and what is left as it is."""

    parts: tuple[Part, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def changes(self) -> list[Change]:
        """Of all parts, in order."""
        return [change for part in self.parts for change in part.changes]


class PrepareOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a person asked for."""

    files: tuple[str, ...] = ()
    quotas: tuple[str, ...] = ()
    kueue: bool = True


def find_changes(api: KubernetesApi, settings: GkeSettings, namespace: str, options: PrepareOptions) -> Preparation:
    """Look at the cluster; nothing is changed. Downloads the releases that are to be installed."""
    try:
        return _find_changes(api, settings, namespace, options)
    except UserError as error:
        raise UserError(error.what, ADMINISTRATOR) if error.code == FORBIDDEN else error from None


def _find_changes(api: KubernetesApi, settings: GkeSettings, namespace: str, options: PrepareOptions) -> Preparation:
    asked, files = wanted.asked_chips(options.quotas), read_files(options.files)
    parts, notes = [], []
    releases = [one for one in RELEASES if options.kueue or one.name != "Kueue"]
    for release in releases:
        if (state := _state(api, release)) is not None:
            notes.append(f"{release.name} {state}")
            continue
        part = _release_part(api, files.get(release.name) or download(release))
        parts.append(part)
    unused = sorted(set(files) - {part.release.name for part in parts if part.release})
    if unused:
        notes.append(f"--from: the file of {' and '.join(unused)} is not used")
    seen = _look(api, settings, namespace, asked, notes, kueue=options.kueue)
    parts.append(_own_part(api, seen, notes))
    return Preparation(parts=tuple(part for part in parts if part.changes), notes=tuple(notes))


def check_rights(api: KubernetesApi, changes: Iterable[Change]) -> None:
    """One sentence that names every right that is missing, before anything is changed."""
    rights = {
        AccessRight(group_of(change.body), PATHS[change.body["kind"]][0], verb, place_of(change.body))
        for change in changes
        for verb in (("create", "patch") if change.action == "create" else ("patch",))
    }
    missing = denied(api, sorted(rights), timeout=CALL_S)
    if missing:
        verbs = sorted({f"{one.verb} {one.resource}" for one in missing})
        raise UserError(
            f"you may not {', '.join(verbs)} in the cluster of context {api.context.name}",
            ADMINISTRATOR,
        )


def path_of(body: Manifest) -> str:
    """Where the object is."""
    version, kind, metadata = body["apiVersion"], body["kind"], body["metadata"]
    if kind not in PATHS:
        raise UserError(f"{kind} {metadata['name']}: Podway does not install objects of this kind", "use kubectl apply")
    plural, placed = PATHS[kind]
    base = f"/apis/{version}" if "/" in version else f"/api/{version}"
    place = f"/namespaces/{place_of(body)}" if placed else ""
    return f"{base}{place}/{plural}/{metadata['name']}"


def group_of(body: Manifest) -> str:
    """Its API group."""
    return str(body["apiVersion"]).rpartition("/")[0]


def place_of(body: Manifest) -> str:
    """Its namespace; none for what belongs to the whole cluster."""
    return str(body["metadata"].get("namespace") or "default") if PATHS[body["kind"]][1] else ""


def applied(api: KubernetesApi, body: Manifest, *, dry_run: bool = False) -> Fields:
    """The object as it becomes."""
    query = _WHO | ({"dryRun": "All"} if dry_run else {})
    return api.call("PATCH", path_of(body), body, query=query, kind=APPLY, timeout=CALL_S)


def read_object(api: KubernetesApi, body: Manifest) -> Fields | None:
    """The object as it is; None where there is none, or where nobody knows its kind yet."""
    return _read(api, path_of(body))


def _read(api: KubernetesApi, path: str) -> Fields | None:
    try:
        return api.call("GET", path, timeout=CALL_S)
    except NotFound:
        return None


def _state(api: KubernetesApi, release: Release) -> str | None:
    """Why the release is not to be installed; None where it is."""
    place = _read(api, f"/api/v1/namespaces/{release.namespace}") or {}
    marks = (place.get("metadata") or {}).get("annotations") or {}
    served = _served(api, release.group)
    if served is None:
        return None
    if marks.get(INSTALLED):
        return f"is installed: {marks[INSTALLED]}, by Podway"
    return None if marks.get(RELEASE) else f"is installed ({served}), not by Podway: left as it is"


def _served(api: KubernetesApi, group: str) -> str | None:
    """The version of the group that the cluster prefers; None where it is not installed."""
    try:
        found = api.call("GET", f"/apis/{group}", timeout=CALL_S)
    except (NotFound, NoJobSet):
        return None
    return str((found.get("preferredVersion") or {}).get("version"))


def _release_part(api: KubernetesApi, file: ReleaseFile) -> Part:
    release = file.release
    version = release.version if file.sha256 == release.sha256 else f"sha256 {file.sha256[:16]}"
    objects = [_annotated(one, {RELEASE: version}) if _is_place(one, release) else one for one in file.objects]
    places = [one for one in objects if _is_place(one, release)]
    if not places:
        raise UserError(f"{file.source}: it has no Namespace {release.namespace}", "name the release's manifests.yaml")
    changes = _compare(api, objects)
    done = _annotated(places[0], {INSTALLED: version})
    return Part(title=file.title, changes=(*changes, Change(action="change", body=done)), release=release)


def _is_place(one: Manifest, release: Release) -> bool:
    return bool(one["kind"] == "Namespace" and one["metadata"]["name"] == release.namespace)


def _annotated(one: Manifest, more: dict[str, str]) -> Manifest:
    metadata = one["metadata"]
    return {**one, "metadata": {**metadata, "annotations": {**(metadata.get("annotations") or {}), **more}}}


def _look(
    api: KubernetesApi,
    settings: GkeSettings,
    namespace: str,
    asked: dict[wanted.Kind, int],
    notes: list[str],
    *,
    kueue: bool,
) -> wanted.ClusterFacts:
    """The nodes and queues that there are."""
    seen = wanted.ClusterFacts(namespace=namespace, settings=settings, kueue_version=None, chips={})
    if not kueue:
        return seen
    served = _served(api, "kueue.x-k8s.io")
    version = served or next(one.api_version for one in RELEASES if one.name == "Kueue")
    chips = wanted.chips_of(api.read_items("/api/v1/nodes", {"labelSelector": wanted.ACCELERATOR_LABEL})) | asked
    queues: list[Fields] = api.read_items(f"/apis/kueue.x-k8s.io/{version}/clusterqueues", {}) if served else []
    others = [one["metadata"]["name"] for one in queues if not wanted.is_ours(one) and _quotas(one)]
    quotas: dict[str, int] = {}
    if others:
        notes.append(f"ClusterQueue {', '.join(others)} has quota for TPUs, not by Podway: no other queue is made")
        chips = {}
    else:
        quotas = {name: count for one in queues if wanted.is_ours(one) for name, count in _quotas(one).items()}
        quotas = {name: count for name, count in quotas.items() if name not in map(wanted.flavor_name, asked)}
        if not chips and not quotas:
            notes.append("no TPU node is there now, so no queue is made; name types and chips: --quota v6e-16=64")
    return msgspec.structs.replace(seen, kueue_version=version, chips=chips, quotas=quotas)


def _quotas(queue: Fields) -> dict[str, int]:
    """Flavor -> chips."""
    found = {}
    for group in (queue.get("spec") or {}).get("resourceGroups") or ():
        for flavor in group.get("flavors") or ():
            for one in flavor.get("resources") or ():
                if one["name"] == TPU:
                    found[flavor["name"]] = _number(one.get("nominalQuota"))
    return found


def _number(quantity: Any) -> int:
    try:
        return int(quantity)
    except (TypeError, ValueError):
        return 0  # `1k` and the like: Podway writes plain numbers


def _own_part(api: KubernetesApi, seen: wanted.ClusterFacts, notes: list[str]) -> Part:
    objects = wanted.objects(seen)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(lambda body: read_object(api, body), objects))
    foreign = [body for body, live in zip(objects, found, strict=True) if live is not None and not wanted.is_ours(live)]
    named = [f"{body['kind']} {body['metadata']['name']}" for body in foreign if body["kind"] != "Namespace"]
    if named:
        notes.append(f"not made by Podway, and left as they are: {', '.join(named)}")
    return Part(title="Podway's own", changes=_compare(api, [one for one in objects if one not in foreign]))


def _compare(api: KubernetesApi, objects: Sequence[Manifest]) -> tuple[Change, ...]:
    for body in objects:
        path_of(body)  # every kind is known
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return tuple(filter(None, pool.map(lambda body: _change(api, body), objects)))


def _change(api: KubernetesApi, body: Manifest) -> Change | None:
    live = read_object(api, body)
    if live is None:
        return Change(action="create", body=body)
    old, new = _text(live), _text(applied(api, body, dry_run=True))
    if old == new:
        return None
    shown = difflib.unified_diff(old.splitlines(), new.splitlines(), n=1, lineterm="")
    lines = [line for line in shown if not line.startswith(("---", "+++", "@@"))]
    return Change(action="change", body=body, diff=() if body["kind"] == "Secret" else tuple(lines))


def _text(found: Fields) -> str:
    metadata = {key: value for key, value in (found.get("metadata") or {}).items() if key not in _VARYING}
    kept = {key: value for key, value in found.items() if key not in ("status", "metadata")}
    return yaml.safe_dump({**kept, "metadata": metadata}, sort_keys=True, width=1000)
