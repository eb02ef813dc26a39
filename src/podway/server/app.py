"""The HTTP face: a Starlette application over the table of routes.

Each request is authenticated by its bearer token (from memory), decoded strictly, handed to its function where that is to run, and
encoded. A UserError becomes its status with `{"error": {what, hint}}`; anything else is logged and answered as a 500 that names the
log.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute

from podway.decoding import json_decoder
from podway.errors import ProviderError, UserError
from podway.server import api, openapi
from podway.server.routes import ROUTES
from podway.server.routing import ApiCall, Caller, Route, Services, Stream, read_query

log = logging.getLogger("podway.server")
MOST_BODY = 64 << 20  # a launch body carries manifests' names only; contents go as packs
encode = msgspec.json.Encoder().encode

Endpoint = Callable[[Request], Awaitable[Response]]


def make_app(services: Services) -> Starlette:
    """All routes, with one error boundary around each."""

    async def show_openapi(request: Request) -> Response:
        return _json(openapi.document())

    async def health(request: Request) -> Response:
        return _json({"status": "ok"})

    routes = [StarletteRoute(row.path, _endpoint(services, row), methods=[row.method]) for row in ROUTES]
    routes += [StarletteRoute("/openapi.json", show_openapi), StarletteRoute("/healthz", health)]
    handlers: dict[Any, Any] = {HTTPException: _http_error}
    return Starlette(routes=routes, exception_handlers=handlers)


def _endpoint(services: Services, row: Route) -> Endpoint:
    typed = row.body is not None and not isinstance(row.body, Stream)
    decoder: msgspec.json.Decoder[Any] | None = json_decoder(row.body) if typed else None  # type: ignore[arg-type]

    async def answer(request: Request) -> Response:
        caller = await _authenticate(services, request)
        if row.admin and not caller.admin:
            raise UserError(f"{caller.user} may not do this", "ask an administrator of this server", status=403)
        call = ApiCall(
            services=services,
            caller=caller,
            path=dict(request.path_params),
            query=read_query(row, dict(request.query_params)),
            body=decoder.decode(await _read(request)) if decoder is not None else None,
            request=request,
        )
        result = await row.run(call)
        return result if isinstance(result, Response) else _json(result)

    return _guarded(answer)


def _guarded(answer: Endpoint) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        try:
            return await answer(request)
        except UserError as error:
            return _error(error.status, error.what, error.hint, error.code or "")
        except msgspec.ValidationError as error:
            return _error(400, f"the request body is not right: {error}", "see /openapi.json for its fields")
        except (msgspec.DecodeError, UnicodeError) as error:
            return _error(400, f"the request body is not JSON: {error}", "send a JSON object")
        except ProviderError as error:
            return _error(503, str(error), "try again in a moment")
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception:
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


async def _authenticate(services: Services, request: Request) -> Caller:
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not token:
        raise UserError("token required", "run: podway login URL", status=401)
    known = await services.tokens.find(token)
    if known is None:
        raise UserError("this token is not known here", "ask for a new one, then: podway login URL", status=401)
    return Caller(user=known.user, admin=known.admin)


async def _http_error(request: Request, error: HTTPException) -> Response:
    if error.status_code == 404:
        return _error(404, f"there is nothing at {request.url.path}", "see /openapi.json")
    if error.status_code == 405:
        return _error(405, f"{request.url.path} has no {request.method}", "see /openapi.json")
    return _error(error.status_code, str(error.detail), "")


def _json(value: Any, status: int = 200) -> Response:
    return Response(encode(value), status_code=status, media_type="application/json")


def _error(status: int, what: str, hint: str, code: str = "") -> Response:
    return _json(api.ErrorReply(error=api.ErrorView(what=what, hint=hint, code=code)), status)
