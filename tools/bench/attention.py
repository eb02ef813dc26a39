"""`make bench-attention`: cycles and bytes of attention over the paged cache, for each TPU generation, without a TPU.

1. Every kernel is compiled once for each generation and number of key/value heads on a chip, in a process of its own (libtpu reads its
   flags once). Its bundles (`bundles.py`) are cycles of its loops; how often each loop turns follows from batch and context.
2. What was compiled is kept in docs/measurements/attention.json; the command goes on where it was stopped, `--fresh` starts over.
3. docs/serving-internals.md gets the table: microseconds of one layer, the larger of cycles over the clock and bytes over the
   bandwidth that HBM reaches.

jax's own kernel (`ragged_paged_attention`) is compiled with the blocks that the engine gave it before it had a kernel of its own:
32 queries, 512 tokens of the cache. It does not store the new keys and values; Podway's does.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tools.bench.bundles import Loop, dump_flags, kernel_loops
from tools.bench.report import machine, table, write_section

from podway.decoding import from_json
from podway.plan.chips import device_of

ROOT = Path(__file__).parents[2]
PAGE, KEPT = ROOT / "docs" / "serving-internals.md", ROOT / "docs" / "measurements" / "attention.json"
CHIPS = {"v6e": "v6e-1", "v5e": "v5litepod-1", "v5p": "v5p-8", "tpu7x": "tpu7x-8"}
PAGE_TOKENS, D_HEAD, SHARED, TABLE = (
    64,
    128,
    4,
    512,
)  # Llama 3: four query heads for each of keys and values; 32k tokens
TOKEN_BYTES = 2 * D_HEAD * 2  # of a key/value head in bfloat16
BATCHES, CONTEXTS, PROMPT, BLOCK = (1, 32, 128, 256), (1024, 8192, 32768), 2048, 128
JAX_QUERIES, JAX_TOKENS = 32, 512


class Kernel(msgspec.Struct, frozen=True, kw_only=True):
    """What to compile."""

    what: str  # decode, jax decode, jax prompt
    generation: str
    heads: int  # key/value heads on a chip
    tokens: int  # of the cache in a block

    @property
    def key(self) -> str:
        return f"{self.what}, {self.generation}, {self.heads} heads, blocks of {self.tokens}"


def compile_kernel(kernel: Kernel) -> None:
    """In a process whose environment has libtpu write bundles."""
    import jax  # here: this module is imported by tests too, and jax takes a second
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    from podway.catalog.slices import find_slice
    from podway.model.attention import Pattern
    from podway.model.mesh import abstract_array, described, spec
    from podway.serve import decode_tpu

    mesh = jax.sharding.Mesh(described(find_slice(CHIPS[kernel.generation]))[:1], ("x",))
    whole = jax.sharding.NamedSharding(mesh, spec())

    def array(dtype: Any, *dims: int) -> jax.Array:
        return abstract_array(dims, dtype, whole)

    number, wide = partial(array, jnp.int32), partial(array, jnp.bfloat16)
    pool = wide(2048, PAGE_TOKENS, 2 * kernel.heads, D_HEAD)
    pages = kernel.tokens // PAGE_TOKENS
    if kernel.what == "decode":

        def own(pool, q, k, v, live, tables, first, at, window):  # type: ignore[no-untyped-def]
            pattern = Pattern(0.1, None, None)
            return decode_tpu.attend(pool, q, k, v, live, tables, first, at, window, pattern, False, pages)

        rows = 128
        new = wide(rows, kernel.heads, D_HEAD)
        given = [pool, wide(rows, SHARED * kernel.heads, D_HEAD), new, new, array(jnp.bool_, rows)]
        given += [number(rows, TABLE), number(), number(rows), number()]
        run = jax.jit(own, donate_argnums=0)
    else:
        tokens, rows = (128, 128) if kernel.what == "jax decode" else (PROMPT, PROMPT // BLOCK)
        given = [wide(tokens, SHARED * kernel.heads, D_HEAD), pool, number(rows), number(rows, TABLE)]
        given += [number(rows + 1), number(1)]
        sizes = {"num_kv_pages_per_block": pages, "num_queries_per_block": JAX_QUERIES, "vmem_limit_bytes": 64 << 20}
        run = jax.jit(partial(ragged_paged_attention, sm_scale=0.1, **sizes))
    with jax.set_mesh(mesh):
        run.lower(*given).compile()


class Cost(NamedTuple):
    """Of one layer on one device."""

    cycles: float  # of a core
    bytes: float


def decode_cost(kernel: Kernel, loops: Loop, batch: int, context: int, cores: int = 1) -> Cost:
    """Rows that generate, all with as many tokens."""
    blocks, token = ceil(context / kernel.tokens), kernel.heads * TOKEN_BYTES
    rows = ceil(batch / cores)
    if kernel.what == "decode":
        row = loops.loops[-1]
        own = loops.bundles + rows * (row.bundles + blocks * row.loops[0].bundles)
        return Cost(own, batch * context * token)
    grid = loops.loops[0]
    cycles = loops.bundles + ceil(batch / JAX_QUERIES) * grid.bundles + batch * _walk(grid, blocks)
    return Cost(cycles, batch * blocks * kernel.tokens * token)


def prompt_cost(kernel: Kernel, loops: Loop, context: int) -> Cost:
    """A step of prompts: the last `PROMPT` tokens of `context`, or several prompts of that many."""
    grid, times = loops.loops[0], PROMPT // JAX_QUERIES
    seen = context - PROMPT / 2 if context > PROMPT else context / 2 + BLOCK / 2
    blocks = seen / kernel.tokens + 0.5  # the last one is computed whole
    cycles = loops.bundles + times * (grid.bundles + _walk(grid, blocks))
    return Cost(cycles, times * blocks * kernel.tokens * kernel.heads * TOKEN_BYTES)


def _walk(grid: Loop, blocks: float) -> float:
    sequence = grid.loops[0]
    return sequence.bundles + blocks * sequence.loops[0].bundles


def microseconds(generation: str, cost: Cost) -> float:
    """The larger of cycles and bytes."""
    device = device_of(generation)
    return 1e6 * max(cost.cycles / device.clock, cost.bytes / device.hbm_bandwidth)


def wanted() -> list[Kernel]:
    """Llama 3 8B on one chip and over eight; other blocks on v6e."""
    found = []
    for generation in CHIPS:
        for heads in (8, 1):
            own = 512 if heads == 8 else 1024  # `decode_tpu.block_pages`
            for tokens in (own // 2, own, own * 2) if generation == "v6e" else (own,):
                found.append(Kernel(what="decode", generation=generation, heads=heads, tokens=tokens))
            for what in ("jax decode", "jax prompt"):
                found.append(Kernel(what=what, generation=generation, heads=heads, tokens=JAX_TOKENS))
    return found


def compiled(kernel: Kernel) -> Loop:
    """Its loops, by a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_ACCELERATOR_TYPE": CHIPS[kernel.generation],
            "LIBTPU_INIT_ARGS": dump_flags(Path(folder)),
        }  # fmt: skip
        command = [sys.executable, "-m", "tools.bench.attention", "--compile", msgspec.json.encode(kernel).decode()]
        subprocess.run(command, env=environment, cwd=ROOT, check=True)
        return kernel_loops(Path(folder), "paged_decode" if kernel.what == "decode" else "ragged_paged_attention")


def page_of(kept: dict[str, Loop]) -> str:
    """Two tables: rows that generate, and prompts."""
    found = [kernel for kernel in wanted() if kernel.key in kept]
    head = ["kernel", "chip", "KV heads on it", "block", "batch", *(f"{c // 1024}k (limit)" for c in CONTEXTS)]
    decode = [_row(k, kept[k.key], batch) for k in found if k.what != "jax prompt" for batch in BATCHES]
    prompts = [_row(k, kept[k.key], None) for k in found if k.what == "jax prompt"]
    return "\n".join(
        [
            f"Measured on {machine()}; jax 0.10.2, libtpu 0.0.51.",
            "",
            "Rows that generate; `limit` is their keys and values over the bandwidth of HBM that is reached:",
            "",
            table(head, decode),
            "",
            f"{PROMPT:,} tokens of prompts that end at this context; `limit` is their scores at the peak of the matrix unit:",
            "",
            table([*head[:4], *head[5:]], prompts),
        ]
    )


def _row(kernel: Kernel, loops: Loop, batch: int | None) -> list[str]:
    device = device_of(kernel.generation)
    cells = []
    for context in CONTEXTS:
        if batch is not None:
            cost = decode_cost(kernel, loops, batch, context, device.cores)
            limit = batch * context * TOKEN_BYTES * kernel.heads / device.hbm_bandwidth
        else:
            cost = prompt_cost(kernel, loops, context)
            seen = context - PROMPT / 2 if context > PROMPT else context / 2
            limit = 4 * PROMPT * seen * SHARED * kernel.heads * D_HEAD / device.peak_bf16
        cells.append(f"{microseconds(kernel.generation, cost):.1f} ({1e6 * limit:.1f})")
    name = {"decode": "Podway", "jax decode": "jax", "jax prompt": "jax"}[kernel.what]
    rows = [] if batch is None else [str(batch)]
    return [name, kernel.generation, str(kernel.heads), str(kernel.tokens), *rows, *cells]


def main() -> int:
    """Compile what is missing, one kernel after the other."""
    parser = argparse.ArgumentParser(description="Cycles of attention over the paged cache by the TPU compiler.")
    parser.add_argument("--fresh", action="store_true", help="compile every kernel again")
    parser.add_argument("--only", default="", help="kernels whose name holds this text")
    parser.add_argument("--compile", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        compile_kernel(from_json(options.compile, Kernel))
        return 0
    kept = from_json(KEPT.read_bytes(), dict[str, Loop]) if KEPT.exists() else {}
    for kernel in wanted():
        if options.only in kernel.key and (options.fresh or kernel.key not in kept):
            kept[kernel.key] = compiled(kernel)
            print(kernel.key, kept[kernel.key], flush=True)
            KEPT.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
        write_section("bench-attention", page_of(kept), PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
