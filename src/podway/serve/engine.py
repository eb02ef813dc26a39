"""The model on its devices: the state of all slots, the compiled programs that move it on, and steps under way.

What a request has on the device lies in its slot: its tokens, how many there are, whether it has ended, and its knobs. So a
step needs from the host only which slots take part and where their pages are; the token that one step chose is there for
the next without a round trip.

The programs are in `programs.py`. There is one for every bucket of `Limits`, compiled ahead of time
(`compile_all`). `dispatch` returns at once with a `Flight`, whose tokens are copied to the host while the next step is
planned.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding, PartitionSpec

from podway.model.decoder import Compute, Tree
from podway.model.layout import SERVE_RULES
from podway.model.mesh import named_sharding
from podway.model.shape import ModelShape
from podway.serve import cache as pages
from podway.serve.asked import Sampling
from podway.serve.batcher import Limits, Request, Row, Step
from podway.serve.cache import Plan
from podway.serve.knobs import Seats, empty_seats, fill_seats
from podway.serve.pages import TRASH
from podway.serve.programs import Scores, State, decode, empty_state, mixed, seat
from podway.serve.sampling import Sampled

SEATS = 8  # requests that one call of `seat` fills in
Ints = npt.NDArray[np.int32]


class Prepared(NamedTuple):
    """A step in arrays of the host."""

    step: Step
    seats: list[Seats]
    small: list[Ints]
    mask: npt.NDArray[np.uint32] | None
    last: np.generic


class Flight:
    """A step under way. The tokens come first; what few ask for is copied only when it is read."""

    def __init__(self, step: Step, sampled: Sampled, scores: Scores | None) -> None:
        self.step = step
        self._sampled = sampled
        self._scores = scores
        sampled.token.copy_to_host_async()

    def tokens(self) -> list[list[int]]:
        """The new tokens of each row; waits for the step."""
        by_row = np.asarray(self._sampled.token).T[: len(self.step.rows)].tolist()
        return [[token for token in row if token >= 0] for row in by_row]

    def logprobs(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        """Of each token: (steps, rows), and ids and numbers of the alternatives (steps, rows, J)."""
        s = self._sampled
        return np.asarray(s.logprob), np.asarray(s.top_ids_RJ), np.asarray(s.top_logprobs_RJ)

    def prompt_scores(self) -> list[tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]]:
        """For each piece: log probability of the token after each of its tokens, and the alternatives."""
        assert self._scores is not None
        arrays = [np.asarray(x) for x in self._scores]
        block, found, begin = arrays[0].shape[1], [], 0
        flat = [x.reshape(-1, *x.shape[2:]) for x in arrays]
        for piece in self.step.pieces:
            logprob, ids, tops = (x[begin : begin + piece.count] for x in flat)
            found.append((logprob, ids, tops))
            begin += -(-piece.count // block) * block
        return found


class Engine:
    """A model on its devices. `prepare` and `launch` may run in two threads, one in each."""

    def __init__(
        self,
        shape: ModelShape,
        tree: Tree,
        limits: Limits,
        *,
        compute: Compute,
        plan: Plan,
        mesh: jax.sharding.Mesh | None = None,
    ) -> None:
        self.shape, self.limits, self.plan, self.mesh = shape, limits, plan, mesh
        self._tree = tree
        self._compute = compute
        self._programs: dict[tuple[int, int], Any] = {}
        self._seat: Any = None
        self._table = np.zeros((limits.slots + 1, limits.table_width), np.int32)
        words = -(-shape.vocab // 32)
        self._no_mask = {
            r: self._put(np.full((r, words), 0xFFFFFFFF, np.uint32)) for r in {*limits.rows, *limits.mixed_rows}
        }
        self._state = self._make_state()

    # --- memory

    def _make_state(self) -> State:
        like = state_like(self.shape, self.limits, self.plan, self.mesh)
        make = jax.jit(partial(empty_state, self.shape, self.limits, self.plan), out_shardings=_shardings(like))
        return self._under_mesh(make)()  # type: ignore[no-any-return]

    def _put(self, array: Any) -> Any:
        return jnp.asarray(array) if self.mesh is None else jax.device_put(array, _whole(self.mesh))

    def _under_mesh(self, f: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            if self.mesh is None:
                return f(*arguments)
            with jax.set_mesh(self.mesh):
                return f(*arguments)

        return run

    # --- programs

    def programs(self) -> list[tuple[int, int]]:
        """(rows, blocks) of every program; no blocks: decode."""
        mixed_sizes = [(rows, blocks) for rows in self.limits.mixed_rows for blocks in self.limits.blocks]
        return [*((rows, 0) for rows in self.limits.rows), *mixed_sizes]

    def compile_all(
        self,
        progress: Callable[[str, int, int], None] | None = None,
        workers: int = 2,
        wanted: list[tuple[int, int]] | None = None,
        compiler_options: dict[str, Any] | None = None,
    ) -> None:
        """Compile every program (or just these), so that no request ever waits for the compiler."""
        wanted = wanted or self.programs()

        def one(key: tuple[int, int]) -> Any:
            return self._under_mesh(self._lower)(*key).compile(compiler_options)

        with ThreadPoolExecutor(workers) as pool:
            for number, (key, program) in enumerate(zip(wanted, pool.map(one, wanted), strict=True), 1):
                self._programs[key] = program
                if progress is not None:
                    progress(f"{key[0]} rows" + (f" + {key[1] * self.limits.block} prompt tokens" if key[1] else ""),
                             number, len(wanted))  # fmt: skip
        self._seat = self._under_mesh(self._lower_seat)().compile(compiler_options)

    def _lower(self, rows: int, blocks: int) -> Any:
        tree = jax.tree.map(_abstract, self._tree)
        return lower_step(self.shape, self.limits, self.plan, self._compute, tree, rows, blocks, self.mesh)

    def _lower_seat(self) -> Any:
        seats = jax.tree.map(lambda a: _like(a.shape, a.dtype, self.mesh), empty_seats(SEATS, self.limits))
        like = state_like(self.shape, self.limits, self.plan, self.mesh)
        jitted = jax.jit(seat, donate_argnums=0, out_shardings=_shardings(like))
        return jitted.lower(like, seats)

    def warm(self) -> None:
        """Run every program once, plain and with every knob turned, so that the first client does not wait for their loading.

        The request that does it writes to the page of padding."""
        everything = Sampling(temperature=1.0, top_k=5, top_p=0.9, presence=0.1, logprobs=True, logit_bias=((0, 0.1),))
        for sampling in (Sampling(), everything):
            request = Request("warm", [1], self.limits.max_len - 1, owner=sampling)
            request.slot, request.pages = 0, [TRASH]
            seats = [request]
            for rows, blocks in self._programs:
                row = [Row(request, 0, -1)]
                step = Step(seats=seats, rows=row, pieces=[], steps=1, row_bucket=rows, block_bucket=blocks)
                self.dispatch(step).tokens()
                seats = []

    def memory(self) -> dict[tuple[int, int], int]:
        """Bytes of scratch memory of each compiled program on one device."""
        return {key: int(p.memory_analysis().temp_size_in_bytes) for key, p in self._programs.items()}

    # --- running

    def dispatch(self, step: Step, masks: dict[int, npt.NDArray[np.uint32]] | None = None) -> Flight:
        """Begin a step: `prepare` and `launch`."""
        return self.launch(self.prepare(step, masks))

    def prepare(self, step: Step, masks: dict[int, npt.NDArray[np.uint32]] | None = None) -> Prepared:
        """All that the step needs of its requests, copied: they may change before it is launched.

        `masks` has the words of the grammar for rows that have one."""
        groups = [step.seats[begin : begin + SEATS] for begin in range(0, len(step.seats), SEATS)]
        rows, blocks = self._describe(step)
        words = None
        if masks:
            words = np.full(self._no_mask[step.row_bucket].shape, 0xFFFFFFFF, np.uint32)
            for row, allowed in masks.items():
                words[row] = allowed
        scoring = any(piece.request.scores_prompt for piece in step.pieces)
        last = np.int32(step.steps) if blocks is None else np.bool_(scoring)
        seats = [fill_seats(group, SEATS, self.limits) for group in groups]
        return Prepared(step, seats, [x for x in (rows, blocks) if x is not None] + [self._table.copy()], words, last)

    def launch(self, prepared: Prepared) -> Flight:
        """Give it to the device. On some devices this returns only when the step is nearly done."""
        step = prepared.step
        for seats in prepared.seats:
            self._state = self._seat(self._state, jax.tree.map(self._put, seats))
        mask = self._no_mask[step.row_bucket] if prepared.mask is None else self._put(prepared.mask)
        program = self._programs[step.row_bucket, step.block_bucket]
        small = [self._put(x) for x in prepared.small]
        self._state, sampled, scores = program(self._tree, self._state, *small, mask, self._put(prepared.last))
        return Flight(step, sampled, scores)

    def _describe(self, step: Step) -> tuple[Ints, Ints | None]:
        """Rows as (slot, where its last token comes out, whether that token is an input of its own), and blocks as
        (slot, first position, tokens)."""
        dummy, block = self.limits.slots, self.limits.block
        for request in {
            id(r): r for r in [*(x.request for x in step.rows), *(p.request for p in step.pieces)]
        }.values():
            self._table[request.slot, : len(request.pages)] = request.pages
        rows = np.zeros((3, step.row_bucket), np.int32)
        rows[0] = dummy
        blocks: Ints | None = None
        ends = []
        if step.block_bucket:
            blocks = np.zeros((3, step.block_bucket), np.int32)
            blocks[0] = dummy
            at = 0
            for piece in step.pieces:
                for offset in range(0, piece.count, block):
                    blocks[:, at] = piece.slot, piece.start + offset, min(block, piece.count - offset)
                    at += 1
                ends.append(step.row_bucket + (at - 1) * block + (piece.count - 1) % block)
        for index, row in enumerate(step.rows):
            rows[:, index] = row.slot, (index if row.piece < 0 else ends[row.piece]), row.piece < 0
        return rows, blocks


def _whole(mesh: jax.sharding.Mesh | None) -> Any:
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]


def _like(dims: Sequence[int], dtype: Any, mesh: jax.sharding.Mesh | None) -> Any:
    return jax.ShapeDtypeStruct(tuple(dims), dtype, sharding=_whole(mesh))  # type: ignore[no-untyped-call]


def _abstract(leaf: jax.Array) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)  # type: ignore[no-untyped-call]


def _shardings(like: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, like)


def state_like(shape: ModelShape, limits: Limits, plan: Plan, mesh: jax.sharding.Mesh | None) -> Any:
    """Shapes, dtypes and shardings of the state: the cache is split by heads, counts by vocabulary, the rest is whole."""
    like = jax.eval_shape(partial(empty_state, shape, limits, plan))
    if mesh is None:
        return like

    def place(axes: tuple[str | None, ...], leaf: Any) -> Any:
        where = named_sharding(mesh, axes, leaf.shape, SERVE_RULES)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)  # type: ignore[no-untyped-call]

    rest = jax.tree.map(lambda leaf: _like(leaf.shape, leaf.dtype, mesh), like)
    counts = place((None, "vocab"), like.counts_ZV)
    return rest._replace(cache=pages.by_head(plan, like.cache, place), counts_ZV=counts)


def lower_step(
    shape: ModelShape,
    limits: Limits,
    plan: Plan,
    compute: Compute,
    tree: Any,
    rows: int,
    blocks: int,
    mesh: jax.sharding.Mesh | None = None,
) -> Any:
    """The program of a step, ready to be compiled; `tree` may be abstract, so no device is needed. Call under the mesh."""
    state = state_like(shape, limits, plan, mesh)
    small = [_like((3, rows), np.int32, mesh)]
    if blocks:
        small.append(_like((3, blocks), np.int32, mesh))
    small.append(_like((limits.slots + 1, limits.table_width), np.int32, mesh))
    small.append(_like((rows, -(-shape.vocab // 32)), np.uint32, mesh))
    small.append(_like((), np.bool_ if blocks else np.int32, mesh))
    step = partial(mixed if blocks else decode, shape, limits, plan, compute)
    out = None if mesh is None else (_shardings(state), _whole(mesh), _whole(mesh))
    return jax.jit(step, donate_argnums=1, out_shardings=out).lower(tree, state, *small)
