"""The OpenAPI document, made from the table of routes: it cannot say anything the server does not do."""

from typing import Any

import msgspec

from podway.server import api
from podway.server.routes import ROUTES, Route
from podway.version import __version__

STREAMS: dict[str, dict[str, Any]] = {
    "/v1/clusters/{cluster}/jobs/{job}/watch": {
        "get": {
            "summary": "Follow a job: its progress, its log lines, its end",
            "operationId": "watch",
            "parameters": [
                {"name": name, "in": "query", "required": False, "schema": schema}
                for name, schema in (
                    ("follow", {"type": "boolean"}),
                    ("tail", {"type": "integer", "minimum": 0}),
                    ("rank", {"type": "integer", "minimum": 0}),
                    ("raw", {"type": "boolean"}),
                    ("colour", {"type": "boolean"}),
                    ("timestamps", {"type": "boolean"}),
                    ("cursor", {"type": "string"}),
                    ("event", {"type": "integer", "minimum": 0}),
                )
            ],
            "responses": {
                "200": {
                    "description": "One JSON object a line",
                    "content": {"application/x-ndjson": {"schema": {"$ref": "#/components/schemas/Frame"}}},
                }
            },
        }
    },
    "/v1/clusters/{cluster}/jobs/{job}/output": {
        "get": {
            "summary": "The raw bytes one rank wrote in one phase",
            "operationId": "output",
            "parameters": [
                {"name": "rank", "in": "query", "required": True, "schema": {"type": "integer", "minimum": 0}},
                {"name": "phase", "in": "query", "required": True, "schema": {"enum": ["setup", "run"]}},
            ],
            "responses": {"200": {"description": "Bytes", "content": {"application/octet-stream": {}}}},
        }
    },
    "/v1/files": {
        "post": {
            "summary": "Upload contents, as a pack",
            "operationId": "files",
            "requestBody": {"required": True, "content": {"application/octet-stream": {}}},
            "responses": {
                "200": {
                    "description": "What is still missing of nothing: always empty",
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/DigestsReply"}}},
                }
            },
        }
    },
}


def document() -> dict[str, Any]:
    """The whole document."""
    types = (
        {route.reply for route in ROUTES} | {route.body for route in ROUTES if route.body} | {api.ErrorReply, api.Frame}
    )
    ordered = sorted(types, key=lambda kind: kind.__name__)
    _, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {
        path: {k: _with_path(path, v) for k, v in verbs.items()} for path, verbs in STREAMS.items()
    }
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


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": route.function.__name__,
        "description": (route.function.__doc__ or "").strip(),
        "responses": {
            "200": _json("Done", route.reply.__name__),
            "default": _json("What went wrong, and what to do", "ErrorReply"),
        },
    }
    operation = _with_path(route.path, operation)
    for name, kind in route.query.items():
        schema = {"type": {int: "integer", float: "number", str: "string"}[kind]}
        operation["parameters"].append({"name": name, "in": "query", "required": False, "schema": schema})
    if route.body is not None:
        operation["requestBody"] = {"required": True, **_json("", route.body.__name__)}
        del operation["requestBody"]["description"]
    return operation


def _with_path(path: str, operation: dict[str, Any]) -> dict[str, Any]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    here = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    responses = {"default": _json("What went wrong, and what to do", "ErrorReply")} | operation["responses"]
    return operation | {"parameters": here + operation.get("parameters", []), "responses": responses}


def _json(description: str, name: str) -> dict[str, Any]:
    return {
        "description": description,
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}},
    }
