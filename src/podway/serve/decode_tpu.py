"""Attention of rows that generate on TPUs: one kernel that stores the keys and values of each row's token and attends.

Letters: N rows, H heads, G key/value heads, K d_head padded to the lanes of the chip, T tokens of a block, P pages of a table.

jax's ragged paged attention takes blocks of queries: for a row with one query it computes the scores of 32 of them, reads the
pages that a window has left behind, uses one of the two cores of a v4 or v5p, and leaves storing to a scatter. Here

1. each row goes through the blocks of pages that it sees, from the first page that its window reaches; the pages of the next block (of this
   row or the next) are fetched while this one is computed, and only those that exist;
2. the token's keys and values go to their page from the kernel: those of row n + 2 while row n is computed, so that they have arrived
   before the pages of that row are fetched;
3. eight query rows, those of one tile, are computed together. Where a key/value head has fewer, heads share a group of rows: each
   head's product gives all rows of the group, and those of the head are kept;
4. where one device has two cores, each takes half of the rows.

Scores and sums are in float32; products are in the dtype of the queries. `make bench-attention` says what it costs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from podway.model.attention import Pattern
from podway.model.mesh import abstract_array

_GROUP = 8  # rows of a tile of the vector unit
_VMEM_SHARE = 0.75  # of the core's memory: a limit for the compiler
_LOWEST = -2e38  # counts for nothing; infinity less itself would not be a number
# Of a block: keys and values of 8 heads. Smaller blocks pay for the ends of their reductions more often, larger ones compute
# more of what is past the end of a row (docs/perf-notes.md).
_BLOCK_BYTES = 2 * 1024 * 1024
_BLOCK_TOKENS = 1024  # at most


class _Sizes(NamedTuple):
    """What is fixed when the kernel is compiled."""

    rows: int  # of a core
    pages: int  # of a block
    page: int
    heads: int  # key/value heads
    shared: int  # rows of a group that belong to one head
    pattern: Pattern
    interpret: bool

    @property
    def block(self) -> int:
        return self.pages * self.page


class _Memory(NamedTuple):
    """The kernel's arguments: in scalar memory, in VMEM, and the pool in HBM."""

    lengths_N: Ref  # tokens of each row with its new one; 0: the row is not live
    tables_NP: Ref
    layer: Ref  # (2,): the layer's first page, and its window
    q: Ref
    new: Ref
    out: Ref
    pool: Ref
    buffers: Ref
    reads: Ref
    writes: Ref


def block_pages(page: int, heads: int, lanes: int, itemsize: int) -> int:
    """Pages of a block of the cache."""
    token = 2 * heads * lanes * itemsize
    return max(1, min(_BLOCK_TOKENS, _BLOCK_BYTES // token) // page)


def attend(
    pool: jax.Array,
    q_NHK: jax.Array,
    k_NGK: jax.Array,
    v_NGK: jax.Array,
    live_N: jax.Array,
    tables_NP: jax.Array,
    first_page: jax.Array,
    at_N: jax.Array,
    window: jax.Array,
    pattern: Pattern,
    interpret: bool,
    pages: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """((N, H, K), pool): row n's token stands at position `at_N[n]`. A row that is not live stores nothing."""
    N, H, K = q_NHK.shape
    page, both, lanes = pool.shape[1:]
    heads = both // 2
    q = _groups(_padded(q_NHK, lanes).reshape(N, heads, H // heads, lanes))
    new = _padded(jnp.stack([k_NGK, v_NGK], axis=2), lanes).reshape(N, both, lanes).astype(pool.dtype)
    info = None if interpret else pltpu.get_tpu_info()
    cores = info.num_cores if info is not None and N % info.num_cores == 0 else 1
    rows, pages = N // cores, min(pages or block_pages(page, heads, lanes, pool.dtype.itemsize), tables_NP.shape[1])
    shared = q.shape[1] * q.shape[2] // heads
    sizes = _Sizes(rows, pages, page, heads, shared, pattern, interpret)
    ours = pl.BlockSpec((rows, *q.shape[1:]), lambda core, *_: (core, 0, 0, 0))
    there = pl.BlockSpec(memory_space=pl.ANY)
    out, pool = pl.pallas_call(
        partial(_kernel, sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(cores,),
            in_specs=[ours, pl.BlockSpec((rows, both, lanes), lambda core, *_: (core, 0, 0)), there],
            out_specs=[ours, there],
            scratch_shapes=[
                pltpu.VMEM((2, pages, page, both, lanes), pool.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=[abstract_array(q.shape, q.dtype), abstract_array(pool.shape, pool.dtype)],
        input_output_aliases={5: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=int(_VMEM_SHARE * info.vmem_capacity_bytes) if info is not None else None,
            # Checking an address takes longer than starting a transfer. They come from the batcher's own tables.
            disable_bounds_checks=True,
        ),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="paged_decode",
    )(jnp.where(live_N, at_N + 1, 0), tables_NP, jnp.stack([first_page, window]), q, new, pool)
    out = out.reshape(N, heads, shared, lanes)[:, :, : H // heads, :K]
    return out.reshape(N, H, K), pool


def _padded(x: jax.Array, width: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


def _groups(q_NGRK: jax.Array) -> jax.Array:
    """Queries in groups of whole tiles: several heads in one where they fill it, else each padded."""
    rows, heads, shared, lanes = q_NGRK.shape
    if _GROUP % shared == 0 and heads % (_GROUP // shared) == 0:
        return q_NGRK.reshape(rows, -1, _GROUP, lanes)
    return jnp.pad(q_NGRK, [(0, 0), (0, 0), (0, -shared % _GROUP), (0, 0)])


def _kernel(sizes: _Sizes, lengths: Ref, tables: Ref, layer: Ref, q: Ref, new: Ref, _: Ref, *others: Ref) -> None:
    m = _Memory(lengths, tables, layer, q, new, *others)
    rows = sizes.rows
    # What was never fetched is multiplied by a weight of zero, so it must be a number.
    m.buffers[...] = jnp.zeros(m.buffers.shape, m.buffers.dtype)
    _store(sizes, m, 0, lambda copy: copy.start())
    _store(sizes, m, 0, lambda copy: copy.wait())
    _fetch(sizes, m, 0, 0, 0)
    if rows > 1:
        _store(sizes, m, 1, lambda copy: copy.start())

    def one_row(row: jax.Array, slot: jax.Array) -> jax.Array:
        @pl.when(row + 1 < rows)
        def _() -> None:
            _store(sizes, m, row + 1, lambda copy: copy.wait())

        @pl.when(row + 2 < rows)
        def _() -> None:
            _store(sizes, m, row + 2, lambda copy: copy.start())

        return _one_row(sizes, m, row, slot)

    lax.fori_loop(0, rows, one_row, jnp.int32(0))


def _one_row(sizes: _Sizes, m: _Memory, row: jax.Array, slot: jax.Array) -> jax.Array:
    """All blocks of a row; `slot` is the buffer that its first one is in. Returns that of the next row's."""
    first, end = _span(sizes, m, row)
    blocks = pl.cdiv(end - first, sizes.pages)
    after = jnp.minimum(row + 1, sizes.rows - 1)
    groups, height, lanes = m.q.shape[1:]

    def one_block(number: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        slot, *sums = carry
        last = number + 1 >= blocks

        @pl.when(jnp.logical_or(~last, row + 1 < sizes.rows))
        def _() -> None:
            _fetch(sizes, m, jnp.where(last, after, row), jnp.where(last, 0, number + 1), 1 - slot)

        _arrived(sizes, m, row, number, slot)
        return 1 - slot, *_block(sizes, m, row, number, slot, sums)

    start = [jnp.full((height, 1), _LOWEST, jnp.float32)] * groups
    start += [jnp.zeros((height, 1), jnp.float32)] * groups
    start += [jnp.zeros((height, lanes), jnp.float32)] * groups
    slot, *sums = lax.fori_loop(0, blocks, one_block, (slot, *start))
    for group in range(groups):
        m.out[row, group] = (sums[2 * groups + group] / sums[groups + group]).astype(m.out.dtype)
    return slot


def _length(sizes: _Sizes, m: _Memory, row: jax.Array | int) -> jax.Array:
    length: jax.Array = m.lengths_N[pl.program_id(0) * sizes.rows + row]
    return length


def _span(sizes: _Sizes, m: _Memory, row: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """Where the pages that a row sees begin in its table, and end. A row that is not live reads one, in vain."""
    length = jnp.maximum(_length(sizes, m, row), 1)
    unseen = 0 if sizes.pattern.window is None else jnp.maximum(length - m.layer[1], 0)
    return jnp.asarray(unseen // sizes.page, jnp.int32), pl.cdiv(length, sizes.page)


def _pages(sizes: _Sizes, m: _Memory, row: jax.Array | int, number: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """The pages of a block: where they begin in the row's table, and how many there are."""
    first, end = _span(sizes, m, row)
    first = first + number * sizes.pages
    return first, jnp.minimum(end - first, sizes.pages)


def _page(sizes: _Sizes, m: _Memory, row: jax.Array | int, place: jax.Array) -> jax.Array:
    number: jax.Array = m.layer[0] + m.tables_NP[pl.program_id(0) * sizes.rows + row, place]
    return number


def _fetch(sizes: _Sizes, m: _Memory, row: jax.Array | int, number: jax.Array | int, slot: jax.Array | int) -> None:
    first, count = _pages(sizes, m, row, number)

    def one(i: jax.Array | int, _: None = None) -> None:
        page = m.pool.at[_page(sizes, m, row, first + i)]
        pltpu.make_async_copy(page, m.buffers.at[slot, i], m.reads.at[slot]).start()

    def whole() -> None:
        for i in range(sizes.pages):  # the addresses of one page are computed beside those of the others
            one(i)

    lax.cond(count == sizes.pages, whole, lambda: lax.fori_loop(0, count, one, None))


def _arrived(sizes: _Sizes, m: _Memory, row: jax.Array, number: jax.Array, slot: jax.Array) -> None:
    _, count = _pages(sizes, m, row, number)

    def wait(there: Ref) -> None:
        pltpu.make_async_copy(there, there, m.reads.at[slot]).wait()  # type: ignore[no-untyped-call]

    def one(i: jax.Array, _: None) -> None:
        wait(m.buffers.at[slot, i])

    whole = partial(wait, m.buffers.at[slot])
    lax.cond(count == sizes.pages, whole, lambda: lax.fori_loop(0, count, one, None))


def _store(sizes: _Sizes, m: _Memory, row: jax.Array | int, act: Callable[[Any], None]) -> None:
    """Start or await the copy of a row's new keys and values to their place."""
    length = _length(sizes, m, row)

    @pl.when(length > 0)
    def _() -> None:
        at = length - 1
        place = m.pool.at[_page(sizes, m, row, at // sizes.page), at % sizes.page]
        act(pltpu.make_async_copy(m.new.at[row], place, m.writes.at[row % 2]))


def _block(
    sizes: _Sizes, m: _Memory, row: jax.Array, number: jax.Array, slot: jax.Array, sums: list[jax.Array]
) -> list[jax.Array]:
    """One block into the largest scores, the sums of weights and the weighted values of every group."""
    q, length, pattern = m.q[row], _length(sizes, m, row), sizes.pattern
    groups, height, _ = q.shape
    keys, values = zip(*(_load(sizes, m.buffers.at[slot], head, q.dtype) for head in range(sizes.heads)), strict=True)
    owner = lax.broadcasted_iota(jnp.int32, (height, 1), 0) // sizes.shared
    first, _ = _pages(sizes, m, row, number)
    places = first * sizes.page + lax.broadcasted_iota(jnp.int32, (height, sizes.block), 1)
    seen = places < length
    if pattern.window is not None:
        seen = jnp.logical_and(seen, places >= length - m.layer[1])

    def by_head(group: int, product: Callable[[int], jax.Array]) -> jax.Array:
        inside = max(1, height // sizes.shared)
        out = product(group * inside)
        for i in range(1, inside):
            out = jnp.where(owner == i, product(group * inside + i), out)
        return out

    def scores(group: int) -> jax.Array:
        across = (((1,), (1,)), ((), ()))
        made = by_head(group, lambda h: lax.dot_general(q[group], keys[h], across, preferred_element_type=jnp.float32))
        made = made * pattern.scale
        if pattern.softcap is not None:
            made = pattern.softcap * jnp.tanh(made / pattern.softcap)
        return jnp.where(seen, made, _LOWEST)

    # Step by step for all groups: the reductions of one are then made beside those of the others.
    every = range(groups)
    scored = [scores(group) for group in every]
    most = [jnp.maximum(sums[g], scored[g].max(axis=1, keepdims=True)) for g in every]
    weights = [jnp.exp(scored[g] - most[g]) for g in every]
    fades = [jnp.exp(sums[g] - most[g]) for g in every]
    total = [sums[groups + g] * fades[g] + weights[g].sum(axis=1, keepdims=True) for g in every]
    small = [weight.astype(q.dtype) for weight in weights]

    def weighted(group: int) -> jax.Array:
        return by_head(group, lambda h: jnp.dot(small[group], values[h], preferred_element_type=jnp.float32))

    return [*most, *total, *(sums[2 * groups + g] * fades[g] + weighted(g) for g in every)]


def _load(sizes: _Sizes, buffer: Any, head: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Keys and values (T, K) of a head. A word of 32 bits has both of one head (bfloat16) or of two heads (float8)."""
    both = 2 * sizes.heads
    if sizes.interpret:  # words of a reference are known to the compiler only
        whole = buffer[...].reshape(sizes.block, both, -1)
        return whole[:, 2 * head].astype(dtype), whole[:, 2 * head + 1].astype(dtype)
    flat = buffer.reshape(sizes.block * both, buffer.shape[-1])
    bits = 8 * jnp.dtype(buffer.dtype).itemsize
    if bits == 32:
        return flat[2 * head :: both, :].astype(dtype), flat[2 * head + 1 :: both, :].astype(dtype)
    packed = 32 // bits
    words = flat.bitcast(jnp.uint32)[2 * head // packed :: both // packed, :]
    if bits == 16:
        k, v = (pltpu.bitcast(half, jnp.float32) for half in (words << 16, words & jnp.uint32(0xFFFF0000)))
        return k.astype(dtype), v.astype(dtype)
    place = 2 * head % packed
    k, v = (pltpu.bitcast((words >> (8 * i)).astype(jnp.uint8), buffer.dtype) for i in (place, place + 1))
    return k.astype(jnp.float32).astype(dtype), v.astype(jnp.float32).astype(dtype)
