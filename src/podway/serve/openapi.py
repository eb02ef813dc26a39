"""The OpenAPI document of the server: paths here, schemas of bodies from their records."""

from functools import cache
from typing import Any

import msgspec

from podway import __version__
from podway.serve.openai import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

_POSTS: dict[str, tuple[type[Any], str]] = {
    "/v1/completions": (CompletionBody, "Continue a text."),
    "/v1/chat/completions": (ChatBody, "Answer a conversation."),
    "/tokenize": (TokenizeBody, "The tokens of a text or a conversation."),
    "/detokenize": (DetokenizeBody, "The text of tokens."),
}
_GETS = {
    "/v1/models": "The model of this server.",
    "/tokenizer_info": "What is known of the tokenizer.",
    "/health": "200 when it is ready, 503 before.",
    "/metrics": "Numbers for Prometheus.",
    "/version": "The version of Podway.",
}


@cache
def document() -> dict[str, Any]:
    """The whole document."""
    kinds = [kind for kind, _ in _POSTS.values()]
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    error = {"description": "refused; the body says why"}
    answers = {"200": {"description": "done"}, "400": error, "401": error, "404": error, "413": error, "429": error,
               "503": error}  # fmt: skip
    paths: dict[str, Any] = {}
    for (path, (_, text)), schema in zip(_POSTS.items(), schemas, strict=True):
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": {"summary": text, "requestBody": body, "responses": answers}}
    for path, text in _GETS.items():
        paths[path] = {"get": {"summary": text, "responses": {k: answers[k] for k in ("200", "401", "503")}}}
    info = {"title": "Podway serving", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}
