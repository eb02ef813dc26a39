"""From an HTTP request of Kubernetes Engine to what it asks for. Bodies are read by Google's own messages, which know every field."""

from collections.abc import Callable

from podway.sandbox.container.node_pools import NodePools
from podway.sandbox.faults import Call
from podway.sandbox.jsons import JsonObject
from podway.sandbox.status import ApiError, invalid

Do = Callable[[float, ApiError | None], JsonObject]


def is_container(pools: NodePools, path: str) -> bool:
    """Whether it is for this API, and not another one under /v1."""
    parts = path.strip("/").split("/")
    return parts[0] == "v1" and (parts[5:6] == ["clusters"] or pools.has_operation("/".join(parts[1:])))


def container_route(pools: NodePools, method: str, path: str, body: object) -> tuple[Call, Do]:
    """What rules of faults see of a request, and how to do it."""
    parts = path.strip("/").split("/")[1:]
    name, zone = "/".join(parts), parts[3]
    if body is not None and not isinstance(body, dict):
        raise invalid("The body must be an object.")
    fields: JsonObject = body or {}
    match method, parts[4:]:
        case "GET", ["operations", one]:
            return _call("GetOperation", zone, one), lambda now, failure: pools.operation(name)
        case "POST", ["clusters"]:
            parent = "/".join(parts[:4])
            return _call("CreateCluster", zone), lambda now, failure: pools.create_cluster(parent, fields, now)
        case "GET", ["clusters", cluster, "nodePools"]:
            return _call("ListNodePools", zone, cluster), lambda now, failure: pools.list("/".join(parts[:6]))
        case "POST", ["clusters", cluster, "nodePools"]:
            pool = _pool(fields)
            return (
                _call("CreateNodePool", zone, str(pool.get("name", ""))),
                lambda now, failure: pools.create("/".join(parts[:6]), pool, now, failure),
            )
        case "GET", ["clusters", _, "nodePools", one]:
            return _call("GetNodePool", zone, one), lambda now, failure: pools.get(name)
        case "DELETE", ["clusters", _, "nodePools", one]:
            return _call("DeleteNodePool", zone, one), lambda now, failure: pools.delete(name, now)
    raise ApiError("NOT_FOUND", f"The requested URL {path} was not found on this server.")


def _call(method: str, zone: str, name: str = "") -> Call:
    return Call(service="container", method=method, zone=zone, name=name)


def _pool(fields: JsonObject) -> JsonObject:
    from google.cloud import container_v1  # a second of CPU: only who asks for node pools waits for it
    from google.protobuf import json_format

    message = container_v1.CreateNodePoolRequest.pb(container_v1.CreateNodePoolRequest())
    try:
        json_format.ParseDict(fields, message)
    except json_format.ParseError as error:
        raise invalid(f"Invalid JSON payload received. {error}") from None
    found: JsonObject = json_format.MessageToDict(message.node_pool)
    return found
