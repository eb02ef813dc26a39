"""What must be right on the GPU before anything is timed there; a part of `tools/h200_serve.py`.

kernels  attention over pages against the reference: blocks of prompts, rows that generate, windows, soft caps, int8
tokens   requests that come and go through the whole engine against the decoder without a cache, a small float32 model
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from podway.model import decoder
from podway.model.attention import Pattern
from podway.model.decoder import Compute
from podway.model.layout import SERVE_RULES
from podway.model.shape import Embedding, ModelShape
from podway.serve import cache, cache_layout
from podway.serve.batcher import Batcher, Limits, Request
from podway.serve.build import Options, build
from podway.serve.cache_layout import Plan

SMALL = ModelShape(
    family="llama", layers=2, d_model=256, heads=8, kv_heads=2, d_head=64, d_ff=512, vocab=512, max_position=256,
    embedding=Embedding(tied=False),
)  # fmt: skip


def check(add: Callable[..., None], tiny: bool) -> None:
    """The kernel against the reference."""
    pages, page, heads, kv, d = (
        64,
        64 if not tiny else 16,
        32 if not tiny else 4,
        8 if not tiny else 2,
        128 if not tiny else 16,
    )
    rng = np.random.default_rng(0)
    plain, odd, many = Pattern(d**-0.5, None, None), Pattern(d**-0.5, 30.0, 100), 32 if not tiny else 4
    cases = (
        (jnp.bfloat16, 1, 5, plain),
        (jnp.bfloat16, many, 3, plain),
        (jnp.bfloat16, many, 3, odd),
        (jnp.bfloat16, 6 if not tiny else 3, 5, odd),  # rows with drafts: few queries, keys split
        (jnp.int8, 1, 5, odd),
    )
    for dtype, queries, blocks, pattern in cases:
        kernel = Plan("nvidia", 2, pages, page, kv, d, dtype, interpret=tiny)
        worst = _worst(kernel, rng, queries, blocks, heads, pattern)
        what = f"{jnp.dtype(dtype).name} cache, {queries} queries, window {pattern.window}, softcap {pattern.softcap}"
        add("check", what=what, error=worst, ok=bool(worst < 0.02))

    for rows in (5, 70):  # with the keys split, and not
        kernel = Plan("nvidia", 2, rows * 8 + 1, page, kv, d, jnp.bfloat16, interpret=tiny)
        worst, same = _worst_decode(kernel, rng, rows, heads, odd if rows == 5 else plain)
        add("check", what=f"store and attend, {rows} rows", error=worst, ok=bool(worst < 0.02 and same))


def _worst_decode(
    kernel: Plan, rng: np.random.Generator, rows: int, heads: int, pattern: Pattern
) -> tuple[float, bool]:
    """The largest error of what the rows see, and whether the same was stored."""
    pool = jax.tree.map(
        lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype) if a is not None else None,
        cache_layout.abstract(kernel),
    )
    tables = rng.permutation(np.arange(1, kernel.pages)).reshape(rows, 8).astype(np.int32)
    at = rng.integers(0, 8 * kernel.page, rows).astype(np.int32)
    cells = tables[np.arange(rows), at // kernel.page] * kernel.page + at % kernel.page
    cells = np.where(np.arange(rows) % 5 == 4, -1, cells).astype(np.int32)
    q, k, v = (
        jnp.asarray(rng.normal(size=(rows, n, kernel.d_head)), jnp.bfloat16)
        for n in (heads, kernel.heads, kernel.heads)
    )
    windowed = jnp.asarray(pattern.window is not None)

    def run(plan: Plan) -> tuple[jax.Array, cache_layout.Cache]:
        go = jax.jit(
            lambda m: cache.write_and_attend(plan, m, jnp.int32(1), q, k, v, cells, tables, at, pattern, windowed)
        )
        return go(pool)

    (seen, stored), (expected, wanted) = run(kernel), run(kernel._replace(backend="reference"))
    live = cells >= 0
    worst = float(jnp.abs(seen.astype(jnp.float32) - expected.astype(jnp.float32))[live].max())
    same = all(bool((a == b).all()) for a, b in zip(jax.tree.leaves(stored), jax.tree.leaves(wanted), strict=True))
    return worst, same


def _worst(kernel: Plan, rng: np.random.Generator, queries: int, blocks: int, heads: int, pattern: Pattern) -> float:
    reference = kernel._replace(backend="reference")
    made = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), cache_layout.abstract(kernel))
    tables = rng.permutation(np.arange(1, kernel.pages))[: blocks * 8].reshape(blocks, 8).astype(np.int32)
    tokens = kernel.page * 8
    starts = rng.integers(0, tokens - queries, blocks).astype(np.int32)
    k, v = (jnp.asarray(rng.normal(size=(blocks * tokens, kernel.heads, kernel.d_head)), jnp.bfloat16) for _ in "kv")
    cells = (tables[:, :, None] * kernel.page + np.arange(kernel.page)).reshape(-1).astype(np.int32)
    made = jax.jit(lambda m: cache.write(kernel, m, jnp.int32(1), k, v, jnp.asarray(cells)))(made)
    q = jnp.asarray(rng.normal(size=(blocks, queries, heads, kernel.d_head)), jnp.bfloat16)

    def run(plan: Plan) -> jax.Array:
        windowed = jnp.asarray(pattern.window is not None)
        go = jax.jit(
            lambda m: cache.attend(
                plan, m, jnp.int32(1), q, jnp.asarray(tables), jnp.asarray(starts), pattern, windowed
            )
        )
        return go(made).astype(jnp.float32)

    return float(jnp.abs(run(kernel) - run(reference)).max())


def check_tokens(add: Callable[..., None], tiny: bool) -> None:
    """20 requests, 16 at a time, each token equal to that of the decoder run over the whole sequence.

    All products in full float32: those of TF32 differ by more than the two most likely tokens now and then do."""
    jax.config.update("jax_default_matmul_precision", "highest")  # programs are compiled in other threads too
    try:
        _check_tokens(add, tiny)
    finally:
        jax.config.update("jax_default_matmul_precision", None)


def _check_tokens(add: Callable[..., None], tiny: bool) -> None:
    made = decoder.init(SMALL, jax.random.key(1), jnp.float32)
    weights = jax.tree.map(lambda w: w * 1.5, made)  # so that the most likely token stands out
    options = Options(
        max_len=128, max_seqs=16, page=16, pages=150, prompt_tokens=128, decode_steps=4, dtype="float32",
        backend="reference" if tiny else "nvidia",
    )  # fmt: skip
    engine = build(SMALL, jax.tree.map(jnp.copy, weights), options, 150)
    bucket = engine.limits.blocks[-1]
    engine.compile_all(workers=4, wanted=[(16, 0), (16, bucket)])
    batcher, chance = Batcher(engine.limits), np.random.default_rng(3)
    engine.limits, batcher.limits = (_only(engine.limits, bucket),) * 2
    requests = []
    for number in range(20):
        prompt = chance.integers(1, SMALL.vocab, int(chance.integers(3, 90))).tolist()
        requests.append(Request(str(number), prompt, int(chance.integers(1, 24))))
        batcher.submit(requests[-1])
    while (step := batcher.plan()) is not None:
        batcher.absorb(step, engine.dispatch(step).tokens())
    right = sum(request.answer == _alone(weights, request) for request in requests)
    add("check", what="tokens of 20 requests against the decoder without a cache", equal=right, ok=right == 20)


def _only(limits: Limits, blocks: int) -> Limits:
    """Just the buckets that were compiled."""
    return msgspec.structs.replace(limits, rows=(16,), blocks=(blocks,))


@jax.jit
def _next(weights: decoder.Tree, tokens: jax.Array, length: jax.Array) -> jax.Array:
    compute = Compute(dtype=jnp.float32, rules=SERVE_RULES, kernel="reference")
    hidden = decoder.forward(weights, tokens[None], SMALL, compute).hidden_BSD
    return decoder.logits(weights, hidden[0, length - 1], SMALL, compute).argmax()


def _alone(weights: decoder.Tree, request: Request) -> list[int]:
    tokens = request.tokens[: request.prompt_len]
    while len(tokens) < request.limit:
        padded = np.zeros(128, np.int32)
        padded[: len(tokens)] = tokens
        tokens.append(int(_next(weights, padded, np.int32(len(tokens)))))
    return tokens[request.prompt_len :]
