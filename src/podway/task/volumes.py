"""Volumes: disks by name that outlive the clusters they are attached to, and the files that describe them.

A task names volumes (`Task.volumes`). A name may hold `${{ dstack.node_rank }}`: then each node has one of its own. A file of
`type: volume` describes one to create, or an existing disk to register; `podway apply` does it.
"""

import re

from podway.task import places
from podway.task.fields import Field
from podway.task.problems import Problems
from podway.task.shapes import Anything, Flag, Key, ListOf, MapOf, Table, Text, check
from podway.task.task import Placement, TaskPart
from podway.task.values import dstack_name, gigabytes
from podway.task.yamlfile import Mapping, Node, parse

CLAIM = "k8s-pvc"  # `type` of SkyPilot's files
NODE_RANK = re.compile(r"\$\{\{\s*dstack\.(?:node_rank|job_num)\s*\}\}")


class VolumeSpec(TaskPart, frozen=True):
    """A volume to create, or (with `disk_id`) an existing disk to register."""

    name: str
    placement: Placement
    size_gb: int | None = None
    disk_id: str | None = None
    disk_type: str | None = None  # in the provider's words: a storage class of Kubernetes; None: the usual one there
    access_mode: str | None = None  # of a claim in Kubernetes: ReadWriteOnce (None), ReadWriteMany, ...
    notes: tuple[str, ...] = ()  # fields understood but without effect here


def is_per_node(name: str) -> bool:
    """Whether each node has a volume of its own."""
    return NODE_RANK.search(name) is not None


def for_node(text: str, node: int | str) -> str:
    """A name or path with the number of a node in it."""
    return NODE_RANK.sub(str(node), text)


def _about(shape: Text | Flag | MapOf | ListOf | Anything, about: str, note: str | None = None) -> Key:
    return Key(shape=shape, about=about, note=note)


VOLUME = Table(
    keys={
        "type": _about(Text(), "volume."),
        "name": _about(Text(), "Its name, by which tasks name it."),
        "backend": _about(Text(), "Where it is: gcp, kubernetes, ssh or local."),
        "region": _about(Text(), "Its region; of ssh, the pool; of kubernetes, the context."),
        "availability_zone": _about(Text(), "Its zone."),
        "size": _about(Text(), "Its size: 100GB."),
        "volume_id": _about(Text(), "An existing disk to register instead of a new one."),
        "claim_name": _about(Text(), "Of kubernetes: an existing claim to register instead of a new one."),
        "storage_class_name": _about(Text(), "Of kubernetes: its storage class."),
        "access_modes": _about(ListOf(item=Text()), "Of kubernetes: ReadWriteOnce, ReadWriteMany or ReadOnlyMany."),
        "auto_cleanup_duration": _about(
            Anything(), "Delete it when it was unused this long.", note="a volume stays until podway volume delete"
        ),
        "tags": _about(MapOf(value=Text()), "Tags put on it.", note="a volume carries Podway's own labels"),
    },
    required=("type",),
)


SKYPILOT_VOLUME = Table(
    keys={
        "type": _about(Text(), "k8s-pvc."),
        "name": _about(Text(), "Its name, by which tasks name it."),
        "infra": _about(Text(), "Where it is: k8s, or k8s/CONTEXT."),
        "size": _about(Text(), "Its size: 100Gi."),
        "use_existing": _about(Flag(), "Register the claim of that name instead of a new one."),
        "labels": _about(MapOf(value=Text()), "Labels put on it.", note="a volume carries Podway's own labels"),
        "config": Key(
            shape=Table(
                keys={
                    "namespace": _about(Text(), "Its namespace.", note="the namespace of gke.yaml is used"),
                    "storage_class_name": _about(Text(), "Its storage class."),
                    "access_mode": _about(Text(), "ReadWriteOnce, ReadWriteMany or ReadOnlyMany."),
                }
            ),
            about="What Kubernetes is told of it.",
        ),
    },
    required=("type",),
)


def is_volume(document: Node) -> bool:
    """Whether a document of a file describes a volume."""
    kind = Field("", document).get("type") if isinstance(document, Mapping) else None
    return kind is not None and not (kind.is_mapping or kind.is_list) and kind.text() in ("volume", CLAIM)


def read_volume_text(
    text: str | bytes, *, name: str = "<stdin>", called: str | None = None, placement: Placement | None = None
) -> VolumeSpec | None:
    """The volume that a text describes; None where it describes something else. `called`, `placement`: in place of its own."""
    documents = parse(text, name)
    if len(documents) != 1 or not is_volume(documents[0]):
        return None
    root, notes = Field(name, documents[0]), list[str]()
    kind = root.get("type")
    of_skypilot = kind is not None and kind.text() == CLAIM
    problems = Problems()
    check(root, SKYPILOT_VOLUME if of_skypilot else VOLUME, notes, problems)
    problems.raise_any()
    if of_skypilot:
        return _claim(root, notes, called, placement)
    own, backend, region, zone = (root.get(key) for key in ("name", "backend", "region", "availability_zone"))
    size, disk, kind = root.get("size"), root.get("claim_name") or root.get("volume_id"), root.get("storage_class_name")
    if called is None and own is None:
        raise root.error("the volume has no name", "add `name:`, or give it with --name")
    if placement is None:
        word = backend.text() if backend else "gcp"
        where = places.provider(backend or root, "ssh" if word == "remote" else word)
        placement = Placement(provider=where, region=region.words() if region else None)
        if zone or where == "gcp":
            placement = places.place(zone or region or root, where, placement.region, zone.words() if zone else None)
    if size is None and disk is None and placement.provider in ("gcp", "gke"):
        raise root.error("neither a size nor a volume_id", "give the size of a new disk, or name an existing one")
    for field in (root.get(key) for key in ("claim_name", "storage_class_name", "access_modes")):
        if field is not None and placement.provider != "gke":
            raise field.error(
                f"only volumes of kubernetes have it, and this one is of {placement.provider}", "remove it"
            )
    return VolumeSpec(
        name=called or (dstack_name(own) if own else ""),
        placement=placement,
        size_gb=gigabytes(size) if size else None,
        disk_id=disk.words() if disk else None,
        disk_type=kind.words() if kind else None,
        access_mode=_access_mode(root),
        notes=tuple(notes),
    )


def _access_mode(root: Field) -> str | None:
    """The widest of dstack's list: a claim is made with one."""
    modes = root.get("access_modes")
    named = [item.words() for item in modes.items()] if modes else []
    return "ReadWriteMany" if "ReadWriteMany" in named else next(iter(named), None)


def _claim(root: Field, notes: list[str], called: str | None, placement: Placement | None) -> VolumeSpec:
    """Of SkyPilot's file."""
    own, infra, size, config = (root.get(key) for key in ("name", "infra", "size", "config"))
    existing = root.get("use_existing")
    register = existing is not None and existing.flag()
    if own is None:
        raise root.error("the volume has no name", "add `name:`")
    if placement is None:
        placement = places.from_infra(infra) if infra else Placement(provider="gke")
    if placement.provider != "gke":
        raise (infra or root).error(f"a {CLAIM} volume is on k8s", "write infra: k8s, or k8s/CONTEXT")
    if size is None and not register:
        raise root.error("the volume has no size", "add `size:`, or `use_existing: true`")
    kind = config.get("storage_class_name") if config else None
    mode = config.get("access_mode") if config else None
    return VolumeSpec(
        name=called or own.words(),
        placement=placement,
        size_gb=gigabytes(size) if size else None,
        disk_id=own.words() if register else None,
        disk_type=kind.words() if kind else None,
        access_mode=mode.words() if mode else None,
        notes=tuple(notes),
    )
