"""The OpenAPI document, made from the table of routes: it cannot say anything the server does not do."""

from typing import Any

import msgspec

from podway.server import api
from podway.server.routes import ROUTES
from podway.server.routing import Route, Stream
from podway.version import __version__

_QUERY: dict[type, dict[str, Any]] = {
    int: {"type": "integer", "minimum": 0},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
}


def document() -> dict[str, Any]:
    """The whole document."""
    types = {kind for route in ROUTES for kind in (_record(route.reply), _record(route.body)) if kind is not None}
    ordered = sorted(types | {api.ErrorReply}, key=lambda kind: kind.__name__)
    _, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Podway", "version": __version__, "license": {"name": "Apache-2.0"}},
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _record(kind: type | Stream | None) -> type | None:
    return kind.lines if isinstance(kind, Stream) else kind


def _operation(route: Route) -> dict[str, Any]:
    names = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    path = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    query = [
        {"name": name, "in": "query", "required": False, "schema": _QUERY[kind]} for name, kind in route.query.items()
    ]
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": route.function.__name__,
        "description": (route.function.__doc__ or "").strip(),
        "parameters": path + query,
        "responses": {
            "200": {"description": "Done", "content": _content(route.reply)},
            "default": {"description": "What went wrong, and what to do", "content": _content(api.ErrorReply)},
        },
    }
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _content(route.body)}
    return operation


def _content(kind: type | Stream) -> dict[str, Any]:
    record = _record(kind)
    schema = {"schema": {"$ref": f"#/components/schemas/{record.__name__}"}} if record is not None else {}
    return {kind.media_type if isinstance(kind, Stream) else "application/json": schema}
