"""POST /v1/responses: OpenAI's newer API, over the same admission and parser as conversations (no jax).

`chat_body` turns a body into that of a conversation; `whole_response` and `response_events` write the answer as items: reasoning, a
message, function calls. Nothing is kept between requests, so `previous_response_id` and what else needs a store is refused.
"""

import uuid
from collections.abc import AsyncIterator

import msgspec

from podway.serve.admission import MAX_MESSAGES, AdmittedRequest
from podway.serve.chat_output import message_of
from podway.serve.openai import ChatBody, JsonObject, JsonValue, RequestError
from podway.serve.output_events import CallArguments, CallStart, Content, Event, Reasoning
from podway.serve.responses import Answer, usage

MAX_ITEMS = 4 * MAX_MESSAGES  # several calls are one message
_KINDS: dict[type[Event], str] = {Content: "message", Reasoning: "reasoning", CallStart: "function_call"}


class ResponsesBody(msgspec.Struct, kw_only=True):
    """POST /v1/responses."""

    input: str | list[JsonObject]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stream: bool | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    text: JsonObject | None = None
    reasoning: JsonObject | None = None
    ignore_eos: bool | None = None
    previous_response_id: str | None = None
    conversation: JsonValue = None
    background: bool | None = None
    metadata: JsonObject | None = None


def chat_body(body: ResponsesBody) -> ChatBody:
    """The same as a conversation."""
    for name in ("previous_response_id", "conversation", "background"):
        if getattr(body, name):
            raise RequestError(f"{name} is not supported: this server keeps no responses", param=name)
    if len(body.input) > MAX_ITEMS and not isinstance(body.input, str):
        raise RequestError(f"{len(body.input)} items, and {MAX_ITEMS} are the limit", param="input")
    messages: list[JsonObject] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    for number, item in enumerate(items):
        _add(messages, item, number)
    effort = (body.reasoning or {}).get("effort")
    return ChatBody(
        messages=messages, model=body.model, max_completion_tokens=body.max_output_tokens, temperature=body.temperature,
        top_p=body.top_p, seed=body.seed, stream=body.stream, parallel_tool_calls=body.parallel_tool_calls,
        tools=[_tool(tool) for tool in body.tools or []] or None, tool_choice=_choice(body.tool_choice),
        response_format=_format((body.text or {}).get("format")), ignore_eos=body.ignore_eos,
        reasoning_effort=effort if isinstance(effort, str) else None,
    )  # fmt: skip


def _add(messages: list[JsonObject], item: JsonObject, number: int) -> None:
    """An item as a message; neighbouring calls belong to one."""
    kind = item.get("type", "message")
    if kind == "message":
        messages.append({"role": item.get("role"), "content": item.get("content")})
    elif kind == "function_call":
        call = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        made = {"id": item.get("call_id"), "type": "function", "function": call}
        if messages and messages[-1].get("tool_calls"):
            messages[-1]["tool_calls"].append(made)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [made]})
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
    elif kind != "reasoning":  # what a model thought before is not shown to it again
        raise RequestError(f"input[{number}]: unknown type {str(kind)[:40]!r}", param="input")


def _tool(tool: JsonObject) -> JsonObject:
    if tool.get("type") != "function":
        raise RequestError(f"tools: {str(tool.get('type'))[:40]!r} is not supported, only functions", param="tools")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if name in tool}}


def _choice(choice: str | JsonObject | None) -> str | JsonObject | None:
    return {"type": "function", "function": {"name": choice.get("name")}} if isinstance(choice, dict) else choice


def _format(wanted: JsonValue) -> JsonObject | None:
    if not isinstance(wanted, dict):
        return None
    if wanted.get("type") != "json_schema":
        return wanted
    return {"type": "json_schema", "json_schema": {"name": wanted.get("name"), "schema": wanted.get("schema")}}


class ResponseWriter:
    """The response to one body."""

    def __init__(self, body: ResponsesBody) -> None:
        self.body = body

    def whole(self, call: AdmittedRequest, output: list[JsonObject] | None = None) -> JsonObject:
        """The response as far as it is: with `output`, in progress."""
        [answer] = call.answers
        done = output is None
        cut = answer.finish == "length"
        status = "in_progress" if not done else "incomplete" if cut else "completed"
        counted = usage(call.prompt_tokens, call.answers, 1)
        body = self.body
        return {
            "id": call.id, "object": "response", "created_at": call.created, "status": status, "error": None, "model": call.model,
            "incomplete_details": {"reason": "max_output_tokens"} if done and cut else None, "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens, "metadata": body.metadata or {}, "previous_response_id": None,
            "output": self._items(call, answer) if output is None else output, "parallel_tool_calls": call.parallel,
            "temperature": answer.sampling.temperature, "top_p": answer.sampling.top_p, "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto", "tools": body.tools or [], "truncation": "disabled",
            "usage": None if not done else {
                "input_tokens": counted["prompt_tokens"], "output_tokens": counted["completion_tokens"],
                "total_tokens": counted["total_tokens"], "input_tokens_details": counted["prompt_tokens_details"],
                "output_tokens_details": {"reasoning_tokens": 0},
            },
        }  # fmt: skip

    def _items(self, call: AdmittedRequest, answer: Answer) -> list[JsonObject]:
        message, _ = message_of(call, answer)
        items = [_item("reasoning", message["reasoning_content"])] if "reasoning_content" in message else []
        if message["content"] or not message.get("tool_calls"):
            items.append(_item("message", message["content"] or ""))
        for made in message.get("tool_calls") or []:
            items.append(_item("function_call", made["function"]["arguments"], made["function"]["name"]))
        return items

    async def events(self, call: AdmittedRequest) -> AsyncIterator[JsonObject]:
        """The events of a stream; each item is added, grows, and is done."""
        number, items, parser = 0, list[JsonObject](), call.parser()
        [answer] = call.answers

        def event(kind: str, **fields: JsonValue) -> JsonObject:
            nonlocal number
            number += 1
            return {"type": f"response.{kind}", "sequence_number": number - 1, **fields}

        def opened(kind: str, name: str) -> list[JsonObject]:
            items.append(_item(kind, "", name, status="in_progress"))
            found = [event("output_item.added", output_index=len(items) - 1, item=items[-1])]
            if kind == "message":
                part = {"type": "output_text", "text": "", "annotations": []}
                found.append(event("content_part.added", **_place(items), content_index=0, part=part))
            return found

        def closed() -> list[JsonObject]:
            if not items or items[-1]["status"] == "completed":
                return []
            items[-1] = {**items[-1], "status": "completed"}
            found, kind = [], items[-1]["type"]
            if kind == "function_call":
                found.append(event("function_call_arguments.done", **_place(items), arguments=items[-1]["arguments"]))
            elif kind == "message":
                part = items[-1]["content"][0]
                found.append(
                    event("output_text.done", **_place(items), content_index=0, text=part["text"], logprobs=[])
                )
                found.append(event("content_part.done", **_place(items), content_index=0, part=part))
            return [*found, event("output_item.done", output_index=len(items) - 1, item=items[-1])]

        yield event("created", response=self.whole(call, []))
        yield event("in_progress", response=self.whole(call, []))
        async for delta in answer.deltas():
            for part in parser.feed(delta.text) + (parser.finish() if delta.finish else []):
                kind = "function_call" if isinstance(part, CallArguments) else _KINDS[type(part)]
                if not items or items[-1]["type"] != kind or isinstance(part, CallStart):
                    for one in closed() + opened(kind, part[0] if isinstance(part, CallStart) else ""):
                        yield one
                if not isinstance(part, CallStart):
                    yield event(**_grown(items, part[0]))
        for one in closed():
            yield one
        yield event(
            "incomplete" if answer.finish == "length" else "completed", response=self.whole(call) | {"output": items}
        )


def _item(kind: str, text: str, name: str = "", status: str = "completed") -> JsonObject:
    made: JsonObject = {"type": kind, "id": f"{kind[:4]}_{uuid.uuid4().hex[:24]}", "status": status}
    if kind == "message":
        return {**made, "role": "assistant", "content": [{"type": "output_text", "text": text, "annotations": []}]}
    if kind == "reasoning":
        return {**made, "summary": [], "content": [{"type": "reasoning_text", "text": text}]}
    return {**made, "call_id": f"call_{uuid.uuid4().hex[:24]}", "name": name, "arguments": text}


def _place(items: list[JsonObject]) -> JsonObject:
    return {"item_id": items[-1]["id"], "output_index": len(items) - 1}


def _grown(items: list[JsonObject], text: str) -> JsonObject:
    """Add text to the last item; the fields of the event that says so."""
    item = items[-1]
    if item["type"] == "function_call":
        items[-1] = {**item, "arguments": item["arguments"] + text}
        return {"kind": "function_call_arguments.delta", "delta": text, **_place(items)}
    part = item["content"][0]
    items[-1] = {**item, "content": [{**part, "text": part["text"] + text}]}
    kind = "output_text.delta" if item["type"] == "message" else "reasoning_text.delta"
    more: JsonObject = {"logprobs": []} if item["type"] == "message" else {}
    return {"kind": kind, "delta": text, "content_index": 0, **_place(items), **more}
