"""The metadata server that a machine on Google Cloud finds at 169.254.169.254: who it is, and a token for its account.

Paths and values are those that a TPU VM shows and that JAX, libtpu and Google's clients read. Without the header
`Metadata-Flavor: Google` nothing is told, as there.
"""

import asyncio
from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from podway.sandbox.access import check_origin
from podway.sandbox.jsons import JsonObject
from podway.sandbox.names import project_number
from podway.sandbox.status import ApiError
from podway.sandbox.tpu.nodes import Node

LONGEST_WAIT_S = 30.0
ROOT = "/computeMetadata/v1"


class Metadata:
    """The ASGI application of one machine; `tree` is called for each request."""

    def __init__(self, tree: Callable[[], JsonObject]) -> None:
        self._tree = tree

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        await (await self._answer(Request(scope, receive)))(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        headers = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}
        path = request.url.path
        try:
            check_origin(request.headers, "metadata", "metadata.google.internal")
        except ApiError as error:
            return Response(f"{error.message}\n", 403, headers)
        if "x-forwarded-for" in request.headers:  # as Google's: sent on by a proxy that was tricked
            return Response("X-Forwarded-For is refused.\n", 403, headers)
        if path in ("", "/"):
            return Response("computeMetadata/\n", headers=headers, media_type="application/text")
        if request.headers.get("metadata-flavor") != "Google":
            return Response("Missing Metadata-Flavor:Google header.\n", 403, headers)
        query = request.query_params
        if query.get("wait_for_change") == "true":
            await asyncio.sleep(min(float(query.get("timeout_sec") or LONGEST_WAIT_S), LONGEST_WAIT_S))
        found: object = self._tree()
        for part in path.removeprefix(ROOT).strip("/").split("/") if path.startswith(ROOT) else ["-"]:
            found = found if part == "" else found.get(part) if isinstance(found, dict) else None
        if found is None:
            return Response("not found\n", 404, headers)
        if query.get("recursive") == "true" or (isinstance(found, dict) and "access_token" in found):
            return Response(msgspec.json.encode(found), headers=headers, media_type="application/json")
        if isinstance(found, dict):
            found = "".join(f"{key}/\n" if isinstance(value, dict) else f"{key}\n" for key, value in found.items())
        return Response(str(found), headers=headers, media_type="application/text")


def metadata_tree(node: Node, worker: int, project_metadata: dict[str, str], token: str) -> JsonObject:
    """What one worker of a node is told."""
    project, zone, id = node.place
    host, number = node.hosts[worker], project_number(project)
    endpoints = ",".join(f"unknown:unknown:{one.address}" for one in node.hosts)
    environment = {
        "ACCELERATOR_TYPE": node.slice.accelerator_type,
        "CHIPS_PER_HOST_BOUNDS": {1: "1,1,1", 4: "2,2,1", 8: "2,4,1"}[node.slice.chips_per_host],
        "TOPOLOGY": node.slice.topology_text,
        "WORKER_ID": str(worker),
        "NODE_ID": id,
        "ZONE": zone,
        "CONSUMER_PROJECT_ID": project,
        "CONSUMER_PROJECT_NUMBER": number,
        "RUNTIME_VERSION": node.spec.get("runtimeVersion", ""),
        "TYPE": node.slice.generation.upper(),
    }
    attributes = {
        **(node.spec.get("metadata") or {}),
        "accelerator-type": node.slice.accelerator_type,
        "agent-worker-number": str(worker),
        "instance-id": id,
        "worker-network-endpoints": endpoints,
        "tpu-env": "".join(f"{key}: '{value}'\n" for key, value in environment.items()),
    }
    interface: JsonObject = {"ip": host.address}
    if (node.spec.get("networkConfig") or {}).get("enableExternalIps"):
        interface["access-configs"] = {"0": {"external-ip": host.external}}
    email = (node.spec.get("serviceAccount") or {}).get("email") or f"{number}-compute@developer.gserviceaccount.com"
    account = {
        "email": email,
        "scopes": "https://www.googleapis.com/auth/cloud-platform\n",
        "token": {"access_token": token, "expires_in": 3599, "token_type": "Bearer"},
        "aliases": "default\n",
    }
    instance = {
        "attributes": attributes,
        "id": f"{node.number}{worker}",
        "name": host.name,
        "hostname": f"{host.name}.{zone}.c.{project}.internal",
        "zone": f"projects/{number}/zones/{zone}",
        "preempted": "FALSE",
        "maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE" if node.maintenance else "NONE",
        "network-interfaces": {"0": interface},
        "service-accounts": {"default": account, email: account},
    }
    return {
        "instance": instance,
        "project": {"project-id": project, "numeric-project-id": number, "attributes": dict(project_metadata)},
    }
