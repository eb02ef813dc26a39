"""An engine whose answers can be computed by hand: it keeps tokens in pages where the real one keeps keys and values.

The next token is a sum over the whole context, read back through the pages. So a page that is shared wrongly, given away too
early or not computed changes an answer. Steps run at once and in order, as on the device; results are read later.
"""

from collections import deque

from podway.serve.batcher import Batcher, Emitted, Limits, Request, Step
from podway.serve.pages import PAD_PAGE

VOCABULARY = 50


def next_token(context: list[int]) -> int:
    """Depends on every token and its place."""
    return sum((place + 3) * token * token + token for place, token in enumerate(context)) % VOCABULARY


def answer_alone(prompt: list[int], max_tokens: int, stop_ids: frozenset[int], min_tokens: int = 0) -> list[int]:
    """The oracle: one request, no pages."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in stop_ids and len(tokens) - len(prompt) >= min_tokens:
            break
    return tokens[len(prompt) :]


class FakeEngine:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.cells: dict[tuple[int, int], int] = {}
        self.slots: list[list[int]] = [[] for _ in range(limits.slots)]
        self.done = [True] * limits.slots
        self.calls: list[tuple[int, int]] = []

    def run(self, step: Step) -> list[list[int]]:
        self._hold_to_limits(step)
        for request in step.admitted:
            assert request.slot is not None
            self.slots[request.slot] = list(request.tokens)
            self.done[request.slot] = False
        for piece in step.pieces:  # every layer writes before it reads, so pieces may use each other's pages
            for place in range(piece.start, piece.start + piece.count):
                self._write(piece.request, piece.slot, place)
        answers: list[list[int]] = [[] for _ in step.rows]
        for turn in range(step.steps):
            for index, row in enumerate(step.rows):
                tokens = self.slots[row.slot]
                if self.done[row.slot] or len(tokens) >= row.request.limit or turn >= row.turns(step.steps):
                    continue
                if row.piece < 0:
                    self._write(row.request, row.slot, len(tokens) - 1)
                token = next_token([self._read(row.request, place) for place in range(len(tokens))])
                tokens.append(token)
                answers[index].append(token)
                enough = len(tokens) - row.request.prompt_len >= row.request.min_tokens
                self.done[row.slot] = token in row.request.stop_ids and enough
        return answers

    def _write(self, request: Request, slot: int, place: int) -> None:
        page = request.pages[place // self.limits.page]
        assert page != PAD_PAGE
        self.cells[page, place % self.limits.page] = self.slots[slot][place]

    def _read(self, request: Request, place: int) -> int:
        return self.cells[request.pages[place // self.limits.page], place % self.limits.page]

    def _hold_to_limits(self, step: Step) -> None:
        limits = self.limits
        blocks = sum(-(-piece.count // limits.block) for piece in step.pieces)
        assert len(step.rows) <= step.row_bucket and (step.row_bucket, step.block_bucket) in limits.programs()
        assert blocks <= step.block_bucket if step.pieces else step.block_bucket == 0
        assert step.block_bucket in (0, *limits.blocks)
        assert 1 <= step.steps <= (1 if step.pieces else limits.steps)
        assert len({row.slot for row in step.rows}) == len(step.rows)
        assert all(len(row.request.pages) <= limits.table_width for row in step.rows)
        self.calls.append((step.row_bucket, step.block_bucket))


class Driver:
    """A loop that stays `depth` steps ahead of what it has read, as the real one does."""

    def __init__(self, limits: Limits, depth: int = 1) -> None:
        self.batcher = Batcher(limits)
        self.engine = FakeEngine(limits)
        self.depth = depth
        self.under_way: deque[tuple[Step, list[list[int]]]] = deque()
        self.steps: list[Step] = []
        self.emitted: list[Emitted] = []

    def turn(self) -> bool:
        """Plan and read once; False when there was nothing to do."""
        step = self.batcher.plan()
        self.batcher.check()
        if step is not None:
            self.steps.append(step)
            self.under_way.append((step, self.engine.run(step)))
        if self.under_way and (step is None or len(self.under_way) > self.depth):
            self.emitted += self.batcher.absorb(*self.under_way.popleft())
            self.batcher.check()
            return True
        return step is not None

    def finish(self, most: int = 5000) -> None:
        for _ in range(most):
            if not self.turn():
                assert self.batcher.idle and not self.under_way
                return
        raise AssertionError("requests never end")
