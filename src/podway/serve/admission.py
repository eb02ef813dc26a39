"""From a body to the answers that it asks for (no jax arrays are made here).

`Service` is what the server knows of its model; `admit_completion` and `admit_chat` check a body against it and make one `Answer`
for each choice, not yet begun.
"""

import json
import time
import uuid
from typing import Any

import msgspec

from podway.model.tokenizer import ModelTokenizer
from podway.serve.batcher import Request
from podway.serve.grammar import Grammars
from podway.serve.loop import Loop
from podway.serve.metrics import Metrics
from podway.serve.openai import (
    ChatBody,
    Common,
    CompletionBody,
    RequestError,
    check_range,
    grammar_of,
    sampling_params,
    stops_of,
)
from podway.serve.responses import Answer
from podway.serve.sampling_params import MAX_ALTERNATIVES, STOP_IDS, SamplingParams
from podway.serve.text_stream import TextStream
from podway.serve.tools import forced_schema, wanted_tools

MAX_PROMPTS = 2048
_TEMPLATE_ARGUMENTS = ("messages", "tools", "ask")  # which chat_template_kwargs cannot replace
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class Service:
    """The model that is served. There are `loops`, one for each replica, once it is warm."""

    def __init__(self, name: str, tokenizer: ModelTokenizer, max_len: int) -> None:
        self.name, self.tokenizer, self.max_len = name, tokenizer, max_len
        self.grammars = Grammars(tokenizer)
        self.created = int(time.time())
        self.loops: list[Loop] = []
        self.status = "starting"
        self._turn = 0

    @property
    def ready(self) -> bool:
        return bool(self.loops) and all(loop.failure is None for loop in self.loops)

    def metrics(self) -> Metrics:
        """Of all replicas together."""
        return Metrics.sum([loop.metrics for loop in self.loops])

    def least_loaded_replica(self) -> Loop:
        """The replica that has the least to do; of equals, the next in turn. One that failed is asked last, and says so."""
        if not self.loops:
            raise RequestError(f"the model is not ready: {self.status}", status=503)
        self._turn += 1
        in_turn = [self.loops[(self._turn + at) % len(self.loops)] for at in range(len(self.loops))]
        return min(in_turn, key=lambda loop: (loop.failure is not None, loop.load))

    def card(self) -> dict[str, Any]:
        """What /v1/models says of it."""
        return {
            "id": self.name, "object": "model", "created": self.created, "owned_by": "podway", "root": self.name,
            "parent": None, "max_model_len": self.max_len,
        }  # fmt: skip

    def check_name(self, asked: str | None) -> None:
        if asked not in (None, "", self.name):
            raise RequestError(
                f"there is no model {asked[:200]!r}; this server has {self.name!r}", status=404, param="model",
                code="model_not_found",
            )  # fmt: skip

    def check_ids(self, ids: list[int], name: str) -> None:
        for id in ids:
            if not isinstance(id, int) or isinstance(id, bool) or not 0 <= id < self.tokenizer.vocab:
                raise RequestError(f"{name}: {str(id)[:40]} is not a token id below {self.tokenizer.vocab}", param=name)


class AdmittedRequest:
    """One body, checked, with its answers."""

    def __init__(self, service: Service, body: Common, prefix: str) -> None:
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = service.name
        self.n = body.n or 1
        self.stream = bool(body.stream)
        self.usage = bool(body.stream_options and body.stream_options.include_usage)
        self.answers: list[Answer] = []
        self.prompt_tokens = 0
        self.logprobs: int | None = None
        self.prompt_logprobs: int | None = None
        self.echo = False
        self.prompt_texts: list[str] = []
        self.tools: list[dict[str, Any]] = []

    def add(
        self,
        service: Service,
        body: Common,
        prompt: list[int],
        max_tokens: int | None,
        grammar: tuple[str, Any] | None,
        scores_prompt: bool,
    ) -> None:
        """`n` answers to one prompt."""
        room = service.max_len - len(prompt)
        if not prompt:
            raise RequestError("the prompt is empty", param="prompt")
        if room < (max_tokens or 1):
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and the answer may have {max_tokens or 1}: the limit is "
                f"{service.max_len} tokens for both",
                param="prompt", code="context_length_exceeded",
            )  # fmt: skip
        most = room if max_tokens is None else max_tokens
        sampling = sampling_params(body, service.tokenizer.vocab, self.logprobs is not None)
        stop_ids = frozenset() if body.ignore_eos else service.tokenizer.stop_ids
        service.check_ids(body.stop_token_ids or [], "stop_token_ids")
        stop_ids |= frozenset(body.stop_token_ids or [])
        if len(stop_ids) > STOP_IDS:
            raise RequestError(f"at most {STOP_IDS} stop ids", param="stop_token_ids")
        check_range(body.min_tokens, 0, most, "min_tokens")
        self.prompt_tokens += len(prompt)
        engine = service.least_loaded_replica()
        for choice in range(self.n):
            request = Request(
                f"{self.id}-{len(self.answers)}", prompt, most, stop_ids=stop_ids, min_tokens=body.min_tokens or 0,
                guided=grammar is not None, scores_prompt=scores_prompt,
            )  # fmt: skip
            guide = service.grammars.start(*grammar) if grammar else None
            stream = TextStream(
                service.tokenizer, stops_of(body), skip_special=body.skip_special_tokens is not False,
                keep_stop=bool(body.include_stop_str_in_output),
            )  # fmt: skip
            from_seed = sampling if choice == 0 else _reseeded(sampling, choice)
            self.answers.append(Answer(len(self.answers), request, engine, stream, from_seed, guide, grammar))


def _reseeded(sampling: SamplingParams, choice: int) -> SamplingParams:
    return msgspec.structs.replace(sampling, seed=(sampling.seed + choice) & 0xFFFFFFFF)


def admit_completion(service: Service, body: CompletionBody) -> AdmittedRequest:
    """The answers to every prompt of a body."""
    service.check_name(body.model)
    if body.suffix:
        raise RequestError("suffix is not supported", param="suffix")
    check_range(body.logprobs, 0, MAX_ALTERNATIVES, "logprobs")
    check_range(body.prompt_logprobs, 0, MAX_ALTERNATIVES, "prompt_logprobs")
    check_range(body.max_tokens, 0, 1 << 30, "max_tokens")
    asked = AdmittedRequest(service, body, "cmpl")
    asked.logprobs, asked.echo, asked.prompt_logprobs = body.logprobs, bool(body.echo), body.prompt_logprobs
    if asked.stream and asked.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    prompts = _prompts(service, body)
    if len(prompts) * asked.n > MAX_PROMPTS:
        raise RequestError(
            f"{len(prompts) * asked.n} answers in one request, and {MAX_PROMPTS} are the limit", param="prompt"
        )
    grammar = grammar_of(body)
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not asked.echo:
        raise RequestError("max_tokens is 0: nothing to do without echo", param="max_tokens")
    for ids, text in prompts:
        asked.prompt_texts.append(text if text is not None else service.tokenizer.decode(ids) if asked.echo else "")
        scoring = (asked.echo and asked.logprobs is not None) or asked.prompt_logprobs is not None
        asked.add(service, body, ids, max_tokens, grammar, scoring)
    return asked


def _prompts(service: Service, body: CompletionBody) -> list[tuple[list[int], str | None]]:
    """Token ids, and the text if that was sent, of a string, a list of strings, ids, or a list of lists of ids."""
    prompt = body.prompt
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], int)):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise RequestError("prompt must be a string, a list of strings, token ids, or lists of them", param="prompt")
    found: list[tuple[list[int], str | None]] = []
    for one in prompt:
        if isinstance(one, str):
            found.append((service.tokenizer.encode(one, body.add_special_tokens is not False), one))
        elif isinstance(one, list):
            service.check_ids(one, "prompt")
            found.append((one, None))
        else:
            raise RequestError(
                "prompt must be a string, a list of strings, token ids, or lists of them", param="prompt"
            )
    return found


def admit_chat(service: Service, body: ChatBody) -> AdmittedRequest:
    """The answers to a conversation."""
    service.check_name(body.model)
    check_range(body.top_logprobs, 0, MAX_ALTERNATIVES, "top_logprobs")
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    check_range(limit, 1, 1 << 30, "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens")
    asked = AdmittedRequest(service, body, "chatcmpl")
    asked.logprobs = (body.top_logprobs or 0) if body.logprobs else None
    asked.tools = wanted_tools(body)
    schema = forced_schema(body, asked.tools)
    grammar = ("json_schema", schema) if schema is not None else grammar_of(body)
    goes_on = bool(body.continue_final_message)
    ask = body.add_generation_prompt is not False and not goes_on
    more = {key: value for key, value in (body.chat_template_kwargs or {}).items() if key not in _TEMPLATE_ARGUMENTS}
    messages = checked_messages(body.messages)
    text = service.tokenizer.render(messages, tools=asked.tools or None, ask=ask, **more)
    if goes_on:  # what the template writes after the last message would end it
        begun = messages[-1]["content"].strip()
        text = text[: text.rfind(begun) + len(begun)]
    ids = service.tokenizer.encode(text, special=False)
    asked.add(service, body, ids, limit, grammar, scores_prompt=False)
    return asked


def checked_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as templates expect them: text in one string, arguments of calls as objects."""
    if not messages:
        raise RequestError("messages is empty", param="messages")
    return [_message(message, number) for number, message in enumerate(messages)]


def _message(message: dict[str, Any], number: int) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise RequestError(f"messages[{number}]: unknown role {str(role)[:40]!r}", param="messages")
    if isinstance(content, list):
        texts = []
        for part in content:
            if not isinstance(part, dict) or part.get("type") not in ("text", "input_text", "refusal"):
                kind = part.get("type") if isinstance(part, dict) else part
                raise RequestError(
                    f"messages[{number}]: this model reads text, not {str(kind)[:40]!r}", param="messages"
                )
            texts.append(str(part.get("text", part.get("refusal", ""))))
        content = "".join(texts)
    if content is not None and not isinstance(content, str):
        raise RequestError(f"messages[{number}]: content must be a string or a list of parts", param="messages")
    if content is None and not message.get("tool_calls"):
        raise RequestError(f"messages[{number}]: content is missing", param="messages")
    clean = {**message, "role": "system" if role == "developer" else role, "content": content or ""}
    if isinstance(calls := message.get("tool_calls"), list):
        clean["tool_calls"] = [_call(call, number) for call in calls]
    return clean


def _call(call: Any, number: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"messages[{number}]: a tool call has no function", param="messages")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            raise RequestError(
                f"messages[{number}]: the arguments of {function['name'][:40]} are not JSON", param="messages"
            ) from None
    return {**call, "function": {**function, "arguments": arguments}}
