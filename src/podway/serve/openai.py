"""What clients send, as the OpenAI API and its users' extensions spell it, and what the engine understands (no jax).

Fields that are not known are ignored, and null means the same as absence: clients send both. Everything else is checked, and
an error names the field.
"""

import json
import os
from typing import Any

import msgspec

from podway.decoding import from_plain
from podway.errors import UserError
from podway.serve.sampling_params import SamplingParams

MAX_CHOICES = 128


class RequestError(UserError):
    """A request that is answered with an error: what, hint, HTTP status, the field and a code for programs."""

    def __init__(self, what: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(what, "", status=status)
        self.param, self.code = param, code


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None


class Common(msgspec.Struct, kw_only=True):
    """What completions and conversations have in common."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    user: str | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    response_format: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class CompletionBody(Common, kw_only=True):
    """POST /v1/completions."""

    prompt: Any = None
    suffix: str | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


class ChatBody(Common, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]


def read(raw: bytes, kind: type[Any]) -> Any:
    """A body of this kind, or a `RequestError` that names the field."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        raise RequestError("the body is not JSON") from None
    if not isinstance(found, dict):
        raise RequestError("the body must be a JSON object")
    if b"\\ud" in raw.lower():  # perhaps half of a character, which is JSON but no text
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise RequestError("the body has half of a surrogate pair, which is not text") from None
    try:
        return from_plain({k: v for k, v in found.items() if v is not None}, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at ")
        param = place.strip("`").removeprefix("$").removeprefix(".").split("[")[0].split(".")[0] or None
        raise RequestError(f"{param + ': ' if param else ''}{what}", param=param) from None


def check_range(value: Any, low: float, high: float, name: str) -> None:
    """Refuse a number outside [low, high]; NaN is outside."""
    if value is not None and not low <= value <= high:
        raise RequestError(f"{name} is {value}, and must lie between {low:g} and {high:g}", param=name)


def sampling_params(body: Common, vocab: int, logprobs: bool) -> SamplingParams:
    """The sampling parameters of a body. Without a temperature it is 1, as the API has it."""
    check_range(body.temperature, 0, 100, "temperature")
    check_range(body.top_p, 0, 1, "top_p")
    check_range(body.min_p, 0, 1, "min_p")
    check_range(body.top_k, -1, 1 << 30, "top_k")
    check_range(body.presence_penalty, -2, 2, "presence_penalty")
    check_range(body.frequency_penalty, -2, 2, "frequency_penalty")
    check_range(body.repetition_penalty, 0.01, 100, "repetition_penalty")
    check_range(body.n, 1, MAX_CHOICES, "n")
    check_range(body.seed, -(1 << 63), 1 << 64, "seed")
    temperature = 1.0 if body.temperature is None else body.temperature
    return SamplingParams(
        temperature=0.0 if temperature < 1e-5 else temperature,
        top_k=max(0, body.top_k or 0),
        top_p=1.0 if body.top_p is None else max(body.top_p, 1e-6),
        min_p=body.min_p or 0.0,
        presence=body.presence_penalty or 0.0,
        frequency=body.frequency_penalty or 0.0,
        repetition=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        seed=int.from_bytes(os.urandom(4), "big") if body.seed is None else body.seed & 0xFFFFFFFF,
        logit_bias=_biases(body.logit_bias or {}, vocab),
        logprobs=logprobs,
    )


def _biases(asked: dict[str, float], vocab: int) -> tuple[tuple[int, float], ...]:
    if len(asked) > 300:
        raise RequestError(f"logit_bias has {len(asked)} entries, and may have 300", param="logit_bias")
    found = []
    for key, value in asked.items():
        if not (key.isascii() and key.isdigit()) or len(key) > 9 or int(key) >= vocab:
            raise RequestError(f"logit_bias: {key[:40]!r} is not a token id below {vocab}", param="logit_bias")
        check_range(value, -100, 100, "logit_bias")
        found.append((int(key), float(value)))
    return tuple(found)


def stops_of(body: Common) -> list[str]:
    """The stop strings."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > 16 or any(len(stop) > 1024 for stop in stops):
        raise RequestError("stop: at most 16 strings of at most 1024 characters", param="stop")
    return stops


def grammar_of(body: Common) -> tuple[str, Any] | None:
    """Which grammar the answer must follow, if any: (kind, value)."""
    asked = body.response_format or {}
    kind = asked.get("type", "text")
    if kind == "json_object":
        return "json_schema", {"type": "object"}
    if kind == "json_schema":
        inner = asked.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if not isinstance(schema, dict | bool):
            raise RequestError("response_format.json_schema.schema is missing", param="response_format")
        return "json_schema", schema
    if kind != "text":
        raise RequestError(f"response_format: unknown type {str(kind)[:40]!r}", param="response_format")
    if body.guided_json is not None:
        try:
            schema = json.loads(body.guided_json) if isinstance(body.guided_json, str) else body.guided_json
        except ValueError:
            raise RequestError("guided_json is not JSON", param="guided_json") from None
        return "json_schema", schema
    for name in ("guided_regex", "guided_choice", "guided_grammar"):
        if (value := getattr(body, name)) is not None:
            return name.removeprefix("guided_"), value
    return None


def error_body(error: UserError) -> dict[str, Any]:
    """The shape of every error."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    default = "server_error" if error.status >= 500 else "invalid_request_error"
    message = error.what + (f"; {error.hint}" if error.hint else "")
    too_long = "the limit is" in error.what and "tokens" in error.what
    code = getattr(error, "code", None) or ("context_length_exceeded" if too_long else None)
    kind = kinds.get(error.status, default)
    return {"error": {"message": message, "type": kind, "param": getattr(error, "param", None), "code": code}}
