"""The server: OpenAI's API over the engine's loop (Starlette).

A request is read (`openai.py`), becomes one `Answer` for each choice, and is answered whole or as server-sent events. If the
client goes away, its answers are cancelled and their pages are free at once. While programs are being compiled /health says
503 and so does everything that needs the engine.
"""

import asyncio
import hmac
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from podway.errors import UserError
from podway.serve.admission import AdmittedRequest, Service, admit_chat, admit_completion, checked_messages
from podway.serve.openai import ChatBody, CompletionBody, DetokenizeBody, RequestError, TokenizeBody, error_body, read
from podway.serve.openapi import document
from podway.serve.responses import (
    Answer,
    Delta,
    chat_logprobs,
    completion_logprobs,
    gather,
    prompt_logprobs,
    usage,
)
from podway.serve.tools import calls_in, may_be_call
from podway.version import __version__

MAX_BYTES = 32 << 20
_OPEN = ("/health", "/metrics", "/version", "/openapi.json")


def make_app(service: Service, keys: Sequence[str] = ()) -> Starlette:
    """The application; without keys everyone may ask."""
    routes = [
        Route("/v1/models", _models(service)),
        Route("/v1/models/{name:path}", _model(service)),
        Route("/v1/completions", _completions(service), methods=["POST"]),
        Route("/v1/chat/completions", _chat(service), methods=["POST"]),
        Route("/v1/embeddings", _no_embeddings, methods=["POST"]),
        Route("/tokenize", _tokenize(service), methods=["POST"]),
        Route("/detokenize", _detokenize(service), methods=["POST"]),
        Route("/tokenizer_info", _tokenizer_info(service)),
        Route("/health", _health(service)),
        Route("/metrics", _metrics(service)),
        Route("/version", _version),
        Route("/openapi.json", _openapi),
    ]
    handlers: dict[Any, Any] = {UserError: _user_error, HTTPException: _http_error, Exception: _own_fault}
    return Starlette(
        routes=routes, exception_handlers=handlers, middleware=[Middleware(AuthMiddleware, keys=tuple(keys))]
    )


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

        async def named(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-request-id", name)]
            await send(message)

        if self.keys and scope["path"] not in _OPEN and not any(hmac.compare_digest(given, key) for key in self.keys):
            refused = RequestError("the API key is missing or wrong", status=401, code="invalid_api_key")
            await JSONResponse(error_body(refused), 401)(scope, receive, named)
            return
        await self.app(scope, receive, named)


async def _user_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, UserError)
    headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
    return JSONResponse(error_body(error), error.status, headers=headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: f"there is no {request.url.path}", 405: f"{request.url.path} does not take {request.method}"}
    refused = RequestError(what.get(error.status_code, str(error.detail)), status=error.status_code)
    return JSONResponse(error_body(refused), error.status_code, headers=error.headers)


async def _own_fault(request: Request, error: Exception) -> Response:
    refused = RequestError("the server failed on this request; its log says why", status=500)
    return JSONResponse(error_body(refused), 500)


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


Handler = Callable[[Request], Awaitable[Response]]


def _models(service: Service) -> Handler:
    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [service.card()]})

    return models


def _model(service: Service) -> Handler:
    async def model(request: Request) -> Response:
        service.check_name(request.path_params["name"])
        return JSONResponse(service.card())

    return model


async def _no_embeddings(request: Request) -> Response:
    raise RequestError("this model generates text and has no embeddings", status=404, code="model_not_found")


def _tokenize(service: Service) -> Handler:
    async def tokenize(request: Request) -> Response:
        body: TokenizeBody = read(await _body(request), TokenizeBody)
        if body.messages is not None:
            prompt = body.add_generation_prompt is not False
            messages = checked_messages(body.messages)
            text, special = service.tokenizer.render(messages, ask=prompt), False
        elif body.prompt is not None:
            text, special = body.prompt, body.add_special_tokens is not False
        else:
            raise RequestError("prompt or messages is missing", param="prompt")
        tokens = service.tokenizer.encode(text, special)
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": service.max_len})

    return tokenize


def _detokenize(service: Service) -> Handler:
    async def detokenize(request: Request) -> Response:
        body: DetokenizeBody = read(await _body(request), DetokenizeBody)
        service.check_ids(body.tokens, "tokens")
        return JSONResponse({"prompt": service.tokenizer.decode(body.tokens, skip_special=False)})

    return detokenize


def _tokenizer_info(service: Service) -> Handler:
    async def info(request: Request) -> Response:
        tokenizer = service.tokenizer
        words = {name: tokenizer.words.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        known = {k: v for k, v in tokenizer.settings.items() if isinstance(v, str | int | bool)}
        template = tokenizer.template.source if tokenizer.template else None
        return JSONResponse({**known, **words, "chat_template": template})

    return info


def _health(service: Service) -> Handler:
    async def health(request: Request) -> Response:
        return Response(status_code=200) if service.ready else JSONResponse({"status": service.status}, 503)

    return health


def _metrics(service: Service) -> Handler:
    async def metrics(request: Request) -> Response:
        return PlainTextResponse(service.metrics().text(), media_type="text/plain; version=0.0.4")

    return metrics


async def _version(request: Request) -> Response:
    return JSONResponse({"version": __version__})


async def _openapi(request: Request) -> Response:
    return JSONResponse(document())


def _completions(service: Service) -> Handler:
    async def completions(request: Request) -> Response:
        asked = admit_completion(service, read(await _body(request), CompletionBody))
        return await _respond(service, request, asked, _completion_whole, _completion_events)

    return completions


def _chat(service: Service) -> Handler:
    async def chat(request: Request) -> Response:
        asked = admit_chat(service, read(await _body(request), ChatBody))
        return await _respond(service, request, asked, _chat_whole, _chat_events)

    return chat


Whole = Callable[[Service, AdmittedRequest], dict[str, Any]]
Events = Callable[[Service, AdmittedRequest], AsyncIterator[dict[str, Any]]]


async def _respond(
    service: Service, request: Request, asked: AdmittedRequest, whole: Whole, events: Events
) -> Response:
    begun = []
    try:
        for answer in asked.answers:
            answer.begin()
            begun.append(answer)
    except UserError:
        for answer in begun:
            answer.cancel()
        raise
    if asked.stream:
        first = _first(_sse(service, asked, events))
        return StreamingResponse(await first, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
    work = asyncio.ensure_future(gather(asked.answers))
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise RequestError("the client went away", status=499)
        await work
    finally:
        work.cancel()
        gone.cancel()
        for answer in asked.answers:
            answer.cancel()
    return JSONResponse(whole(service, asked))


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _first(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same events, the first of them already there: what is refused before it is an error of its own."""
    first = await anext(events)

    async def all_of_them() -> AsyncIterator[bytes]:
        yield first
        async for event in events:
            yield event

    return all_of_them()


async def _sse(service: Service, asked: AdmittedRequest, events: Events) -> AsyncIterator[bytes]:
    begun = False
    try:
        async for event in events(service, asked):
            yield b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
            begun = True
        yield b"data: [DONE]\n\n"
    except UserError as error:
        if not begun:
            raise
        yield b"data: " + json.dumps(error_body(error)).encode() + b"\n\n"
    finally:
        for answer in asked.answers:
            answer.cancel()


async def _merged(answers: list[Answer]) -> AsyncIterator[tuple[Answer, Delta]]:
    """The deltas of all answers as they come."""
    if len(answers) == 1:
        async for delta in answers[0].deltas():
            yield answers[0], delta
        return
    found: asyncio.Queue[tuple[Answer, Delta | UserError | None]] = asyncio.Queue()

    async def follow(answer: Answer) -> None:
        try:
            async for delta in answer.deltas():
                found.put_nowait((answer, delta))
            found.put_nowait((answer, None))
        except UserError as error:
            found.put_nowait((answer, error))

    tasks = [asyncio.ensure_future(follow(answer)) for answer in answers]
    try:
        left = len(answers)
        while left:
            answer, new = await found.get()
            if isinstance(new, UserError):
                raise new
            if new is None:
                left -= 1
            else:
                yield answer, new
    finally:
        for task in tasks:
            task.cancel()


def _head(asked: AdmittedRequest, kind: str) -> dict[str, Any]:
    return {"id": asked.id, "object": kind, "created": asked.created, "model": asked.model}


# --- completions


def _completion_choice(service: Service, asked: AdmittedRequest, answer: Answer) -> dict[str, Any]:
    prompt = asked.prompt_texts[answer.index // asked.n] if asked.echo else ""
    scores = answer.scores
    if asked.echo and asked.logprobs is not None:
        scores = [*answer.prompt_scores, *scores]
    logprobs = None
    if asked.logprobs is not None:
        logprobs = completion_logprobs(scores, asked.logprobs, service.tokenizer, 0)
    choice = {"index": answer.index, "text": prompt + answer.text, "logprobs": logprobs, "finish_reason": answer.finish}
    if asked.prompt_logprobs is not None:
        choice["prompt_logprobs"] = prompt_logprobs(answer.prompt_scores, asked.prompt_logprobs, service.tokenizer)
    return choice


def _completion_whole(service: Service, asked: AdmittedRequest) -> dict[str, Any]:
    choices = [_completion_choice(service, asked, answer) for answer in asked.answers]
    return {**_head(asked, "text_completion"), "choices": choices, "usage": usage(asked.prompt_tokens, asked.answers)}


async def _completion_events(service: Service, asked: AdmittedRequest) -> AsyncIterator[dict[str, Any]]:
    head = _head(asked, "text_completion") | ({"usage": None} if asked.usage else {})
    written: dict[int, int] = {}
    async for answer, delta in _merged(asked.answers):
        text, scores = delta.text, delta.scores
        if answer.index not in written and asked.echo:
            text = asked.prompt_texts[answer.index // asked.n] + text
            scores = [*answer.prompt_scores, *scores]
        offset = written.setdefault(answer.index, 0)
        if not (text or scores or delta.finish):
            continue
        logprobs = None
        if asked.logprobs is not None:
            logprobs = completion_logprobs(scores, asked.logprobs, service.tokenizer, offset)
        written[answer.index] += len(text)
        choice = {"index": answer.index, "text": text, "logprobs": logprobs, "finish_reason": delta.finish}
        yield {**head, "choices": [choice]}
    if asked.usage:
        yield {**head, "choices": [], "usage": usage(asked.prompt_tokens, asked.answers)}


# --- conversations


def _chat_whole(service: Service, asked: AdmittedRequest) -> dict[str, Any]:
    choices = []
    for answer in asked.answers:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        finish = answer.finish
        if asked.tools:
            content, calls = calls_in(answer.text, asked.tools)
            if calls:
                message |= {"content": content, "tool_calls": calls}
                finish = "tool_calls"
        logprobs = None
        if asked.logprobs is not None:
            logprobs = chat_logprobs(answer.scores, asked.logprobs, service.tokenizer)
        choices.append({"index": answer.index, "message": message, "logprobs": logprobs, "finish_reason": finish})
    return {**_head(asked, "chat.completion"), "choices": choices, "usage": usage(asked.prompt_tokens, asked.answers)}


async def _chat_events(service: Service, asked: AdmittedRequest) -> AsyncIterator[dict[str, Any]]:
    head = _head(asked, "chat.completion.chunk") | ({"usage": None} if asked.usage else {})
    held: dict[int, str] = {}  # text that may be a tool call

    def chunk(answer: Answer, delta: dict[str, Any], finish: str | None, scores: Any = None) -> dict[str, Any]:
        logprobs = None
        if scores and asked.logprobs is not None:
            logprobs = chat_logprobs(scores, asked.logprobs, service.tokenizer)
        choice = {"index": answer.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return {**head, "choices": [choice]}

    spoke: set[int] = set()
    async for answer, delta in _merged(asked.answers):
        if answer.index not in spoke:
            spoke.add(answer.index)
            yield chunk(answer, {"role": "assistant", "content": ""}, None)
        text = delta.text
        if asked.tools:
            text = held.get(answer.index, "") + text
            if (answer.text == text or answer.index in held) and may_be_call(text) is not False and not delta.finish:
                held[answer.index] = text
                continue
            held.pop(answer.index, None)
            content, calls = calls_in(text, asked.tools) if delta.finish else (text, [])
            if calls:
                numbered = [{"index": i, **call} for i, call in enumerate(calls)]
                yield chunk(answer, {"content": content, "tool_calls": numbered}, None, delta.scores)
                yield chunk(answer, {}, "tool_calls")
                continue
        if text or delta.scores:
            yield chunk(answer, {"content": text}, None, delta.scores)
        if delta.finish:
            yield chunk(answer, {}, delta.finish)
    if asked.usage:
        yield {**head, "choices": [], "usage": usage(asked.prompt_tokens, asked.answers)}
