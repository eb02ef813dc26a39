"""What a node is made of: from a request's body to a spec, and from a node to each version's JSON.

A spec is a body in v2's words, checked, with enums by name. v1 (legacy TPU Nodes) has other words for some fields and lacks
others; v2alpha1 has more, and gcloud sends still more than its published schema.
"""

import functools

from podway.catalog.prices import all_prices, zones_of
from podway.catalog.slices import Slice, all_slices, find_slice
from podway.errors import UserError
from podway.sandbox.jsons import JsonObject
from podway.sandbox.names import check_labels, project_number
from podway.sandbox.status import ApiError, invalid
from podway.sandbox.tpu.capacity import ON_DEMAND, RESERVED, SPOT

GENERATION_OF_TYPE = {
    "V2": "v2",
    "V3": "v3",
    "V4": "v4",
    "V5LITE_POD": "v5e",
    "V5P": "v5p",
    "V6E": "v6e",
    "TPU7X": "tpu7x",  # not in the published schema; gcloud 528 knows it
}
TYPE_OF_GENERATION = {generation: type for type, generation in GENERATION_OF_TYPE.items()}
OUTPUT_ONLY = (
    *("name", "state", "healthDescription", "createTime", "networkEndpoints", "health", "id", "apiVersion", "symptoms"),
    *("queuedResource", "multisliceNode", "upcomingMaintenance", "ipAddress", "port"),
)
V1_SAME = (
    *("name", "description", "acceleratorType", "state", "healthDescription", "cidrBlock", "createTime", "health"),
    *("labels", "symptoms"),
)
UPDATABLE = {"description", "tags", "labels", "metadata", "network_config.enable_external_ips", "data_disks"}
NODE_PORT = 8470  # where a TPU's gRPC server listens; Cloud TPU shows it for TPU VMs as well
V1_TENSORFLOW = ("2.10.0", "2.11.0", "2.12.0", "2.12.1")
# Google's page of runtimes, with its older entries that people's files still name.
RUNTIMES = (
    "tpu-ubuntu2204-base",
    "tpu-vm-base",
    "tpu-vm-v4-base",
    "v2-alpha-tpuv4",
    "v2-alpha-tpuv5",
    "v2-alpha-tpuv5-lite",
    "v2-alpha-tpuv6e",
    "v2-alpha-tpu7-ubuntu2404",
    *(
        f"tpu-vm-tf-{release}{pod}{kind}"
        for release in ("2.13.0", "2.14.0", "2.15.0", "2.16.1", "2.17.0")
        for pod in ("", "-pod")
        for kind in ("", "-pjrt", "-se")
    ),
)


@functools.cache
def zones() -> tuple[str, ...]:
    """All zones that have TPUs."""
    return tuple(sorted({row.zone for row in all_prices() if row.zone}))


@functools.cache
def slices_in(zone: str) -> tuple[Slice, ...]:
    """What a zone offers through the TPU API: one layout of hosts for each type."""
    found: dict[str, Slice] = {}
    for row in all_slices():
        if zone in zones_of(row.generation):
            known = found.get(row.accelerator_type)
            if known is None or row.hosts < known.hosts:
                found[row.accelerator_type] = row
    return tuple(found.values())


def read_node(version: str, body: JsonObject, zone: str) -> tuple[JsonObject, Slice]:
    """The spec and the slice that a body asks for."""
    if not isinstance(body, dict):
        raise invalid("Missing required field: node")
    spec = {key: value for key, value in body.items() if key not in OUTPUT_ONLY and value is not None}
    if version == "v1":
        spec = _from_v1(spec)
    if not spec.get("runtimeVersion"):
        raise invalid("Missing required field: node.runtime_version")
    if version != "v1" and spec["runtimeVersion"] not in RUNTIMES:
        raise ApiError("NOT_FOUND", f"Runtime version '{spec['runtimeVersion']}' was not found in zone {zone}.")
    check_labels(spec.get("labels"))
    slice = _slice_of(spec, zone)
    written = [disk for disk in spec.get("dataDisks") or [] if disk.get("mode") != "READ_ONLY_MANY"]
    if written and not slice.single_host:
        raise invalid(
            f"Disk '{written[0].get('sourceDisk')}' must be READ_ONLY_MANY: a pod slice has {slice.hosts} hosts."
        )
    spec["acceleratorType"] = slice.accelerator_type
    spec["acceleratorConfig"] = {"type": TYPE_OF_GENERATION[slice.generation], "topology": slice.topology_text}
    return spec, slice


def _slice_of(spec: JsonObject, zone: str) -> Slice:
    name, config = spec.get("acceleratorType", ""), spec.get("acceleratorConfig") or {}
    if bool(name) == bool(config):
        raise invalid("Exactly one of accelerator_type and accelerator_config must be given.")
    try:
        if config:
            generation = GENERATION_OF_TYPE.get(config.get("type", ""))
            if generation is None:
                raise invalid(f"Invalid accelerator_config.type: {config.get('type')}")
            found = find_slice(generation, topology=config.get("topology") or "")
        else:
            found = find_slice(name)
    except UserError as error:
        raise invalid(f"Invalid accelerator: {error.what}") from None
    if name and found.accelerator_type != name:
        raise invalid(f"Invalid accelerator_type: '{name}'; this API calls it '{found.accelerator_type}'.")
    if zone not in zones_of(found.generation):
        raise ApiError("NOT_FOUND", f"Accelerator type '{found.accelerator_type}' was not found in zone {zone}.")
    return found


def _from_v1(spec: JsonObject) -> JsonObject:
    moved = dict(spec)
    moved["runtimeVersion"] = moved.pop("tensorflowVersion", "")
    if "network" in moved:
        moved["networkConfig"] = {"network": moved.pop("network")}
    moved.pop("serviceAccount", None)
    return moved


def tier_of(spec: JsonObject) -> str:
    """Which stock a node is taken from."""
    config = spec.get("schedulingConfig") or {}
    model = config.get("provisioningModel")
    if config.get("reserved") or config.get("reservationName") or model == "RESERVATION_BOUND":
        return RESERVED
    if config.get("spot") or config.get("preemptible") or model == "SPOT":
        return SPOT
    return ON_DEMAND


def with_defaults(spec: JsonObject, project: str, zone: str, cidr: str) -> JsonObject:
    """What Cloud TPU fills in; networks by their full paths."""
    network = dict(spec.get("networkConfig") or {})
    for kind, place in (("network", "global"), ("subnetwork", f"regions/{zone.rpartition('-')[0]}")):
        given = str(network.get(kind) or "default").partition("/compute/v1/")[2] or str(network.get(kind) or "default")
        parent = "" if given.startswith("projects/") else f"projects/{project}/"
        network[kind] = parent + (given if "/" in given else f"{place}/{kind}s/{given}")
    account = spec.get("serviceAccount") or {}
    email = account.get("email") or f"{project_number(project)}-compute@developer.gserviceaccount.com"
    scopes = account.get("scope") or ["https://www.googleapis.com/auth/cloud-platform"]
    return {
        **spec,
        "networkConfig": network,
        "serviceAccount": {"email": email, "scope": scopes},
        "schedulingConfig": spec.get("schedulingConfig") or {},
        "cidrBlock": spec.get("cidrBlock") or cidr,
    }


def to_v1(view: JsonObject) -> JsonObject:
    """A node's JSON in the words of v1."""
    shown = {key: view[key] for key in V1_SAME if key in view}
    endpoints = [{"ipAddress": one["ipAddress"], "port": one["port"]} for one in view.get("networkEndpoints", [])]
    scheduling = view.get("schedulingConfig", {})
    return {
        **shown,
        "tensorflowVersion": view.get("runtimeVersion", ""),
        "network": view["networkConfig"]["network"],
        "serviceAccount": view["serviceAccount"]["email"],
        "schedulingConfig": {key: scheduling[key] for key in ("preemptible", "reserved") if key in scheduling},
        "networkEndpoints": endpoints,
        **({"ipAddress": endpoints[0]["ipAddress"], "port": str(endpoints[0]["port"])} if endpoints else {}),
        "apiVersion": "V1",
    }
