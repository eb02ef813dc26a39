"""The least rights that Podway needs in a namespace (docs/kubernetes.md has them as a Role), and which of them the caller lacks."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from podway.providers.gke.api import KubernetesApi

# group, resource, verbs
LEAST = (
    ("jobset.x-k8s.io", "jobsets", ("get", "list", "create", "patch", "delete")),
    ("", "configmaps", ("get", "list", "create", "patch", "delete")),
    ("", "secrets", ("get", "list", "create", "patch", "delete")),
    ("", "persistentvolumeclaims", ("get", "create", "delete")),
    ("", "pods", ("get", "list")),
    ("", "pods/log", ("get",)),
    ("", "pods/exec", ("create", "get")),
    ("", "events", ("list",)),
)
OF_KUEUE = (
    ("kueue.x-k8s.io", "workloads", ("get", "list", "patch")),
    ("kueue.x-k8s.io", "localqueues", ("get", "list")),
)
# Of the whole cluster: what an offer says of nodes and quota before a launch.
OF_OFFERS = (
    ("", "nodes", ("get", "list")),
    ("kueue.x-k8s.io", "clusterqueues", ("get", "list")),
    ("kueue.x-k8s.io", "resourceflavors", ("get", "list")),
)
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
AT_ONCE = 8


class AccessRight(NamedTuple):
    """One verb on one resource; without a namespace: of the whole cluster."""

    group: str
    resource: str
    verb: str
    namespace: str = ""


def missing_rights(api: KubernetesApi, namespace: str, *, kueue: bool, timeout: float) -> list[str]:
    """Those of the least rights that the cluster says the caller does not have, as `create jobsets`."""
    least = (*LEAST, *(OF_KUEUE if kueue else ()))
    wanted = [AccessRight(group, resource, verb, namespace) for group, resource, verbs in least for verb in verbs]
    return [f"{one.verb} {one.resource}" for one in denied(api, wanted, timeout=timeout)]


def denied(api: KubernetesApi, wanted: Sequence[AccessRight], *, timeout: float) -> list[AccessRight]:
    """Those that the cluster says the caller does not have."""

    def allowed(one: AccessRight) -> bool:
        name, _, part = one.resource.partition("/")
        attributes = {"namespace": one.namespace, "group": one.group, "resource": name, "verb": one.verb}
        body = {"spec": {"resourceAttributes": attributes | ({"subresource": part} if part else {})}}
        kind = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        return bool((api.call("POST", REVIEWS, kind | body, timeout=timeout).get("status") or {}).get("allowed"))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [one for one, ok in zip(wanted, pool.map(allowed, wanted), strict=True) if not ok]
