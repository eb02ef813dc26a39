"""The HTTP face: a Starlette application over the table of routes.

Each request is authenticated by its bearer token (from memory), authorised by what its route says, decoded strictly, handed to its
function where that is to run, and encoded; a change is written into the audit log, whether it was allowed or not. A UserError
becomes its status with `{"error": {what, hint, code}}`; anything else is logged and answered as a 500 that names the log.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute

from podway.control.access import Caller
from podway.control.people import AuditEntry, token_digest
from podway.control.store import is_full
from podway.decoding import json_decoder
from podway.errors import ProviderError, UserError
from podway.home import unwritable
from podway.launch_options import LaunchRequest
from podway.server import api, openapi
from podway.server.connection import OTHER_VERSION
from podway.server.page import PageServer
from podway.server.routes import ROUTES
from podway.server.routing import ApiCall, Route, Services, Stream, read_query
from podway.server.service_api import ApplyBody
from podway.server.sessions import CSRF_HEADER, OTHER_SESSION, cookie_name, csrf_matches
from podway.terminal import visible
from podway.version import __version__

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
    page = PageServer(services.sessions)
    routes += [
        StarletteRoute("/", page.root),
        StarletteRoute("/login", page.login),
        StarletteRoute("/page/{path:path}", page.file),
    ]
    handlers: dict[Any, Any] = {HTTPException: _http_error}
    return Starlette(routes=routes, exception_handlers=handlers)


def _endpoint(services: Services, row: Route) -> Endpoint:
    typed = row.body is not None and not isinstance(row.body, Stream)
    decoder: msgspec.json.Decoder[Any] | None = json_decoder(row.body) if typed else None  # type: ignore[arg-type]

    async def answer(request: Request) -> Response:
        call = ApiCall(
            services=services,
            caller=request.state.caller,
            path=dict(request.path_params),
            query=read_query(row, dict(request.query_params)),
            request=request,
        )
        call = await row.authorise(call)
        if decoder is not None:
            call = msgspec.structs.replace(call, body=decoder.decode(await _read(request)))
            request.state.body = call.body
        result = await row.run(call)
        return result if isinstance(result, Response) else _json(result)

    async def endpoint(request: Request) -> Response:
        try:
            _check_version(request)
            request.state.caller = await _authenticate(services, request)
        except UserError as error:
            return _error(error.status, error.what, error.hint, error.code or "")
        response = await _guarded(answer)(request)
        if row.audited:
            await _record(services, row, request, response.status_code)
        return response

    return endpoint


async def _record(services: Services, row: Route, request: Request, status: int) -> None:
    """In the audit log: who, what, on which cluster or person, and how it was answered."""
    caller: Caller = request.state.caller
    body = getattr(request.state, "body", None)
    named = [str(value) for value in request.path_params.values()]
    if isinstance(body, ApplyBody):
        body = body.request
    if isinstance(body, LaunchRequest):
        named.append(body.options.cluster or (body.task.service and body.task.name) or "")
    elif isinstance(body, api.TokenBody):
        named.append(body.user)
    entry = AuditEntry(
        time=time.time(),
        user=caller.user,
        token=caller.token,
        address=request.client.host if request.client else "",
        action=row.function.__name__,
        target=" ".join(named)[:200],
        status=status,
    )
    try:
        await asyncio.get_running_loop().run_in_executor(services.quick, services.store.people.record, entry)
    except Exception as error:  # what was done is done, and the answer says so; the log has what the database has not
        if _why_unwritten(error) is None:
            raise
        log.error("not in the audit log, which cannot be written: %s", entry)


def _guarded(answer: Endpoint) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        try:
            return await answer(request)
        except UserError as error:
            return _error(error.status, error.what, error.hint, error.code or "")
        except msgspec.ValidationError as error:
            told = request.headers.get(api.VERSION_HEADER, "").partition(" ")[2][:40]
            hint = f"this server is Podway {__version__}, the command {told}: install the same" if told else ""
            same = told in ("", __version__)
            return _error(
                400, f"the request body is not right: {error}", "see /openapi.json for its fields" if same else hint
            )
        except (msgspec.DecodeError, UnicodeError) as error:
            return _error(400, f"the request body is not JSON: {error}", "send a JSON object")
        except ProviderError as error:
            return _error(503, str(error), "try again in a moment", "provider_failed")
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception as error:
            if (refusal := _why_unwritten(error)) is not None:
                log.warning("%s %s: %s", request.method, visible(request.url.path), refusal.what)
                return _error(refusal.status, refusal.what, refusal.hint)
            log.exception("%s %s", request.method, visible(request.url.path))  # which may hold anything
            return _error(500, "Podway itself failed", "the server's log tells more: podway server logs")

    return endpoint


def _why_unwritten(error: Exception) -> UserError | None:
    """What a full or read-only disk of the server means to a person; None for other errors."""
    if isinstance(error, OSError):
        return unwritable(error)
    what = "the server cannot write to its database: its disk is full or read-only"
    return UserError(what, "ask its administrator to make room", status=507) if is_full(error) else None


async def _read(request: Request) -> bytes:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MOST_BODY:
            raise UserError("the request body is too large", f"at most {MOST_BODY >> 20} MiB", status=413)
    return bytes(data)


def _check_version(request: Request) -> None:
    """Commands tell which API they speak. Others (the page, programs that read /openapi.json) need not."""
    told, version = request.headers.get(api.VERSION_HEADER), f"Podway {__version__}"
    if told is None or request.url.path == "/v1/info":  # which tells both sides what the other is
        return
    number, _, other = told[:60].partition(" ")
    if number != str(api.VERSION):
        newer = number.isascii() and number.isdigit() and int(number) > api.VERSION
        what = f"this server is {version}, and the command is of a{' newer' if newer else 'n older'} one, {other}"
        hint = "upgrade the server" if newer else f"upgrade the command: pip install podway=={__version__}"
        raise UserError(what, hint, status=426, code=OTHER_VERSION)


async def _authenticate(services: Services, request: Request) -> Caller:
    cookie = request.cookies.get(cookie_name(request.headers.get("host", "")))
    if "authorization" not in request.headers and cookie is not None:
        return _session_caller(services, request, cookie)
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not token:
        raise UserError("token required", "run: podway login URL", status=401)
    request.state.token_digest = token_digest(token)
    return await services.tokens.caller(token)


def _session_caller(services: Services, request: Request, cookie: str) -> Caller:
    """Whoever holds the token that the session was opened with; changes must come from the page itself."""
    session = services.sessions.find(cookie)
    if session is None:
        raise UserError("the session has ended", "open the page again with: podway ui", status=401)
    if request.method not in ("GET", "HEAD") and not csrf_matches(session, request.headers.get(CSRF_HEADER)):
        what, hint = "the request does not come from the page", "reload the page, and try again"
        raise UserError(what, hint, status=403, code=OTHER_SESSION)
    request.state.csrf = session.csrf
    return services.tokens.holder(session.token_digest)


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
