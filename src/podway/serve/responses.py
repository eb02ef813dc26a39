"""One answer on its way from the engine to a client (no jax).

`Answer` is the listener of one request: the loop's thread gives it updates, the server's event loop reads them as `Delta`s. It
turns tokens into text, sees stop strings (and then cancels the request), and keeps what the response needs in the end.
"""

import asyncio
import codecs
from collections.abc import AsyncIterator
from typing import NamedTuple

from podway.errors import UserError
from podway.model.tokenizer import ModelTokenizer
from podway.serve.batcher import Request
from podway.serve.delivery import Delivery
from podway.serve.grammar import Grammar, Guide, Words
from podway.serve.loop import Loop, TokenScore, TokenUpdate
from podway.serve.sampling_params import SamplingParams
from podway.serve.text_stream import TextStream


class Delta(NamedTuple):
    """What is new of an answer."""

    text: str
    tokens: list[int]
    scores: list[TokenScore]
    finish: str | None


class Answer:
    """One choice of one response."""

    def __init__(
        self,
        index: int,
        request: Request,
        replica: Loop,
        stream: TextStream,
        sampling: SamplingParams,
        delivery: Delivery[TokenUpdate],
        *,
        guide: Guide | None = None,
        grammar: Grammar | None = None,
        mask: Words | None = None,
    ) -> None:
        self.index, self.request, self.sampling, self.guide, self.mask = index, request, sampling, guide, mask
        self.grammar = grammar  # of the guide, for a replica on another host
        self.prompt_scores: list[TokenScore] = []
        self.scores: list[TokenScore] = []
        self.cached = 0
        self.tokens: list[int] = []
        self.finish: str | None = None
        self._replica, self._stream, self._delivery = replica, stream, delivery
        self._update: TokenUpdate | None = None  # what is not read yet
        self._reader: asyncio.Future[None] | None = None
        request.owner = self

    @property
    def text(self) -> str:
        return self._stream.text

    def on_update(self, update: TokenUpdate) -> None:
        """From any thread."""
        self._delivery.put(self, update)

    def receive(self, update: TokenUpdate) -> None:
        """On the event loop. A slow reader gets several at once; after the end comes nothing."""
        known = self._update
        if known is None:
            self._update = update
        elif known.finish is None:
            self._update = _joined(known, update)
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def begin(self) -> None:
        self._replica.submit(self.request)

    def cancel(self) -> None:
        """Nobody reads it any more."""
        if self.finish is None:
            self.finish = "cancelled"
            self._replica.cancel(self.request)
            self._wake()

    async def deltas(self) -> AsyncIterator[Delta]:
        """What comes, until it ends. What the engine refuses is raised."""
        while self.finish is None:
            if self._update is None:
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader
            update, self._update = self._update, None
            if update is None or self.finish is not None:  # cancelled meanwhile
                return
            if update.error is not None:
                self.finish = "error"
                raise update.error
            yield self._take(update)

    def _take(self, update: TokenUpdate) -> Delta:
        self.cached = update.cached
        if update.prompt_scores:
            self.prompt_scores = update.prompt_scores
        tokens, scores = update.tokens, update.scores or []
        ends = update.finish == "stop" and bool(tokens) and tokens[-1] in self.request.stop_ids
        # The token that ends an answer is not part of its text.
        text, used = self._stream.push(tokens[:-1] if ends else tokens, last=update.finish is not None)
        finish = update.finish
        if self._stream.stopped:
            tokens, scores = tokens[:used], scores[:used]  # what came after the stop string is nobody's
            if finish is None:
                self._replica.cancel(self.request)
            finish = "stop"
        self.tokens += tokens
        self.scores += scores
        self.finish = finish
        return Delta(text, tokens, scores, finish)


def _joined(first: TokenUpdate, second: TokenUpdate) -> TokenUpdate:
    scores = [*(first.scores or []), *(second.scores or [])] if first.scores or second.scores else None
    return TokenUpdate(
        [*first.tokens, *second.tokens], scores, first.prompt_scores or second.prompt_scores,
        second.cached or first.cached, second.finish, second.error,
    )  # fmt: skip


def usage(prompt_tokens: int, answers: list[Answer], n: int) -> dict[str, object]:
    """Tokens of a response. The choices of a prompt share it, so what was cached counts once."""
    made = sum(len(answer.tokens) for answer in answers)
    cached = sum(max(answer.cached for answer in answers[at : at + n]) for at in range(0, len(answers), n))
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": made,
        "total_tokens": prompt_tokens + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class TextOffsets:
    """Where tokens begin in the text, counted in characters, over answers that come in pieces."""

    def __init__(self, tokenizer: ModelTokenizer, skip_special: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at, self._begun = 0, False

    def next(self, token: int) -> int:
        """The offset of the next token; one that goes on with a character has that character's."""
        begin = self._at
        if not (self._skip and token in self._tokenizer.special_ids):
            raw = self._tokenizer.token_bytes(token)
            if not self._begun and self._tokenizer.strips_first_space:
                raw = raw.removeprefix(b" ")
            self._begun = True
            self._at += len(self._decoder.decode(raw))
        return begin


def completion_logprobs(
    scores: list[TokenScore], most: int, tokenizer: ModelTokenizer, offsets: TextOffsets
) -> dict[str, object]:
    """The logprobs of /v1/completions; the alternatives hold the token itself too."""
    tokens, places, tops = [], [], []
    for score in scores:
        word = tokenizer.token(score.token)
        tokens.append(word)
        places.append(offsets.next(score.token))
        best: dict[str, float] = {}
        for id, logprob in score.top[:most]:  # the most likely first: of two with the same text it is that one
            best.setdefault(tokenizer.token(id), logprob)
        if score.logprob is not None:
            best[word] = score.logprob
        tops.append(best if score.logprob is not None else None)
    return {
        "tokens": tokens,
        "token_logprobs": [score.logprob for score in scores],
        "top_logprobs": tops,
        "text_offset": places,
    }


def prompt_logprobs(
    scores: list[TokenScore], most: int, tokenizer: ModelTokenizer
) -> list[dict[str, dict[str, object]] | None]:
    """For each token of a prompt but the first: how likely it was, and the likeliest in its place, by token id."""

    def one(id: int, logprob: float) -> dict[str, object]:
        return {"logprob": logprob, "decoded_token": tokenizer.token(id)}

    found: list[dict[str, dict[str, object]] | None] = []
    for score in scores:
        if score.logprob is None:
            found.append(None)
        else:
            best = {str(id): one(id, logprob) for id, logprob in score.top[:most]}
            found.append({str(score.token): one(score.token, score.logprob), **best})
    return found


def chat_logprobs(scores: list[TokenScore], most: int, tokenizer: ModelTokenizer) -> dict[str, object]:
    """The logprobs of /v1/chat/completions."""

    def one(id: int, logprob: float | None) -> dict[str, object]:
        return {"token": tokenizer.token(id), "logprob": logprob, "bytes": list(tokenizer.token_bytes(id))}

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


async def merged(answers: list[Answer]) -> AsyncIterator[tuple[Answer, Delta]]:
    """The deltas of all answers as they come."""
    if len(answers) == 1:
        async for delta in answers[0].deltas():
            yield answers[0], delta
        return
    found: asyncio.Queue[tuple[Answer, Delta | UserError | None]] = asyncio.Queue()

    async def follow(answer: Answer) -> None:
        try:
            async for delta in answer.deltas():
                found.put_nowait((answer, delta))
            found.put_nowait((answer, None))
        except UserError as error:
            found.put_nowait((answer, error))

    tasks = [asyncio.ensure_future(follow(answer)) for answer in answers]
    try:
        left = len(answers)
        while left:
            answer, new = await found.get()
            if isinstance(new, UserError):
                raise new
            if new is None:
                left -= 1
            else:
                yield answer, new
    finally:
        for task in tasks:
            task.cancel()
