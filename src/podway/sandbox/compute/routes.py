"""From an HTTP request of Compute Engine to what it asks for; methods are called as Google's reference calls them."""

from collections.abc import Callable

from podway.sandbox.compute.resources import COLLECTIONS, Compute
from podway.sandbox.faults import Call
from podway.sandbox.jsons import JsonObject
from podway.sandbox.status import ApiError, invalid

Do = Callable[[float, ApiError | None], JsonObject]
_POWER = {"start": True, "stop": False}


def compute_route(
    compute: Compute,
    disk_users: Callable[[str], list[str]],
    method: str,
    path: str,
    query: dict[str, str],
    body: object,
) -> tuple[Call, Do]:
    """What rules of faults see of a request, and how to do it."""
    inner = path.removeprefix("/compute/v1/").strip("/")
    parts = inner.split("/")
    if parts[0] != "projects" or len(parts) < 2:
        raise _unknown(path)
    if body is not None and not isinstance(body, dict):
        raise invalid("The body must be an object.")
    if parts[2:] in ([], ["setCommonInstanceMetadata"]):
        return _project(compute, parts[1], method, bool(parts[2:]), body, path)
    if parts[2] == "aggregated" and parts[3:] and parts[3] in COLLECTIONS and method == "GET":
        return _call(parts[3], "aggregatedList"), lambda now, failure: compute.aggregated(parts[1], parts[3], query)
    if parts[2] in ("zones", "regions") and len(parts) < 5:
        return _place(compute, parts, method, path)
    depth = 3 if parts[2] == "global" else 4
    parent, rest = "/".join(parts[:depth]), parts[depth:]
    zone = parts[3] if parts[2] == "zones" else ""
    if rest and rest[0] == "operations" and len(rest) in (2, 3):
        name = f"{parent}/operations/{rest[1]}"
        return _call("operations", "wait" if len(rest) == 3 else "get", zone), lambda now, failure: compute.operation(
            name
        )
    if not rest or rest[0] not in COLLECTIONS:
        raise _unknown(path)
    if len(rest) == 1:
        return _collection(compute, parent, rest[0], zone, method, query, body or {}, path)
    return _resource(compute, disk_users, parent, rest, zone, method, body or {}, path)


def _project(
    compute: Compute, project: str, method: str, setting: bool, body: JsonObject | None, path: str
) -> tuple[Call, Do]:
    if setting and method == "POST":
        call = _call("projects", "setCommonInstanceMetadata", name=project)
        return call, lambda now, failure: compute.set_metadata(project, body or {}, now)
    if method == "GET":
        return _call("projects", "get", name=project), lambda now, failure: compute.project(project)
    raise _unknown(path)


def _place(compute: Compute, parts: list[str], method: str, path: str) -> tuple[Call, Do]:
    if method != "GET":
        raise _unknown(path)
    if len(parts) == 3:
        return _call(parts[2], "list"), lambda now, failure: compute.places(parts[1], parts[2])
    return _call(parts[2], "get", name=parts[3]), lambda now, failure: compute.place(parts[1], parts[2], parts[3])


def _collection(
    compute: Compute,
    parent: str,
    collection: str,
    zone: str,
    method: str,
    query: dict[str, str],
    body: JsonObject,
    path: str,
) -> tuple[Call, Do]:
    if method == "GET":
        return _call(collection, "list", zone), lambda now, failure: compute.list_of(parent, collection, query)
    if method == "POST":
        call = _call(collection, "insert", zone, str(body.get("name", "")))
        return call, lambda now, failure: compute.insert(parent, collection, body, now, failure)
    raise _unknown(path)


def _resource(
    compute: Compute,
    disk_users: Callable[[str], list[str]],
    parent: str,
    rest: list[str],
    zone: str,
    method: str,
    body: JsonObject,
    path: str,
) -> tuple[Call, Do]:
    collection, name, verb = rest[0], rest[1], rest[2] if len(rest) > 2 else ""
    about = f"{parent}/{collection}/{name}"
    if method == "GET" and not verb:
        return _call(collection, "get", zone, name), lambda now, failure: compute.get(about)
    if method == "DELETE" and not verb:
        call = _call(collection, "delete", zone, name)
        return call, lambda now, failure: compute.delete(about, now, failure, disk_users(about))
    if method in ("PATCH", "PUT") and not verb:
        return _call(collection, "patch", zone, name), lambda now, failure: compute.patch(about, body, now, failure)
    if method == "POST" and collection == "instances" and verb in _POWER:
        call = _call(collection, verb, zone, name)
        return call, lambda now, failure: compute.power(about, _POWER[verb], now, failure)
    if method == "POST" and collection == "instances" and verb == "setMetadata":
        call = _call(collection, verb, zone, name)
        return call, lambda now, failure: compute.set_instance_metadata(about, body, now)
    raise _unknown(path)


def _call(collection: str, verb: str, zone: str = "", name: str = "") -> Call:
    return Call(service="compute", method=f"{collection}.{verb}", zone=zone, name=name)


def _unknown(path: str) -> ApiError:
    return ApiError("NOT_FOUND", f"The requested URL {path} was not found on this server.")
