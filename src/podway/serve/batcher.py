"""Which tokens go into the next step: plain Python, no jax.

The engine runs a step after its turn comes; the host plans the next one meanwhile. So a plan may not depend on tokens that
are still being computed. It need not: how many tokens a request will have after a step is known unless it ends early, and
the device sees the end by itself and ignores the rest.

1. `submit` puts a request at the end of the queue. It holds nothing yet.
2. `plan` makes one `Step`:
   a. every request that generates gets one more token (a row), oldest first. Where pages run out, the youngest request is
      put back at the front of the queue and loses its pages; it will be computed again;
   b. requests whose prompt is not computed yet get a piece of it, then the queue is admitted in order, as long as there are
      slots, pages and room in the step. Pages of a known prefix are shared;
   c. with no prompt to compute, the rows get several tokens in one step (those that follow a grammar one).
3. The engine runs the step; `absorb` takes the tokens that it read back, ends what has ended, frees its slot and pages.

A freed page may be given away while a step that writes to it is still under way: steps run in order, and whoever reads the
page next computes it in a later step.

Positions: a request with n tokens has its keys and values computed for the first n - 1; the last token is the input of the
next step. `ahead` counts the tokens a request will have when all steps under way are done.
"""

from collections import deque
from collections.abc import Sequence
from itertools import count

import msgspec

from podway.errors import UserError
from podway.serve.pages import PagePool, page_keys

DRAFTED_TOKENS = 128  # of rows and their drafts in a step
TOKENS_BESIDE = 1024  # of prompts, in a step in which many rows generate


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes that the compiled programs have."""

    slots: int  # requests that run at once
    max_len: int  # tokens of one request, prompt and answer
    page: int  # tokens in a page
    pages: int  # pages in all, page 0 included
    block: int  # tokens of one request that are computed as one block of a prompt
    blocks: tuple[int, ...]  # how many blocks the programs for prompts take, ascending
    rows: tuple[int, ...]  # how many rows the programs without prompts take, ascending; the last is `slots`
    steps: int  # tokens a row gets in one step at most
    draft: int = 0  # tokens that are drafted after the last one of a row (`speculative.py`); 0: none

    @property
    def prompt_rows(self) -> int | None:
        """How many prompts may end in the programs that take prompts alone; None where there are no such programs."""
        return 32 if self.slots > 32 else None

    @property
    def mixed_rows(self) -> tuple[int, ...]:
        """How many rows the programs for prompts and rows take: idle rows cost as much as tokens of a prompt."""
        return tuple(sorted({min(64, self.slots), self.slots}))

    def programs(self) -> list[tuple[int, int]]:
        """(rows, blocks) of every program of a step; no blocks: decode. Every step that is planned has one of these sizes."""
        most = _at_least(self.blocks, self.blocks_beside(1))
        beside = [blocks for blocks in self.blocks if self.prompt_rows is None or blocks <= most]
        alone = [(self.prompt_rows, blocks) for blocks in self.blocks] if self.prompt_rows else []
        return [
            *((rows, 0) for rows in self.rows),
            *alone,
            *((rows, blocks) for rows in self.mixed_rows for blocks in beside),
        ]

    def drafts(self, rows: int) -> bool:
        """Whether the program of so many rows, without prompts, computes drafts: as long as they cost little more than reading
        the weights does."""
        return bool(self.draft) and rows * (1 + self.draft) <= DRAFTED_TOKENS

    def turns(self, rows: int) -> int:
        """How many tokens a program of so many rows makes for each: fewer where a step takes long, so that prompts wait less;
        more where drafts make them quicker."""
        if self.drafts(rows):
            return 2 * self.steps
        return max(1, min(self.steps, 128 * self.steps // rows))

    def blocks_beside(self, rows: int) -> int:
        """How many blocks of prompts a step takes while so many rows generate.

        With all that fit, requests would begin and so end in bunches, and each bunch wait for its own prompts.
        """
        return self.blocks[-1] if not rows else min(self.blocks[-1], max(1, TOKENS_BESIDE // self.block))

    def row_bucket(self, rows: Sequence["Row"], *, prompts: bool) -> int:
        """How many rows the program of a step takes."""
        if not prompts:
            return _at_least(self.rows, len(rows))
        if self.prompt_rows and len(rows) <= self.prompt_rows and all(row.piece >= 0 for row in rows):
            return self.prompt_rows
        return _at_least(self.mixed_rows, len(rows))

    @property
    def table_width(self) -> int:
        """Pages of the longest request, and room for the padding of its last block."""
        return -(-(self.max_len + self.block) // self.page)


class Request:
    """One prompt and the tokens that answer it."""

    __slots__ = (
        "adapter", "ahead", "cached", "computed", "finish", "guided", "id", "in_flight", "keys", "limit", "min_tokens", "number",
        "owner", "pages", "preemptions", "prompt_len", "salt", "scores_prompt", "slot", "stop_ids", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        id: str,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        stop_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        guided: bool = False,
        scores_prompt: bool = False,
        salt: bytes = b"",
        adapter: int = 0,
        owner: object = None,
    ) -> None:
        self.id = id
        self.tokens = list(prompt)  # and the answer, as far as it was read back
        self.prompt_len = len(self.tokens)
        self.limit = self.prompt_len + max_tokens
        self.stop_ids = stop_ids
        self.min_tokens = min_tokens
        self.guided = guided  # each token must be read back before the next may be chosen
        self.scores_prompt = scores_prompt  # wants the probabilities of its prompt: all of it must be computed
        self.salt = salt  # requests share pages only with those of equal salt
        self.adapter = adapter  # number of its LoRA adapter; 0: none
        self.owner = owner  # whatever the caller wants to find again
        self.number = -1
        self.finish: str | None = None  # stop, length or cancelled
        self.slot: int | None = None
        self.pages: list[int] = []
        self.keys: list[bytes] = []  # of its full pages that are published or were found
        self.computed = 0  # tokens of the prompt whose keys and values are computed by steps begun so far
        self.ahead = 0  # 0: the prompt is not computed yet
        self.in_flight = 0  # steps under way that will bring tokens
        self.cached = 0  # tokens of the prompt that were found computed when it was first admitted
        self.preemptions = 0

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt_len :]


class Piece(msgspec.Struct, frozen=True):
    """Tokens [start, start + count) of a request's prompt."""

    request: Request
    slot: int
    start: int
    count: int
    row: int  # where the token after it comes out; -1: the prompt goes on in another step


class Row(msgspec.Struct, frozen=True):
    """A request that gets tokens; `piece` if its prompt ends in this same step."""

    request: Request
    slot: int
    piece: int  # index of the piece; -1: its last token is the input

    def turns(self, steps: int) -> int:
        """How many tokens it gets in a step of so many: a guided one is read back after each."""
        return 1 if self.request.guided else steps


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine does next. Pages of every request in it are in `request.pages`."""

    admitted: list[Request]  # whose slots must be filled before
    rows: list[Row]
    pieces: list[Piece]
    steps: int  # tokens for each row that is not guided
    row_bucket: int
    block_bucket: int  # 0: no prompts


class Emitted(msgspec.Struct, frozen=True):
    """New tokens of a request, and how it ended if it did."""

    request: Request
    row: int
    tokens: list[int]
    finish: str | None


class Batcher:
    """The queue, the slots and the pages."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pool = PagePool(limits.pages, limits.page)
        self.queue: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.free_slots = list(range(limits.slots - 1, -1, -1))
        self.preemptions = 0
        self._numbers = count()

    def submit(self, request: Request) -> None:
        """Queue a request, or say why it can never run."""
        limits, length = self.limits, request.prompt_len
        if not length:
            raise UserError("the prompt is empty", "send at least one token", status=400)
        if request.limit > limits.max_len:
            raise UserError(
                f"{length} tokens of prompt and {request.limit - length} of answer are {request.limit}, and the limit "
                f"is {limits.max_len}",
                "shorten the prompt or lower max_tokens",
                status=400,
            )
        if self.pool.pages_for(request.limit) > limits.pages - 1:
            raise UserError(
                f"{request.limit} tokens need more than the {limits.pages - 1} pages of the cache",
                "shorten the prompt or lower max_tokens",
                status=400,
            )
        request.number = next(self._numbers)
        self.queue.append(request)

    def cancel(self, request: Request) -> None:
        """End a request now; what is under way for it comes to nothing."""
        if request.finish is None:
            self._end(request, "cancelled")

    def finish(self, request: Request) -> None:
        """End a request that has all of its answer."""
        self._end(request, "stop")

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self.running and not self.queue

    # --- planning

    def plan(self) -> Step | None:
        """The next step; None where nothing can be done before results are read."""
        chosen = self._choose_rows()
        admitted: list[Request] = []
        pieces: list[Piece] = []
        rows = [Row(request, _slot(request), -1) for request in chosen]
        # Where no row generates, no more prompts end than the programs for prompts alone take.
        most = self.limits.slots if rows else self.limits.prompt_rows or self.limits.slots
        blocks = self._continue_prompts(self.limits.blocks_beside(len(rows)), pieces, rows, most)
        self._admit(admitted, pieces, rows, blocks, most)
        if not rows and not pieces:
            return None
        steps = 1 if pieces else self._stretch(chosen)
        for row in rows:
            request = row.request
            if row.piece < 0:
                request.ahead = min(request.ahead + row.turns(steps), request.limit)
            request.in_flight += 1
        used = sum(self._blocks(piece.count) for piece in pieces)
        return Step(
            admitted=admitted,
            rows=rows,
            pieces=pieces,
            steps=steps,
            row_bucket=self.limits.row_bucket(rows, prompts=bool(pieces)),
            block_bucket=_at_least(self.limits.blocks, used) if pieces else 0,
        )

    def _choose_rows(self) -> list[Request]:
        """The requests that generate, each with a page for its next input."""
        chosen = []
        for request in list(self.running):
            if request.slot is None or not request.ahead or request.ahead >= request.limit:
                continue
            if request.guided and request.in_flight:
                continue
            if self._give_pages(request):
                chosen.append(request)
        return [request for request in chosen if request.slot is not None]

    def _give_pages(self, request: Request) -> bool:
        """Pages for the input at `ahead - 1`; the youngest lose theirs until there are enough. False: it was itself."""
        missing = self.pool.pages_for(request.ahead) - len(request.pages)
        while missing > self.pool.free:
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is request:
                return False
        request.pages += self.pool.take(missing) or [] if missing > 0 else []
        return True

    def _preempt(self, request: Request) -> None:
        self._vacate(request)
        request.computed = request.ahead = 0
        request.preemptions += 1
        self.preemptions += 1
        self.queue.appendleft(request)

    def _continue_prompts(self, left: int, pieces: list[Piece], rows: list[Row], most: int) -> int:
        """Pieces of prompts already begun; how many blocks are left in the step."""
        for request in self.running:
            if not request.ahead and left and len(rows) < most:
                left -= self._add_piece(request, left, pieces, rows)
        return left

    def _admit(self, admitted: list[Request], pieces: list[Piece], rows: list[Row], left: int, most: int) -> None:
        while self.queue and self.free_slots and left and len(rows) < most:
            request = self.queue[0]
            if request.in_flight or not self._take_prompt_pages(request):
                return  # first come, first served: nobody overtakes it
            self.queue.popleft()
            request.slot = self.free_slots.pop()
            self.running.append(request)
            admitted.append(request)
            left -= self._add_piece(request, left, pieces, rows)

    def _take_prompt_pages(self, request: Request) -> bool:
        """Share what is known of its tokens, and take pages for the rest; one page stays for each that runs."""
        page, length = self.limits.page, len(request.tokens)
        known = page_keys(request.tokens, page, request.salt)
        # The last token must be computed in any case: its logits choose the next one.
        shared = [] if request.scores_prompt else self.pool.matching(known[: (length - 1) // page])
        self.pool.reuse(shared)
        spare = len(self.running)
        fresh = self.pool.pages_for(length) - len(shared)
        taken = self.pool.take(fresh) if fresh + spare <= self.pool.free else None
        if taken is None:
            self.pool.release(shared)
            return False
        request.pages = shared + taken
        request.keys = known[: len(shared)]
        request.computed = len(shared) * page
        if not request.preemptions:
            request.cached = request.computed
        return True

    def _add_piece(self, request: Request, left: int, pieces: list[Piece], rows: list[Row]) -> int:
        """The next piece of a prompt, as long as fits; how many blocks it takes."""
        length = len(request.tokens)
        size = min(length - request.computed, left * self.limits.block)
        start, slot = request.computed, _slot(request)
        request.computed += size
        row = -1
        if request.computed == length:
            row = len(rows)
            rows.append(Row(request, slot, len(pieces)))
            request.ahead = min(length + 1, request.limit)
        pieces.append(Piece(request, slot, start, size, row))
        self._publish(request, request.computed)
        return self._blocks(size)

    def _stretch(self, chosen: list[Request]) -> int:
        """How many tokens each row may get in one step: several, if the pages for them are free."""
        # A guided row takes part with one token, and the others go on in the same step: nobody is held back by it. The step is
        # shorter then, since the guided row has its next turn after the step that follows.
        guided = sum(request.guided for request in chosen)
        most = self.limits.turns(_at_least(self.limits.rows, len(chosen)))
        chosen = [request for request in chosen if not request.guided]
        steps = 1 if not chosen else max(1, most // 2) if guided else most
        while steps > 1:
            ends = [min(request.ahead + steps - 1, request.limit - 1) for request in chosen]
            missing = [max(0, self.pool.pages_for(e) - len(r.pages)) for e, r in zip(ends, chosen, strict=True)]
            if sum(missing) <= self.pool.free:
                for request, pages in zip(chosen, missing, strict=True):
                    request.pages += self.pool.take(pages) or []
                return steps
            steps //= 2
        return 1

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.limits.block)

    # --- results

    def absorb(self, step: Step, tokens: Sequence[Sequence[int]]) -> list[Emitted]:
        """Take the tokens of each row of a step; what was cancelled meanwhile stays silent."""
        emitted = []
        for index, row in enumerate(step.rows):
            request = row.request
            request.in_flight -= 1
            if request.finish is not None:
                continue
            new = []
            for token in tokens[index]:
                new.append(token)
                request.tokens.append(token)
                if token in request.stop_ids and len(request.tokens) - request.prompt_len >= request.min_tokens:
                    request.finish = "stop"
                    break
            if request.finish is None and len(request.tokens) >= request.limit:
                request.finish = "length"
            if request.slot is not None and request.ahead:
                self._publish(request, len(request.tokens) - 1)
            if request.finish is not None:
                self._end(request, request.finish)
            emitted.append(Emitted(request, index, new, request.finish))
        return emitted

    def _publish(self, request: Request, computed: int) -> None:
        """Let others share the pages that are full of computed tokens."""
        done = len(request.keys)
        if computed // self.limits.page <= done or request.scores_prompt:
            return
        tail = request.keys[-1] if request.keys else b""
        page = self.limits.page
        fresh = page_keys(request.tokens[: computed // page * page], page, request.salt, tail, done * page)
        for index, key in enumerate(fresh, done):
            self.pool.publish(request.pages[index], key)
        request.keys += fresh

    def _end(self, request: Request, reason: str) -> None:
        request.finish = reason
        if request.slot is not None:
            self._vacate(request)
        else:
            self.queue.remove(request)

    def _vacate(self, request: Request) -> None:
        self.running.remove(request)
        self.free_slots.append(_slot(request))
        self.pool.release(request.pages)
        request.slot, request.pages, request.keys = None, [], []

    def check(self) -> None:
        """The invariants (for tests)."""
        self.pool.check([request.pages for request in self.running])
        slots = [_slot(request) for request in self.running]
        assert sorted(slots + self.free_slots) == list(range(self.limits.slots))
        ages = [request.number for request in [*self.running, *self.queue]]
        assert ages == sorted(ages), "someone was overtaken"
        assert all(request.finish is None for request in [*self.running, *self.queue])
        assert all(not request.pages for request in self.queue)


def _slot(request: Request) -> int:
    assert request.slot is not None
    return request.slot


def _at_least(sizes: Sequence[int], wanted: int) -> int:
    return next(size for size in sizes if size >= wanted)
