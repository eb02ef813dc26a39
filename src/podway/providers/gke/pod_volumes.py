"""What the pods of an order see besides their own disk: buckets by the gcsfuse CSI driver, and volumes. Pure; golden-tested.

A pod's volumes are fixed when it is made, so they come from the order. The driver's sidecar is asked for by an annotation, and reads
the bucket as the pod's service account (workload identity). A pod on its node's network has to ask for that identity by name: without,
the sidecar has the node's. A volume is a claim (claims.py), in one directory for each name: a job links what it asks for from there.
"""

import shlex

import msgspec

from podway.errors import UserError
from podway.order import Order, OrderBucket, OrderVolume
from podway.providers.gke.manifests import JobSetContext, Manifest

VOLUMES_AT = "/podway/volumes"
DRIVER = "gcsfuse.csi.storage.gke.io"
_SIDECAR = {"gke-gcsfuse/volumes": "true"}


class PodVolumes(msgspec.Struct, frozen=True, kw_only=True):
    """Volumes of a pod, where its container sees them, and the annotations that they need."""

    mounts: tuple[Manifest, ...] = ()
    volumes: tuple[Manifest, ...] = ()
    annotations: dict[str, str] = {}


def pod_volumes(context: JobSetContext, order: Order, home: str) -> PodVolumes:
    """Those of an order; `home` is the container's."""
    account = order.service_account or context.settings.service_account
    on_node = context.settings.host_network and order.accelerator_type is not None
    mounts, volumes = [], []
    for number, bucket in enumerate(order.buckets):
        name = f"bucket-{number}"
        volumes.append({"name": name, "csi": _csi(bucket, own_identity=bool(account and on_node))})
        mounts.append({"name": name, "mountPath": _path(bucket.target, home), "readOnly": bucket.read_only})
    for number, volume in enumerate(order.volumes):
        _check_nodes(volume, order)
        name = f"volume-{number}"
        volumes.append(
            {"name": name, "persistentVolumeClaim": {"claimName": volume.disk, "readOnly": volume.read_only}}
        )
        mounts.append({"name": name, "mountPath": f"{VOLUMES_AT}/{volume.name}", "readOnly": volume.read_only})
    annotations = _SIDECAR if order.buckets else {}
    return PodVolumes(mounts=tuple(mounts), volumes=tuple(volumes), annotations=annotations)


def _check_nodes(volume: OrderVolume, order: Order) -> None:
    """All pods of a JobSet are made alike, so each has every volume of the order."""
    if volume.shared or order.hosts == 1:
        return
    raise UserError(
        f"volume {volume.name} is of one node at a time, and {order.hosts} hosts would have it",
        "make it with --access-mode ReadWriteMany and a storage class that has that, or use a bucket in file_mounts; or "
        "launch on a slice of one host",
    )


def uses_driver(jobset: Manifest) -> bool:
    """Whether its pods need the gcsfuse driver."""
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return any((one.get("csi") or {}).get("driver") == DRIVER for one in pod["volumes"])


def _csi(bucket: OrderBucket, *, own_identity: bool) -> Manifest:
    name, _, prefix = bucket.uri.removeprefix("gs://").partition("/")
    inside = prefix.strip("/")
    # Directories that no object stands for are shown, as people expect of a path such as data/train/0.txt.
    options = ["implicit-dirs", *([f"only-dir={inside}"] if inside else []), *_options(bucket)]
    attributes = {"bucketName": name, "mountOptions": ",".join(options)}
    if own_identity:
        attributes["hostNetworkPodKSA"] = "true"
    return {"driver": DRIVER, "readOnly": bucket.read_only, "volumeAttributes": attributes}


def _options(bucket: OrderBucket) -> list[str]:
    """Arguments of gcsfuse as the driver takes them: `--uid 1000 -o ro` is uid=1000,ro."""
    where = f"mount_options of {bucket.target}"
    try:
        words = shlex.split(bucket.arguments)
    except ValueError as error:
        raise UserError(f"{where}: {bucket.arguments!r} cannot be taken apart: {error}", "close its quotes") from None
    found: list[str] = []
    before = ""
    for word in words:
        if word.startswith("--") and word != "--":
            found.append(word[2:])
        elif before.startswith("--") and "=" not in before:  # the value of the flag before it
            found[-1] += f"={word}"
        elif word != "-o":
            found += word.lstrip("-").split(",")
        before = word
    if any("," in option.partition("=")[2] for option in found):
        raise UserError(f"{where}: a comma cannot be part of a value here", "give the options one by one")
    return found


def _path(target: str, home: str) -> str:
    if target.startswith("/"):
        return target
    return f"{home}/{target[2:]}" if target.startswith("~/") else f"{home}/sky_workdir/{target}"
