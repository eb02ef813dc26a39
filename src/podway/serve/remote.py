"""A replica on another host: its loop runs there, next to its devices; the API server is here.

The host with the port (the front) has one connection to each such replica:

    front                                       host of the replica
    RemoteLoop.submit  -- SubmitMessage    -->  answer_front: EngineLoop.submit, with a listener that
    RemoteLoop.cancel  -- CancelMessage    -->  EngineLoop.cancel
    Answer.on_update   <-- UpdateMessage   --   forwards every update

So the work of planning steps is on the replica's own host, and the front only makes text. Both sides know a request by a
number that the front gives it. A grammar is sent as it was asked for, and followed on the other side.
"""

import socket
import threading
import time
from contextlib import suppress
from itertools import count
from typing import Any

import msgspec
import numpy as np

from podway.decoding import from_msgpack
from podway.errors import UserError
from podway.model.adapter_files import Adapter
from podway.serve.batcher import Request
from podway.serve.grammar import Grammar, Grammars, Guide
from podway.serve.hosts import frames, send
from podway.serve.loop import EngineLoop, TokenScore, TokenUpdate
from podway.serve.metrics import Metrics
from podway.serve.sampling_params import SamplingParams

_GONE = ("the host of this replica is gone", "ask again")


class SubmitMessage(msgspec.Struct, tag=True, array_like=True, kw_only=True):
    """A request, without who asked it."""

    key: int
    prompt: list[int]
    max_tokens: int
    stop_ids: list[int]
    min_tokens: int
    scores_prompt: bool
    sampling: SamplingParams
    grammar: Grammar | None
    mask: bytes | None  # of `Listener.mask`
    salt: bytes


class CancelMessage(msgspec.Struct, tag=True, array_like=True):
    """Nobody wants it any more."""

    key: int


class UpdateMessage(msgspec.Struct, array_like=True, kw_only=True):
    """`TokenUpdate`, with its error in words."""

    key: int
    tokens: list[int]
    scores: list[TokenScore] | None
    prompt_scores: list[TokenScore] | None
    cached: int
    finish: str | None
    error: tuple[str, str, int] | None


class _Connection:
    """A connection that several threads write to."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._lock = threading.Lock()

    def send(self, message: SubmitMessage | CancelMessage | UpdateMessage | None) -> None:
        """None: the end."""
        raw = b"" if message is None else msgspec.msgpack.encode(message)
        with suppress(OSError), self._lock:  # the reading side sees that it is closed
            send(self.connection, raw)


class _Pending(msgspec.Struct):
    """A request that is not answered to its end."""

    key: int
    asked: float
    begun: bool = False


class RemoteLoop:
    """What `EngineLoop` is to answers, for a loop on another host."""

    def __init__(self, connection: socket.socket, most: int) -> None:
        self.metrics = Metrics()
        self.failure: BaseException | None = None
        self.most = most  # requests that may be there at once
        self._connection = _Connection(connection)
        self._keys = count()
        self._lock = threading.Lock()
        self._open: dict[Request, _Pending] = {}
        self._by_key: dict[int, Request] = {}
        threading.Thread(target=self._listen, name="replica", daemon=True).start()

    @property
    def load(self) -> int:
        """Requests that are not answered yet."""
        return len(self._open)

    def submit(self, request: Request) -> None:
        """Send it there."""
        owner: Any = request.owner
        with self._lock:
            if self.failure is not None:
                raise UserError(*_GONE, status=503)
            if len(self._open) >= self.most:
                raise UserError(f"{self.most} requests are waiting already", "ask again in a moment", status=429)
            key = next(self._keys)
            self._open[request], self._by_key[key] = _Pending(key, time.monotonic()), request
            self.metrics.running.set(len(self._open))
        self._connection.send(
            SubmitMessage(
                key=key, prompt=request.tokens, max_tokens=request.limit - request.prompt_len,
                stop_ids=sorted(request.stop_ids), min_tokens=request.min_tokens, scores_prompt=request.scores_prompt,
                sampling=owner.sampling, grammar=owner.grammar, salt=request.salt,
                mask=None if owner.mask is None else owner.mask.tobytes(),
            )
        )  # fmt: skip

    def cancel(self, request: Request) -> None:
        """End it there; no more updates come."""
        if (left := self._forget(request)) is not None:
            self.metrics.finished.inc(of="abort")
            self._connection.send(CancelMessage(left.key))

    def set_adapter(self, number: int, adapter: Adapter | None) -> None:
        raise UserError("adapters are served on one host", "start the server without --enable-lora on several hosts")

    def stop(self) -> None:
        self._connection.send(None)

    def _forget(self, request: Request) -> _Pending | None:
        with self._lock:
            found = self._open.pop(request, None)
            if found is not None:
                del self._by_key[found.key]
                self.metrics.running.set(len(self._open))
            return found

    def _listen(self) -> None:
        try:
            for raw in frames(self._connection.connection):
                self._on_update(from_msgpack(raw, UpdateMessage))
        except (OSError, EOFError) as error:
            self.failure = error
        for request in list(self._open):
            if self._forget(request) is not None:
                request.owner.on_update(TokenUpdate(finish="error", error=UserError(*_GONE, status=503)))  # type: ignore[attr-defined]

    def _on_update(self, news: UpdateMessage) -> None:
        request = self._by_key.get(news.key)
        known = self._open.get(request) if request is not None else None
        if request is None or known is None:
            return
        spent = time.monotonic() - known.asked
        if news.tokens and not known.begun:
            known.begun = True
            self.metrics.first_token_seconds.observe(spent)
            self.metrics.prompt_tokens.inc(request.prompt_len - news.cached)
        self.metrics.answer_tokens.inc(len(news.tokens))
        if news.finish is not None:
            self._forget(request)
            self.metrics.finished.inc(of=news.finish)
            self.metrics.request_seconds.observe(spent)
        error = None if news.error is None else UserError(news.error[0], news.error[1], status=news.error[2])
        update = TokenUpdate(news.tokens, news.scores, news.prompt_scores, news.cached, news.finish, error)
        request.owner.on_update(update)  # type: ignore[attr-defined]


class _Forward:
    """The listener of a request that the front sent."""

    def __init__(
        self, connection: _Connection, asked: SubmitMessage, guide: Guide | None, open_: dict[int, Request]
    ) -> None:
        self.sampling, self.guide = asked.sampling, guide
        self.mask = None if asked.mask is None else np.frombuffer(asked.mask, np.uint32)
        self._connection, self._key, self._open = connection, asked.key, open_

    def on_update(self, news: TokenUpdate) -> None:
        """From the loop's thread."""
        if news.finish is not None:
            self._open.pop(self._key, None)
        error = None if news.error is None else (news.error.what, news.error.hint, news.error.status)
        self._connection.send(
            UpdateMessage(
                key=self._key, tokens=news.tokens, scores=news.scores, prompt_scores=news.prompt_scores,
                cached=news.cached, finish=news.finish, error=error,
            )
        )  # fmt: skip


def answer_front(connection: socket.socket, loop: EngineLoop, grammars: Grammars) -> bool:
    """Do what the front asks, until its end. False: it was lost."""
    line, open_ = _Connection(connection), dict[int, Request]()
    asked: Any = SubmitMessage | CancelMessage
    try:
        for raw in frames(connection):
            message = from_msgpack(raw, asked)
            if isinstance(message, SubmitMessage):
                _begin(line, message, loop, grammars, open_)
            elif (request := open_.pop(message.key, None)) is not None:
                loop.cancel(request)
    except (OSError, EOFError):
        return False
    return True


def _begin(
    connection: _Connection, asked: SubmitMessage, loop: EngineLoop, grammars: Grammars, open_: dict[int, Request]
) -> None:
    guide = grammars.start(asked.grammar) if asked.grammar else None
    listener = _Forward(connection, asked, guide, open_)
    request = Request(
        str(asked.key), asked.prompt, asked.max_tokens, stop_ids=frozenset(asked.stop_ids), min_tokens=asked.min_tokens,
        guided=guide is not None, scores_prompt=asked.scores_prompt, salt=asked.salt, owner=listener,
    )  # fmt: skip
    open_[asked.key] = request
    try:
        loop.submit(request)
    except UserError as error:
        listener.on_update(TokenUpdate(finish="error", error=error))
