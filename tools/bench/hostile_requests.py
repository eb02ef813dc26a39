"""Requests that are meant to hold up a server: large, deep, many at once, or costly to check. All are answered or refused in good order."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

Json = dict[str, Any]


class HostileRequest(NamedTuple):
    """What it is, where it goes, and its body."""

    name: str
    path: str
    body: bytes


def corpus(max_len: int, vocab: int) -> Iterator[HostileRequest]:
    """All of them, for a model of this length and so many tokens."""
    for name, path, body in [*_texts(max_len), *_lists(vocab), *_grammars(), *_chats()]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        yield HostileRequest(f"{name} ({len(raw) / 1e6:.1f} MB)" if len(raw) > 99_999 else name, path, raw)


COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"


def _texts(max_len: int) -> Iterator[tuple[str, str, Json | bytes]]:
    yield "tokenize 8 MB", "/tokenize", {"prompt": "word " * 1_600_000}
    yield "tokenize 4 MB", "/tokenize", {"prompt": "word " * 800_000}
    yield "a prompt of 7 MB", COMPLETIONS, {"prompt": "é" * 1_100_000, "max_tokens": 1}
    yield "a prompt without a space", COMPLETIONS, {"prompt": "a" * (2 * max_len), "max_tokens": 1}
    many = ["word " * 800] * 1500
    yield "1,500 prompts of 4,000 characters", COMPLETIONS, {"prompt": many, "max_tokens": 1}
    yield "2,048 prompts of one token", COMPLETIONS, {"prompt": [[5]] * 2048, "max_tokens": 1, "logprobs": 5}
    yield "16 prompts, 128 choices each, streamed", COMPLETIONS, {
        "prompt": [[5]] * 16, "n": 128, "max_tokens": 2, "stream": True, "logprobs": 5,
    }  # fmt: skip
    yield "a million prompts", COMPLETIONS, {"prompt": ["a"] * 1_000_000}
    yield "echo with logprobs", COMPLETIONS, {
        "prompt": [[7] * (max_len - 2)] * 8, "echo": True, "logprobs": 20, "max_tokens": 1,
    }  # fmt: skip


def _lists(vocab: int) -> Iterator[tuple[str, str, Json | bytes]]:
    yield "detokenize 2 million tokens", "/detokenize", {"tokens": [7] * 2_000_000}
    yield "2 million allowed tokens", COMPLETIONS, {
        "prompt": "a", "max_tokens": 1, "allowed_token_ids": [9] * 2_000_000,
    }  # fmt: skip
    yield "a prompt of 2 million tokens", COMPLETIONS, {"prompt": [9] * 2_000_000, "max_tokens": 1}
    yield "200,000 bad words", COMPLETIONS, {"prompt": "a", "bad_words": [f"w{i}" for i in range(200_000)]}
    yield "one bad word of 6 MB", COMPLETIONS, {"prompt": "a", "bad_words": ["a b" * 2_000_000]}
    yield "a bias for each token", COMPLETIONS, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(vocab)}}
    yield "300,000 stop strings", COMPLETIONS, {"prompt": "a", "stop": ["ab"] * 300_000}
    yield "a million stop tokens", COMPLETIONS, {"prompt": "a", "stop_token_ids": [1] * 1_000_000}
    yield "300,000 unknown fields", COMPLETIONS, {"prompt": "a", "max_tokens": 1} | {f"x{i}": 1 for i in range(300_000)}
    yield "a million empty objects", COMPLETIONS, {"prompt": "a", "max_tokens": 1, "metadata": [{}] * 1_000_000}
    yield "nested 100,000 deep", COMPLETIONS, b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    yield "not JSON", COMPLETIONS, b"[" * 8_000_000


def _grammars() -> Iterator[tuple[str, str, Json | bytes]]:
    def guided(**grammar: object) -> Json:
        return {"prompt": "a", "max_tokens": 2, "n": 8, **grammar}

    fields = {f"field_{i}": {"type": "string", "enum": [f"v{i}_{j}" for j in range(20)]} for i in range(900)}
    yield "a schema of 250 KB, 8 choices", COMPLETIONS, guided(guided_json={"type": "object", "properties": fields})
    lone = {"type": "object", "properties": fields, "title": "second"}
    yield "the same with 128 choices", COMPLETIONS, guided(guided_json=lone, n=128)
    yield "a schema of 7 MB", COMPLETIONS, guided(guided_json={"enum": ["x" * 70] * 100_000})
    deep: Json = {"type": "string"}
    for _ in range(400):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    yield "a schema 400 deep", COMPLETIONS, guided(guided_json=deep)
    ring = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    yield "a schema that refers to itself", COMPLETIONS, guided(guided_json=ring)
    yield "a choice of 9,000", COMPLETIONS, guided(guided_choice=[f"option {i} of many" for i in range(9000)])
    yield "a choice of 200,000", COMPLETIONS, guided(guided_choice=[str(i) for i in range(200_000)])
    yield "a regex that grows", COMPLETIONS, guided(guided_regex="((a{1,500}){1,500}){1,500}")
    yield "a regex of 200 KB", COMPLETIONS, guided(guided_regex="(ab|cd)?" * 25_000)
    yield "a regex of nested groups", COMPLETIONS, guided(guided_regex="(" * 20_000 + "a" + ")*" * 20_000)
    rules = "\n".join(f"r{i}: r{i + 1} | r{i + 1} r{i + 1}" for i in range(4000))
    yield "a grammar of 4,000 rules", COMPLETIONS, guided(guided_grammar=f'start: r0\n{rules}\nr4000: "a"')
    tags = [{"begin": f"<t{i}>", "schema": {"type": "string"}, "end": f"</t{i}>"} for i in range(3000)]
    tag = {"type": "structural_tag", "structures": tags, "triggers": ["<t"]}
    yield "3,000 structural tags", COMPLETIONS, guided(response_format=tag)


def _chats() -> Iterator[tuple[str, str, Json | bytes]]:
    def chat(messages: list[Json], **more: object) -> Json:
        return {"messages": messages, "max_tokens": 1, **more}

    user = {"role": "user", "content": "hi"}
    yield "200,000 short messages", CHAT, chat([user] * 200_000)
    yield "4,096 messages", CHAT, chat([user] * 4096)
    yield "a message of 400,000 parts", CHAT, chat([
        {"role": "user", "content": [{"type": "text", "text": "a"}] * 180_000}
    ])  # fmt: skip
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "description": "d" * 200, "parameters": {
            "type": "object", "properties": {"a": {"type": "string"}}}}} for i in range(4000)
    ]  # fmt: skip
    yield "4,000 tools", CHAT, chat([user], tools=tools)
    yield "4,000 tools, one required", CHAT, chat([user], tools=tools, tool_choice="required")
    wide = {"role": "user", "content": "hi", "extra": {f"k{i}": [i] * 9 for i in range(60_000)}}
    yield "a message with a large field of its own", CHAT, chat([wide])
    yield "template arguments of 5 MB", CHAT, chat([user], chat_template_kwargs={"documents": ["x" * 50] * 90_000})
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": [0] * 900_000})}}
    yield "a past call with arguments of 3 MB", CHAT, chat([user, {"role": "assistant", "tool_calls": [call]}])
    deep_call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" * 400_000}}
    yield "a past call nested 400,000 deep", CHAT, chat([user, {"role": "assistant", "tool_calls": [deep_call]}])
    items = [{"type": "message", "role": "user", "content": "hi"}] * 100_000
    yield "responses with 100,000 items", RESPONSES, {"input": items, "max_output_tokens": 1}
