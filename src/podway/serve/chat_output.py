"""The answers of /v1/chat/completions, whole and as events (no jax).

Both go through `output_parser`: what a stream gives in pieces is what the whole message has.
"""

import uuid
from collections.abc import AsyncIterator, Iterable

from podway.serve.admission import AdmittedRequest
from podway.serve.completion_output import head, running_usage
from podway.serve.loop import TokenScore
from podway.serve.openai import JsonObject
from podway.serve.output_events import CallArguments, CallStart, Content, Event, Reasoning
from podway.serve.responses import Answer, chat_logprobs, merged, usage
from podway.serve.service import Service


def whole_chat(service: Service, call: AdmittedRequest) -> JsonObject:
    """The response to a request that is not streamed."""
    choices = [_choice(service, call, answer) for answer in call.answers]
    counted = usage(call.prompt_tokens, call.answers, call.n)
    found = {**head(call, "chat.completion"), "choices": choices, "usage": counted}
    return found | ({"prompt_token_ids": call.prompts[0]} if call.return_token_ids else {})


def message_of(call: AdmittedRequest, answer: Answer) -> tuple[JsonObject, str | None]:
    """The message of an answer that has ended, and why it ended."""
    parser = call.parser()
    events = [*parser.feed(answer.text), *parser.finish()]

    def text(kind: type[Event]) -> str:
        return "".join(event[0] for event in events if isinstance(event, kind))

    calls: list[JsonObject] = []
    for event in events:
        if isinstance(event, CallStart):
            calls.append(_tool_call(event.name))
        elif isinstance(event, CallArguments):
            calls[-1]["function"]["arguments"] += event.text
    message: JsonObject = {"role": "assistant", "content": text(Content) or (None if calls else ""), "refusal": None}
    if reasoning := text(Reasoning):
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message, _finish(answer.finish, bool(calls))


def _tool_call(name: str) -> JsonObject:
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": {"name": name, "arguments": ""}}


def _finish(finish: str | None, called: bool) -> str | None:
    return "tool_calls" if called and finish == "stop" else finish


def _choice(service: Service, call: AdmittedRequest, answer: Answer) -> JsonObject:
    message, finish = message_of(call, answer)
    choice: JsonObject = {"index": answer.index, "message": message, "logprobs": None, "finish_reason": finish}
    if call.logprobs is not None:
        choice["logprobs"] = chat_logprobs(answer.scores, call.logprobs, service.tokenizer)
    return choice | ({"token_ids": answer.tokens} if call.return_token_ids else {})


class _Deltas:
    """The events of one answer as deltas of the API."""

    def __init__(self, call: AdmittedRequest) -> None:
        self.parser = call.parser()
        self.calls = 0

    def of(self, events: Iterable[Event]) -> list[JsonObject]:
        out: list[JsonObject] = []
        for event in events:
            if isinstance(event, Content):
                out.append({"content": event.text})
            elif isinstance(event, Reasoning):
                out.append({"reasoning_content": event.text})
            elif isinstance(event, CallStart):
                out.append({"tool_calls": [{"index": self.calls, **_tool_call(event.name)}]})
                self.calls += 1
            else:
                out.append({"tool_calls": [{"index": self.calls - 1, "function": {"arguments": event.text}}]})
        return out


async def chat_events(service: Service, call: AdmittedRequest) -> AsyncIterator[JsonObject]:
    """The events of a stream: the role, then what comes, then why it ended."""
    begin = head(call, "chat.completion.chunk")
    streams = {answer.index: _Deltas(call) for answer in call.answers}
    spoke: set[int] = set()

    def chunk(
        answer: Answer, delta: JsonObject, finish: str | None = None, scores: list[TokenScore] | None = None
    ) -> JsonObject:
        choice: JsonObject = {"index": answer.index, "delta": delta, "logprobs": None, "finish_reason": finish}
        if scores and call.logprobs is not None:
            choice["logprobs"] = chat_logprobs(scores, call.logprobs, service.tokenizer)
        return {**begin, "choices": [choice], **running_usage(call)}

    async for answer, delta in merged(call.answers):
        mine = streams[answer.index]
        if answer.index not in spoke:
            spoke.add(answer.index)
            first = chunk(answer, {"role": "assistant", "content": ""})
            yield first | ({"prompt_token_ids": call.prompts[0]} if call.return_token_ids else {})
        events = mine.parser.feed(delta.text) + (mine.parser.finish() if delta.finish else [])
        parts = mine.of(events) or ([{}] if delta.scores or (call.return_token_ids and delta.tokens) else [])
        for number, part in enumerate(parts):  # what was counted in tokens goes with the first part
            event = chunk(answer, part, None, delta.scores if number == 0 else None)
            if call.return_token_ids and number == 0:
                event["choices"][0]["token_ids"] = delta.tokens
            yield event
        if delta.finish:
            yield chunk(answer, {}, _finish(delta.finish, mine.calls > 0))
    if call.usage:
        yield {**begin, "choices": [], "usage": usage(call.prompt_tokens, call.answers, call.n)}
