"""From a body to the answers that it asks for (no jax arrays are made here).

`admit_completion` and `admit_chat` check a body against the service and make one `Answer` for each choice, not yet begun. They
refuse what is too large first, and do what takes long in threads (`service.py`, `grammar.py`).
"""

import asyncio
import json
import time
import uuid
from typing import NamedTuple

import msgspec
import numpy as np

from podway.serve.batcher import Request
from podway.serve.body_weight import MAX_WEIGHT, TOO_HEAVY, weight
from podway.serve.grammar import Grammar, Words
from podway.serve.openai import (
    ChatBody,
    Common,
    CompletionBody,
    JsonObject,
    JsonValue,
    RequestError,
    check_range,
    grammar_of,
    sampling_params,
    stops_of,
)
from podway.serve.output_events import Schemas
from podway.serve.output_parser import OutputParser, ToolFormat
from podway.serve.responses import Answer
from podway.serve.sampling_params import BIASES, MAX_ALTERNATIVES, STOP_IDS, SamplingParams
from podway.serve.service import Service
from podway.serve.text_stream import TextStream
from podway.serve.tools import forced_schema, schemas_of, wanted_tools

MAX_PROMPTS = 2048
MAX_MESSAGES = 4096
_LONG = 1 << 14  # bytes of a body whose conversation is rendered in a thread
_LONGEST_WORD = 256  # characters of a bad word
_PROMPTS_A_TURN = 64  # that are admitted before others have their turn on the event loop
_TEMPLATE_ARGUMENTS = ("messages", "tools", "ask")  # which chat_template_kwargs cannot replace
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class AdmittedRequest:
    """One body, checked, with its answers."""

    def __init__(self, service: Service, body: Common, prefix: str) -> None:
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.adapter = service.adapter_of(body.model)
        self.model = self.adapter.name if self.adapter else service.name
        self.n = body.n or 1
        self.stream = bool(body.stream)
        options = body.stream_options
        self.usage = bool(options and options.include_usage)
        self.running_usage = bool(self.usage and options and options.continuous_usage_stats)
        self.return_token_ids = bool(body.return_token_ids)
        self.skip_special = body.skip_special_tokens is not False
        self.answers: list[Answer] = []
        self.prompts: list[list[int]] = []
        self.logprobs: int | None = None
        self.prompt_logprobs: int | None = None
        self.echo = False
        self.prompt_texts: list[str] = []
        self.schemas: Schemas = {}
        self.tool_format: ToolFormat | None = None
        self.reasoning = self.begun_reasoning = False
        self.parallel = True
        self._shared: _Shared | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def parser(self) -> OutputParser:
        """A parser for one answer of a conversation."""
        return OutputParser(
            self.schemas, self.tool_format, reasoning=self.reasoning, begun_reasoning=self.begun_reasoning,
            parallel=self.parallel,
        )  # fmt: skip

    async def add(
        self, service: Service, body: Common, prompt: list[int], max_tokens: int | None, grammar: Grammar | None,
        scores_prompt: bool,
    ) -> None:  # fmt: skip
        """`n` answers to one prompt."""
        prompt = _truncated(prompt, body, service.max_len)
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
        if self._shared is None:
            self._shared = _Shared.of(service, body, self.logprobs is not None)
        sampling, stop_ids, mask, stops = self._shared
        check_range(body.min_tokens, 0, most, "min_tokens")
        self.prompts.append(prompt)
        replica = service.least_loaded_replica()
        guides = None if grammar is None else await service.grammars.guides(grammar, self.n)
        for choice in range(self.n):
            request = Request(
                f"{self.id}-{len(self.answers)}", prompt, most, stop_ids=stop_ids, min_tokens=body.min_tokens or 0,
                guided=guides is not None, scores_prompt=scores_prompt,
                salt=(self.adapter.salt if self.adapter else b"") + (body.cache_salt or "").encode(),
                adapter=self.adapter.number if self.adapter else 0,
            )  # fmt: skip
            stream = TextStream(
                service.tokenizer, stops, skip_special=self.skip_special,
                keep_stop=bool(body.include_stop_str_in_output),
            )  # fmt: skip
            from_seed = sampling if choice == 0 else _reseeded(sampling, choice)
            guide = guides[choice] if guides is not None else None
            made = Answer(
                len(self.answers), request, replica, stream, from_seed, service.delivery(), guide=guide,
                grammar=grammar, mask=mask,
            )  # fmt: skip
            self.answers.append(made)


class _Shared(NamedTuple):
    """What the answers of a body have in common."""

    sampling: SamplingParams
    stop_ids: frozenset[int]
    mask: Words | None
    stops: list[str]

    @staticmethod
    def of(service: Service, body: Common, logprobs: bool) -> "_Shared":
        bad = _bad_ids(service, body.bad_words or [])
        sampling = sampling_params(body, service.tokenizer.vocab, logprobs, service.defaults, bad)
        return _Shared(sampling, _stop_ids(service, body), _mask(service, body), stops_of(body))


def _truncated(prompt: list[int], body: Common, max_len: int) -> list[int]:
    wanted = body.truncate_prompt_tokens
    if wanted is None:
        return prompt
    check_range(wanted, -1, max_len, "truncate_prompt_tokens")
    keep = max_len - (body.max_tokens or 1) if wanted == -1 else wanted
    if keep < 1:
        raise RequestError("truncate_prompt_tokens leaves nothing of the prompt", param="truncate_prompt_tokens")
    return prompt[-keep:]


def _stop_ids(service: Service, body: Common) -> frozenset[int]:
    stop_ids = frozenset() if body.ignore_eos else service.tokenizer.stop_ids
    service.check_ids(body.stop_token_ids or [], "stop_token_ids")
    stop_ids |= frozenset(body.stop_token_ids or [])
    if len(stop_ids) > STOP_IDS:
        raise RequestError(f"at most {STOP_IDS} stop ids", param="stop_token_ids")
    return stop_ids


def _bad_ids(service: Service, words: list[str]) -> list[int]:
    """The token of each word, alone and after a space. A word of several tokens cannot be kept out one token at a time."""
    found: set[int] = set()
    if len(words) > BIASES or any(len(word) > _LONGEST_WORD for word in words):
        raise RequestError(
            f"bad_words: at most {BIASES} words of at most {_LONGEST_WORD} characters", param="bad_words"
        )
    for word in words:
        spelled = [service.tokenizer.encode(text, special=False) for text in {word, f" {word}"}]
        single = [ids[0] for ids in spelled if len(ids) == 1]
        if not single:
            raise RequestError(f"bad_words: {word[:40]!r} is not a single token", param="bad_words")
        found.update(single)
    return sorted(found)


def _mask(service: Service, body: Common) -> Words | None:
    """A bit for each token that allowed_token_ids names."""
    if body.allowed_token_ids is None:
        return None
    if not body.allowed_token_ids:
        raise RequestError("allowed_token_ids is empty", param="allowed_token_ids")
    service.check_ids(body.allowed_token_ids, "allowed_token_ids")
    bits = np.zeros(-(-service.tokenizer.vocab // 32) * 32, np.uint8)
    bits[body.allowed_token_ids] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def _reseeded(sampling: SamplingParams, choice: int) -> SamplingParams:
    return msgspec.structs.replace(sampling, seed=(sampling.seed + choice) & 0xFFFFFFFF)


async def admit_completion(service: Service, body: CompletionBody) -> AdmittedRequest:
    """The answers to every prompt of a body."""
    if body.suffix:
        raise RequestError("suffix is not supported", param="suffix")
    check_range(body.logprobs, 0, MAX_ALTERNATIVES, "logprobs")
    check_range(body.prompt_logprobs, 0, MAX_ALTERNATIVES, "prompt_logprobs")
    check_range(body.max_tokens, 0, 1 << 30, "max_tokens")
    call = AdmittedRequest(service, body, "cmpl")
    call.logprobs, call.echo, call.prompt_logprobs = body.logprobs, bool(body.echo), body.prompt_logprobs
    if call.stream and call.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not call.echo:
        raise RequestError("max_tokens is 0: nothing to do without echo", param="max_tokens")
    prompts = _prompts(body)
    if len(prompts) * call.n > MAX_PROMPTS:
        raise RequestError(
            f"{len(prompts) * call.n} answers in one request, and {MAX_PROMPTS} are the limit", param="prompt"
        )
    grammar = grammar_of(body)
    scoring = (call.echo and call.logprobs is not None) or call.prompt_logprobs is not None
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    for text in texts:
        service.check_length(len(text.encode(errors="replace")), "prompt")
    encoded = iter(await service.encode_all(texts, body.add_special_tokens is not False))
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            ids, text = next(encoded), prompt
        else:
            service.check_length(len(prompt) * service.tokenizer.longest, "prompt")
            service.check_ids(prompt, "prompt")
            ids, text = prompt, service.tokenizer.decode(prompt) if call.echo else ""
        call.prompt_texts.append(text)
        await call.add(service, body, ids, max_tokens, grammar, scoring)
        if number % _PROMPTS_A_TURN == _PROMPTS_A_TURN - 1:
            await asyncio.sleep(0)  # others have their turn
    return call


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    """The prompts of a string, a list of strings, ids, or a list of lists of ids."""
    prompt = body.prompt
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], int)):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt or not all(isinstance(one, str | list) for one in prompt):
        raise RequestError("prompt must be a string, a list of strings, token ids, or lists of them", param="prompt")
    return prompt


async def admit_chat(service: Service, body: ChatBody, size: int) -> AdmittedRequest:
    """The answers to a conversation, whose body has so many bytes."""
    check_range(body.top_logprobs, 0, MAX_ALTERNATIVES, "top_logprobs")
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    check_range(limit, 1, 1 << 30, "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens")
    call = AdmittedRequest(service, body, "chatcmpl")
    call.logprobs = (body.top_logprobs or 0) if body.logprobs else None
    tools = wanted_tools(body)
    schema = forced_schema(body, tools)
    grammar = Grammar.of("json_schema", schema) if schema is not None else grammar_of(body)
    call.schemas, call.parallel = schemas_of(tools), body.parallel_tool_calls is not False
    if schema is not None:
        call.tool_format = "llama3"  # what is forced is a bare object
    elif grammar is None:
        call.tool_format, call.reasoning = service.tool_format, service.reasoning
        call.skip_special = call.skip_special and not _marks_with_special(call)
    text = await render_chat(service, body.messages, body, tools, size)
    call.begun_reasoning = call.reasoning and text.rstrip().endswith("<think>")
    service.check_length(len(text.encode()), "messages")
    ids = await service.encode(text, False)
    await call.add(service, body, ids, limit, grammar, scores_prompt=False)
    return call


def _marks_with_special(call: AdmittedRequest) -> bool:
    """Whether the model's calls or channels are marked by special tokens, which the text must keep for the parser."""
    return call.tool_format == "harmony" or bool(call.schemas and call.tool_format in ("llama3", "mistral", "deepseek"))


async def render_chat(
    service: Service, messages: list[JsonObject], body: ChatBody, tools: list[JsonObject], size: int
) -> str:
    """The text of a conversation up to where the model answers, or goes on with its last message; its body has `size` bytes."""
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"{len(messages)} messages, and {MAX_MESSAGES} are the limit", param="messages")
    clean = await service.beside(size > _LONG, checked_messages, messages)
    service.check_length(sum(len(message["content"]) for message in clean), "messages")
    goes_on = bool(body.continue_final_message)
    ask = body.add_generation_prompt is not False and not goes_on
    given = {"reasoning_effort": body.reasoning_effort} if body.reasoning_effort else {}
    given |= {k: v for k, v in (body.chat_template_kwargs or {}).items() if k not in _TEMPLATE_ARGUMENTS}

    def render() -> str:
        return service.tokenizer.render(clean, tools=tools or None, ask=ask, **given)

    text = await service.beside(size > _LONG, render)
    if goes_on:  # what the template writes after the last message would end it
        begun = clean[-1]["content"].strip()
        text = text[: text.rfind(begun) + len(begun)]
    return text


def checked_messages(messages: list[JsonObject]) -> list[JsonObject]:
    """The messages as templates expect them: text in one string, arguments of calls as objects."""
    if not messages:
        raise RequestError("messages is empty", param="messages")
    return [_message(message, number) for number, message in enumerate(messages)]


def _message(message: JsonObject, number: int) -> JsonObject:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise RequestError(f"messages[{number}]: unknown role {str(role)[:40]!r}", param="messages")
    if isinstance(content, list):
        content = _text_of_parts(content, number)
    if content is not None and not isinstance(content, str):
        raise RequestError(f"messages[{number}]: content must be a string or a list of parts", param="messages")
    if content is None and not message.get("tool_calls"):
        raise RequestError(f"messages[{number}]: content is missing", param="messages")
    clean = {**message, "role": "system" if role == "developer" else role, "content": content or ""}
    if isinstance(calls := message.get("tool_calls"), list):
        clean["tool_calls"] = [_call(call, number) for call in calls]
    return clean


def _text_of_parts(parts: list[JsonValue], number: int) -> str:
    texts = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") not in ("text", "input_text", "output_text", "refusal"):
            kind = part.get("type") if isinstance(part, dict) else part
            raise RequestError(f"messages[{number}]: this model reads text, not {str(kind)[:40]!r}", param="messages")
        texts.append(str(part.get("text", part.get("refusal", ""))))
    return "".join(texts)


def _call(call: JsonValue, number: int) -> JsonObject:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"messages[{number}]: a tool call has no function", param="messages")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        if weight(arguments.encode(errors="replace")) > MAX_WEIGHT:
            raise RequestError(f"messages[{number}]: the arguments of a call have {TOO_HEAVY}", param="messages")
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise RequestError(
                f"messages[{number}]: the arguments of {function['name'][:40]} are not JSON", param="messages"
            ) from None
    return {**call, "function": {**function, "arguments": arguments}}
