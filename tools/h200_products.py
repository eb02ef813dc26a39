"""Products of a few rows with weights of bfloat16 and int8 on one NVIDIA GPU, written in several ways.

    python tools/h200_products.py [--out DIR] [--tiny]

The matrices are those of Llama 3 8B's shape, as many copies of each as do not fit into the chip's cache, one product after the other in
one program. A line of JSON for each: microseconds of a product, bytes of weights a second, and the error against float32.
"""

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

SHAPES = {
    "qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096), "head": (4096, 128256)
}  # fmt: skip
Product = Callable[..., jax.Array]


def plain(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    """Weights as (inputs, outputs)."""
    return jnp.dot(x, w)


def turned(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    """Weights as (outputs, inputs), here and below."""
    return (jnp.dot(x, w.astype(x.dtype).T) * scale).astype(x.dtype)


def summed(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    total = (x[0][None, :].astype(jnp.float32) * w.astype(jnp.float32)).sum(1)
    return (total * scale).astype(x.dtype)[None]


def both_int8(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    high = jnp.maximum(jnp.abs(x.astype(jnp.float32)).max(-1, keepdims=True), 1e-8) / 127
    small = jnp.round(x.astype(jnp.float32) / high).astype(jnp.int8)
    out = jax.lax.dot_general(small, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
    return (out * high * scale).astype(x.dtype)


def variants(rows: int) -> dict[str, tuple[str, Product]]:
    """Forms of a product by name, each with the kind of weights it takes."""
    found: dict[str, tuple[str, Product]] = {
        "bfloat16": ("bfloat16", plain), "bfloat16, turned": ("turned", turned), "int8, turned": ("int8", turned),
    }  # fmt: skip
    if rows == 1:
        return found | {"bfloat16, turned, summed": ("turned", summed), "int8, turned, summed": ("int8", summed)}
    return found | {"int8 by int8, turned": ("int8", both_int8)}


TURNS = 8


def often(run: Callable[..., list[jax.Array]], x: jax.Array, *rest: Any) -> list[jax.Array]:
    """The products `TURNS` times over, in a loop as that of the engine; each turn waits for the one before it."""

    def turn(_: int, outs: list[jax.Array]) -> list[jax.Array]:
        return run(x + outs[-1][:1, :1] * jnp.asarray(1e-30, x.dtype), *rest)

    zeros = [jnp.zeros(like.shape, like.dtype) for like in jax.eval_shape(run, x, *rest)]
    made: list[jax.Array] = jax.lax.fori_loop(0, TURNS, turn, zeros)
    return made


def timed(run: Any, *arguments: Any) -> float:
    jax.block_until_ready(run(*arguments))
    jax.block_until_ready([run(*arguments) for _ in range(3)])
    best = []
    for _ in range(3):
        begun = time.perf_counter()
        jax.block_until_ready([run(*arguments) for _ in range(8)])
        best.append((time.perf_counter() - begun) / 8 / TURNS)
    return sorted(best)[1]


def weights(name: str, kind: str, copies: int) -> list[jax.Array]:
    dims = SHAPES[name] if kind == "bfloat16" else SHAPES[name][::-1]

    def draw(key: jax.Array) -> jax.Array:
        if kind == "int8":
            return jax.random.randint(key, dims, -127, 128, jnp.int8)
        return jax.random.normal(key, dims, jnp.bfloat16)

    return [jax.jit(draw)(jax.random.key(i)) for i in range(copies)]


def compiled(jobs: dict[Any, Any]) -> dict[Any, Any]:
    """All programs at once, on all cores; what does not compile is its error."""

    def one(job: Any) -> Any:
        try:
            return job().compile()
        except Exception as error:  # one form that fails must not cost the others
            return f"{type(error).__name__}: {str(error)[:300]}"

    with ThreadPoolExecutor(14) as pool:
        return dict(zip(jobs, pool.map(one, jobs.values()), strict=True))


def measure(add: Callable[..., None], tiny: bool) -> None:
    for name in SHAPES:
        K, N = SHAPES[name]
        copies = max(2, min(16, 400_000_000 // (K * N))) if not tiny else 2
        stored = {dtype: weights(name, dtype, copies) for dtype in ("bfloat16", "int8", "turned")}
        scale = jax.random.uniform(jax.random.key(9), (N,), jnp.float32, 0.5, 1.5) * K**-0.5 / 64
        jobs, forms = {}, {}
        for rows in (1, 16, 32, 128, 1024) if not tiny else (1, 16, 32):
            x = jax.random.normal(jax.random.key(8), (rows, K), jnp.bfloat16)
            for form, (dtype, run) in variants(rows).items():
                every = jax.jit(functools.partial(often, lambda x, ws, s, run=run: [run(x, w, s) for w in ws]))
                jobs[rows, form] = functools.partial(every.lower, x, stored[dtype], scale)
                forms[rows, form] = (x, dtype)
        begun = time.perf_counter()
        for (rows, form), program in compiled(jobs).items():
            x, dtype = forms[rows, form]
            if isinstance(program, str):
                add(what=f"{name}, {rows} rows, {form}", failed=program)
                continue
            ws = stored[dtype]
            seconds = timed(program, x, ws, scale) / copies
            first = ws[0].astype(jnp.float32)
            exact = jnp.dot(x.astype(jnp.float32), first if dtype == "bfloat16" else first.T, precision="highest")
            exact = exact * (scale if dtype != "bfloat16" else 1)
            got = program(x, ws, scale)[0].astype(jnp.float32)
            error = float(jnp.linalg.norm(got - exact) / jnp.linalg.norm(exact))
            add(
                what=f"{name}, {rows} rows, {form}", us=round(seconds * 1e6, 2), error=round(error, 5),
                tb_per_s=round(ws[0].nbytes / seconds / 1e12, 3),
            )  # fmt: skip
        print(f"{name}: {time.perf_counter() - begun:.1f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "."), type=Path)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    if arguments.tiny:
        SHAPES.clear()
        SHAPES.update({"qkv": (256, 384), "o": (256, 256), "gate_up": (256, 512), "down": (512, 256)})
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / "h200_products.jsonl").open("w") as file:

        def add(**facts: object) -> None:
            line = json.dumps(facts)
            file.write(line + "\n")
            file.flush()
            print(line, flush=True)

        measure(add, arguments.tiny)
    return 0


if __name__ == "__main__":
    sys.exit(main())
