"""The server: OpenAI's API over the engine's loop (Starlette).

A request is read (`openai.py`), becomes one `Answer` for each choice (`admission.py`), and is answered whole or as server-sent
events. If the client goes away, from the first byte on, its answers are cancelled and their pages are free at once. While programs
are being compiled, and while the server drains before its end, /health says 503 and so does everything that needs the engine.
"""

import asyncio
import hmac
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from podway import __version__
from podway.errors import UserError
from podway.serve.admission import AdmittedRequest, admit_chat, admit_completion, render_chat
from podway.serve.body_weight import MAX_WEIGHT, TOO_HEAVY, weight, weight_outside_strings
from podway.serve.chat_output import chat_events, whole_chat
from podway.serve.completion_output import completion_events, whole_completion
from podway.serve.openai import (
    B,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    JsonObject,
    LoadAdapterBody,
    RequestError,
    TokenizeBody,
    UnloadAdapterBody,
    error_body,
    read,
)
from podway.serve.openapi import document
from podway.serve.responses import gather
from podway.serve.responses_api import ResponsesBody, ResponseWriter, chat_body
from podway.serve.service import Service

MAX_BYTES = 8 << 20
MAX_TEXT = 4 << 20  # bytes that /tokenize takes
_LARGE = 4096  # tokens and alternatives of a response that is written in a thread
_OPEN = ("/health", "/ping", "/metrics", "/version", "/openapi.json")


def make_app(
    service: Service,
    keys: Sequence[str] = (),
    *,
    origins: Sequence[str] = (),
    access_log: Callable[[str], None] | None = None,
) -> Starlette:
    """The application; without keys everyone may ask. Web pages of these origins may ask from a browser."""
    routes = [
        Route("/v1/models", _models(service)),
        Route("/v1/models/{name:path}", _model(service)),
        Route("/v1/completions", _completions(service), methods=["POST"]),
        Route("/v1/chat/completions", _chat(service), methods=["POST"]),
        Route("/v1/responses", _responses(service), methods=["POST"]),
        Route("/v1/embeddings", _no_embeddings, methods=["POST"]),
        Route("/v1/load_lora_adapter", _load_adapter(service), methods=["POST"]),
        Route("/v1/unload_lora_adapter", _unload_adapter(service), methods=["POST"]),
        Route("/tokenize", _tokenize(service), methods=["POST"]),
        Route("/detokenize", _detokenize(service), methods=["POST"]),
        Route("/tokenizer_info", _tokenizer_info(service)),
        Route("/health", _health(service)),
        Route("/ping", _health(service), methods=["GET", "POST"]),
        Route("/metrics", _metrics(service)),
        Route("/version", _version),
        Route("/openapi.json", _openapi),
    ]
    handlers: dict[Any, Any] = {
        UserError: _user_error, HTTPException: _http_error, RecursionError: _too_deep, Exception: _server_error
    }  # fmt: skip
    middleware = [Middleware(AuthMiddleware, keys=tuple(keys))]
    if origins:  # outside: a browser asks before it sends a key
        seen = ["x-request-id", "x-ignored-fields"]
        allowed = Middleware(
            CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"], expose_headers=seen
        )
        middleware.insert(0, allowed)
    if access_log is not None:
        middleware.insert(0, Middleware(AccessLogMiddleware, log=access_log))
    return Starlette(routes=routes, exception_handlers=handlers, middleware=middleware)


class ApiResponse(JSONResponse):
    """JSON, written fast."""

    def render(self, content: object) -> bytes:
        return msgspec.json.encode(content)


class AccessLogMiddleware:
    """A line for each request when it has ended: who, what, status, time. Neither keys nor queries."""

    def __init__(self, app: ASGIApp, log: Callable[[str], None]) -> None:
        self.app, self.log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, status, name = time.monotonic(), 0, b"-"

        async def noting(message: Message) -> None:
            nonlocal status, name
            if message["type"] == "http.response.start":
                status, name = message["status"], dict(message["headers"]).get(b"x-request-id", b"-")
            await send(message)

        try:
            await self.app(scope, receive, noting)
        finally:
            client = (scope.get("client") or ("-",))[0]
            shown = f"{scope['method']} {scope['path']} {status} {name.decode('latin-1')}"
            milliseconds = 1e3 * (time.monotonic() - begun)
            # What a client chose may hold control characters, and this goes to a terminal.
            self.log(f"{client} {shown.encode('unicode_escape').decode()} {milliseconds:.1f} ms")


class AuthMiddleware:
    """Who may come in, and the name that each request has in answers."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self.app, self.keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ").strip()
        name = headers.get(b"x-request-id", b"")[:200] or uuid.uuid4().hex.encode()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-request-id", name)]
            await send(message)

        if self.keys and scope["path"] not in _OPEN and not any(hmac.compare_digest(given, key) for key in self.keys):
            refused = RequestError("the API key is missing or wrong", status=401, code="invalid_api_key")
            await ApiResponse(error_body(refused), 401)(scope, receive, named)
            return
        await self.app(scope, receive, named)


async def _user_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, UserError)
    headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
    return ApiResponse(error_body(error), error.status, headers=headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: f"there is no {request.url.path}", 405: f"{request.url.path} does not take {request.method}"}
    refused = RequestError(what.get(error.status_code, str(error.detail)), status=error.status_code)
    return ApiResponse(error_body(refused), error.status_code, headers=error.headers)


async def _too_deep(request: Request, error: Exception) -> Response:
    """What can be decoded may still be nested too deep for what is done with it: a template, a schema that is written again."""
    return ApiResponse(error_body(RequestError("the body is nested too deep")), 400)


async def _server_error(request: Request, error: Exception) -> Response:
    refused = RequestError("the server failed on this request; its log says why", status=500)
    return ApiResponse(error_body(refused), 500)


async def _body(request: Request) -> bytes:
    """The bytes of the body, not more than we would read."""
    whole = bytearray()
    try:
        async for chunk in request.stream():
            whole += chunk
            if len(whole) > MAX_BYTES:
                raise RequestError(f"the body is larger than {MAX_BYTES >> 20} MiB", status=413)
    except ClientDisconnect:
        raise RequestError("the client went away", status=499) from None
    return bytes(whole)


async def _read(service: Service, request: Request, kind: type[B]) -> tuple[B, list[str], int]:
    """The body, the names of its fields that nothing here knows, and its size in bytes."""
    raw = await _body(request)
    if weight(raw) > MAX_WEIGHT and await service.beside(True, weight_outside_strings, raw) > MAX_WEIGHT:
        raise RequestError(f"the body has {TOO_HEAVY}")
    body, ignored = read(raw, kind)
    await asyncio.sleep(0)  # a large one took its time
    return body, ignored, len(raw)


Handler = Callable[[Request], Awaitable[Response]]


def _models(service: Service) -> Handler:
    async def models(request: Request) -> Response:
        return ApiResponse({"object": "list", "data": service.cards()})

    return models


def _model(service: Service) -> Handler:
    async def model(request: Request) -> Response:
        return ApiResponse(service.card(service.adapter_of(request.path_params["name"])))

    return model


def _load_adapter(service: Service) -> Handler:
    async def load(request: Request) -> Response:
        body, _, _ = await _read(service, request, LoadAdapterBody)
        await service.beside(True, service.load_adapter, body.lora_name, body.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    return load


def _unload_adapter(service: Service) -> Handler:
    async def unload(request: Request) -> Response:
        body, _, _ = await _read(service, request, UnloadAdapterBody)
        service.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return unload


async def _no_embeddings(request: Request) -> Response:
    raise RequestError("this model generates text and has no embeddings", status=404, code="model_not_found")


def _tokenize(service: Service) -> Handler:
    async def tokenize(request: Request) -> Response:
        body, _, size = await _read(service, request, TokenizeBody)
        if body.messages is not None:
            chat = ChatBody(messages=body.messages, add_generation_prompt=body.add_generation_prompt)
            text, special = await render_chat(service, body.messages, chat, [], size), False
        elif body.prompt is not None:
            text, special = body.prompt, body.add_special_tokens is not False
        else:
            raise RequestError("prompt or messages is missing", param="prompt")
        if len(text) > MAX_TEXT:
            raise RequestError(f"{len(text)} characters, and {MAX_TEXT} are the limit", param="prompt")
        tokens = await service.encode(text, special)
        return ApiResponse({"tokens": tokens, "count": len(tokens), "max_model_len": service.max_len})

    return tokenize


def _detokenize(service: Service) -> Handler:
    async def detokenize(request: Request) -> Response:
        body, _, _ = await _read(service, request, DetokenizeBody)
        service.check_ids(body.tokens, "tokens")
        text = await service.beside(len(body.tokens) > 1024, service.tokenizer.decode, body.tokens, False)
        return ApiResponse({"prompt": text})

    return detokenize


def _tokenizer_info(service: Service) -> Handler:
    async def info(request: Request) -> Response:
        tokenizer = service.tokenizer
        words = {name: tokenizer.words.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        known = {k: v for k, v in tokenizer.settings.items() if isinstance(v, str | int | bool)}
        template = tokenizer.template.source if tokenizer.template else None
        return ApiResponse({**known, **words, "chat_template": template})

    return info


def _health(service: Service) -> Handler:
    async def health(request: Request) -> Response:
        if service.ready:
            return Response(status_code=200)
        return ApiResponse({"status": "stopping" if service.draining else service.status}, 503)

    return health


def _metrics(service: Service) -> Handler:
    async def metrics(request: Request) -> Response:
        return PlainTextResponse(service.metrics().text(), media_type="text/plain; version=0.0.4")

    return metrics


async def _version(request: Request) -> Response:
    return ApiResponse({"version": __version__})


async def _openapi(request: Request) -> Response:
    return ApiResponse(document())


Whole = Callable[[Service, AdmittedRequest], JsonObject]
Events = Callable[[Service, AdmittedRequest], AsyncIterator[JsonObject]]


def _completions(service: Service) -> Handler:
    async def completions(request: Request) -> Response:
        body, ignored, _ = await _read(service, request, CompletionBody)
        call = await admit_completion(service, body)
        return _naming(await respond(service, request, call, whole_completion, completion_events), ignored)

    return completions


def _chat(service: Service) -> Handler:
    async def chat(request: Request) -> Response:
        body, ignored, size = await _read(service, request, ChatBody)
        call = await admit_chat(service, body, size)
        return _naming(await respond(service, request, call, whole_chat, chat_events), ignored)

    return chat


def _responses(service: Service) -> Handler:
    async def responses(request: Request) -> Response:
        body, ignored, size = await _read(service, request, ResponsesBody)
        call, writer = await admit_chat(service, chat_body(body), size), ResponseWriter(body)
        call.id = call.id.replace("chatcmpl-", "resp_")
        made = await respond(
            service, request, call, lambda _, call: writer.whole(call), lambda _, call: writer.events(call)
        )
        return _naming(made, ignored)

    return responses


def _naming(response: Response, ignored: list[str]) -> Response:
    """Name the fields that had no effect."""
    if ignored:
        response.headers["x-ignored-fields"] = ", ".join(ignored).encode("ascii", "replace").decode()[:1000]
    return response


async def respond(service: Service, request: Request, call: AdmittedRequest, whole: Whole, events: Events) -> Response:
    """Begin the answers, and send them whole or as they come."""
    if call.adapter is not None and service.adapter_of(call.adapter.name) is not call.adapter:
        raise RequestError("the adapter was replaced by another of that name", status=503)
    service.open.update(call.answers)
    try:
        for answer in call.answers:
            answer.begin()
        if call.stream:
            stream = _sse(service, call, events)
            first = await _unless_gone(request, anext(stream))
            return EventStream(first, stream, lambda: close(service, call))
        await _unless_gone(request, gather(call.answers))
        close(service, call)
        return await service.beside(_size(call) > _LARGE, lambda: ApiResponse(_by_choice(whole(service, call))))
    except BaseException:
        close(service, call)
        raise


def _size(call: AdmittedRequest) -> int:
    """Tokens that a response speaks of, alternatives counted."""
    spoken = sum(len(answer.tokens) + len(answer.prompt_scores) for answer in call.answers)
    return spoken * (1 + max(call.logprobs or 0, call.prompt_logprobs or 0))


def _by_choice(found: JsonObject) -> JsonObject:
    """The same with each choice encoded: encoding holds the interpreter, and all choices together might hold it for long."""
    choices = [msgspec.Raw(msgspec.json.encode(choice)) for choice in found.get("choices", [])]
    return {**found, "choices": choices} if len(choices) > 1 else found


def close(service: Service, call: AdmittedRequest) -> None:
    """Nobody reads the answers any more."""
    for answer in call.answers:
        answer.cancel()
        service.open.discard(answer)


async def _unless_gone(request: Request, work: Awaitable[Any]) -> Any:
    """The result of the work; if the client goes away before it is there, the work ends."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RequestError("the client went away", status=499)
        return await task
    finally:
        task.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events as they come. The first is there already: what is refused before it is an error of its own."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncIterator[bytes], end: Callable[[], None]) -> None:
        """`end` is called when the client leaves, and makes the events end."""
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._first, self._rest, self._end = first, rest, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watching = asyncio.ensure_future(self._watch(receive))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for event in self._rest:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watching.cancel()
            self._end()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._end()


async def _sse(service: Service, call: AdmittedRequest, events: Events) -> AsyncIterator[bytes]:
    begun = False
    try:
        async for event in events(service, call):
            named = f"event: {event['type']}\n".encode() if "type" in event else b""
            yield named + b"data: " + msgspec.json.encode(event) + b"\n\n"
            begun = True
        yield b"data: [DONE]\n\n"
    except UserError as error:
        if not begun:
            raise
        yield b"data: " + msgspec.json.encode(error_body(error)) + b"\n\n"
    finally:
        close(service, call)
