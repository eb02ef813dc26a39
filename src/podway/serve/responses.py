"""One answer on its way from the engine to a client (no jax).

`Answer` is the listener of one request: the loop's thread tells it news, the server's event loop reads them as `Delta`s. It
turns tokens into text, sees stop strings (and then cancels the request), and keeps what the response needs in the end.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, NamedTuple

from podway.errors import UserError
from podway.model.tokenizer import ModelTokenizer
from podway.serve.batcher import Request
from podway.serve.grammar import Guide
from podway.serve.loop import Loop, TokenScore, TokenUpdate
from podway.serve.sampling_params import SamplingParams
from podway.serve.text_stream import TextStream


class Delta(NamedTuple):
    """What is new of an answer."""

    text: str
    scores: list[TokenScore]
    finish: str | None


class Answer:
    """One choice of one response."""

    def __init__(
        self,
        index: int,
        request: Request,
        engine: Loop,
        stream: TextStream,
        sampling: SamplingParams,
        guide: Guide | None,
        grammar: tuple[str, Any] | None = None,
    ) -> None:
        self.index, self.request, self.sampling, self.guide = index, request, sampling, guide
        self.grammar = grammar  # of the guide, for a replica on another host
        self.prompt_scores: list[TokenScore] = []
        self.scores: list[TokenScore] = []
        self.cached = 0
        self.count = 0  # tokens of the answer
        self.finish: str | None = None
        self._engine, self._stream = engine, stream
        self._events = asyncio.get_running_loop()
        self._news: asyncio.Queue[TokenUpdate] = asyncio.Queue()
        request.owner = self

    @property
    def text(self) -> str:
        return self._stream.text

    def on_update(self, news: TokenUpdate) -> None:
        """From the loop's thread."""
        with suppress(RuntimeError):  # the server's event loop is closed: nobody reads any more
            self._events.call_soon_threadsafe(self._news.put_nowait, news)

    def begin(self) -> None:
        self._engine.submit(self.request)

    def cancel(self) -> None:
        """Nobody reads it any more."""
        if self.finish is None:
            self.finish = "cancelled"
            self._engine.cancel(self.request)

    async def deltas(self) -> AsyncIterator[Delta]:
        """What comes, until it ends. What the engine refuses is raised."""
        while self.finish is None:
            news = await self._news.get()
            while not self._news.empty() and news.finish is None:  # a slow reader gets several at once
                news = _joined(news, self._news.get_nowait())
            if news.error is not None:
                self.finish = "error"
                raise news.error
            yield self._take(news)

    def _take(self, news: TokenUpdate) -> Delta:
        self.cached = news.cached
        if news.prompt_scores:
            self.prompt_scores = news.prompt_scores
        self.count += len(news.tokens)
        scores = news.scores or []
        self.scores += scores
        shown = news.tokens
        if news.finish == "stop" and shown and shown[-1] in self.request.stop_ids:
            shown = shown[:-1]  # the token that ends an answer is no part of its text
        text = self._stream.push(shown, last=news.finish is not None)
        finish = news.finish
        if self._stream.stopped and finish != "stop":
            if finish is None:
                self._engine.cancel(self.request)
            finish = "stop"
        self.finish = finish
        return Delta(text, scores, finish)


def _joined(first: TokenUpdate, second: TokenUpdate) -> TokenUpdate:
    scores = [*(first.scores or []), *(second.scores or [])] if first.scores or second.scores else None
    return TokenUpdate(
        [*first.tokens, *second.tokens], scores, first.prompt_scores or second.prompt_scores, second.cached,
        second.finish, second.error,
    )  # fmt: skip


def usage(prompt_tokens: int, answers: list[Answer]) -> dict[str, Any]:
    """Tokens of a response."""
    made = sum(answer.count for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": made,
        "total_tokens": prompt_tokens + made,
        "prompt_tokens_details": {"cached_tokens": sum(answer.cached for answer in answers)},
    }


def completion_logprobs(scores: list[TokenScore], most: int, tokenizer: ModelTokenizer, offset: int) -> dict[str, Any]:
    """The logprobs of /v1/completions; the alternatives hold the token itself too."""
    tokens, offsets, tops = [], [], []
    for score in scores:
        word = tokenizer.token(score.token)
        tokens.append(word)
        offsets.append(offset)
        offset += len(word)
        best = {tokenizer.token(id): logprob for id, logprob in score.top[:most]}
        if score.logprob is not None:
            best.setdefault(word, score.logprob)
        tops.append(best if score.logprob is not None else None)
    return {
        "tokens": tokens,
        "token_logprobs": [score.logprob for score in scores],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def prompt_logprobs(scores: list[TokenScore], most: int, tokenizer: ModelTokenizer) -> list[dict[str, Any] | None]:
    """For each token of a prompt but the first: how likely it was, and the likeliest in its place, by token id."""

    def one(id: int, logprob: float) -> dict[str, Any]:
        return {"logprob": logprob, "decoded_token": tokenizer.token(id)}

    found: list[dict[str, Any] | None] = []
    for score in scores:
        if score.logprob is None:
            found.append(None)
        else:
            best = {str(id): one(id, logprob) for id, logprob in score.top[:most]}
            found.append({str(score.token): one(score.token, score.logprob), **best})
    return found


def chat_logprobs(scores: list[TokenScore], most: int, tokenizer: ModelTokenizer) -> dict[str, Any]:
    """The logprobs of /v1/chat/completions."""

    def one(id: int, logprob: float | None) -> dict[str, Any]:
        word = tokenizer.token(id)
        return {"token": word, "logprob": logprob, "bytes": list(word.encode())}

    content = [
        {**one(s.token, s.logprob), "top_logprobs": [one(id, logprob) for id, logprob in s.top[:most]]} for s in scores
    ]
    return {"content": content, "refusal": None}


async def gather(answers: list[Answer]) -> None:
    """All answers to their ends; if one fails, all are given up."""

    async def whole(answer: Answer) -> None:
        async for _ in answer.deltas():
            pass

    try:
        await asyncio.gather(*(whole(answer) for answer in answers))
    except (UserError, asyncio.CancelledError):
        for answer in answers:
            answer.cancel()
        raise
