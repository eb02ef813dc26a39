"""HTTP: one address for the Cloud TPU API, Compute Engine, Kubernetes Engine, Cloud Storage, Service Usage, projects, and the
sandbox's own commands.

Who may ask is checked first (access.py). Then a request finds its part by its path, which answers a Starlette response or raises; an
error becomes Google's JSON, and a connection that a fault wants dropped is closed.
"""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from podway.sandbox.access import OWNER, check_json, check_origin
from podway.sandbox.commands import Commands
from podway.sandbox.compute.resources import compute_error
from podway.sandbox.container.routes import is_container
from podway.sandbox.faults import Call
from podway.sandbox.jsons import JsonObject
from podway.sandbox.names import project_number
from podway.sandbox.sandbox import Dropped, Sandbox
from podway.sandbox.service_usage import list_metrics
from podway.sandbox.status import ApiError, invalid
from podway.sandbox.storage.api import storage_error
from podway.sandbox.tpu.routes import route
from podway.sandbox.tpu.schema import as_numbers, descriptor_of, message_type

Part = Callable[[Request], Awaitable[Response]]


class Connection(H11Protocol):
    """uvicorn's own, which lets a request have its connection closed without an answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        app = self.app

        async def with_transport(scope: Scope, receive: Receive, send: Send) -> None:
            scope["podway.transport"] = transport
            await app(scope, receive, send)

        self.app = with_transport


def answer(value: object, status: int = 200) -> Response:
    """JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json; charset=UTF-8")


async def body_of(request: Request) -> object:
    """The JSON of a request."""
    text = await request.body()
    if not text.strip():
        return None
    try:
        value: object = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise invalid(f"Invalid JSON payload received: {error}") from None
    return value


class Web:
    """The application."""

    def __init__(self, sandbox: Sandbox, *, inside: bool = False) -> None:
        """`inside` is for listeners that only the sandbox's own hosts can reach: their storage clients need no token."""
        self._sandbox, self._inside = sandbox, inside
        self._commands = Commands(sandbox)
        # By the beginning of the path; the first that fits.
        self._parts: list[tuple[str, Part]] = [
            ("/sandbox", self._command),
            ("/compute/v1/", self._compute),
            ("/storage/v1/", self._storage),
            ("/upload/storage/v1/", self._storage),
            ("/resumable/upload/storage/v1/", self._storage),  # as gcloud calls it
            ("/download/storage/v1/", self._storage),
            ("/v1beta1/", self._service_usage),
            ("/v", self._google),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "lifespan":
            return
        request = Request(scope, receive)
        try:
            self._admit(request)
            response = await self._part(request)(request)
        except ApiError as error:
            response = answer(error.as_http(), error.http_code)
        except Dropped:
            scope["podway.transport"].abort()
            return
        await response(scope, receive, send)

    def _admit(self, request: Request) -> None:
        """Refuse those who may not ask."""
        path, headers = request.url.path, request.headers
        check_origin(headers)
        upload = path.startswith(("/upload/", "/resumable/"))
        if not upload:
            check_json(headers)
        # As on Cloud Storage, whoever knows a session's address may upload to it.
        elif self._sandbox.storage.has_session(request.query_params.get("upload_id", "")):
            return
        if self._inside and "authorization" not in headers and self._part(request) == self._storage:
            return
        caller = self._sandbox.access.caller(headers.get("authorization", ""))
        if caller != OWNER and self._part(request) == self._command:
            raise ApiError("PERMISSION_DENIED", "Hosts may not command the sandbox.")

    def _part(self, request: Request) -> Part:
        for start, part in self._parts:
            if request.url.path.startswith(start):
                return part
        raise ApiError("NOT_FOUND", f"The requested URL {request.url.path} was not found on this server.")

    async def _command(self, request: Request) -> Response:
        done = await self._commands.run(
            request.method, request.url.path, dict(request.query_params), await body_of(request)
        )
        return answer(done)

    async def _compute(self, request: Request) -> Response:
        query = dict(request.query_params)
        try:
            return answer(await self._sandbox.compute(request.method, request.url.path, query, await body_of(request)))
        except ApiError as error:
            return answer(compute_error(error), error.http_code)

    async def _storage(self, request: Request) -> Response:
        try:
            call, act = self._sandbox.storage.route(request)

            async def do(_: ApiError | None) -> Response:
                if project := request.query_params.get("project"):
                    self._sandbox.projects.check("storage", project, call.method)
                return await act()

            return await self._sandbox.guarded(call, do)
        except ApiError as error:
            return storage_error(error)

    async def _google(self, request: Request) -> Response:
        """The Cloud TPU API; and under /v1 alone Kubernetes Engine, and the project itself (Cloud Resource Manager)."""
        path = request.url.path
        if is_container(self._sandbox.world.node_pools, path):
            return answer(await self._sandbox.container(request.method, path, await body_of(request)))
        parts = path.strip("/").split("/")
        if parts[:2] == ["v1", "projects"] and len(parts) < 4 and request.method == "GET":
            return await self._project(parts[2]) if parts[2:] else await self._list_projects()
        asked = route(request.method, path, dict(request.query_params), await body_of(request))
        shown: object = await self._sandbox.tpu(asked.version, asked.method, asked.fields)
        wants = request.query_params.get("$alt", "")
        kind = {"GetNode": "Node", "ListNodes": "ListNodesResponse", "GetQueuedResource": "QueuedResource"}
        kind["ListQueuedResources"] = "ListQueuedResourcesResponse"
        if "enum-encoding=int" in wants and asked.method in kind and asked.version != "v1":
            shown = as_numbers(descriptor_of(message_type(asked.version, kind[asked.method])), shown)
        return answer(shown)

    async def _service_usage(self, request: Request) -> Response:
        """projects/P/services/S/consumerQuotaMetrics, and nothing else."""
        match request.url.path.strip("/").split("/")[1:]:
            case ["projects", project, "services", service, "consumerQuotaMetrics"] if request.method == "GET":
                call = Call(service="serviceusage", method="ListConsumerQuotaMetrics", name=project)
            case _:
                raise ApiError("NOT_FOUND", f"The requested URL {request.url.path} was not found on this server.")

        async def do(_: ApiError | None) -> Response:
            query = dict(request.query_params)
            self._sandbox.projects.check("serviceusage", project, call.method)
            return answer(list_metrics(self._sandbox.world.capacity, project, service, query))

        return await self._sandbox.guarded(call, do)

    async def _project(self, project: str) -> Response:
        call = Call(service="cloudresourcemanager", method="GetProject", name=project)

        async def do(_: ApiError | None) -> Response:
            self._sandbox.projects.check("cloudresourcemanager", project, call.method)
            return answer(_project_view(project))

        return await self._sandbox.guarded(call, do)

    async def _list_projects(self) -> Response:
        async def do(_: ApiError | None) -> Response:
            return answer({"projects": [_project_view(name) for name in self._sandbox.projects.usable()]})

        return await self._sandbox.guarded(Call(service="cloudresourcemanager", method="ListProjects"), do)


def _project_view(project: str) -> JsonObject:
    number = project_number(project)
    return {"projectId": project, "projectNumber": number, "name": project, "lifecycleState": "ACTIVE"}
