"""What clients send, as the OpenAI API and its users' extensions spell it, and what the engine understands (no jax).

Null means the same as absence: clients send both. A field works, is refused by name (`UNSUPPORTED`), or is one of those that
change no answer (`WITHOUT_EFFECT`). What is none of these is ignored, and named in the header `x-ignored-fields`.
"""

import gc
import json
import os
from typing import Any, TypeVar

import msgspec

from podway.decoding import from_plain
from podway.errors import UserError
from podway.serve.grammar import MAX_GRAMMAR_BYTES, Grammar
from podway.serve.sampling_params import BIASES, SamplingParams

MAX_CHOICES = 128
MAX_FIELDS = 256  # of a body
JsonValue = Any  # whatever JSON can hold
JsonObject = dict[str, Any]
B = TypeVar("B", bound="msgspec.Struct")

# Fields of other servers that would change the answer, and the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[JsonValue, ...]] = {
    "priority": (0,), "best_of": (), "chat_template": (), "use_beam_search": (False,), "length_penalty": (1, 1.0),
    "logits_processors": (), "documents": ([],), "audio": (), "modalities": (["text"],), "prediction": (), "functions": ([],),
    "function_call": ("none", "auto"), "web_search_options": (), "media_io_kwargs": (), "mm_processor_kwargs": (),
    "guided_decoding_backend": (), "guided_whitespace_pattern": (), "kv_transfer_params": (), "vllm_xargs": (), "adapter": (),
}  # fmt: skip
# Fields that change no answer of this server.
WITHOUT_EFFECT = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "request_id",
    "spaces_between_special_tokens", "verbosity", "include_reasoning", "return_tokens_as_token_ids",
}  # fmt: skip


class RequestError(UserError):
    """A request that is answered with an error: what, hint, HTTP status, the field and a code for programs."""

    def __init__(self, what: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(what, "", status=status)
        self.param, self.code = param, code


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's present name of the guided_… fields; one of them."""

    json: JsonValue = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | JsonObject | None = None


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
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    response_format: JsonObject | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonValue = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class CompletionBody(Common, kw_only=True):
    """POST /v1/completions."""

    prompt: JsonValue = None
    suffix: str | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class ChatBody(Common, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[JsonObject]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: list[JsonObject] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class LoadAdapterBody(msgspec.Struct, kw_only=True):
    """POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str


class UnloadAdapterBody(msgspec.Struct, kw_only=True):
    """POST /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None  # vLLM's own number of it, of no use here


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


def _decoded(raw: bytes) -> JsonValue:
    """The values of a body. Lists of lists would set off one collection of garbage after another, and none of it is garbage."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    finally:
        if collects:
            gc.enable()


def read(raw: bytes, kind: type[B]) -> tuple[B, list[str]]:
    """A body of this kind, or a `RequestError` that names the field; and the fields that nothing here knows."""
    found = _decoded(raw)
    if not isinstance(found, dict):
        raise RequestError("the body must be a JSON object")
    if len(found) > MAX_FIELDS:
        raise RequestError(f"the body has {len(found)} fields, and {MAX_FIELDS} are the limit")
    given = {name: value for name, value in found.items() if value is not None}
    unknown = given.keys() - set(kind.__struct_fields__)
    for name in sorted(unknown & UNSUPPORTED.keys()):
        if given[name] not in UNSUPPORTED[name] and not (name == "best_of" and given[name] == given.get("n", 1)):
            raise RequestError(f"{name} is not supported", param=name)
    try:
        body = from_plain(given, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at ")
        param = place.strip("`").removeprefix("$").removeprefix(".").split("[")[0].split(".")[0] or None
        raise RequestError(f"{param + ': ' if param else ''}{what}", param=param) from None
    return body, sorted(name[:60] for name in unknown - UNSUPPORTED.keys() - WITHOUT_EFFECT)


def check_range(value: float | None, low: float, high: float, name: str) -> None:
    """Refuse a number outside [low, high]; NaN is outside."""
    if value is not None and not low <= value <= high:
        raise RequestError(f"{name} is {value}, and must lie between {low:g} and {high:g}", param=name)


def sampling_params(body: Common, vocab: int, logprobs: bool, defaults: JsonObject, bad: list[int]) -> SamplingParams:
    """The sampling parameters of a body. What it leaves out has the model's own default (generation_config.json), else the
    API's. `bad` tokens never come."""
    check_range(body.temperature, 0, 100, "temperature")
    check_range(body.top_p, 0, 1, "top_p")
    check_range(body.min_p, 0, 1, "min_p")
    check_range(body.top_k, -1, 1 << 30, "top_k")
    check_range(body.presence_penalty, -2, 2, "presence_penalty")
    check_range(body.frequency_penalty, -2, 2, "frequency_penalty")
    check_range(body.repetition_penalty, 0.01, 100, "repetition_penalty")
    check_range(body.n, 1, MAX_CHOICES, "n")
    check_range(body.seed, -(1 << 63), 1 << 64, "seed")

    def given(name: str, otherwise: float) -> float:
        value = getattr(body, name)
        return float(defaults.get(name, otherwise) if value is None else value)

    temperature = given("temperature", 1.0)
    return SamplingParams(
        temperature=0.0 if temperature < 1e-5 else temperature,
        top_k=max(0, int(given("top_k", 0))),
        top_p=max(given("top_p", 1.0), 1e-6),
        min_p=given("min_p", 0.0),
        presence=body.presence_penalty or 0.0,
        frequency=body.frequency_penalty or 0.0,
        repetition=given("repetition_penalty", 1.0),
        seed=int.from_bytes(os.urandom(4), "big") if body.seed is None else body.seed & 0xFFFFFFFF,
        logit_bias=_biases(body.logit_bias or {}, vocab, bad),
        logprobs=logprobs,
    )


def sampling_defaults(generation: JsonObject) -> JsonObject:
    """The sampling parameters that a generation_config.json recommends, as far as they are possible."""
    bounds = {
        "temperature": (0, 100),
        "top_p": (0, 1),
        "top_k": (0, 1 << 30),
        "min_p": (0, 1),
        "repetition_penalty": (0.01, 100),
    }
    found = {}
    for name, (low, high) in bounds.items():
        value = generation.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
            found[name] = value
    return found


_NEVER = -1e9  # added to the logit of a token that must not come


def _biases(asked: dict[str, float], vocab: int, bad: list[int]) -> tuple[tuple[int, float], ...]:
    if len(asked) + len(bad) > BIASES:
        raise RequestError(
            f"logit_bias and bad_words have {len(asked) + len(bad)} tokens, and may have {BIASES}", param="logit_bias"
        )
    found = [(id, _NEVER) for id in bad]
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


def grammar_of(body: Common) -> Grammar | None:
    """Which grammar the answer must follow, if any."""
    asked = body.response_format or {}
    kind = asked.get("type", "text")
    if kind == "json_object":
        return Grammar.of("json_schema", {"type": "object"})
    if kind == "json_schema":
        inner = asked.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if not isinstance(schema, dict | bool):
            raise RequestError("response_format.json_schema.schema is missing", param="response_format")
        return Grammar.of("json_schema", schema)
    if kind == "structural_tag":
        return Grammar.of("structural_tag", asked)
    if kind != "text":
        raise RequestError(f"response_format: unknown type {str(kind)[:40]!r}", param="response_format")
    return _structured(body.structured_outputs) or _structured(
        StructuredOutputs(
            json=body.guided_json, regex=body.guided_regex, choice=body.guided_choice, grammar=body.guided_grammar
        ),
        "guided_",
    )


def _structured(asked: StructuredOutputs | None, prefix: str = "structured_outputs.") -> Grammar | None:
    if asked is None:
        return None
    given = [name for name in asked.__struct_fields__ if getattr(asked, name) is not None]
    if not given or (given == ["json_object"] and not asked.json_object):
        return None
    if len(given) > 1:
        raise RequestError(
            f"{' and '.join(prefix + name for name in given)}: give one of them", param=prefix + given[0]
        )
    [name] = given
    value = getattr(asked, name)
    param = prefix.partition(".")[0] if "." in prefix else prefix + name
    if name in ("json", "structural_tag") and isinstance(value, str):
        if len(value) > MAX_GRAMMAR_BYTES:
            raise RequestError(f"{prefix}{name} has more than {MAX_GRAMMAR_BYTES} characters", param=param)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise RequestError(f"{prefix}{name} is not JSON", param=param) from None
    if name == "choice" and not value:
        raise RequestError(f"{prefix}choice is empty", param=param)
    kinds = {"json": "json_schema", "grammar": "lark", "json_object": "json_schema"}
    return Grammar.of(kinds.get(name, name), {"type": "object"} if name == "json_object" else value)


def error_body(error: UserError) -> JsonObject:
    """The shape of every error."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    default = "server_error" if error.status >= 500 else "invalid_request_error"
    message = error.what + (f"; {error.hint}" if error.hint else "")
    too_long = "the limit is" in error.what and "tokens" in error.what
    code = getattr(error, "code", None) or ("context_length_exceeded" if too_long else None)
    kind = kinds.get(error.status, default)
    return {"error": {"message": message, "type": kind, "param": getattr(error, "param", None), "code": code}}
