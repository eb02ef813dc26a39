"""The answers of /v1/completions, whole and as events (no jax)."""

from collections.abc import AsyncIterator

from podway.serve.admission import AdmittedRequest
from podway.serve.openai import JsonObject
from podway.serve.responses import Answer, TextOffsets, completion_logprobs, merged, prompt_logprobs, usage
from podway.serve.service import Service

_LARGE = 256  # tokens whose logprobs are written in a thread: those of a prompt that is echoed


def head(call: AdmittedRequest, kind: str) -> JsonObject:
    """What every response and event begins with."""
    return {"id": call.id, "object": kind, "created": call.created, "model": call.model}


def running_usage(call: AdmittedRequest) -> JsonObject:
    """The usage of an event that has choices: null, or the count so far where the client asked for that."""
    if not call.usage:
        return {}
    return {"usage": usage(call.prompt_tokens, call.answers, call.n) if call.running_usage else None}


def whole_completion(service: Service, call: AdmittedRequest) -> JsonObject:
    """The response to a request that is not streamed."""
    choices = [_choice(service, call, answer) for answer in call.answers]
    counted = usage(call.prompt_tokens, call.answers, call.n)
    return {**head(call, "text_completion"), "choices": choices, "usage": counted}


def _choice(service: Service, call: AdmittedRequest, answer: Answer) -> JsonObject:
    prompt = call.prompt_texts[answer.index // call.n] if call.echo else ""
    logprobs = None
    if call.logprobs is not None:
        scores = [*answer.prompt_scores, *answer.scores] if call.echo else answer.scores
        offsets = TextOffsets(service.tokenizer, call.skip_special)
        logprobs = completion_logprobs(scores, call.logprobs, service.tokenizer, offsets)
    choice = {"index": answer.index, "text": prompt + answer.text, "logprobs": logprobs, "finish_reason": answer.finish}
    if call.prompt_logprobs is not None:
        choice["prompt_logprobs"] = prompt_logprobs(answer.prompt_scores, call.prompt_logprobs, service.tokenizer)
    if call.return_token_ids:
        choice |= {"token_ids": answer.tokens, "prompt_token_ids": call.prompts[answer.index // call.n]}
    return choice


async def completion_events(service: Service, call: AdmittedRequest) -> AsyncIterator[JsonObject]:
    """The events of a stream."""
    begin = head(call, "text_completion")
    offsets: dict[int, TextOffsets] = {}
    async for answer, delta in merged(call.answers):
        text, scores, first = delta.text, delta.scores, answer.index not in offsets
        if first:
            offsets[answer.index] = TextOffsets(service.tokenizer, call.skip_special)
        if first and call.echo:
            text = call.prompt_texts[answer.index // call.n] + text
            scores = [*answer.prompt_scores, *scores]
        if not (text or scores or delta.finish or (call.return_token_ids and delta.tokens)):
            continue
        logprobs = None
        if call.logprobs is not None:
            large = len(scores) > _LARGE
            logprobs = await service.beside(
                large, completion_logprobs, scores, call.logprobs, service.tokenizer, offsets[answer.index]
            )
        choice: JsonObject = {"index": answer.index, "text": text, "logprobs": logprobs, "finish_reason": delta.finish}
        if call.return_token_ids:
            choice["token_ids"] = delta.tokens
            choice |= {"prompt_token_ids": call.prompts[answer.index // call.n]} if first else {}
        yield {**begin, "choices": [choice], **running_usage(call)}
    if call.usage:
        yield {**begin, "choices": [], "usage": usage(call.prompt_tokens, call.answers, call.n)}
