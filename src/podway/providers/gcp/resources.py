"""The cloud's resources as plain facts: whichever API a resource came from, a `Resource` says what it is and whose.

A resource is ours when its description carries the mark that render.py gives it; anything else in the project is passed over.
"""

import datetime
import re
from collections.abc import Iterable
from typing import Literal

import msgspec
from google.cloud import tpu_v1, tpu_v2
from google.protobuf.timestamp_pb2 import Timestamp

from podway.providers import Step
from podway.providers.gcp.errors import failed_operation
from podway.providers.gcp.render import read_mark, read_volume_mark

Kind = Literal["queued resource", "node", "tpu node", "instance", "disk", "firewall rule"]
KINDS: tuple[Kind, ...] = ("queued resource", "node", "tpu node", "instance", "disk", "firewall rule")

_MADE_BY: dict[str, tuple[Kind, ...]] = {
    "create-queued-resource": ("queued resource", "node"),
    "create-queued-resource-v2alpha1": ("queued resource", "node"),
    "create-node": ("node",),
    "create-tpu-node": ("tpu node",),
    "create-instance": ("instance",),
    "create-disk": ("disk",),
    "mount-volume": (),
    "create-firewall": ("firewall rule",),
}


class Resource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One resource in the project that carries Podway's mark."""

    kind: Kind
    path: str  # projects/P/locations/Z/nodes/N
    zone: str | None
    state: str  # in the cloud's own word
    cluster: str = ""
    volume: str = ""  # of a disk that is no cluster's
    owner: str = ""
    parts: int = 1  # how many nodes and machines make its cluster whole
    why: str = ""
    health: str = ""
    accelerator_type: str | None = None
    created: float | None = None
    spot: bool = False
    number: str = ""  # its number in the cloud: another one for each that had the name
    addresses: tuple[tuple[str, str | None], ...] = ()  # of each worker: inside, outside
    queued: str = ""  # the queued resource it came from
    size_gb: int = 0
    disk_type: str | None = None

    @property
    def id(self) -> str:
        """The last word of its path."""
        return self.path.rpartition("/")[2]


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """What a look saw, and the zones that did not answer."""

    resources: tuple[Resource, ...] = ()
    unreachable: tuple[str, ...] = ()


def zone_of(path: str) -> str | None:
    """The zone in a resource's path."""
    found = re.search(r"/(?:locations|zones)/([^/]+)", path)
    return found[1] if found else None


class _AcceleratorConfig(msgspec.Struct, frozen=True):
    type: str = ""
    topology: str = ""


class _Scheduling(msgspec.Struct, frozen=True, rename="camel"):
    """How capacity is paid for, in a node's body, and in an instance of Compute Engine."""

    spot: bool = False
    preemptible: bool = False
    provisioning_model: str = ""


class _NodeBody(msgspec.Struct, frozen=True, rename="camel"):
    accelerator_type: str = ""
    accelerator_config: _AcceleratorConfig | None = None


class _NodeSpec(msgspec.Struct, frozen=True):
    node: _NodeBody


class _TpuBody(msgspec.Struct, frozen=True, rename="camel"):
    node_spec: tuple[_NodeSpec, ...] = ()


class _StepBody(_NodeBody, frozen=True, rename="camel"):
    """The part of a step's body that is read again."""

    tpu: _TpuBody = _TpuBody()
    scheduling_config: _Scheduling = _Scheduling()
    spot: dict[str, object] | None = None  # present and empty in a queued resource at the spot tariff
    size_gb: int = 0


def wanted_of(step: Step) -> str:
    """What a step asks for, in a sentence: the accelerator type, or the resource."""
    body = step.read(_StepBody)
    node = body.tpu.node_spec[0].node if body.tpu.node_spec else body
    config = node.accelerator_config
    shape = f"{config.type} {config.topology}" if config else ""
    return node.accelerator_type or shape or step.target.rpartition("/")[2]


def is_spot(step: Step) -> bool:
    """Whether a step asks for capacity at the spot tariff."""
    body = step.read(_StepBody)
    return body.spot is not None or body.scheduling_config.spot or body.scheduling_config.preemptible


def disk_size_gb(steps: Iterable[Step]) -> int:
    """The size of the data disk that the steps create; 0 where they create none."""
    return next((step.read(_StepBody).size_gb for step in steps if step.verb == "create-disk"), 0)


class VolumeMount(msgspec.Struct, frozen=True, rename="camel"):
    """A volume that the host of a slice mounts: the body of a `mount-volume` step."""

    volume: str
    directory: str
    size_gb: int
    format_if_blank: bool
    slice: int


def volume_mounts(steps: Iterable[Step]) -> list[VolumeMount]:
    """What the hosts mount of volumes."""
    return [step.read(VolumeMount) for step in steps if step.verb == "mount-volume"]


def kinds_made_by(steps: Iterable[Step]) -> tuple[Kind, ...]:
    """What there may be of a cluster after these steps."""
    made = {kind for step in steps for kind in _MADE_BY[step.verb]}
    return tuple(kind for kind in KINDS if kind in made)


def tpu_node_name(steps: Iterable[Step]) -> str | None:
    """The name of the legacy TPU Node that the steps create, if they do."""
    return next((step.target.rpartition("/")[2] for step in steps if step.verb == "create-tpu-node"), None)


def _with_mark(description: str, resource: Resource) -> Resource | None:
    """The resource, with what its description says of it; None where Podway did not write that."""
    mark = read_mark(description)
    if mark is None:
        return None
    return msgspec.structs.replace(resource, owner=mark.owner, cluster=mark.cluster, parts=mark.parts)


def _seconds(stamp: Timestamp | datetime.datetime | None) -> float | None:
    """The clients give a datetime where their types say Timestamp."""
    return stamp.timestamp() if isinstance(stamp, datetime.datetime) else None


def from_queued_resource(item: tpu_v2.QueuedResource) -> Resource | None:
    """A queued resource of version 2, marked on the node it asks for."""
    specs = list(item.tpu.node_spec)
    if not specs:
        return None
    node, state, zone = specs[0].node, item.state, zone_of(item.name)
    why = ""
    if "failed_data" in state and state.failed_data.error.code:
        error = state.failed_data.error
        why = failed_operation(error.code, error.message, node.accelerator_type or item.name, zone).what
    found = Resource(
        kind="queued resource",
        path=item.name,
        zone=zone,
        state=state.state.name,
        why=why,
        accelerator_type=node.accelerator_type or None,
        created=_seconds(item.create_time),
        spot="spot" in item,
    )
    return _with_mark(node.description, found)


def from_node(item: tpu_v2.Node) -> Resource | None:
    """A TPU VM of version 2: one slice."""
    found = Resource(
        kind="node",
        path=item.name,
        zone=zone_of(item.name),
        state=item.state.name,
        why=item.health_description,
        health=item.health.name,
        accelerator_type=item.accelerator_type or None,
        created=_seconds(item.create_time),
        spot=item.scheduling_config.spot or item.scheduling_config.preemptible,
        number=str(item.id),
        addresses=tuple((e.ip_address, e.access_config.external_ip or None) for e in item.network_endpoints),
        queued=item.queued_resource,
    )
    return _with_mark(item.description, found)


def from_tpu_node(item: tpu_v1.Node) -> Resource | None:
    """A legacy TPU Node of version 1."""
    found = Resource(
        kind="tpu node",
        path=item.name,
        zone=zone_of(item.name),
        state=item.state.name,
        why=item.health_description,
        health=item.health.name,
        accelerator_type=item.accelerator_type,
        created=_seconds(item.create_time),
        spot=item.scheduling_config.preemptible,
    )
    return _with_mark(item.description, found)


class _AccessConfig(msgspec.Struct, frozen=True):
    natIP: str | None = None


class _NetworkInterface(msgspec.Struct, frozen=True, rename="camel"):
    networkIP: str = ""
    access_configs: tuple[_AccessConfig, ...] = ()


class ComputeItem(msgspec.Struct, frozen=True, rename="camel"):
    """What is read of an instance, a disk or a firewall rule of Compute Engine."""

    id: str = ""
    description: str = ""
    self_link: str = ""
    status: str = ""
    creation_timestamp: datetime.datetime | None = None
    network_interfaces: tuple[_NetworkInterface, ...] = ()
    scheduling: _Scheduling = _Scheduling()
    size_gb: int = 0
    type: str = ""  # of a disk: the last word of the address is its kind


def from_instance(item: ComputeItem) -> Resource | None:
    """A virtual machine of Compute Engine."""
    nets = item.network_interfaces[:1]
    addresses = [(net.networkIP, net.access_configs[0].natIP if net.access_configs else None) for net in nets]
    found = msgspec.structs.replace(
        _of_compute("instance", item),
        number=item.id,
        addresses=tuple((inside, outside) for inside, outside in addresses if inside),
        spot=item.scheduling.provisioning_model == "SPOT",
    )
    return _with_mark(item.description, found)


def from_disk(item: ComputeItem) -> Resource | None:
    """A disk of Compute Engine."""
    kind = item.type.rpartition("/")[2] or None
    found = msgspec.structs.replace(_of_compute("disk", item), size_gb=item.size_gb, disk_type=kind)
    return _with_mark(item.description, found)


def from_volume_disk(item: ComputeItem) -> Resource | None:
    """The disk of a volume; None for any other. No look at a cluster sees one, so that nothing ends it with a cluster."""
    mark = read_volume_mark(item.description)
    if mark is None:
        return None
    kind = item.type.rpartition("/")[2] or None
    found = msgspec.structs.replace(_of_compute("disk", item), size_gb=item.size_gb, disk_type=kind)
    return msgspec.structs.replace(found, volume=mark[0], owner=mark[1])


def from_firewall(item: ComputeItem) -> Resource | None:
    """A firewall rule: it has no state of its own."""
    found = msgspec.structs.replace(_of_compute("firewall rule", item), state="READY")
    return _with_mark(item.description, found)


def _of_compute(kind: Kind, item: ComputeItem) -> Resource:
    path = item.self_link.partition("/compute/v1/")[2]
    created = item.creation_timestamp.timestamp() if item.creation_timestamp else None
    return Resource(kind=kind, path=path, zone=zone_of(path), state=item.status, created=created)
