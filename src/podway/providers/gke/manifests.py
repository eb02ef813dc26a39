"""The objects that are sent to Kubernetes, as plain mappings. Pure; golden-tested.

A slice is one Job of Indexed completion with a pod for each host; `replicas` of it in one JobSet are the slices. What holds for every
JobSet is here: which nodes, how many chips, exclusive placement (a slice never shares a node pool's ring of chips with another),
restarts, and who may evict whom. What the container runs is given by the caller: an agent that stays (`render.py`), or a task that
ends (`one_shot.py`).

Defaults that JobSet's webhook would fill in are written out, so that the same value is sent whether or not it is there.
"""

import hashlib
import re
from typing import Any

import msgspec

from podway.catalog.slices import Slice, find_slice
from podway.errors import UserError
from podway.order import Order
from podway.providers.gke.settings import GkeSettings
from podway.task.task import container_image

Manifest = dict[str, Any]

API_VERSION = "jobset.x-k8s.io/v1alpha2"
MANAGED_BY, PODWAY = "app.kubernetes.io/managed-by", "podway"
CLUSTER, OWNER, NAME = "podway.dev/cluster", "podway.dev/owner", "podway.dev/name"
ACCELERATOR, ONE_SHOT = "podway.dev/accelerator", "podway.dev/one-shot"
QUEUE = "kueue.x-k8s.io/queue-name"
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
JOB_INDEX = "jobset.sigs.k8s.io/job-index"
RESTART_ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
POD_INDEX = "batch.kubernetes.io/job-completion-index"
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
NODE_POOL = "cloud.google.com/gke-nodepool"
TPU = "google.com/tpu"
CONTAINER, SLICE = "main", "slice"
START_S = 600  # for the first process to be ready, once the image is there
GRACE_S = 30  # Kubernetes' own default between SIGTERM and SIGKILL

# A pod is called JOBSET-slice-JOB-POD-xxxxx and its host name must have 63 characters at most (RFC 1123): this is left for JOBSET
# with three digits of slices and four of hosts.
LONGEST_NAME = 42


class JobSetContext(msgspec.Struct, frozen=True, kw_only=True):
    """Everything besides the order that a request depends on."""

    owner: str
    context: str
    namespace: str
    settings: GkeSettings = GkeSettings()


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """What the pods of a JobSet run."""

    image: str
    command: tuple[str, ...]
    started: tuple[str, ...] = ()  # a command that succeeds once it has started: the pod is not ready before
    env: tuple[Manifest, ...] = ()
    env_from: tuple[Manifest, ...] = ()
    mounts: tuple[Manifest, ...] = ()
    volumes: tuple[Manifest, ...] = ()
    annotations: dict[str, str] = {}
    grace_s: int = GRACE_S


class Restarts(msgspec.Struct, frozen=True, kw_only=True):
    """How often a JobSet that failed begins again, and after which exit codes; none: after any."""

    most: int = 0
    exit_codes: tuple[int, ...] = ()


def object_name(owner: str, cluster: str) -> str:
    """The name of the cluster's objects: readable, legal, short enough for its pods, and one for owner and cluster."""
    slug = re.sub(r"[^a-z0-9]+", "-", cluster.lower()).strip("-")
    slug = slug if slug[:1].isalpha() else f"c-{slug}"
    return f"{slug[: LONGEST_NAME - 9].strip('-')}-{hashlib.sha256(f'{owner}/{cluster}'.encode()).hexdigest()[:8]}"


def pull_secret_name(ident: str) -> str:
    """Of the Secret with the task's own login to the registry of its image, by the name of the cluster's objects."""
    return f"{ident}-pull"


def labels_of(context: JobSetContext, cluster: str) -> dict[str, str]:
    """What marks an object as ours. The cluster's own name may not be a legal label: that is in an annotation."""
    return {
        MANAGED_BY: PODWAY,
        OWNER: context.owner,
        CLUSTER: object_name(context.owner, cluster),
    }


def metadata(context: JobSetContext, cluster: str, **more: Any) -> Manifest:
    """Name, namespace, labels and annotations of an object of the cluster."""
    return {
        "name": object_name(context.owner, cluster),
        "namespace": context.namespace,
        "labels": labels_of(context, cluster) | more.get("labels", {}),
        "annotations": {NAME: cluster} | more.get("annotations", {}),
    }


def image_of(context: JobSetContext, order: Order) -> str:
    """The pods' image: the task's, or the settings'."""
    return container_image(order.image) or context.settings.image


def slice_of(order: Order) -> Slice | None:
    """The slice of an order; refused where GKE has none such."""
    if order.accelerator_type is None:
        return None
    tpu = find_slice(order.accelerator_type, order.topology)
    if tpu.gke_accelerator is None:
        raise UserError(
            f"Kubernetes has no node label for {tpu.accelerator_type}: GKE offers v3 to v6e and tpu7x slices",
            "choose a slice that GKE has, see: podway tpus; or another --infra",
        )
    return tpu


def jobset(context: JobSetContext, cluster: str, order: Order, container: Container, restarts: Restarts) -> Manifest:
    """The JobSet of a cluster or a run: `order.slices` Jobs of `order.hosts_per_slice` pods each."""
    tpu, settings = slice_of(order), context.settings
    labels = {key: _label(key, value) for key, value in order.labels.items()}
    if settings.queue:
        labels = {QUEUE: settings.queue} | labels
    annotations = {EXCLUSIVE: NODE_POOL} if tpu is not None else {}
    shown = {ACCELERATOR: order.accelerator_type} if order.accelerator_type else {}
    return {
        "apiVersion": API_VERSION,
        "kind": "JobSet",
        "metadata": metadata(context, cluster, labels=labels, annotations=annotations | shown),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All"},
            "failurePolicy": _failure_policy(restarts),
            "replicatedJobs": [
                {
                    "name": SLICE,
                    "replicas": order.slices,
                    "template": {"spec": _job(context, cluster, order, container, restarts)},
                }
            ],
        },
    }


def _failure_policy(restarts: Restarts) -> Manifest:
    """A pod that ended with a code that is not to be tried again (its Job's PodFailurePolicy) ends the JobSet."""
    policy: Manifest = {"maxRestarts": restarts.most, "restartStrategy": "Recreate"}
    if restarts.exit_codes:
        rule = {"name": "noRetry", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
        policy["rules"] = [rule]
    return policy


def _job(context: JobSetContext, cluster: str, order: Order, container: Container, restarts: Restarts) -> Manifest:
    spec: Manifest = {
        "completionMode": "Indexed",
        "parallelism": order.hosts_per_slice,
        "completions": order.hosts_per_slice,
        "backoffLimit": 0,  # one host lost is the slice lost: its chips are one machine
    }
    if restarts.exit_codes:
        on_codes = {"containerName": CONTAINER, "operator": "NotIn", "values": sorted(set(restarts.exit_codes))}
        spec["podFailurePolicy"] = {"rules": [{"action": "FailJob", "onExitCodes": on_codes}]}
    spec["template"] = {
        "metadata": {
            "labels": labels_of(context, cluster),
            "annotations": {NAME: cluster} | container.annotations,
        },
        "spec": _pod(context, cluster, order, container),
    }
    return spec


def _pod(context: JobSetContext, cluster: str, order: Order, container: Container) -> Manifest:
    tpu, settings = slice_of(order), context.settings
    pod: Manifest = {"restartPolicy": "Never", "terminationGracePeriodSeconds": container.grace_s}
    if selector := node_selector(order, tpu):
        pod["nodeSelector"] = selector
    if tolerations := _tolerations(order, tpu):
        pod["tolerations"] = tolerations
    if priority := order.priority_class or settings.priority_class:
        pod["priorityClassName"] = priority
    if account := order.service_account or settings.service_account:
        pod["serviceAccountName"] = account
    own = pull_secret_name(object_name(context.owner, cluster)) if order.pull_login else None
    if secrets := [{"name": name} for name in (own, settings.pull_secret) if name]:
        pod["imagePullSecrets"] = secrets
    if settings.host_network and tpu is not None:
        # Chips reach other slices through the node's own network cards; a pod network in between costs bandwidth.
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    runs: Manifest = {"name": CONTAINER, "image": container.image, "command": list(container.command)}
    if container.started:
        often = {"periodSeconds": 1, "failureThreshold": START_S}
        runs["startupProbe"] = {"exec": {"command": list(container.started)}, **often}
        runs["terminationMessagePolicy"] = "FallbackToLogsOnError"  # so that a pod whose agent did not start tells why
    if container.env:
        runs["env"] = list(container.env)
    if container.env_from:
        runs["envFrom"] = list(container.env_from)
    if tpu is not None:
        chips = str(order.chips_per_host)
        runs["securityContext"] = {"privileged": True}
        runs["resources"] = {"requests": {TPU: chips}, "limits": {TPU: chips}}
    shared_memory = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
    runs["volumeMounts"] = [*container.mounts, {"name": "shared-memory", "mountPath": "/dev/shm"}]
    return pod | {"containers": [runs], "volumes": [*container.volumes, shared_memory]}


def node_selector(order: Order, tpu: Slice | None) -> dict[str, str]:
    """The labels of the nodes that may run it (Google, "Deploy TPU workloads in GKE")."""
    selector = {}
    if tpu is not None:
        selector["cloud.google.com/gke-tpu-accelerator"] = tpu.gke_accelerator or ""
        selector["cloud.google.com/gke-tpu-topology"] = tpu.topology_text
    if order.spot:
        selector["cloud.google.com/gke-spot"] = "true"
    if order.reservation:
        selector["cloud.google.com/reservation-name"] = order.reservation.rpartition("/")[2]
    if order.queued and not order.reservation:
        selector["cloud.google.com/gke-queued"] = "true"
    if order.instance_type:
        selector["node.kubernetes.io/instance-type"] = order.instance_type
    return selector


def _tolerations(order: Order, tpu: Slice | None) -> list[Manifest]:
    found: list[Manifest] = [{"key": TPU, "operator": "Exists"}] if tpu is not None else []
    if order.spot:
        found.append({"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"})
    if order.queued and not order.reservation:
        found.append(
            {"key": "cloud.google.com/gke-queued", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        )
    return found


_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_LABEL_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")


def _label(key: str, value: str) -> str:
    if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
        raise UserError(
            f"labels: {key}: {value!r} cannot be a label in Kubernetes",
            "use letters, digits, '-', '_' and '.', at most 63 characters",
        )
    return value
