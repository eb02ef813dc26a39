"""The model on its devices: the state of all slots, the compiled programs that move it on, and steps under way.

What a request has on the device lies in its slot: its tokens, how many there are, whether it has ended, and its knobs. So a
step needs from the host only which slots take part and where their pages are; the token that one step chose is there for
the next without a round trip.

The programs are in `programs.py`. There is one for every bucket of `Limits` (on NVIDIA two), compiled ahead of time
(`compile_all`). `dispatch` returns at once with a `Flight`, whose tokens are copied to the host while the next step is
planned.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
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
from podway.serve.knobs import empty_seats, fill_seats, is_plain, pack, unpack
from podway.serve.pages import TRASH
from podway.serve.programs import Scores, State, decode, empty_state, mixed, plain_decode, plain_mixed, seat
from podway.serve.sampling import Sampled

SEATS = 8  # requests that one call of `seat` fills in
Ints = npt.NDArray[np.int32]


class Prepared(NamedTuple):
    """A step in arrays of the host."""

    step: Step
    seats: list[Ints]  # as `knobs.pack` makes them
    small: list[Ints]
    mask: npt.NDArray[np.uint32] | None
    last: np.generic
    plain: bool  # every row wants the most likely token and nothing else


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
        self._plain_programs: dict[tuple[int, int], Any] = {}
        self._plain_slot = np.ones(limits.slots + 1, np.bool_)
        self._seat: Any = None
        self._table = np.zeros((limits.slots + 1, limits.table_width), np.int32)
        words = -(-shape.vocab // 32)
        self._no_mask = {
            r: self._put(np.full((r, words), 0xFFFFFFFF, np.uint32)) for r in {*limits.rows, *limits.mixed_rows}
        }
        if mesh is None:
            self._no_mask = jax.device_put(self._no_mask)
        self.before_launch: Callable[[Prepared], None] | None = None  # other hosts of the mesh hear of a step here
        self._state = self._make_state()

    # --- memory

    def _make_state(self) -> State:
        like = state_like(self.shape, self.limits, self.plan, self.mesh)
        make = jax.jit(partial(empty_state, self.shape, self.limits, self.plan), out_shardings=_shardings(like))
        return self._under_mesh(make)()  # type: ignore[no-any-return]

    def _put(self, array: Any) -> Any:
        if self.mesh is None:  # programs take arrays of the host as they are: quicker than to put each one there
            return array
        if self.mesh.is_multi_process:  # device_put would compare the array with that of every other host
            return jax.make_array_from_callback(np.shape(array), _whole(self.mesh), np.asarray(array).__getitem__)
        return jax.device_put(array, _whole(self.mesh))

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
        return programs_of(self.limits)

    def compile_all(
        self,
        progress: Callable[[str, int, int], None] | None = None,
        workers: int = 2,
        wanted: list[tuple[int, int]] | None = None,
        twins: Sequence[bool] | None = None,
    ) -> None:
        """Compile every program (or just these) and its plain twin (or just one of the two), so that no request ever waits
        for the compiler."""
        wanted = wanted or self.programs()
        twins = twins or ((False, True) if has_twins(self.plan) else (False,))
        jobs = [(rows, blocks, plain) for rows, blocks in wanted for plain in twins]

        def one(job: tuple[int, int, bool]) -> Any:
            return self._under_mesh(self._lower)(*job).compile()

        with ThreadPoolExecutor(workers) as pool:
            for number, (job, program) in enumerate(zip(jobs, pool.map(one, jobs), strict=True), 1):
                rows, blocks, plain = job
                (self._plain_programs if plain else self._programs)[rows, blocks] = program
                if progress is not None:
                    prompts = f" + {blocks * self.limits.block} prompt tokens" if blocks else ""
                    progress(f"{rows} rows{prompts}{', plain' if plain else ''}", number, len(jobs))
        lower = self._under_mesh(lower_seat)
        self._seat = lower(self.shape, self.limits, self.plan, self.mesh).compile()

    def _lower(self, rows: int, blocks: int, plain: bool) -> Any:
        tree = jax.tree.map(_abstract, self._tree)
        return lower_step(self.shape, self.limits, self.plan, self._compute, tree, rows, blocks, self.mesh, plain)

    def warm(self) -> None:
        """Run every program once, plain and with every knob turned, so that the first client does not wait for their loading.

        The request that does it writes to the page of padding."""
        everything = Sampling(temperature=1.0, top_k=5, top_p=0.9, presence=0.1, logprobs=True, logit_bias=((0, 0.1),))
        for sampling, programs in ((Sampling(), self._plain_programs or self._programs), (everything, self._programs)):
            request = Request("warm", [1], self.limits.max_len - 1, owner=sampling)
            request.slot, request.pages = 0, [TRASH]
            seats = [request]
            for rows, blocks in programs:
                row = [Row(request, 0, -1)]
                step = Step(seats=seats, rows=row, pieces=[], steps=1, row_bucket=rows, block_bucket=blocks)
                self.dispatch(step).tokens()
                seats = []

    def memory(self) -> dict[tuple[int, int], int]:
        """Bytes of scratch memory of each compiled program on one device."""
        both = (*self._plain_programs.items(), *self._programs.items())
        return {key: int(p.memory_analysis().temp_size_in_bytes) for key, p in both}

    # --- running

    def dispatch(self, step: Step, masks: dict[int, npt.NDArray[np.uint32]] | None = None) -> Flight:
        """Begin a step: `prepare` and `launch`."""
        return self.launch(self.prepare(step, masks))

    def prepare(self, step: Step, masks: dict[int, npt.NDArray[np.uint32]] | None = None) -> Prepared:
        """All that the step needs of its requests, copied: they may change before it is launched.

        `masks` has the words of the grammar for rows that have one."""
        groups = [step.seats[begin : begin + SEATS] for begin in range(0, len(step.seats), SEATS)]
        for request in step.seats:
            self._plain_slot[request.slot] = is_plain(request)
        rows, blocks = self._describe(step)
        words = None
        if masks:
            words = np.full(self._no_mask[step.row_bucket].shape, 0xFFFFFFFF, np.uint32)
            for row, allowed in masks.items():
                words[row] = allowed
        scoring = any(piece.request.scores_prompt for piece in step.pieces)
        plain = not masks and not scoring and bool(self._plain_slot[[row.slot for row in step.rows]].all())
        plain = plain and (step.row_bucket, step.block_bucket) in self._plain_programs
        last = np.int32(step.steps) if blocks is None else np.bool_(scoring)
        seats = [pack(fill_seats(group, SEATS, self.limits)) for group in groups]
        small = [x for x in (rows, blocks) if x is not None] + [self._table.copy()]
        return Prepared(step, seats, small, words, last, plain)

    def launch(self, prepared: Prepared) -> Flight:
        """Give it to the device. On some devices this returns only when the step is nearly done."""
        if self.before_launch is not None:
            self.before_launch(prepared)
        step = prepared.step
        for seats in prepared.seats:
            self._state = self._seat(self._state, self._put(seats))
        key = step.row_bucket, step.block_bucket
        small = [self._put(x) for x in prepared.small]
        if not prepared.plain:
            small.append(self._no_mask[step.row_bucket] if prepared.mask is None else self._put(prepared.mask))
        if not prepared.plain or not step.block_bucket:
            small.append(self._put(prepared.last))
        program = (self._plain_programs if prepared.plain else self._programs)[key]
        self._state, sampled, scores = program(self._tree, self._state, *small)
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


def programs_of(limits: Limits) -> list[tuple[int, int]]:
    """(rows, blocks) of every program of a step; no blocks: decode."""
    mixed_sizes = [(rows, blocks) for rows in limits.mixed_rows for blocks in limits.blocks]
    return [*((rows, 0) for rows in limits.rows), *mixed_sizes]


def lower_seat(shape: ModelShape, limits: Limits, plan: Plan, mesh: jax.sharding.Mesh | None = None) -> Any:
    """The program that fills slots, ready to be compiled. Call under the mesh."""
    empty = empty_seats(SEATS, limits)
    like = state_like(shape, limits, plan, mesh)

    def fill(state: State, packed: jax.Array) -> State:
        return seat(state, unpack(packed, empty))

    jitted = jax.jit(fill, donate_argnums=0, out_shardings=_shardings(like))
    return jitted.lower(like, _like(pack(empty).shape, np.int32, mesh))


def has_twins(plan: Plan) -> bool:
    """Whether conditions cost so much that steps without any have programs of their own (`programs.py`)."""
    return plan.backend == "nvidia"


def lower_step(
    shape: ModelShape,
    limits: Limits,
    plan: Plan,
    compute: Compute,
    tree: Any,
    rows: int,
    blocks: int,
    mesh: jax.sharding.Mesh | None = None,
    plain: bool = False,
) -> Any:
    """The program of a step, ready to be compiled; `tree` may be abstract, so no device is needed. Call under the mesh."""
    state = state_like(shape, limits, plan, mesh)
    small = [_like((3, rows), np.int32, mesh)]
    if blocks:
        small.append(_like((3, blocks), np.int32, mesh))
    small.append(_like((limits.slots + 1, limits.table_width), np.int32, mesh))
    if not plain:
        small.append(_like((rows, -(-shape.vocab // 32)), np.uint32, mesh))
        small += [_like((), np.bool_, mesh)] if blocks else []
    small += [] if blocks else [_like((), np.int32, mesh)]
    which = (plain_mixed if blocks else plain_decode) if plain else (mixed if blocks else decode)
    step = partial(which, shape, limits, plan, compute)
    out = None if mesh is None else (_shardings(state), _whole(mesh), _whole(mesh))
    return jax.jit(step, donate_argnums=1, out_shardings=out).lower(tree, state, *small)
