"""The OpenAPI document of the server: paths here, schemas of bodies from their records.

What a record leaves open because it is checked later, in words that a person can use (a prompt in one of four forms, messages,
how many choices), is written out here.
"""

from functools import cache
from typing import Any

import msgspec

from podway.serve.admission import ROLES
from podway.serve.openai import (
    MAX_CHOICES,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    LoadAdapterBody,
    TokenizeBody,
    UnloadAdapterBody,
)
from podway.serve.responses_api import ResponsesBody
from podway.version import __version__

_POSTS: dict[str, tuple[type[Any], str]] = {
    "/v1/completions": (CompletionBody, "Continue a text."),
    "/v1/chat/completions": (ChatBody, "Answer a conversation."),
    "/v1/responses": (ResponsesBody, "Answer items of a conversation."),
    "/tokenize": (TokenizeBody, "The tokens of a text or a conversation."),
    "/detokenize": (DetokenizeBody, "The text of tokens."),
    "/v1/load_lora_adapter": (LoadAdapterBody, "Load a LoRA adapter."),
    "/v1/unload_lora_adapter": (UnloadAdapterBody, "Unload a LoRA adapter."),
}
_GETS = {
    "/v1/models": "The model of this server and its adapters.",
    "/tokenizer_info": "What is known of the tokenizer.",
    "/health": "200 when it is ready, 503 before.",
    "/metrics": "Numbers for Prometheus.",
    "/version": "The version of Podway.",
}
_STREAMS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
_PROMPT = {"anyOf": [_TEXT, _IDS, *({"type": "array", "items": one, "minItems": 1} for one in (_TEXT, _IDS))]}
_MESSAGE = {
    "type": "object", "required": ["role", "content"],
    "properties": {"role": {"enum": list(ROLES)}, "content": {"type": "string"}},
}  # fmt: skip
_ERROR = {
    "type": "object", "required": ["error"],
    "properties": {"error": {
        "type": "object", "required": ["message", "type", "param", "code"],
        "properties": {"message": {"type": "string"}, "type": {"type": "string"},
                       "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]}},
    }},
}  # fmt: skip
_BOUNDS: dict[str, dict[str, Any]] = {
    "temperature": {"minimum": 0, "maximum": 100}, "top_p": {"minimum": 0, "maximum": 1}, "min_p": {"minimum": 0, "maximum": 1},
    "presence_penalty": {"minimum": -2, "maximum": 2}, "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"minimum": 0.01, "maximum": 100}, "n": {"minimum": 1, "maximum": MAX_CHOICES},
    "max_tokens": {"minimum": 0}, "max_completion_tokens": {"minimum": 0}, "min_tokens": {"minimum": 0},
    "top_k": {"minimum": -1}, "top_logprobs": {"minimum": 0, "maximum": 20},
}  # fmt: skip


@cache
def document() -> dict[str, Any]:
    """The whole document."""
    kinds = [kind for kind, _ in _POSTS.values()]
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for kind in kinds:
        _write_out(components[kind.__name__])
    components["Error"] = _ERROR
    paths: dict[str, Any] = {}
    for (path, (_, text)), schema in zip(_POSTS.items(), schemas, strict=True):
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        media = "text/plain" if path.endswith("lora_adapter") else "application/json"
        answers = _answers(media, ("400", "401", "403", "404", "413", "429", "503"))
        if path in _STREAMS:
            # Events of /v1/responses have names, those of the others are data alone.
            event = {"type": "object"} if path == "/v1/responses" else {"type": "string"}
            answers["200"]["content"]["text/event-stream"] = {"schema": event}
        paths[path] = {"post": {"summary": text, "requestBody": body, "responses": answers}}
    for path, text in _GETS.items():
        content = "text/plain" if path == "/metrics" else "application/json"
        paths[path] = {"get": {"summary": text, "responses": _answers(content, ("401",))}}
    paths["/health"] = {"get": {"summary": _GETS["/health"], "responses": {
        "200": {"description": "ready"},
        "503": {"description": "not yet", "content": {"application/json": {"schema": {"type": "object"}}}},
    }}}  # fmt: skip
    info = {"title": "Podway serving", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}


def _answers(kind: str, refusals: tuple[str, ...]) -> dict[str, Any]:
    shape = {"type": "string"} if kind == "text/plain" else {"type": "object"}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    refused = {status: {"description": "refused; the body says why", "content": error} for status in refusals}
    return {"200": {"description": "done", "content": {kind: {"schema": shape}}}, **refused}


def _write_out(schema: dict[str, Any]) -> None:
    """The constraints that are checked after a body was read."""
    fields = schema["properties"]
    for name in fields.keys() & _BOUNDS.keys():
        kind = {"type": "integer"} if "integer" in str(fields[name]) else {"type": "number"}
        fields[name] = {"anyOf": [{**kind, **_BOUNDS[name]}, {"type": "null"}]}
    if schema["title"] == "CompletionBody":
        fields["prompt"] = _PROMPT
        schema["required"] = [*schema["required"], "prompt"]
    if "messages" in fields:
        some = {"type": "array", "items": _MESSAGE, "minItems": 1}
        fields["messages"] = some if schema["title"] == "ChatBody" else {"anyOf": [some, {"type": "null"}]}
