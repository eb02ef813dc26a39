"""From an HTTP request of the Cloud TPU API to a method and its fields, as google/api/http annotations map them. Pure."""

import re

from podway.sandbox.jsons import JsonObject
from podway.sandbox.status import ApiError, invalid
from podway.sandbox.tpu.schema import descriptor_of, named, request_type

# collection -> (the method's noun, its plural)
NOUNS = {
    "nodes": ("Node", "Nodes"),
    "queuedResources": ("QueuedResource", "QueuedResources"),
    "acceleratorTypes": ("AcceleratorType", "AcceleratorTypes"),
    "runtimeVersions": ("RuntimeVersion", "RuntimeVersions"),
    "tensorflowVersions": ("TensorFlowVersion", "TensorFlowVersions"),
    "reservations": ("Reservation", "Reservations"),
    "operations": ("Operation", "Operations"),
}
# (collection, verb after the colon) -> method
VERBS = {
    ("nodes", "stop"): "StopNode",
    ("nodes", "start"): "StartNode",
    ("nodes", "reimage"): "ReimageNode",
    ("nodes", "getGuestAttributes"): "GetGuestAttributes",
    ("nodes", "simulateMaintenanceEvent"): "SimulateMaintenanceEvent",
    ("nodes", "performMaintenance"): "PerformMaintenance",
    ("queuedResources", "reset"): "ResetQueuedResource",
    ("queuedResources", "performMaintenanceQueuedResource"): "PerformMaintenanceQueuedResource",
    ("operations", "cancel"): "CancelOperation",
    ("", "generateServiceIdentity"): "GenerateServiceIdentity",
}
# Where the body is one field of the request, and which; else it is the request itself.
BODIES = {"CreateNode": "node", "UpdateNode": "node", "CreateQueuedResource": "queuedResource"}
_PATH = re.compile(
    r"^(?P<version>v1|v2|v2alpha1)/projects/(?P<project>[^/:]+)"
    r"(?:/locations(?:/(?P<zone>[^/:]+)(?:/(?P<collection>[A-Za-z]+)(?:/(?P<id>[^/]+?))?)?(?::(?P<verb>[A-Za-z]+))?)?)?$"
)
_SYSTEM = {"alt", "$alt", "prettyPrint", "key", "fields", "quotaUser", "access_token", "userProject", "uploadType"}


class Routed:
    """A request understood."""

    def __init__(self, version: str, method: str, fields: JsonObject) -> None:
        self.version, self.method, self.fields = version, method, fields

    @property
    def zone(self) -> str:
        """For rules of faults."""
        return zone_of(self.fields)

    @property
    def name(self) -> str:
        """For rules of faults: the id of what it is about."""
        return id_of(self.fields)


def project_of(fields: JsonObject) -> str:
    """The project that a request is about."""
    return about_of(fields).split("/")[1] if "/" in about_of(fields) else ""


def zone_of(fields: JsonObject) -> str:
    """The zone that a request is about."""
    parts = about_of(fields).split("/")
    return parts[3] if len(parts) > 3 else ""


def id_of(fields: JsonObject) -> str:
    """The id of what a request is about."""
    parts = about_of(fields).split("/")
    given = fields.get("nodeId") or fields.get("queuedResourceId")
    return str(given or (parts[5] if len(parts) > 5 else ""))


def about_of(fields: JsonObject) -> str:
    """The name of what a request is about: a resource, or the parent of what is listed or made."""
    return str(fields.get("name") or fields.get("parent") or (fields.get("node") or {}).get("name") or "")


def route(http_method: str, path: str, query: dict[str, str], body: object) -> Routed:
    """What a request asks for; refused where Google's frontend would not know the address."""
    found = _PATH.match(path.strip("/"))
    unknown = ApiError("NOT_FOUND", f"The requested URL /{path.strip('/')} was not found on this server.")
    if not found:
        raise unknown
    version, project, zone, collection, id, verb = found.groups()
    method = _method(http_method, zone, collection, id, verb)
    if method is None:
        raise unknown
    parent = f"projects/{project}" + (f"/locations/{zone}" if zone else "")
    about = f"{parent}/{collection}/{id}" if id else parent
    asked = {key: value for key, value in query.items() if key not in _SYSTEM}
    fields: JsonObject = dict(asked)
    if method in BODIES:
        fields[BODIES[method]] = body or {}
    elif isinstance(body, dict):
        fields.update(body)
    elif body:
        raise invalid("The body must be an object.")
    if method == "UpdateNode":
        fields["node"] = {**fields["node"], "name": about}
    elif id or method in ("ListLocations", "GetLocation", "ListOperations"):
        fields["name"] = about
    else:
        fields["parent"] = about
    shape = request_type(version, method)
    if shape is not None:
        fields = named(descriptor_of(shape), fields)
    elif method not in (
        "GetOperation",
        "ListOperations",
        "CancelOperation",
        "DeleteOperation",
        "ListLocations",
        "GetLocation",
    ):
        raise unknown
    return Routed(version, method, fields)


def _method(http_method: str, zone: str | None, collection: str | None, id: str | None, verb: str | None) -> str | None:
    if verb:
        return VERBS.get((collection or "", verb)) if http_method == "POST" else None
    if zone is None:
        return "ListLocations" if http_method == "GET" else None
    if collection is None:
        return "GetLocation" if http_method == "GET" else None
    if collection not in NOUNS:
        return None
    one, many = NOUNS[collection]
    if id is None:
        return {"GET": f"List{many}", "POST": f"Create{one}"}.get(http_method)
    return {"GET": f"Get{one}", "DELETE": f"Delete{one}", "PATCH": f"Update{one}"}.get(http_method)
