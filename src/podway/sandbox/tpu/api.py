"""The Cloud TPU API as one table of methods, whatever wire they come over.

`call(version, method, fields)` takes a request as the JSON of its proto (`CreateNode` takes parent, nodeId, node) and answers
with the JSON of its response. REST and gRPC only translate to this and back.
"""

from collections.abc import Callable, Iterable

from podway.catalog.slices import Slice
from podway.sandbox.filters import read_filter
from podway.sandbox.jsons import JsonObject
from podway.sandbox.names import parent_of, project_number, split_name, split_parent
from podway.sandbox.status import ApiError, invalid, not_found
from podway.sandbox.tpu.nodes import Node
from podway.sandbox.tpu.operations import Operation
from podway.sandbox.tpu.shapes import (
    RUNTIMES,
    TYPE_OF_GENERATION,
    V1_TENSORFLOW,
    slices_in,
    zones,
)
from podway.sandbox.world import World

MOST_ON_A_PAGE = 1000


class TpuApi:
    """The methods, over a world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._answered: dict[tuple[str, str], tuple[JsonObject, str]] = {}  # (method, request id) -> request, operation
        nodes, queue = world.nodes, world.queue
        self._changing: dict[str, Callable[[str, JsonObject, float, ApiError | None], Operation]] = {
            "CreateNode": lambda v, f, t, d: nodes.create(v, _parent(f), f.get("nodeId", ""), f.get("node", {}), t, d),
            "DeleteNode": lambda v, f, t, d: nodes.delete(v, f["name"], t, d),
            "StopNode": lambda v, f, t, d: nodes.stop(v, f["name"], t, d),
            "StartNode": lambda v, f, t, d: nodes.start(v, f["name"], t, d),
            "ReimageNode": lambda v, f, t, d: nodes.maintain(v, f["name"], (), t, d),
            "UpdateNode": self._update,
            "SimulateMaintenanceEvent": lambda v, f, t, d: nodes.maintain(v, f["name"], _workers(f), t, d),
            "PerformMaintenance": lambda v, f, t, d: nodes.maintain(v, f["name"], (), t, d),
            "CreateQueuedResource": lambda v, f, t, d: queue.create(
                v, _parent(f), f.get("queuedResourceId", ""), f.get("queuedResource", {}), t, d
            ),
            "DeleteQueuedResource": lambda v, f, t, d: queue.delete(v, f["name"], bool(f.get("force")), t, d),
            "ResetQueuedResource": lambda v, f, t, d: queue.reset(v, f["name"], t, d),
            "PerformMaintenanceQueuedResource": lambda v, f, t, d: queue.maintain(
                v, f["name"], f.get("nodeNames") or [], t, d
            ),
        }
        self._reading: dict[str, Callable[[str, JsonObject, float], JsonObject]] = {
            "GetNode": lambda v, f, t: nodes.view(nodes.get(f["name"]), v),
            "ListNodes": self._list_nodes,
            "GetQueuedResource": lambda v, f, t: queue.view(queue.get(f["name"]), v),
            "ListQueuedResources": self._list_queued,
            "GetGuestAttributes": self._guest_attributes,
            "ListAcceleratorTypes": self._list_types,
            "GetAcceleratorType": self._get_type,
            "ListRuntimeVersions": lambda v, f, t: self._list_versions(f, "runtimeVersions", RUNTIMES),
            "GetRuntimeVersion": lambda v, f, t: _version(f["name"], "runtimeVersions", RUNTIMES),
            "ListTensorFlowVersions": lambda v, f, t: self._list_versions(f, "tensorflowVersions", V1_TENSORFLOW),
            "GetTensorFlowVersion": lambda v, f, t: _version(f["name"], "tensorflowVersions", V1_TENSORFLOW),
            "GenerateServiceIdentity": self._identity,
            "ListReservations": self._list_reservations,
            "GetOperation": lambda v, f, t: world.operations.get(f["name"]).view(),
            "ListOperations": self._list_operations,
            "CancelOperation": self._cancel_operation,
            "DeleteOperation": self._delete_operation,
            "ListLocations": self._list_locations,
            "GetLocation": self._get_location,
        }

    def call(
        self, version: str, method: str, fields: JsonObject, now: float, failure: ApiError | None = None
    ) -> JsonObject:
        """Do what a request asks for. `failure` is an error that the operation it begins has to end with."""
        self.world.advance(now)
        fields = {"name": "", **fields}  # a request may leave it out, and is then told that it is not a name
        if method in self._reading:
            return self._reading[method](version, fields, now)
        if method not in self._changing:
            raise ApiError("UNIMPLEMENTED", f"Method {method} is not there.")
        key = (method, str(fields.get("requestId") or ""))
        if key[1] and key in self._answered:
            before, operation = self._answered[key]
            if before != fields:
                raise invalid(f"request_id '{key[1]}' was used for another request.")
            return self.world.operations.get(operation).view()
        for spec in _specs_in(fields):
            self.world.check_disks(spec)
        begun = self._changing[method](version, fields, now, failure)
        if key[1]:
            self._answered[key] = (fields, begun.name)
        return begun.view()

    def _update(self, version: str, fields: JsonObject, now: float, failure: ApiError | None) -> Operation:
        node, mask = fields.get("node") or {}, fields.get("updateMask") or ""
        paths = [_snake(path.strip()) for path in mask.split(",") if path.strip()]
        return self.world.nodes.update(version, node.get("name", ""), node, paths, now, failure)

    def _list_nodes(self, version: str, fields: JsonObject, now: float) -> JsonObject:
        nodes = self.world.nodes
        chosen: dict[str, Node] = _within(fields, nodes.all)
        if version == "v1":  # legacy nodes alone: a TPU VM cannot be told in v1's words
            chosen = {name: node for name, node in chosen.items() if node.version == "v1"}
        return _page(fields, "nodes", chosen, lambda name: nodes.view(chosen[name], version))

    def _list_queued(self, version: str, fields: JsonObject, now: float) -> JsonObject:
        queue = self.world.queue
        chosen = _within(fields, queue.all)
        return _page(fields, "queuedResources", chosen, lambda name: queue.view(chosen[name], version))

    def _guest_attributes(self, version: str, fields: JsonObject, now: float) -> JsonObject:
        node = self.world.nodes.get(fields["name"])
        chosen = _workers(fields) or range(len(node.hosts))
        found = []
        for worker in chosen:
            if worker >= len(node.hosts):
                raise invalid(f"'{node.name}' has no worker {worker}.")
            host = node.hosts[worker]
            items = [{"namespace": "hostname", "key": "hostname", "value": host.name}]
            if host.key:
                kind, _, value = host.key.partition(" ")
                items.insert(0, {"namespace": "hostkeys", "key": kind, "value": value})
            if host.port != 22:  # sshds on loopback; a TPU VM listens on 22 and says nothing
                items.append({"namespace": "sandbox", "key": "ssh-port", "value": str(host.port)})
            wanted = [one for one in items if _asked(one, fields.get("queryPath") or "")]
            found.append({"queryPath": fields.get("queryPath") or "", "queryValue": {"items": wanted}})
        return {"guestAttributes": found}

    def _list_types(self, version: str, fields: JsonObject, now: float) -> JsonObject:
        project, zone = _zone_of(fields)
        parent = parent_of(project, zone)
        rows = {f"{parent}/acceleratorTypes/{one.accelerator_type}": one for one in slices_in(zone)}
        return _page(fields, "acceleratorTypes", rows, lambda name: _type(version, name, rows[name]))

    def _get_type(self, version: str, fields: JsonObject, now: float) -> JsonObject:
        _, zone, id = split_name(fields["name"], "acceleratorTypes")
        for row in slices_in(zone):
            if row.accelerator_type == id:
                return _type(version, fields["name"], row)
        raise not_found(fields["name"])

    def _list_versions(self, fields: JsonObject, collection: str, versions: tuple[str, ...]) -> JsonObject:
        project, zone = _zone_of(fields)
        names = [f"{parent_of(project, zone)}/{collection}/{one}" for one in versions]
        return _page(fields, collection, names, lambda name: _version(name, collection, versions))

    def _identity(self, version: str, fields: JsonObject, now: float) -> JsonObject:
        project, _ = _zone_of(fields)
        return {"identity": {"email": f"service-{project_number(project)}@cloud-tpu.iam.gserviceaccount.com"}}

    def _list_reservations(self, version: str, fields: JsonObject, now: float) -> JsonObject:
        chosen = _within(fields, self.world.capacity.reservations)

        def show(name: str) -> JsonObject:
            used = sum(one.slice.chips for one in self.world.nodes.held() if one.reservation == name)
            standard = {
                "size": chosen[name].chips,
                "capacityUnits": "CHIPS",
                "resourceType": TYPE_OF_GENERATION[chosen[name].generation],
                "usage": {"total": str(used)},
            }
            return {"name": name, "state": "ACTIVE", "standard": standard}

        return _page(fields, "reservations", chosen, show)

    def _list_operations(self, version: str, fields: JsonObject, now: float) -> JsonObject:
        parent = fields.get("name", "").removesuffix("/operations")
        every = {one.name: one for one in self.world.operations.all()}
        chosen = _within({"parent": parent}, every)
        return _page(fields, "operations", chosen, lambda name: chosen[name].view())

    def _cancel_operation(self, version: str, fields: JsonObject, now: float) -> JsonObject:
        self.world.operations.cancel(fields["name"])
        return {}

    def _delete_operation(self, version: str, fields: JsonObject, now: float) -> JsonObject:
        self.world.operations.delete(fields["name"])
        return {}

    def _list_locations(self, version: str, fields: JsonObject, now: float) -> JsonObject:
        project = fields["name"].removeprefix("projects/").partition("/")[0]
        names = [parent_of(project, zone) for zone in zones()]
        return _page(fields, "locations", names, _location)

    def _get_location(self, version: str, fields: JsonObject, now: float) -> JsonObject:
        _, zone = split_parent(fields["name"])
        if zone not in zones():
            raise not_found(fields["name"])
        return _location(fields["name"])


def _specs_in(fields: JsonObject) -> list[JsonObject]:
    """The nodes that a request describes."""
    requests = ((fields.get("queuedResource") or {}).get("tpu") or {}).get("nodeSpec") or []
    return [fields.get("node") or {}, *(request.get("node") or {} for request in requests)]


def _parent(fields: JsonObject) -> str:
    return str(fields.get("parent") or "")


def _zone_of(fields: JsonObject) -> tuple[str, str]:
    project, zone = split_parent(_parent(fields))
    if zone not in zones():
        raise not_found(_parent(fields))
    return project, zone


def _workers(fields: JsonObject) -> tuple[int, ...]:
    asked = [worker for worker in fields.get("workerIds") or [] if worker != ""]
    if not all(str(worker).isdigit() for worker in asked):
        raise invalid("worker_ids must be numbers.")
    return tuple(int(worker) for worker in asked)


def _within(fields: JsonObject, resources: JsonObject) -> JsonObject:
    """Those of one zone, or with the location `-` of all zones of the project."""
    project, zone = split_parent(_parent(fields))
    if zone != "-" and zone not in zones():
        raise not_found(_parent(fields))
    start = f"projects/{project}/locations/" + ("" if zone == "-" else f"{zone}/")
    return {name: one for name, one in resources.items() if name.startswith(start)}


def _page(fields: JsonObject, collection: str, every: Iterable[str], show: Callable[[str], JsonObject]) -> JsonObject:
    """A page in the order of names; the token is the last name shown, so a page stays right when others come and go."""
    size = int(fields.get("pageSize") or MOST_ON_A_PAGE)
    if size < 0:
        raise invalid("page_size must not be negative.")
    after = fields.get("pageToken") or ""
    passes = read_filter(str(fields.get("filter") or ""))
    found = [(name, item) for name in sorted(every) if name > after and passes(item := show(name))]
    shown = found[: min(size, MOST_ON_A_PAGE)]
    more = {"nextPageToken": shown[-1][0]} if len(found) > len(shown) else {}
    return {collection: [item for _, item in shown], **more}


def _type(version: str, name: str, slice: Slice) -> JsonObject:
    shown = {"name": name, "type": slice.accelerator_type}
    if version == "v1":
        return shown
    config = {"type": TYPE_OF_GENERATION[slice.generation], "topology": slice.topology_text}
    return {**shown, "acceleratorConfigs": [config]}


def _version(name: str, collection: str, versions: tuple[str, ...]) -> JsonObject:
    _, _, id = split_name(name, collection)
    if id not in versions:
        raise not_found(name)
    return {"name": name, "version": id}


def _location(name: str) -> JsonObject:
    zone = name.rpartition("/")[2]
    return {"name": name, "locationId": zone, "labels": {"cloud.googleapis.com/region": zone.rpartition("-")[0]}}


def _asked(item: JsonObject, path: str) -> bool:
    namespace, _, key = path.strip("/").partition("/")
    return namespace in ("", item["namespace"]) and key in ("", item["key"])


def _snake(path: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in path)
