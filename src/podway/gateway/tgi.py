"""Models that speak Hugging Face TGI's own API, offered as OpenAI's. Pure.

1. `translate` turns a chat or completion request into TGI's: the messages through the model's chat template, the parameters by
   name. What TGI cannot do (tools, log probabilities) is refused rather than left out.
2. The answer is translated as it comes (`TgiAnswer`): a stream event by event, anything else when it is whole. TGI leaves the stop
   sequence at the end of the text, and OpenAI's clients expect it gone, so text that may become one is kept back.

A service without a chat template needs none of this: TGI from 1.4 on has `/v1/chat/completions` itself, and requests go there.
"""

import time
import uuid
from functools import lru_cache
from typing import Any, Literal

import msgspec

from podway.decoding import from_json
from podway.errors import UserError
from podway.gateway.openai import BYTES_PER_TOKEN, TokenUsage, error_body
from podway.gateway.table import RoutedService
from podway.gateway.wire import Header, value_of
from podway.model.chat import ChatTemplate

USUAL_TOKENS = 512  # where a request sets no limit: TGI's own default is 20 to 100 tokens
LARGEST_ANSWER = 64 << 20
MOST_STOPS = 16

Kind = Literal["chat", "text"]
_PATHS: dict[bytes, Kind] = {b"/v1/chat/completions": "chat", b"/v1/completions": "text"}
_REASONS = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}


class NotTranslatable(Exception):
    """The request asks for something that this model's server does not have."""


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = False


class _JsonSchema(msgspec.Struct, frozen=True):
    schema: msgspec.Raw = msgspec.Raw(b"{}")


class _ResponseFormat(msgspec.Struct, frozen=True):
    type: str = "text"
    json_schema: _JsonSchema | None = None


class TgiQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of OpenAI's requests that have a counterpart."""

    model: str
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[str] | None = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = 1
    response_format: _ResponseFormat | None = None
    tools: list[msgspec.Raw] | None = None
    logprobs: bool | int | None = None
    echo: bool | None = False

    @property
    def stops(self) -> list[str]:
        """Where the text is to end."""
        return [one for one in ([self.stop] if isinstance(self.stop, str) else self.stop or []) if one]


class Translation(msgspec.Struct, frozen=True, kw_only=True):
    """A request as TGI takes it, and what its answer needs to become OpenAI's."""

    target: bytes
    body: bytes
    kind: Kind
    model: str
    stops: tuple[str, ...]
    streamed: bool
    include_usage: bool
    prompt_tokens: int  # about, for servers that do not tell

    def request_headers(self, headers: list[Header]) -> list[Header]:
        """The client's headers for another body, whose answer the gateway must be able to read."""
        others = [one for one in headers if one[0] not in (b"content-type", b"accept-encoding", b"accept")]
        return [*others, (b"content-type", b"application/json")]


@lru_cache(maxsize=64)
def _template(source: str, eos_token: str, name: str) -> ChatTemplate:
    return ChatTemplate(source, {"eos_token": eos_token, "bos_token": ""}, name)


def translate(service: RoutedService, path: bytes, body: bytes) -> Translation:
    """The request for TGI; `NotTranslatable` says why there is none."""
    kind = _PATHS.get(path)
    if kind is None:
        raise NotTranslatable(f"{service.model} is served by TGI, which has no {path.decode('latin-1')}")
    try:
        question = from_json(body, TgiQuestion)
    except msgspec.ValidationError as error:
        raise NotTranslatable(str(error)) from None
    except RecursionError:
        raise NotTranslatable("the body is nested too deeply") from None
    _refuse_unknown(question)
    inputs = _inputs(service, kind, question)
    stops = question.stops + ([service.eos_token] if service.eos_token else [])
    if len(stops) > MOST_STOPS:
        raise NotTranslatable(f"at most {MOST_STOPS} stop sequences")
    streamed = bool(question.stream)
    sent = {"inputs": inputs, "parameters": _parameters(question, stops), "stream": streamed}
    return Translation(
        target=b"/generate_stream" if streamed else b"/generate",
        body=msgspec.json.encode(sent),
        kind=kind,
        model=question.model,
        stops=tuple(stops),
        streamed=streamed,
        include_usage=bool(question.stream_options and question.stream_options.include_usage),
        prompt_tokens=len(inputs) // BYTES_PER_TOKEN,
    )


def _refuse_unknown(question: TgiQuestion) -> None:
    refused = {
        "tools": question.tools,
        "logprobs": question.logprobs,
        "presence_penalty": question.presence_penalty,
        "echo": question.echo,
        "n above 1 in a stream": question.stream and (question.n or 1) > 1,
    }
    for name, given in refused.items():
        if given:
            raise NotTranslatable(f"this model is served by TGI, which has no {name}")
    wanted = question.response_format
    if wanted is not None and wanted.type not in ("text", "json_schema"):
        raise NotTranslatable(f"this model is served by TGI, which has no response_format {wanted.type!r}")


def _inputs(service: RoutedService, kind: Kind, question: TgiQuestion) -> str:
    if kind == "text":
        if isinstance(question.prompt, list) and len(question.prompt) == 1:
            return question.prompt[0]
        if not isinstance(question.prompt, str):
            raise NotTranslatable("this model takes one prompt, as text")
        return question.prompt
    if not question.messages:
        raise NotTranslatable("Object missing required field `messages`")
    try:
        template = _template(service.chat_template or "", service.eos_token or "", f"of {service.name}")
        return template.render([_flat(one) for one in question.messages], "messages", ask=True)
    except UserError as error:
        raise NotTranslatable(error.what) from None


def _flat(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is text; templates of this format know no parts."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise NotTranslatable("this model takes text only")
    return {**message, "content": "".join(str(text) for text in texts)}


def _parameters(question: TgiQuestion, stops: list[str]) -> dict[str, Any]:
    """TGI refuses a temperature of 0 and a top_p of 1, which say: no sampling, no limit."""
    temperature = question.temperature if question.temperature is not None else 1.0
    asked = question.max_completion_tokens or question.max_tokens or USUAL_TOKENS
    found: dict[str, Any] = {"do_sample": temperature > 0, "max_new_tokens": asked, "stop": stops, "details": True}
    if temperature > 0:
        found["temperature"] = temperature
    if question.top_p is not None and 0 < question.top_p < 1:
        found["top_p"] = question.top_p
    if question.frequency_penalty:
        found["frequency_penalty"] = question.frequency_penalty
    if question.seed is not None:
        found["seed"] = question.seed
    if (question.n or 1) > 1:
        found["best_of"] = question.n
    wanted = question.response_format
    if wanted is not None and wanted.json_schema is not None:
        found["grammar"] = {"type": "json", "value": wanted.json_schema.schema}
    return found


# the answer


class _TgiSequence(msgspec.Struct, frozen=True):
    generated_text: str = ""
    finish_reason: str = "stop_sequence"
    generated_tokens: int = 0


class _TgiDetails(msgspec.Struct, frozen=True):
    finish_reason: str = "stop_sequence"
    generated_tokens: int = 0
    input_length: int | None = None
    best_of_sequences: list[_TgiSequence] | None = None


class _TgiToken(msgspec.Struct, frozen=True):
    text: str = ""
    special: bool = False


class _TgiEvent(msgspec.Struct, frozen=True):
    """One event of a stream, or a whole answer."""

    token: _TgiToken | None = None
    generated_text: str | None = None
    details: _TgiDetails | None = None
    error: str | None = None


class StopTrimmer:
    """Passes text on up to a stop sequence; the beginning of what may become one waits."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._kept = ""
        self._over = False

    def feed(self, text: str) -> str:
        """What of this text can be shown now."""
        if self._over:
            return ""
        text = self._kept + text
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self._over, self._kept = True, ""
            return text[: min(found)]
        most = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._kept = text[len(text) - most :]
        return text[: len(text) - most]

    def end(self) -> str:
        """What was kept back, and did not become one."""
        kept, self._kept = self._kept, ""
        return kept


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text begin a stop sequence."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


def _trimmed(text: str, stops: tuple[str, ...]) -> str:
    trimmer = StopTrimmer(stops)
    return trimmer.feed(text) + trimmer.end()


class TgiAnswer:
    """One answer of TGI on its way to a client of OpenAI's API."""

    def __init__(self, translation: Translation) -> None:
        self._of = translation
        self._id = ("chatcmpl-" if translation.kind == "chat" else "cmpl-") + uuid.uuid4().hex
        self._created = int(time.time())
        self._status = 200
        self._kept = b""
        self._trimmer = StopTrimmer(translation.stops)
        self._begun = self._finished = False
        self._prompt, self._completion = translation.prompt_tokens, 0

    def head(self, status: int, headers: list[Header]) -> list[Header]:
        """The headers that the client gets."""
        self._status = status
        told = value_of(headers, b"x-prompt-tokens")
        if told is not None and told.isdigit():
            self._prompt = int(told)
        kind = b"text/event-stream" if self._streams else b"application/json"
        after = value_of(headers, b"retry-after")
        return [(b"content-type", kind), *([(b"retry-after", after)] if after is not None else [])]

    @property
    def _streams(self) -> bool:
        return self._of.streamed and self._status == 200

    @property
    def usage(self) -> TokenUsage:
        """What the answer took."""
        return TokenUsage(prompt=self._prompt, completion=self._completion)

    def feed(self, data: bytes) -> bytes:
        """What these bytes become; nothing before a whole event, or the end of an answer that is no stream."""
        self._kept += data
        if len(self._kept) > LARGEST_ANSWER:
            raise ValueError("the replica's answer is too large")
        if not self._streams:
            return b""
        *lines, self._kept = self._kept.split(b"\n")
        return b"".join(self._event(line[5:].strip()) for line in lines if line.startswith(b"data:"))

    def end(self) -> bytes:
        """The rest."""
        if self._streams:
            rest, self._kept = self._kept, b""
            last = self._event(rest[5:].strip()) if rest.startswith(b"data:") else b""
            return last + self._finish("stop") + b"data: [DONE]\n\n"
        try:
            answer = from_json(self._kept, _TgiEvent)
        except (msgspec.DecodeError, RecursionError):
            return error_body("the replica's answer is not TGI's", "server_error", "bad_answer")
        if self._status >= 400 or answer.error is not None:
            return error_body(answer.error or "the replica failed", "server_error", "replica_error")
        return self._whole(answer)

    def _whole(self, answer: _TgiEvent) -> bytes:
        details = answer.details or _TgiDetails()
        first = _TgiSequence(answer.generated_text or "", details.finish_reason, details.generated_tokens)
        sequences = [first, *(details.best_of_sequences or ())]
        self._completion = sum(one.generated_tokens for one in sequences)
        if details.input_length is not None:
            self._prompt = details.input_length
        choices = []
        for index, one in enumerate(sequences):
            text = _trimmed(one.generated_text, self._of.stops)
            shown = {"message": {"role": "assistant", "content": text}} if self._of.kind == "chat" else {"text": text}
            choices.append({"index": index, **shown, "logprobs": None, "finish_reason": _reason(one.finish_reason)})
        return msgspec.json.encode({**self._frame(streamed=False), "choices": choices, "usage": self._counts()})

    def _event(self, data: bytes) -> bytes:
        try:
            event = from_json(data, _TgiEvent)
        except (msgspec.DecodeError, RecursionError):
            return b""
        if event.error is not None:
            self._finished = True
            return b"data: " + error_body(event.error, "server_error", "replica_error") + b"\n\n"
        out = b""
        if event.token is not None:
            self._completion += 1
            text = "" if event.token.special else self._trimmer.feed(event.token.text)
            out = self._text(text) if text else b""
        if event.details is not None:
            self._completion = event.details.generated_tokens or self._completion
            self._prompt = event.details.input_length or self._prompt
            out += self._finish(_reason(event.details.finish_reason))
        return out

    def _text(self, text: str) -> bytes:
        role = {} if self._begun else {"role": "assistant"}
        self._begun = True
        shown = {"delta": {**role, "content": text}} if self._of.kind == "chat" else {"text": text}
        return self._chunk([{"index": 0, **shown, "logprobs": None, "finish_reason": None}])

    def _finish(self, reason: str) -> bytes:
        if self._finished:
            return b""
        self._finished = True
        kept = self._trimmer.end()
        out = self._text(kept) if kept else b""
        shown: dict[str, Any] = {"delta": {}} if self._of.kind == "chat" else {"text": ""}
        out += self._chunk([{"index": 0, **shown, "logprobs": None, "finish_reason": reason}])
        return out + (self._chunk([], usage=self._counts()) if self._of.include_usage else b"")

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return b"data: " + msgspec.json.encode({**self._frame(streamed=True), "choices": choices, **more}) + b"\n\n"

    def _frame(self, *, streamed: bool) -> dict[str, Any]:
        chat = "chat.completion.chunk" if streamed else "chat.completion"
        kind = chat if self._of.kind == "chat" else "text_completion"
        return {"id": self._id, "object": kind, "created": self._created, "model": self._of.model}

    def _counts(self) -> dict[str, int]:
        total = self._prompt + self._completion
        return {"prompt_tokens": self._prompt, "completion_tokens": self._completion, "total_tokens": total}


def _reason(name: str) -> str:
    return _REASONS.get(name, "stop")
