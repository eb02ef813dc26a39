"""The model on its devices: the state of all slots, the compiled programs that move it on, and steps under way.

What a request has on the device lies in its slot: its tokens, how many there are, whether it has ended, and its
sampling parameters. So a
step needs from the host only which slots take part and where their pages are; the token that one step chose is there for
the next without a round trip.

The programs are in `programs.py`. There is one for every bucket of `Limits` (on NVIDIA two), compiled ahead of time
(`compile_all`). `dispatch` returns at once with a `InFlightStep`, whose tokens are copied to the host while the next step is
planned.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, ParamSpec, TypeVar

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding
from jax.stages import Compiled, Lowered
from jax.typing import DTypeLike

from podway.model.adapter_files import Adapter
from podway.model.decoder import Compute, Tree
from podway.model.layout import SERVE_RULES
from podway.model.mesh import abstract_array, named_sharding, spec
from podway.model.shape import ModelShape
from podway.serve import cache_layout
from podway.serve.adapters import AdapterSizes, loaded
from podway.serve.batcher import Limits, Request, Row, Step
from podway.serve.cache_layout import Plan
from podway.serve.pages import PAD_PAGE
from podway.serve.programs import (
    Scores,
    Setup,
    State,
    StepInputs,
    decode,
    empty_state,
    fill_slots,
    mixed,
    plain_decode,
    plain_mixed,
)
from podway.serve.sampling import Sampled
from podway.serve.sampling_params import SamplingParams
from podway.serve.slot_inputs import empty_slot_inputs, is_plain, pack, slot_inputs, unpack
from podway.serve.speculative import speculate

SLOTS_PER_FILL = 8  # requests that one call of `fill_slots` takes
Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
HostArray = npt.NDArray[np.generic]
Words = npt.NDArray[np.uint32]
P = ParamSpec("P")
R = TypeVar("R")


class HostInputs(NamedTuple):
    """`StepInputs` in arrays of the host."""

    rows: Ints
    blocks: Ints | None
    table_ZP: Ints
    mask_RU: Words | None
    scoring: np.bool_ | None
    turns_R: Ints | None


class Prepared(NamedTuple):
    """A step in arrays of the host."""

    step: Step
    slot_fills: list[Ints]  # as `slot_inputs.pack` makes them
    inputs: HostInputs
    plain: bool  # every row wants the most likely token and nothing else


class InFlightStep:
    """A step under way. The tokens come first; what few ask for is copied only when it is read."""

    def __init__(self, step: Step, sampled: Sampled, extra: Scores | jax.Array | None) -> None:
        self.step = step
        self._sampled = sampled
        self._scores = extra if isinstance(extra, Scores) else None
        self._drafts = extra if isinstance(extra, jax.Array) else None
        if self._drafts is not None:
            self._drafts.copy_to_host_async()
        sampled.token.copy_to_host_async()

    def tokens(self) -> list[list[int]]:
        """The new tokens of each row; waits for the step."""
        by_row = np.asarray(self._sampled.token).T[: len(self.step.rows)].tolist()
        return [[token for token in row if token >= 0] for row in by_row]

    def drafts(self) -> tuple[int, int, int]:
        """Rows that had a draft, tokens in the drafts, and tokens of them that were taken."""
        if self._drafts is None:
            return 0, 0, 0
        drafts, proposed, accepted = np.asarray(self._drafts).tolist()
        return drafts, proposed, accepted

    def logprobs(self) -> tuple[Floats, Ints, Floats]:
        """Of each token: (steps, rows), and ids and numbers of the alternatives (steps, rows, J)."""
        s = self._sampled
        return np.asarray(s.logprob), np.asarray(s.top_ids_RJ), np.asarray(s.top_logprobs_RJ)

    def prompt_scores(self) -> list[tuple[Floats, Ints, Floats]]:
        """For each piece: log probability of the token after each of its tokens, and the alternatives."""
        assert self._scores is not None
        arrays = [np.asarray(x) for x in self._scores]
        block, begin = arrays[0].shape[1], 0
        found: list[tuple[Floats, Ints, Floats]] = []
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
        adapters: AdapterSizes | None = None,
    ) -> None:
        self.shape, self.limits, self.plan, self.mesh = shape, limits, plan, mesh
        self.setup = Setup(shape, limits, plan, compute, adapters)
        self._tree = tree
        self._programs: dict[tuple[int, int], Compiled] = {}
        self._plain_programs: dict[tuple[int, int], Compiled] = {}
        self._fill_slots: Compiled | None = None
        self._plain_slot = np.ones(limits.slots + 1, np.bool_)
        self._table = np.zeros((limits.slots + 1, limits.table_width), np.int32)
        words = -(-shape.vocab // 32)
        self._no_mask = {
            r: self._put(np.full((r, words), 0xFFFFFFFF, np.uint32)) for r in {r for r, _ in limits.programs()}
        }
        if mesh is None:
            self._no_mask = jax.device_put(self._no_mask)
        self.before_launch: Callable[[Prepared], None] | None = None  # other hosts of the mesh are sent a step here
        self._state = self._make_state()

    # --- memory

    def _make_state(self) -> State:
        like = state_like(self.setup, self.mesh)
        make = jax.jit(partial(empty_state, self.setup), out_shardings=_shardings(like))
        state: State = self._under_mesh(make)()
        return state

    def _put(self, array: HostArray | np.generic) -> jax.Array:
        if self.mesh is None:  # programs take arrays of the host as they are: quicker than to put each one there
            return array  # type: ignore[return-value]
        where = NamedSharding(self.mesh, spec())
        if self.mesh.is_multi_process:  # device_put would compare the array with that of every other host
            return jax.make_array_from_callback(np.shape(array), where, np.asarray(array).__getitem__)
        there: jax.Array = jax.device_put(array, where)
        return there

    def _under_mesh(self, f: Callable[P, R]) -> Callable[P, R]:
        def run(*arguments: P.args, **named: P.kwargs) -> R:
            if self.mesh is None:
                return f(*arguments, **named)
            with jax.set_mesh(self.mesh):
                return f(*arguments, **named)

        return run

    # --- programs

    def programs(self) -> list[tuple[int, int]]:
        """(rows, blocks) of every program; no blocks: decode."""
        return self.limits.programs()

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

        def one(job: tuple[int, int, bool]) -> Compiled:
            return self._under_mesh(self._lower)(*job).compile()

        with ThreadPoolExecutor(workers) as pool:
            for number, (job, program) in enumerate(zip(jobs, pool.map(one, jobs), strict=True), 1):
                rows, blocks, plain = job
                (self._plain_programs if plain else self._programs)[rows, blocks] = program
                if progress is not None:
                    prompts = f" + {blocks * self.limits.block} prompt tokens" if blocks else ""
                    progress(f"{rows} rows{prompts}{', plain' if plain else ''}", number, len(jobs))
        self._fill_slots = self._under_mesh(lower_fill_slots)(self.setup, self.mesh).compile()

    def _lower(self, rows: int, blocks: int, plain: bool) -> Lowered:
        tree = jax.tree.map(_abstract, self._tree)
        return lower_step(self.setup, tree, rows, blocks, self.mesh, plain)

    def warm(self) -> None:
        """Run every program once, plain and with every parameter set, so that the first client does not wait for their
        loading. The request that does it writes to the page of padding."""
        everything = SamplingParams(
            temperature=1.0, top_k=5, top_p=0.9, presence=0.1, logprobs=True, logit_bias=((0, 0.1),)
        )
        plain = self._plain_programs or self._programs
        for sampling, programs in ((SamplingParams(), plain), (everything, self._programs)):
            request = Request("warm", [1], self.limits.max_len - 1, owner=sampling)
            request.slot, request.pages = 0, [PAD_PAGE]
            admitted = [request]
            for rows, blocks in programs:
                row = [Row(request, 0, -1)]
                step = Step(admitted=admitted, rows=row, pieces=[], steps=1, row_bucket=rows, block_bucket=blocks)
                self.dispatch(step).tokens()
                admitted = []

    def memory(self) -> dict[tuple[int, int], int]:
        """Bytes of scratch memory of each compiled program on one device."""
        both = (*self._plain_programs.items(), *self._programs.items())
        return {key: _scratch_bytes(program) for key, program in both}

    def set_adapter(self, number: int, adapter: Adapter | None) -> None:
        """Put a LoRA adapter into its place, or nothing. In the thread that launches steps: it takes effect between two."""
        assert self.setup.adapters is not None
        self._tree = self._under_mesh(loaded)(self._tree, self.shape, self.setup.adapters, number, adapter)

    # --- running

    def dispatch(self, step: Step, masks: dict[int, Words] | None = None) -> InFlightStep:
        """Begin a step: `prepare` and `launch`."""
        return self.launch(self.prepare(step, masks))

    def prepare(self, step: Step, masks: dict[int, Words] | None = None) -> Prepared:
        """All that the step needs of its requests, copied: they may change before it is launched.

        `masks` has the words of the grammar for rows that have one."""
        groups = [step.admitted[at : at + SLOTS_PER_FILL] for at in range(0, len(step.admitted), SLOTS_PER_FILL)]
        for request in step.admitted:
            self._plain_slot[request.slot] = is_plain(request)
        rows, blocks = self._describe(step)
        words: Words | None = None
        if masks:
            words = np.full(self._no_mask[step.row_bucket].shape, 0xFFFFFFFF, np.uint32)
            for row, allowed in masks.items():
                words[row] = allowed
        scoring = any(piece.request.scores_prompt for piece in step.pieces)
        plain = not masks and not scoring and bool(self._plain_slot[[row.slot for row in step.rows]].all())
        plain = plain and (step.row_bucket, step.block_bucket) in self._plain_programs
        inputs = HostInputs(
            rows, blocks, self._table.copy(), mask_RU=words,
            scoring=None if plain or blocks is None else np.bool_(scoring),
            turns_R=_turns(step) if blocks is None else None,
        )  # fmt: skip
        fills = [pack(slot_inputs(group, SLOTS_PER_FILL, self.limits)) for group in groups]
        return Prepared(step, fills, inputs, plain)

    def launch(self, prepared: Prepared) -> InFlightStep:
        """Give it to the device. On some devices this returns only when the step is nearly done."""
        if self.before_launch is not None:
            self.before_launch(prepared)
        step = prepared.step
        assert self._fill_slots is not None
        for fill in prepared.slot_fills:
            self._state = self._fill_slots(self._state, self._put(fill))
        rows, blocks, table, *others = prepared.inputs
        mask, scoring, turns = (None if one is None else self._put(one) for one in others)
        there = None if blocks is None else self._put(blocks)
        inputs = StepInputs(self._put(rows), there, self._put(table), mask, scoring, turns)
        if not prepared.plain and inputs.mask_RU is None:
            inputs = inputs._replace(mask_RU=self._no_mask[step.row_bucket])
        program = (self._plain_programs if prepared.plain else self._programs)[step.row_bucket, step.block_bucket]
        self._state, sampled, extra = program(self._tree, self._state, inputs)
        return InFlightStep(step, sampled, extra)

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
            at, first = 0, 0 if step.row_bucket == self.limits.prompt_rows else step.row_bucket
            for piece in step.pieces:
                for offset in range(0, piece.count, block):
                    blocks[:, at] = piece.slot, piece.start + offset, min(block, piece.count - offset)
                    at += 1
                ends.append(first + (at - 1) * block + (piece.count - 1) % block)
        for index, row in enumerate(step.rows):
            rows[:, index] = row.slot, (index if row.piece < 0 else ends[row.piece]), row.piece < 0
        return rows, blocks


def _turns(step: Step) -> Ints:
    turns = np.zeros(step.row_bucket, np.int32)
    turns[: len(step.rows)] = [row.turns(step.steps) for row in step.rows]
    return turns


def _scratch_bytes(program: Compiled) -> int:
    found = program.memory_analysis()
    return 0 if found is None else int(found.temp_size_in_bytes)


def _whole(mesh: jax.sharding.Mesh | None) -> NamedSharding | None:
    return None if mesh is None else NamedSharding(mesh, spec())


def _abstract(leaf: jax.Array) -> jax.Array:
    return abstract_array(leaf.shape, leaf.dtype, leaf.sharding)


def _shardings(like: R) -> R:
    found: R = jax.tree.map(lambda leaf: leaf.sharding, like)
    return found


def state_like(setup: Setup, mesh: jax.sharding.Mesh | None) -> State:
    """Shapes, dtypes and shardings of the state: the cache is split by heads, counts by vocabulary, the rest is whole."""
    like: State = jax.eval_shape(partial(empty_state, setup))
    if mesh is None:
        return like

    def place(axes: tuple[str | None, ...], leaf: jax.Array) -> jax.Array:
        return abstract_array(leaf.shape, leaf.dtype, named_sharding(mesh, axes, leaf.shape, SERVE_RULES))

    rest: State = jax.tree.map(lambda leaf: abstract_array(leaf.shape, leaf.dtype, _whole(mesh)), like)
    cache = cache_layout.by_head(setup.plan, like.cache, place)
    return rest._replace(cache=cache, counts_ZV=place((None, "vocab"), like.counts_ZV))


def lower_fill_slots(setup: Setup, mesh: jax.sharding.Mesh | None = None) -> Lowered:
    """The program that fills slots, ready to be compiled. Call under the mesh."""
    empty = empty_slot_inputs(SLOTS_PER_FILL, setup.limits)
    like = state_like(setup, mesh)

    def fill(state: State, packed: jax.Array) -> State:
        return fill_slots(state, unpack(packed, empty))

    jitted = jax.jit(fill, donate_argnums=0, out_shardings=_shardings(like))
    return jitted.lower(like, abstract_array(pack(empty).shape, np.int32, _whole(mesh)))


def has_twins(plan: Plan) -> bool:
    """Whether conditions cost so much that steps without any have programs of their own (`programs.py`)."""
    return plan.backend == "nvidia"


def lower_step(
    setup: Setup, tree: Tree, rows: int, blocks: int, mesh: jax.sharding.Mesh | None = None, plain: bool = False
) -> Lowered:
    """The program of a step, ready to be compiled; `tree` may be abstract, so no device is needed. Call under the mesh."""
    limits, state = setup.limits, state_like(setup, mesh)

    def like(dims: tuple[int, ...], dtype: DTypeLike = np.int32) -> jax.Array:
        return abstract_array(dims, dtype, _whole(mesh))

    inputs = StepInputs(
        like((3, rows)),
        like((3, blocks)) if blocks else None,
        like((limits.slots + 1, limits.table_width)),
        mask_RU=None if plain else like((rows, -(-setup.shape.vocab // 32)), np.uint32),
        scoring=like((), np.bool_) if blocks and not plain else None,
        turns_R=None if blocks else like((rows,)),
    )
    which: Callable[..., tuple[State, Sampled, Scores | jax.Array | None]]
    if not blocks and limits.drafts(rows):
        which = partial(speculate, plain=plain)
    else:
        which = (plain_mixed if blocks else plain_decode) if plain else (mixed if blocks else decode)
    out = None if mesh is None else (_shardings(state), _whole(mesh), _whole(mesh))
    return jax.jit(partial(which, setup), donate_argnums=1, out_shardings=out).lower(tree, state, inputs)
