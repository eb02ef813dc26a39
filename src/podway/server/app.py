"""The HTTP face: a Starlette application over the table of routes.

Each request is authenticated by its bearer token, decoded strictly, handed to its function in a thread, and encoded. A UserError
becomes its status with `{"error": {what, hint}}`; anything else is logged and answered as a 500 that names the log.
"""

import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute

from podway.decoding import json_decoder
from podway.errors import ProviderError, UserError
from podway.extras import explain
from podway.server import api, openapi
from podway.server.routes import ROUTES, Call, Caller, Route, Services
from podway.server.streams import Streams

log = logging.getLogger("podway.server")
MOST_BODY = 64 << 20  # a launch body carries manifests' names only; contents go as packs
encode = msgspec.json.Encoder().encode

Endpoint = Callable[[Request], Awaitable[Response]]


def make_app(services: Services, streams: Streams) -> Starlette:
    """All routes, with one error boundary around each."""

    async def show_openapi(request: Request) -> Response:
        return _json(openapi.document())

    async def health(request: Request) -> Response:
        return _json({"status": "ok"})

    routes = [StarletteRoute(row.path, _endpoint(services, row), methods=[row.method]) for row in ROUTES]
    routes += [
        StarletteRoute(path, _guarded(services, function), methods=[method])
        for method, path, function in streams.table()
    ]
    routes += [StarletteRoute("/openapi.json", show_openapi), StarletteRoute("/healthz", health)]
    handlers: dict[Any, Any] = {HTTPException: _http_error}
    return Starlette(routes=routes, exception_handlers=handlers)


def _endpoint(services: Services, row: Route) -> Endpoint:
    decoder: msgspec.json.Decoder[Any] | None = json_decoder(row.body) if row.body is not None else None

    async def handle(request: Request, caller: Caller) -> Response:
        if row.admin and not caller.admin:
            raise UserError(f"{caller.user} may not do this", "ask an administrator of this server", status=403)
        body = decoder.decode(await _read(request)) if decoder is not None else None
        call = Call(
            services=services,
            caller=caller,
            path=dict(request.path_params),
            query=dict(request.query_params),
            body=body,
        )
        return _json(await run_in_threadpool(row.function, call))

    return _guarded(services, handle)


def _guarded(services: Services, handle: Callable[[Request, Caller], Awaitable[Response]]) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        try:
            return await handle(request, await run_in_threadpool(_authenticate, services, request))
        except UserError as error:
            return _error(error.status, error.what, error.hint)
        except msgspec.ValidationError as error:
            return _error(400, f"the request body is not right: {error}", "see /openapi.json for its fields")
        except (msgspec.DecodeError, UnicodeError) as error:
            return _error(400, f"the request body is not JSON: {error}", "send a JSON object")
        except ProviderError as error:
            return _error(503, str(error), "try again in a moment")
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception as error:
            known = explain(error, "this request", where="on the server")
            if known is not None:
                return _error(501, known.what, known.hint)
            log.exception("%s %s", request.method, request.url.path)
            return _error(500, "Podway itself failed", "the server's log tells more: podway server logs")

    return endpoint


async def _read(request: Request) -> bytes:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MOST_BODY:
            raise UserError("the request body is too large", f"at most {MOST_BODY >> 20} MiB", status=413)
    return bytes(data)


def _authenticate(services: Services, request: Request) -> Caller:
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not token:
        raise UserError("this server wants a token", "run: podway login URL", status=401)
    if hmac.compare_digest(token.encode("utf-8", "replace"), services.local_token.encode()):
        return Caller(user=services.local_user, admin=True)
    known = services.store.user_of(token)
    if known is None:
        raise UserError("this token is not known here", "ask for a new one, then: podway login URL", status=401)
    return Caller(user=known[0], admin=known[1])


async def _http_error(request: Request, error: HTTPException) -> Response:
    if error.status_code == 404:
        return _error(404, f"there is nothing at {request.url.path}", "see /openapi.json")
    if error.status_code == 405:
        return _error(405, f"{request.method} is not for {request.url.path}", "see /openapi.json")
    return _error(error.status_code, str(error.detail), "")


def _json(value: Any, status: int = 200) -> Response:
    return Response(encode(value), status_code=status, media_type="application/json")


def _error(status: int, what: str, hint: str) -> Response:
    return _json(api.ErrorReply(error=api.ErrorView(what=what, hint=hint)), status)
