"""Podway's own objects in a cluster, for the TPU nodes that are there. Pure; golden-tested.

A flavor of Kueue's for each kind of slice, one ClusterQueue whose quota is the chips of the nodes, a LocalQueue in the namespace, the
priority classes that XPK's users know, and an account with the least rights. A quota is never made smaller: nodes that went may come
again. What somebody else made under the same name stays as it is.
"""

from collections.abc import Iterable, Mapping

import msgspec

from podway.catalog.slices import find_slice
from podway.errors import UserError
from podway.providers.gke.api import Fields
from podway.providers.gke.manifests import MANAGED_BY, PODWAY, TPU, Manifest
from podway.providers.gke.rights import LEAST, OF_KUEUE, OF_OFFERS
from podway.providers.gke.settings import GkeSettings

ACCELERATOR_LABEL, TOPOLOGY_LABEL = "cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology"
CLUSTER_QUEUE = "podway"
OFFERS = "podway-offers"
RBAC = "rbac.authorization.k8s.io"
# XPK's names and values, so that its users find theirs.
PRIORITIES = {"very-low": 100, "low": 250, "medium": 500, "high": 750, "very-high": 1000}

Kind = tuple[str, str]  # the labels of a node: accelerator, topology


class ClusterFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the objects depend on."""

    namespace: str
    settings: GkeSettings
    kueue_version: str | None  # None: Kueue is not to be used
    chips: dict[Kind, int]  # of the nodes that are there, and of what was asked for
    quotas: dict[str, int] = {}  # flavor -> chips that the ClusterQueue has now


def is_ours(found: Mapping[str, object]) -> bool:
    """Whether Podway made it."""
    metadata = found.get("metadata")
    labels = metadata.get("labels") if isinstance(metadata, dict) else None
    return isinstance(labels, dict) and labels.get(MANAGED_BY) == PODWAY


def chips_of(nodes: Iterable[Fields]) -> dict[Kind, int]:
    """How many chips there are of each kind of slice."""
    found: dict[Kind, int] = {}
    for node in nodes:
        labels, status = node["metadata"].get("labels") or {}, node.get("status") or {}
        kind = (str(labels.get(ACCELERATOR_LABEL, "")), str(labels.get(TOPOLOGY_LABEL, "")))
        if all(kind):
            count = (status.get("allocatable") or status.get("capacity") or {}).get(TPU, 0)
            found[kind] = found.get(kind, 0) + int(count)
    return found


def asked_chips(words: Iterable[str]) -> dict[Kind, int]:
    """`v6e-16=64`: the quota of a type of which there may be no node now."""
    found: dict[Kind, int] = {}
    for word in words:
        name, equal, count = word.partition("=")
        if not equal or not (count.isascii() and count.isdecimal()) or len(count) > 9:
            raise UserError(f"--quota {word}: not a type and a number of chips", "write it as --quota v6e-16=64")
        tpu = find_slice(name)
        if tpu.gke_accelerator is None:
            raise UserError(f"--quota {word}: GKE has no {tpu.accelerator_type} nodes", "see: podway tpus")
        found[tpu.gke_accelerator, tpu.topology_text] = int(count)
    return found


def flavor_name(kind: Kind) -> str:
    """`tpu-v6e-slice-4x4`."""
    return "-".join(kind)


def objects(seen: ClusterFacts) -> list[Manifest]:
    """In the order they are to be applied."""
    return [*_place(seen), *_queues(seen), *_priorities(), *_accounts(seen)]


def _place(seen: ClusterFacts) -> list[Manifest]:
    if seen.namespace == "default":
        return []
    return [_object("v1", "Namespace", seen.namespace)]


def _queues(seen: ClusterFacts) -> list[Manifest]:
    version = seen.kueue_version
    quotas = dict(seen.quotas)
    for kind, chips in seen.chips.items():
        quotas[flavor_name(kind)] = max(chips, quotas.get(flavor_name(kind), 0))
    if version is None or not quotas:
        return []
    api = f"kueue.x-k8s.io/{version}"
    flavors = [
        _object(api, "ResourceFlavor", flavor_name(kind))
        | {"spec": {"nodeLabels": {ACCELERATOR_LABEL: kind[0], TOPOLOGY_LABEL: kind[1]}}}
        for kind in sorted(seen.chips)
    ]
    listed = [
        {"name": name, "resources": [{"name": TPU, "nominalQuota": str(chips)}]}
        for name, chips in sorted(quotas.items())
    ]
    spec = {
        "namespaceSelector": {},  # of every namespace: who may submit is decided by who has a LocalQueue
        "preemption": {"withinClusterQueue": "LowerPriority"},
        "resourceGroups": [{"coveredResources": [TPU], "flavors": listed}],
    }
    queue = _object(api, "ClusterQueue", CLUSTER_QUEUE) | {"spec": spec}
    name = seen.settings.queue or CLUSTER_QUEUE
    local = _object(api, "LocalQueue", name, seen.namespace) | {"spec": {"clusterQueue": CLUSTER_QUEUE}}
    return [*flavors, queue, local]


def _priorities() -> list[Manifest]:
    return [
        _object("scheduling.k8s.io/v1", "PriorityClass", name) | {"value": value, "globalDefault": False}
        for name, value in PRIORITIES.items()
    ]


def _accounts(seen: ClusterFacts) -> list[Manifest]:
    """Podway's own, with the least rights; and the pods' that gke.yaml names, which has none."""
    namespace, account = seen.namespace, PODWAY
    subjects = [{"kind": "ServiceAccount", "name": account, "namespace": namespace}]
    rights = (*LEAST, *(OF_KUEUE if seen.kueue_version else ()))
    offers = [one for one in OF_OFFERS if seen.kueue_version or one[0] != "kueue.x-k8s.io"]
    bound = f"{OFFERS}-{namespace}"
    found = [
        _object("v1", "ServiceAccount", account, namespace),
        _object(f"{RBAC}/v1", "Role", account, namespace) | {"rules": _rules(rights)},
        _object(f"{RBAC}/v1", "RoleBinding", account, namespace)
        | {"roleRef": {"apiGroup": RBAC, "kind": "Role", "name": account}, "subjects": subjects},
        _object(f"{RBAC}/v1", "ClusterRole", OFFERS) | {"rules": _rules(offers)},
        _object(f"{RBAC}/v1", "ClusterRoleBinding", bound)
        | {"roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": OFFERS}, "subjects": subjects},
    ]
    pods = seen.settings.service_account
    return [*found, *([_object("v1", "ServiceAccount", pods, namespace)] if pods and pods != account else [])]


def _rules(rights: Iterable[tuple[str, str, tuple[str, ...]]]) -> list[Manifest]:
    return [{"apiGroups": [group], "resources": [resource], "verbs": list(verbs)} for group, resource, verbs in rights]


def _object(version: str, kind: str, name: str, namespace: str | None = None) -> Manifest:
    place = {"namespace": namespace} if namespace else {}
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, **place, "labels": {MANAGED_BY: PODWAY}}}
