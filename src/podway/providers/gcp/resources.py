"""The cloud's resources as plain facts: whichever API a resource came from, a `Thing` says what it is and whose.

A resource is ours when its description carries the mark that gcp_render.py gives it; anything else in the project is passed over.
"""

import datetime
import re
from typing import Any, Literal

import msgspec
from google.cloud import tpu_v1, tpu_v2

from podway.decoding import from_plain
from podway.providers import Step
from podway.providers.gcp.errors import failed_operation
from podway.providers.gcp.render import read_mark

Kind = Literal["queued resource", "node", "tpu node", "instance", "disk", "firewall rule"]
KINDS: tuple[Kind, ...] = ("queued resource", "node", "tpu node", "instance", "disk", "firewall rule")


class Thing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One resource in the project that carries Podway's mark."""

    kind: Kind
    path: str  # projects/P/locations/Z/nodes/N
    zone: str | None
    state: str  # in the cloud's own word
    cluster: str
    owner: str
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

    @property
    def id(self) -> str:
        """The last word of its path."""
        return self.path.rpartition("/")[2]


class Sight(msgspec.Struct, frozen=True, kw_only=True):
    """What a look saw, and the zones that did not answer."""

    things: tuple[Thing, ...] = ()
    blind: tuple[str, ...] = ()


def zone_of(path: str) -> str | None:
    """The zone in a resource's path."""
    found = re.search(r"/(?:locations|zones)/([^/]+)", path)
    return found[1] if found else None


def wanted_of(step: Step) -> str:
    """What a step asks for, in a sentence: the accelerator type, or the resource."""
    nodes = step.body.get("tpu", {}).get("nodeSpec", [])
    node = nodes[0]["node"] if nodes else step.body
    config = node.get("acceleratorConfig", {})
    shape = f"{config['type']} {config['topology']}" if config else ""
    return node.get("acceleratorType") or shape or step.target.rpartition("/")[2]


def is_spot(step: Step) -> bool:
    """Whether a step asks for capacity at the spot tariff."""
    config = step.body.get("schedulingConfig", {})
    return "spot" in step.body or bool(config.get("spot") or config.get("preemptible"))


def _marked(description: str, **facts: Any) -> Thing | None:
    found = read_mark(description)
    return Thing(owner=found.owner, cluster=found.cluster, parts=found.parts, **facts) if found else None


def _seconds(stamp: Any) -> float | None:
    return stamp.timestamp() if stamp else None


def from_queued_resource(item: tpu_v2.QueuedResource) -> Thing | None:
    """A queued resource of version 2, marked on the node it asks for."""
    specs = list(item.tpu.node_spec)
    if not specs:
        return None
    node, state, zone = specs[0].node, item.state, zone_of(item.name)
    why = ""
    if "failed_data" in state and state.failed_data.error.code:
        error = state.failed_data.error
        why = failed_operation(error.code, error.message, node.accelerator_type or item.name, zone).what
    return _marked(
        node.description,
        kind="queued resource",
        path=item.name,
        zone=zone,
        state=state.state.name,
        why=why,
        accelerator_type=node.accelerator_type or None,
        created=_seconds(item.create_time),
        spot="spot" in item,
    )


def from_node(item: tpu_v2.Node) -> Thing | None:
    """A TPU VM of version 2: one slice."""
    return _marked(
        item.description,
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


def from_tpu_node(item: tpu_v1.Node) -> Thing | None:
    """A legacy TPU Node of version 1."""
    return _marked(
        item.description,
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


def from_instance(item: dict[str, Any]) -> Thing | None:
    """A virtual machine of Compute Engine."""
    nets = item.get("networkInterfaces", [])
    addresses = [(net.get("networkIP", ""), (net.get("accessConfigs") or [{}])[0].get("natIP")) for net in nets[:1]]
    scheduling = item.get("scheduling", {})
    return _marked(
        item.get("description", ""),
        kind="instance",
        number=str(item.get("id", "")),
        addresses=tuple((inside, outside) for inside, outside in addresses if inside),
        spot=scheduling.get("provisioningModel") == "SPOT",
        **_of_compute(item),
    )


def from_disk(item: dict[str, Any]) -> Thing | None:
    """A disk of Compute Engine."""
    size = int(item.get("sizeGb", 0))
    return _marked(item.get("description", ""), kind="disk", size_gb=size, **_of_compute(item))


def from_firewall(item: dict[str, Any]) -> Thing | None:
    """A firewall rule: it has no state of its own."""
    return _marked(item.get("description", ""), kind="firewall rule", **{**_of_compute(item), "state": "READY"})


def _of_compute(item: dict[str, Any]) -> dict[str, Any]:
    path = item.get("selfLink", "").partition("/compute/v1/")[2]
    return {"path": path, "zone": zone_of(path), "state": item.get("status", ""), "created": _rfc3339(item)}


def _rfc3339(item: dict[str, Any]) -> float | None:
    stamp = item.get("creationTimestamp")
    return from_plain(stamp.replace("Z", "+00:00"), datetime.datetime).timestamp() if stamp else None
