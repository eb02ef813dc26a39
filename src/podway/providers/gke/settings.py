"""Which Kubernetes clusters may be used, and what every pod there is given.

`PODWAY_HOME/gke.yaml`, all of it optional:

    contexts: [tpu-east, tpu-west]   # of KUBECONFIG; none: its current context
    namespace: team-a                # none: the context's own, else default
    queue: multislice-queue          # Kueue's LocalQueue; none: the scheduler alone decides
    priority_class: medium
    service_account: trainer         # of the pods: workload identity goes by it
    pull_secret: registry-login      # a Secret of the namespace, for private registries
    image: python:3.12               # of pods whose task names none; python3 >= 3.8 and bash must be in it
    host_network: true               # false: pods have addresses of their own
    owner: team-a                    # one name for several servers on one database; none: made by chance, kept in gke/owner
    node_pools:                      # launches make the node pools they lack, which cost money; none: they make none
      clusters: {tpu-east: projects/P/locations/L/clusters/C}   # of contexts whose names do not say it
      most: 8                        # at once in a cluster; none: as many as are launched
      zone: us-east5-b               # of the nodes, in a cluster of a region
      service_account: a@P.iam.gserviceaccount.com
      placement_policy: ring         # a workload policy, which tpu7x slices need
      flex_start: true               # where the task names neither spot nor a reservation

With the file, launches that name no provider ask these clusters too; without it they are asked by name: `--infra gke`.
"""

import re
from pathlib import Path

import msgspec

from podway.task.fields import Field, did_you_mean, read_mapping

FILE = "gke.yaml"
DEFAULT_IMAGE = "python:3.12"
# Kubernetes, "Object Names and IDs" (RFC 1123 label), and what a label's value may be.
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
GKE_CLUSTER = re.compile(r"projects/[^/]+/locations/[^/]+/clusters/[^/]+")
_NAMES = ("namespace", "queue", "priority_class", "service_account", "pull_secret", "owner")


class NodePoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Launches may make node pools, such as these."""

    clusters: dict[str, str] = {}  # context -> projects/P/locations/L/clusters/C
    most: int | None = None
    zone: str | None = None
    service_account: str | None = None
    placement_policy: str | None = None
    flex_start: bool = False


class GkeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The file, read."""

    contexts: tuple[str, ...] = ()
    namespace: str | None = None
    queue: str | None = None
    priority_class: str | None = None
    service_account: str | None = None
    pull_secret: str | None = None
    image: str = DEFAULT_IMAGE
    host_network: bool = True
    owner: str | None = None
    node_pools: NodePoolSettings | None = None  # None: launches make none


def is_configured(root: Path) -> bool:
    """Whether launches that name no provider may use Kubernetes: whoever writes the file says so."""
    return (root / FILE).exists()


def read_settings(root: Path) -> GkeSettings:
    """The settings of the Podway home `root`."""
    path = root / FILE
    try:
        return parse_settings(path.read_bytes(), str(path))
    except FileNotFoundError:
        return GkeSettings()


def parse_settings(data: bytes, path: str) -> GkeSettings:
    """The settings from the text of the file."""
    root = read_mapping(data, path, GkeSettings.__struct_fields__)
    if root is None:
        return GkeSettings()
    names = {key: _name(found) for key in _NAMES if (found := root.get(key)) is not None}
    contexts, image, network = root.get("contexts"), root.get("image"), root.get("host_network")
    return GkeSettings(
        contexts=tuple(item.words() for item in _items(contexts)),
        image=image.words() if image is not None else DEFAULT_IMAGE,
        host_network=network.flag() if network is not None else True,
        node_pools=_node_pools(root.get("node_pools")),
        **names,
    )


def _node_pools(field: Field | None) -> NodePoolSettings | None:
    """`true`, or a mapping of what the pools are given."""
    if field is None:
        return None
    if field.is_flag:
        return NodePoolSettings() if field.flag() else None
    known = NodePoolSettings.__struct_fields__
    for key, entry in field.entries().items():
        if key not in known:
            raise entry.error("unknown key", did_you_mean(key, known))
    words = {
        key: found.words()
        for key in ("zone", "service_account", "placement_policy")
        if (found := field.get(key)) is not None
    }
    clusters, most, flex_start = field.get("clusters"), field.get("most"), field.get("flex_start")
    return NodePoolSettings(
        clusters={key: _cluster(entry) for key, entry in clusters.entries().items()} if clusters is not None else {},
        most=_most(most) if most is not None else None,
        flex_start=flex_start.flag() if flex_start is not None else False,
        **words,
    )


def _cluster(field: Field) -> str:
    name = field.words()
    if not GKE_CLUSTER.fullmatch(name):
        raise field.error(
            f"{field.found} is not a GKE cluster", "write projects/PROJECT/locations/LOCATION/clusters/NAME"
        )
    return name


def _most(field: Field) -> int:
    count = field.integer()
    if count < 1:
        raise field.error("must be at least 1", "write a number of node pools; node_pools: false makes none")
    return count


def _items(field: Field | None) -> list[Field]:
    if field is None:
        return []
    return field.items() if field.is_list else [field]


def _name(field: Field) -> str:
    word = field.words()
    if not _LABEL.fullmatch(word):
        raise field.error(
            f"{field.found} cannot be a name in Kubernetes",
            "use lowercase letters, digits and '-', at most 63 characters",
        )
    return word
