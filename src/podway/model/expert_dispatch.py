"""How tokens reach the experts of other chips in a group that splits both (no jax).

Letters: P chips of an expert group, N tokens on each, J experts per token.

1. `all-to-all`: a chip sends each assignment's row to the chip of its expert and gets the answer back (`expert_exchange.py`). A layer
   moves 6 x capacity x J x N x (P - 1) / P rows in a step: there and back, forward, computed again and as gradients. Rows are sorted
   on both sides.
2. `gather`: every token of the group comes to every chip, and answers are summed on their way back. A layer moves 5 x N x (P - 1) rows,
   but the buffers of a chip hold the case that all of the group's assignments are its own: P x J x N rows, of which the P-th part is
   in use.

A narrow group moves fewer rows by gathering, and a wide one has room for too many. What is not asked for is chosen by the width of
the group and by J, from compiled steps (docs/training-internals.md#experts; a test holds the choice to them). The trainer, the
planner and a rehearsal all ask here.
"""

from typing import Literal, NamedTuple

from podway.model.shape import EXPERT_CAPACITY

DispatchKind = Literal["all-to-all", "gather"]
FURTHER_ROUNDS = (
    "further_rounds"  # the name of a loop in programs, by which a rehearsal knows that it is seldom entered
)


class Dispatch(NamedTuple):
    """What is asked for."""

    kind: DispatchKind | None = None  # None: by the width of the group and the experts of a token
    capacity: float = EXPERT_CAPACITY  # all-to-all: rows that a chip sends to another at a time, over the mean
    drop: bool = False  # all-to-all: what is beyond that is not answered

    def choose(self, *, chips: int, per_token: int) -> DispatchKind:
        """How a group of so many chips does it."""
        if self.kind is not None:
            return self.kind
        return "gather" if not self.drop and chips <= GATHERED and per_token > chips else "all-to-all"

    def spare_rows(self, *, chips: int, per_token: int) -> float:
        """Rows that the buffers of a chip's experts hold, over those of its own tokens; 1 where chips share no experts."""
        if chips == 1:
            return 1.0
        return self.capacity if self.choose(chips=chips, per_token=per_token) == "all-to-all" else float(chips)


GATHERED = 2  # the widest group that gathers
DROPLESS = Dispatch()
