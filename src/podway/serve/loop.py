"""The one loop that drives the engine, in a thread of its own.

    take what was asked -> plan a step -> begin it -> read the step before it -> give out its tokens

One step is always running while the next one is planned, so the device does not wait for Python. Launching a step has a
thread of its own: with a loop or a condition in the program, jax on NVIDIA comes back only when the step is nearly done
(measured on an H200), and the results of the step before must not wait for that. The loop sleeps only when nothing runs.
What it gives out goes through `Listener.on_update`, which must be quick: the server hands it to its event loop.

A request that follows a grammar is different: its next token cannot be chosen before the last one is known, so steps with
such rows wait for their results (the batcher sees to that).
"""

import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import msgspec
import numpy as np

from podway.errors import UserError
from podway.model.adapter_files import Adapter
from podway.serve.batcher import Batcher, Emitted, Request, Step
from podway.serve.engine import Engine, InFlightStep
from podway.serve.grammar import Guide, GuideError, Words
from podway.serve.metrics import Metrics
from podway.serve.sampling_params import SamplingParams

DEPTH = 1  # steps under way beside the one that is being planned


class TokenScore(msgspec.Struct, frozen=True):
    """How likely a token was, and the most likely ones in its place."""

    token: int
    logprob: float | None
    top: list[tuple[int, float]]


class TokenUpdate(msgspec.Struct, frozen=True):
    """UpdateMessage of a request: new tokens, scores of its prompt, its end, or what went wrong."""

    tokens: list[int] = []
    scores: list[TokenScore] | None = None
    prompt_scores: list[TokenScore] | None = None
    cached: int = 0
    finish: str | None = None
    error: UserError | None = None


class Listener(Protocol):
    """Receives the updates of a request; the engine reads its `sampling`."""

    sampling: SamplingParams
    guide: Guide | None
    mask: Words | None  # a bit for each token that may come at any time; None: all

    def on_update(self, news: TokenUpdate) -> None:
        """Called from the loop's thread."""


class Loop(Protocol):
    """A replica, as those see it who ask: `EngineLoop`, or one on another host (`remote.py`)."""

    metrics: Metrics
    failure: BaseException | None

    @property
    def load(self) -> int:
        """Requests that are not answered yet."""

    def submit(self, request: Request) -> None: ...

    def cancel(self, request: Request) -> None: ...

    def set_adapter(self, number: int, adapter: Adapter | None) -> None: ...

    def stop(self) -> None: ...


class RequestTimes(msgspec.Struct):
    """When it arrived, got a slot, and had its first and its last token; 0: not yet."""

    arrived: float
    began: float = 0.0
    first: float = 0.0
    last: float = 0.0


class EngineLoop:
    """Owns the engine and the batcher; everything else talks to it through `submit` and `cancel`."""

    def __init__(self, engine: Engine, metrics: Metrics, max_queue: int = 1024) -> None:
        self.engine = engine
        self.metrics = metrics
        self.batcher = Batcher(engine.limits)
        self.max_queue = max_queue
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._launcher = ThreadPoolExecutor(1, thread_name_prefix="launch")
        self._under_way: deque[Future[InFlightStep]] = deque()
        self._times: dict[int, RequestTimes] = {}
        self._scored: dict[int, list[TokenScore]] = {}
        self._drafted = (metrics.drafts, metrics.draft_tokens, metrics.accepted_tokens)
        self.failure: BaseException | None = None
        # Asked after a failure; whoever saw the loss then tells everyone.
        self.is_host_lost: Callable[[], bool] = lambda: False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; requests that still wait get an error."""
        self._asked.put(None)
        self._thread.join(timeout=30)
        self._launcher.shutdown(wait=False, cancel_futures=True)

    @property
    def load(self) -> int:
        """Requests that are not answered yet."""
        return self._waiting + len(self.batcher.running)

    def submit(self, request: Request) -> None:
        """Queue a request. RequestError at once: what can never run, and what finds the queue full."""
        if self.failure is not None:
            raise UserError("the engine has stopped", "restart the server; its log says why", status=500)
        with self._lock:
            if self._waiting >= self.max_queue:
                raise UserError(f"{self._waiting} requests are waiting already", "ask again in a moment", status=429)
            self._waiting += 1
        self.metrics.waiting.set(self._waiting)
        arrived = time.monotonic()
        self._asked.put(lambda: self._enter(request, arrived))

    def cancel(self, request: Request) -> None:
        """End a request; no more updates come."""
        self._asked.put(lambda: self._leave(request))

    def set_adapter(self, number: int, adapter: Adapter | None) -> None:
        """Put a LoRA adapter into its place; returns when it is there."""
        self._launcher.submit(self.engine.set_adapter, number, adapter).result()

    # --- inside the thread

    def _enter(self, request: Request, arrived: float) -> None:
        try:
            self.batcher.submit(request)
        except UserError as error:
            self._left_queue()
            _listener(request).on_update(TokenUpdate(finish="error", error=error))
            return
        self._times[request.number] = RequestTimes(arrived)

    def _leave(self, request: Request) -> None:
        if request.finish is None and request.number >= 0:
            if not request.preemptions and request in self.batcher.queue:
                self._left_queue()
            self.batcher.cancel(request)
            self._forget(request)
            self.metrics.finished.inc(of="abort")

    def _run(self) -> None:
        try:
            while self._take_asked():
                self._turn()
        except BaseException as error:
            self.failure = error  # from here on `submit` refuses
            if self.is_host_lost():
                return
            traceback.print_exc()
            self._tell_all(UserError(f"the engine failed: {error}", "see the server's log", status=500))
        else:
            self._tell_all(UserError("the server is stopping", "ask again later", status=503))

    def _tell_all(self, why: UserError) -> None:
        """Nobody waits for what will not come."""
        while not self._asked.empty():
            if (asked := self._asked.get()) is not None:
                asked()
        for request in [*self.batcher.running, *self.batcher.queue]:
            self.batcher.cancel(request)
            _listener(request).on_update(TokenUpdate(finish="error", error=why))

    def _take_asked(self) -> bool:
        """Do what was asked; sleep if there is nothing else to do. False: the end."""
        idle = self.batcher.idle and not self._under_way
        while True:
            try:
                asked = self._asked.get(block=idle)
            except queue.Empty:
                return True
            if asked is None:
                return False
            asked()
            idle = False

    def _turn(self) -> None:
        step = self.batcher.plan()
        if step is not None:
            for request in step.admitted:
                if not request.preemptions:
                    self._left_queue()
                    times = self._times[request.number]
                    times.began = time.monotonic()
                    self.metrics.queue_seconds.observe(times.began - times.arrived)
            masks, failed = _masks(step)
            prepared = self.engine.prepare(step, masks)
            self._under_way.append(self._launcher.submit(self.engine.launch, prepared))
            for request, error in failed:  # what the step makes of them is not read
                self._fail(request, error)
            self.metrics.steps.inc(of="mixed" if step.pieces else "decode")
            computed = sum(piece.count for piece in step.pieces)
            self.metrics.prompt_tokens.inc(computed)
            self.metrics.step_tokens.observe(computed + len(step.rows))
        if self._under_way and (step is None or len(self._under_way) > DEPTH):
            self._read(self._under_way.popleft().result())
        self._count()

    def _fail(self, request: Request, error: UserError) -> None:
        if request.finish is None:
            self.batcher.cancel(request)
        self._forget(request)
        self.metrics.finished.inc(of="error")
        _listener(request).on_update(TokenUpdate(finish="error", error=error))

    def _read(self, flight: InFlightStep) -> None:
        tokens = flight.tokens()
        self._read_prompt_scores(flight)
        for number, counted in zip(flight.drafts(), self._drafted, strict=True):
            counted.inc(number)
        now = time.monotonic()
        for emitted in self.batcher.absorb(flight.step, tokens):
            request = emitted.request
            listener = _listener(request)
            if listener.guide is not None:
                try:
                    listener.guide.advance(emitted.tokens)
                except GuideError as error:
                    self._fail(request, error)
                    continue
                if emitted.finish is None and listener.guide.complete:  # nothing more may come
                    self.batcher.finish(request)
                    emitted = msgspec.structs.replace(emitted, finish="stop")
            first = len(request.tokens) - len(emitted.tokens) == request.prompt_len
            self._count_tokens(request, len(emitted.tokens), first, now)
            scores = _scores(flight, emitted) if listener.sampling.logprobs else None
            prompt = self._scored.pop(request.number, None) if first else None
            listener.on_update(TokenUpdate(emitted.tokens, scores, prompt, request.cached, emitted.finish))
            if emitted.finish is not None:
                self._count_end(request, emitted.finish, now)
                self._forget(request)

    def _read_prompt_scores(self, flight: InFlightStep) -> None:
        if not any(piece.request.scores_prompt for piece in flight.step.pieces):
            return
        for piece, (logprobs, ids, tops) in zip(flight.step.pieces, flight.prompt_scores(), strict=True):
            request = piece.request
            if not request.scores_prompt or request.finish is not None:
                continue
            known = self._scored.setdefault(request.number, [TokenScore(request.tokens[0], None, [])])
            del known[piece.start + 1 :]  # a preempted request computes its prompt again
            for offset in range(min(piece.count, request.prompt_len - 1 - piece.start)):
                token = request.tokens[piece.start + offset + 1]
                known.append(TokenScore(token, float(logprobs[offset]), _pairs(ids[offset], tops[offset])))

    def _count_tokens(self, request: Request, tokens: int, first: bool, now: float) -> None:
        """Several tokens of one step came at even gaps, as far as anyone can tell."""
        if not tokens:
            return
        m, times = self.metrics, self._times[request.number]
        if first:
            times.first = now
            m.first_token_seconds.observe(now - times.arrived)
            m.prefill_seconds.observe(now - times.began)
            m.cache_queries.inc(request.prompt_len)
            m.cache_hits.inc(request.cached)
        elif times.last:
            m.token_seconds.observe((now - times.last) / tokens, tokens)
        times.last = now
        m.answer_tokens.inc(tokens)

    def _count_end(self, request: Request, finish: str, now: float) -> None:
        m, times, made = self.metrics, self._times[request.number], len(request.tokens) - request.prompt_len
        m.request_seconds.observe(now - times.arrived)
        m.inference_seconds.observe(now - times.began)
        if times.first:
            m.decode_seconds.observe(now - times.first)
        if made > 1:
            m.mean_token_seconds.observe((now - times.first) / (made - 1))
        m.request_prompt.observe(request.prompt_len)
        m.request_answer.observe(made)
        m.request_limit.observe(request.limit - request.prompt_len)
        m.finished.inc(of=finish)

    def _forget(self, request: Request) -> None:
        self._times.pop(request.number, None)
        self._scored.pop(request.number, None)

    def _left_queue(self) -> None:
        with self._lock:
            self._waiting -= 1
        self.metrics.waiting.set(self._waiting)

    def _count(self) -> None:
        m, batcher = self.metrics, self.batcher
        m.running.set(len(batcher.running))
        m.cache_usage.set(batcher.pool.held / max(1, batcher.pool.count - 1))
        m.preemptions.set(batcher.preemptions)


def _listener(request: Request) -> Listener:
    return request.owner  # type: ignore[return-value]


def _masks(step: Step) -> tuple[dict[int, Words], list[tuple[Request, GuideError]]]:
    """What the grammars of the rows allow, and the requests whose grammars fail."""
    found: dict[int, Words] = {}
    failed: list[tuple[Request, GuideError]] = []
    for index, row in enumerate(step.rows):
        listener = _listener(row.request)
        try:
            if listener.guide is not None:
                found[index] = listener.guide.allowed(listener.mask)
            elif listener.mask is not None:
                found[index] = listener.mask
        except GuideError as error:
            failed.append((row.request, error))
    return found, failed


def _pairs(ids: Any, tops: Any) -> list[tuple[int, float]]:
    return [(int(i), float(t)) for i, t in zip(np.asarray(ids), np.asarray(tops), strict=True) if i >= 0]


def _scores(flight: InFlightStep, emitted: Emitted) -> list[TokenScore]:
    logprob, ids, tops = flight.logprobs()
    row = emitted.row
    return [
        TokenScore(token, float(logprob[k, row]), _pairs(ids[k, row], tops[k, row]))
        for k, token in enumerate(emitted.tokens)
    ]
