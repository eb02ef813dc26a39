"""The least rights that Podway needs in a namespace (docs/kubernetes.md has them as a Role), and which of them the caller lacks."""

from concurrent.futures import ThreadPoolExecutor

from podway.providers.gke.api import KubernetesApi

# group, resource, verbs
LEAST = (
    ("jobset.x-k8s.io", "jobsets", ("get", "list", "create", "patch", "delete")),
    ("", "configmaps", ("get", "list", "create", "patch", "delete")),
    ("", "secrets", ("get", "list", "create", "patch", "delete")),
    ("", "pods", ("get", "list")),
    ("", "pods/log", ("get",)),
    ("", "pods/exec", ("create", "get")),
    ("", "events", ("list",)),
)
OF_KUEUE = (
    ("kueue.x-k8s.io", "workloads", ("get", "list", "patch")),
    ("kueue.x-k8s.io", "localqueues", ("get", "list")),
)
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
AT_ONCE = 8


def missing_rights(api: KubernetesApi, namespace: str, *, kueue: bool, timeout: float) -> list[str]:
    """Those that the cluster says the caller does not have, as `create jobsets`."""
    wanted = [
        (group, resource, verb) for group, resource, verbs in (*LEAST, *(OF_KUEUE if kueue else ())) for verb in verbs
    ]

    def allowed(one: tuple[str, str, str]) -> bool:
        group, resource, verb = one
        name, _, part = resource.partition("/")
        attributes = {"namespace": namespace, "group": group, "resource": name, "verb": verb}
        body = {"spec": {"resourceAttributes": attributes | ({"subresource": part} if part else {})}}
        kind = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        return bool((api.call("POST", REVIEWS, kind | body, timeout=timeout).get("status") or {}).get("allowed"))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [
            f"{verb} {resource}"
            for (_, resource, verb), ok in zip(wanted, pool.map(allowed, wanted), strict=True)
            if not ok
        ]
