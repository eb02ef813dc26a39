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

With the file, launches that name no provider ask these clusters too; without it they are asked by name: `--infra gke`.
"""

import re
from pathlib import Path

import msgspec

from podway.task.fields import Field, read_mapping

FILE = "gke.yaml"
DEFAULT_IMAGE = "python:3.12"
# Kubernetes, "Object Names and IDs" (RFC 1123 label), and what a label's value may be.
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_NAMES = ("namespace", "queue", "priority_class", "service_account", "pull_secret", "owner")


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
        **names,
    )


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
