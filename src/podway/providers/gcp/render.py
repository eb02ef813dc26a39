"""An order as the calls that will be made for it: one `Step` for each resource, its body as the Cloud's JSON. Pure.

1. Everything is named by the cluster and its owner (`ident`), and marked with both, so that it is found again by anybody.
2. What may wait in line is asked for as a queued resource: pods, spot, reservations, several zones, several slices. A single host
   on demand is created at once, because only such a node can be stopped and started (Google, "Manage TPU resources").
3. Several slices are one queued resource (multislice); zones that are queued in at the same time have a step each.
4. A data disk comes before the node that has it; a firewall rule stands for the ports; a legacy TPU Node has a host VM.
5. Volumes are attached with the nodes; the last steps say what the hosts mount of them, and are no calls.
"""

import hashlib
import re

import msgspec

from podway.catalog.slices import Slice, find_slice
from podway.errors import UserError
from podway.order import Order
from podway.providers import Request, Step
from podway.providers.gcp.settings import SCOPE, Settings

BOOT_DISK_GB = 100  # Google, "Attach durable block storage to a TPU VM"
HOST_VM = "n1-highmem-8"  # for a legacy TPU Node, as its documentation suggests
NODE_RUNTIME = "2.12.0"  # TensorFlow on a TPU Node, as people's task files name it
VOLUMES_AT = "/mnt/podway-volumes"  # on a host: one directory for each volume
NEWER_DISKS = frozenset(("v6e", "tpu7x"))  # they take hyperdisks, and the others persistent disks: as `disks` says
CPU_VM = "n2-standard-8"
HOST_IMAGE = "projects/debian-cloud/global/images/family/debian-12"
# AcceleratorConfig.Type of the API, version 2; newer generations have none yet.
CONFIG_TYPES = {"v2": "V2", "v3": "V3", "v4": "V4", "v5e": "V5LITE_POD", "v5p": "V5P", "v6e": "V6E"}
_LABEL_KEY = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_LABEL_VALUE = re.compile(r"[a-z0-9_-]{0,63}")
_MARK = re.compile(r"podway cluster=(?P<cluster>\S+) owner=(?P<owner>\S+) of=(?P<parts>[0-9]{1,6})")
_VOLUME_MARK = re.compile(r"podway volume=(?P<volume>\S+) owner=(?P<owner>\S+)")
_PORTS = re.compile(r"[0-9]{1,5}(?:-[0-9]{1,5})?")


class RenderContext(msgspec.Struct, frozen=True, kw_only=True):
    """What rendering needs besides the order: whose project it is, and what hosts are given."""

    project: str
    owner: str
    public_key: str
    settings: Settings


def ident(owner: str, cluster: str) -> str:
    """The id of the cluster's resources: readable, legal everywhere (RFC 1035, 63 characters), and one for owner and name."""
    slug = re.sub(r"[^a-z0-9]+", "-", cluster.lower()).strip("-")[:40].rstrip("-")
    return f"{slug}-{hashlib.sha256(f'{owner}/{cluster}'.encode()).hexdigest()[:8]}"


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """The description every resource carries, since labels cannot hold every name: whose it is, and one of how many."""

    cluster: str
    owner: str
    parts: int  # how many nodes and machines make the cluster whole

    def __str__(self) -> str:
        return f"podway cluster={self.cluster} owner={self.owner} of={self.parts}"


def read_mark(description: str) -> Mark | None:
    """The mark in a description, if Podway wrote it."""
    found = _MARK.fullmatch(description or "")
    return Mark(cluster=found["cluster"], owner=found["owner"], parts=int(found["parts"])) if found else None


def volume_mark(volume: str, owner: str) -> str:
    """The description of a volume's disk."""
    return f"podway volume={volume} owner={owner}"


def read_volume_mark(description: str) -> tuple[str, str] | None:
    """The volume and the owner in a description, if Podway wrote it."""
    found = _VOLUME_MARK.fullmatch(description or "")
    return (found["volume"], found["owner"]) if found else None


def is_queued(order: Order) -> bool:
    """Whether the order stands in line instead of being created at once."""
    if order.accelerator_type is None or not order.tpu_vm:
        return False
    if any(one.slice is not None for one in order.volumes):
        return False  # one request for all slices would give all of them the same disks
    if order.queued is not None:
        return order.queued
    asks_for_capacity = order.spot or order.best_effort or order.reservation or order.valid_until_s
    many = order.hosts > 1 and (order.slices == 1 or _multislice(order))
    return bool(asks_for_capacity or many or len(order.zones) > 1)


def _multislice(order: Order) -> bool:
    """Slices of one queued resource work together from v4 on (Google, "Multislice overview")."""
    tpu = find_slice(order.accelerator_type or "", order.topology)
    return tpu.generation_facts.dcn_bandwidth_per_host is not None


def render(name: str, order: Order, context: RenderContext) -> Request:
    """All steps, in the order in which they are begun."""
    zones = order.zones or ((order.zone,) if order.zone else ())
    if not zones:
        raise UserError("the order names no zone of Google Cloud", "choose one, e.g. --zone us-east5-b")
    _check(order, zones)
    builder = _StepBuilder(name, order, context)
    steps = [builder.firewall()] if order.ports else []
    for zone in zones:
        if order.accelerator_type is None:
            steps += [builder.instance(zone, f"{builder.ident}-{i}", CPU_VM, i) for i in range(order.slices)]
        elif not order.tpu_vm:
            steps += [builder.instance(zone, builder.ident, HOST_VM), builder.tpu_node(zone)]
        else:
            steps += builder.disks(zone)
            steps += [builder.queued(zone)] if is_queued(order) else builder.nodes(zone)
        steps += builder.mounts(zone)
    return Request(provider="gcp", name=name, steps=tuple(steps))


def _check(order: Order, zones: tuple[str, ...]) -> None:
    """What no zone would do."""
    kind = order.accelerator_type
    for key, value in order.labels.items():
        if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            raise UserError(
                f"label {key}={value} is not one Google Cloud takes",
                "use lower-case letters, digits, '-' and '_', at most 63, the key starting with a letter",
            )
    for ports in order.ports:
        if not _PORTS.fullmatch(ports):
            raise UserError(f"{ports!r} is not a port or a range of ports", "write 8080 or 8000-8010")
    if len(zones) > 1 and not is_queued(order):
        raise UserError("only queued resources can be asked for in several zones at once", "name one zone")
    if not order.tpu_vm and (order.slices > 1 or order.hosts_per_slice > 1):
        raise UserError(
            f"{order.slices} x {kind} as legacy TPU Nodes is not supported: one TPU Node of one host is",
            "use TPU VMs (leave tpu_vm: False out)",
        )
    if order.accelerator_type and order.tpu_vm and _disk_gb(order) and order.hosts > 1:
        raise UserError(
            f"disk_size {order.disk_gb} is not possible on {order.hosts} hosts of {kind}: they cannot each have a disk that can "
            f"be written, and their own have {BOOT_DISK_GB} GB",
            "keep large files in a bucket (file_mounts), and leave disk_size out",
        )
    _check_volumes(order)
    if order.slices > 1 and order.tpu_vm and kind and order.queued and not _multislice(order):
        raise UserError(f"{kind} cannot be queued as several slices: multislice begins with v4", "use one slice")
    if order.best_effort and not is_queued(order):
        raise UserError("best-effort capacity is for queued resources only", "leave `queued: false` out")


def _check_volumes(order: Order) -> None:
    """A disk that can be written is one host's (Google, "Attach durable block storage to a TPU VM")."""
    for volume in order.volumes:
        what = f"volume {volume.name} cannot be attached to {order.slices} x {order.accelerator_type or 'CPU host'}"
        if not order.tpu_vm:
            raise UserError(f"{what}: a legacy TPU Node has no disks", "use TPU VMs (leave tpu_vm: False out)")
        if order.hosts_per_slice > 1:
            raise UserError(
                f"{what}: {order.hosts_per_slice} hosts cannot all write to one disk",
                "use a slice of one host, or a bucket in file_mounts",
            )
        if order.slices > 1 and volume.slice is None:
            raise UserError(
                f"{what}: a disk is attached to one of them",
                "name one for each, such as data-${{ dstack.node_rank }}, or use a bucket in file_mounts",
            )
        newer = bool(order.accelerator_type) and _generation(order) in NEWER_DISKS
        if order.accelerator_type and volume.disk_type and newer != volume.disk_type.startswith("hyperdisk"):
            wanted = "hyperdisk-balanced" if newer else "pd-balanced"
            raise UserError(
                f"{what}: it is a {volume.disk_type}, which {_generation(order)} does not take",
                f"create one with --disk-type {wanted}, and copy what it holds",
            )


def _generation(order: Order) -> str:
    return find_slice(order.accelerator_type or "", order.topology).generation


def _disk_gb(order: Order) -> int:
    """The size of the data disk, 0 where the boot disk is as large as was asked."""
    return order.disk_gb if order.disk_gb and order.disk_gb > BOOT_DISK_GB else 0


class _StepBuilder:
    """The bodies, for one cluster."""

    def __init__(self, name: str, order: Order, context: RenderContext) -> None:
        self.order = order
        self.context = context
        self.ident = ident(context.owner, name)
        self.mark = str(Mark(cluster=name, owner=context.owner, parts=order.slices if order.tpu_vm else 2))
        slug = self.ident[:-9]
        own = {"podway-cluster": slug, "podway-owner": context.owner}
        self.labels = {**context.settings.labels, **order.labels, **own}
        self.network = order.network or context.settings.network or "default"

    def queued(self, zone: str) -> Step:
        order = self.order
        node = {**self.node(zone), **self._data_disks(zone, 0)}
        spec: dict[str, object] = {"parent": self._parent(zone), "node": node}
        if order.slices > 1:
            key = "multiNodeParams" if order.best_effort else "multisliceParams"
            spec[key] = {"nodeCount": order.slices, "nodeIdPrefix": self.ident}
        else:
            spec["nodeId"] = self.ident
        body: dict[str, object] = {"tpu": {"nodeSpec": [spec]}}
        if order.spot:
            body["spot"] = {}
        elif order.best_effort:
            body["bestEffort"] = {}
        if order.reservation:
            body["reservationName"] = self._reservation(zone)
        if order.valid_until_s:
            body["queueingPolicy"] = {"validUntilDuration": f"{round(order.valid_until_s)}s"}
        verb = "create-queued-resource-v2alpha1" if order.best_effort else "create-queued-resource"
        return Step(verb=verb, target=f"{self._parent(zone)}/queuedResources/{self.ident}", body=body)

    def nodes(self, zone: str) -> list[Step]:
        """A node for each slice."""
        several = self.order.slices > 1
        names = [f"{self.ident}-{i}" for i in range(self.order.slices)] if several else [self.ident]
        scheduling: dict[str, object] = {}
        if self.order.spot:
            scheduling = {"schedulingConfig": {"spot": True}}
        elif self.order.reservation:
            scheduling = {"schedulingConfig": {"reserved": True}}
        return [
            Step(
                verb="create-node",
                target=f"{self._parent(zone)}/nodes/{name}",
                body={**self.node(zone), **scheduling, **self._data_disks(zone, number)},
            )
            for number, name in enumerate(names)
        ]

    def node(self, zone: str) -> dict[str, object]:
        """A TPU VM, apart from how it is paid for."""
        order, settings = self.order, self.context.settings
        tpu = find_slice(order.accelerator_type or "", order.topology)
        service: dict[str, object] = {"scope": [SCOPE]}
        email = order.service_account or settings.service_account
        if email:
            service = {"email": email, **service}
        network = {**self._network(zone, self.network), "enableExternalIps": settings.external_ips}
        return {
            "description": self.mark,
            **_accelerator(tpu),
            "runtimeVersion": order.runtime_version or tpu.generation_facts.default_runtime,
            "networkConfig": network,
            "serviceAccount": service,
            "labels": self.labels,
            "tags": self._tags(),
            "metadata": self._metadata(),
        }

    def tpu_node(self, zone: str) -> Step:
        """A legacy TPU Node: the TPU alone, reached over the network from its host VM. Its runtime is not a TPU VM's."""
        order, version = self.order, self.order.runtime_version
        tpu = find_slice(order.accelerator_type or "", order.topology)
        body = {
            "description": self.mark,
            "acceleratorType": tpu.accelerator_type,
            "tensorflowVersion": NODE_RUNTIME if version in (None, tpu.generation_facts.default_runtime) else version,
            "network": self.network,
            "labels": self.labels,
            "schedulingConfig": {"preemptible": order.spot},
        }
        name = order.tpu_name or self.ident
        return Step(verb="create-tpu-node", target=f"{self._parent(zone)}/nodes/{name}", body=body)

    def instance(self, zone: str, name: str, machine: str, number: int = 0) -> Step:
        """A virtual machine without chips: a CPU host, or the host of a TPU Node."""
        order, settings = self.order, self.context.settings
        interface: dict[str, object] = self._network(zone, _network_path(self.context.project, self.network))
        if settings.external_ips:
            interface["accessConfigs"] = [{"type": "ONE_TO_ONE_NAT", "name": "External NAT"}]
        image = order.image if order.image and "/images/" in order.image else HOST_IMAGE
        disk = {"sourceImage": image, "diskSizeGb": str(order.disk_gb or BOOT_DISK_GB), "labels": self.labels}
        body = {
            "name": name,
            "description": self.mark,
            "machineType": f"zones/{zone}/machineTypes/{order.instance_type or machine}",
            "labels": self.labels,
            "tags": {"items": self._tags()},
            "disks": [
                {"boot": True, "autoDelete": True, "initializeParams": disk},
                *({"source": path, "mode": "READ_WRITE", "autoDelete": False} for path in self._volumes_of(number)),
            ],
            "networkInterfaces": [interface],
            "metadata": {"items": [{"key": key, "value": value} for key, value in self._metadata().items()]},
            "serviceAccounts": [
                {"email": order.service_account or settings.service_account or "default", "scopes": [SCOPE]}
            ],
        }
        if order.spot and order.accelerator_type is None:
            body["scheduling"] = {"provisioningModel": "SPOT", "instanceTerminationAction": "STOP"}
        target = f"projects/{self.context.project}/zones/{zone}/instances/{name}"
        return Step(verb="create-instance", target=target, body=body)

    def disks(self, zone: str) -> list[Step]:
        """A data disk for a host that asks for more than its boot disk has."""
        size = _disk_gb(self.order)
        if not size:
            return []
        tpu = find_slice(self.order.accelerator_type or "", self.order.topology)
        # The only kinds that TPUs take, by generation (Google, "Attach durable block storage to a TPU VM").
        kind = "hyperdisk-balanced" if tpu.generation in NEWER_DISKS else "pd-balanced"
        body = {
            "name": self.ident,
            "description": self.mark,
            "sizeGb": str(size),
            "type": f"zones/{zone}/diskTypes/{kind}",
            "labels": self.labels,
        }
        return [Step(verb="create-disk", target=self._disk_path(zone), body=body)]

    def firewall(self) -> Step:
        """The ports, open to everybody, on this cluster's hosts alone."""
        body = {
            "name": self.ident,
            "description": self.mark,
            "network": _network_path(self.context.project, self.network),
            "direction": "INGRESS",
            "sourceRanges": ["0.0.0.0/0"],
            "targetTags": [self.ident],
            "allowed": [{"IPProtocol": "tcp", "ports": list(self.order.ports)}],
        }
        target = f"projects/{self.context.project}/global/firewalls/{self.ident}"
        return Step(verb="create-firewall", target=target, body=body)

    def mounts(self, zone: str) -> list[Step]:
        """What each host does with its volumes once it is up."""
        return [
            Step(
                verb="mount-volume",
                target=volume.disk,
                body={
                    "volume": volume.name,
                    "directory": f"{VOLUMES_AT}/{volume.name}",
                    "sizeGb": volume.size_gb,
                    "formatIfBlank": volume.blank,
                    "slice": volume.slice or 0,
                },
            )
            for volume in self.order.volumes
            if f"/zones/{zone}/" in volume.disk
        ]

    def _volumes_of(self, number: int) -> list[str]:
        return [one.disk for one in self.order.volumes if one.slice in (None, number)]

    def _data_disks(self, zone: str, number: int) -> dict[str, object]:
        """The cluster's own disk, and the volumes of this slice."""
        paths = [*([self._disk_path(zone)] if _disk_gb(self.order) else []), *self._volumes_of(number)]
        return {"dataDisks": [{"sourceDisk": path, "mode": "READ_WRITE"} for path in paths]} if paths else {}

    def _disk_path(self, zone: str) -> str:
        return f"projects/{self.context.project}/zones/{zone}/disks/{self.ident}"

    def _parent(self, zone: str) -> str:
        return f"projects/{self.context.project}/locations/{zone}"

    def _network(self, zone: str, network: str) -> dict[str, object]:
        """The network; with a subnetwork, which says by itself which network it is of, only where both are named."""
        name = self.order.subnetwork or self.context.settings.subnetwork
        if not name:
            return {"network": network}
        if "/" not in name:
            name = f"projects/{self.context.project}/regions/{zone.rpartition('-')[0]}/subnetworks/{name}"
        named = self.order.network or self.context.settings.network
        return {"network": network, "subnetwork": name} if named else {"subnetwork": name}

    def _reservation(self, zone: str) -> str:
        name = self.order.reservation or ""
        return name if "/" in name else f"{self._parent(zone)}/reservations/{name}"

    def _tags(self) -> list[str]:
        return [*self.context.settings.tags, *self.order.tags, self.ident]

    def _metadata(self) -> dict[str, str]:
        return {
            "ssh-keys": f"{self.context.settings.ssh_user}:{self.context.public_key}",
            "enable-oslogin": "FALSE",  # else the guest does not look at ssh-keys
            "enable-guest-attributes": "TRUE",  # where it shows its host keys
        }


def _accelerator(tpu: Slice) -> dict[str, object]:
    """By name; by kind and topology where it is not the usual one of that name."""
    if find_slice(tpu.accelerator_type).topology == tpu.topology:
        return {"acceleratorType": tpu.accelerator_type}
    if tpu.generation not in CONFIG_TYPES:
        raise UserError(
            f"Google Cloud's API takes no topology for {tpu.generation}",
            f"leave the topology out: {tpu.accelerator_type}",
        )
    return {"acceleratorConfig": {"type": CONFIG_TYPES[tpu.generation], "topology": tpu.topology_text}}


def _network_path(project: str, network: str) -> str:
    return network if "/" in network else f"projects/{project}/global/networks/{network}"
