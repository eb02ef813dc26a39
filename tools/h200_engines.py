"""Engines to measure on one GPU, and the parts of `tools/h200_serve.py` that need one of their own.

int8       decode at batch 1 with int8 weights, and with an int8 and an fp8 cache: the same sizes as `decode`, beside bfloat16
speculate  batch 1 with drafts: text that repeats (a model that is made to say the same 64 tokens in circles) and text that does
           not, beside the same without drafts
lora       decode with 16 adapters of rank 16 beside every matrix, each row with another one, beside the same without adapters
"""

import gc
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podway.model.adapter_files import Adapter, matrices
from podway.model.layout import MeshShape
from podway.model.params import matrix_count, nest, params
from podway.model.shape import ModelShape
from podway.serve.adapters import AdapterSizes
from podway.serve.batcher import Batcher, Request, Row, Step
from podway.serve.build import Options, budget, build, device_bytes
from podway.serve.engine import Engine, InFlightStep

BANDWIDTH, PEAK = 4.3e12, 989e12  # bytes/s and bf16 FLOP/s of an H200, as measured and as published
Add = Callable[..., None]


def random_tree(shape: ModelShape) -> dict[str, object]:
    """Weights with the variances of a fresh model, one parameter at a time."""
    leaves = {}
    for number, param in enumerate(params(shape)):
        if param.init in ("ones", "zeros"):
            leaves[param.name] = jnp.ones(param.dims, jnp.bfloat16)
            continue
        scale = (param.fan_in or shape.d_model) ** -0.5
        draw = jax.jit(lambda key, p=param, s=scale: jax.random.normal(key, p.dims, jnp.bfloat16) * jnp.bfloat16(s))
        leaves[param.name] = draw(jax.random.key(number)).block_until_ready()
    return nest(leaves)


def decode_seconds(engine: Engine, batch: int, context: int, rounds: int, adapters: int = 0) -> tuple[float, float]:
    """Seconds of one step at this batch and context, and the mean context; steps follow each other as in the server."""
    limits = engine.limits
    bucket = next(size for size in limits.rows if size >= batch)  # as the batcher chooses
    turns = limits.turns(bucket)
    rounds = rounds * limits.steps // turns
    each = -(-(context + (rounds + 2) * turns) // limits.page)
    requests = []
    for number in range(batch):
        adapter = number % adapters + 1 if adapters else 0
        request = Request(str(number), [number % 100 + 1] * context, (rounds + 2) * turns, adapter=adapter)
        request.slot = number
        request.pages = list(range(1 + number * each, 1 + (number + 1) * each))
        requests.append(request)
    rows = [Row(request, request.slot or 0, -1) for request in requests]

    def step(seats: list[Request]) -> Step:
        return Step(admitted=seats, rows=rows, pieces=[], steps=turns, row_bucket=bucket, block_bucket=0)

    engine.dispatch(step(requests)).tokens()  # seats, and warms up
    begun = time.perf_counter()
    flights = [engine.dispatch(step([]))]
    for _ in range(rounds - 1):
        flights.append(engine.dispatch(step([])))
        made = flights[-2].tokens()
        assert all(len(row) == turns for row in made), "a row ended early"
    flights[-1].tokens()
    seconds = (time.perf_counter() - begun) / (rounds * turns)
    return seconds, context + turns + rounds * turns / 2


def decode_limit(shape: ModelShape, batch: int, context: float) -> float:
    """The fewest seconds of a step: every weight and every key and value read once; or the matrix products, if slower."""
    matrices = matrix_count(shape)
    cached = 2 * shape.layers * shape.kv_heads * shape.d_head * 2 * context * batch
    return max(2 * matrices / BANDWIDTH, 2 * matrices * batch / PEAK) + cached / BANDWIDTH


def _engine(shape: ModelShape, tree: Any, tiny: bool, programs: list[tuple[int, int]], **changes: Any) -> Engine:
    """As `podway serve` builds it, with a small cache and these programs alone. It takes the tree apart."""
    sizes: dict[str, Any] = {"max_len": 2048, "max_seqs": 64, "pages": 64 * 33, "prompt_tokens": 2048}
    if tiny:
        sizes = {"max_len": 192, "max_seqs": 4, "page": 16, "pages": 64, "prompt_tokens": 64}
    options = Options(**{**sizes, **changes})
    budget(shape, options, MeshShape(), device_bytes())
    engine = build(shape, tree, options, options.pages or 64)
    engine.compile_all(workers=8, wanted=programs, twins=None if tiny else (True,))
    return engine


def int8_part(add: Add, shape: ModelShape, tiny: bool) -> None:
    """Batch 1, 16 and 32 with 1k of context: what int8 weights, an int8 cache and an fp8 cache do to a token."""
    kinds = {
        "bfloat16": {},
        "int8 weights": {"quantize": "int8"},
        "fp8 cache": {"kv": "fp8"},
        "int8 cache": {"kv": "int8"},
    }
    context, rounds, batches = (1024, 20, (1, 16, 32)) if not tiny else (32, 2, (1, 4))
    before: dict[int, float] = {}
    for name, changes in kinds.items():
        engine = _engine(shape, random_tree(shape), tiny, [(batch, 0) for batch in batches], **changes)
        for batch in batches:
            seconds, _ = decode_seconds(engine, batch, context, rounds)
            before.setdefault(batch, seconds)
            add(
                "int8", what=f"batch {batch}, {name}", ms=seconds * 1e3, tokens_per_s=batch / seconds,
                of_bfloat16=before[batch] / seconds, target=1.6 if (name, batch) == ("int8 weights", 1) else "",
            )  # fmt: skip
        del engine
        gc.collect()


def circling_tree(shape: ModelShape, period: int) -> Any:
    """Random weights whose next token is decided by the last one: the first `period` tokens follow each other in circles.

    What the layers add is made small beside the embedding, and each token's column of the head is the embedding of the token
    before it. The work of a step stays the same."""
    tree = random_tree(shape)
    quiet = jax.jit(lambda w: w * jnp.asarray(1e-4, w.dtype), donate_argnums=0)
    tree["layers"]["o"], tree["layers"]["down"] = quiet(tree["layers"]["o"]), quiet(tree["layers"]["down"])
    follow = jnp.asarray([(token + 1) % period for token in range(period)])
    size = 0.5 if shape.d_model > 1000 else 1.0  # enough to stand out after its own token, and after no other

    def point(head: jax.Array, embed: jax.Array) -> jax.Array:
        before = embed[:period].astype(jnp.float32)
        before = before / jnp.linalg.norm(before, axis=-1, keepdims=True) * size
        return head.at[:, follow].set(before.T.astype(head.dtype))

    tree["head"] = jax.jit(point, donate_argnums=0)(tree["head"], tree["embed"])
    return tree


def _timed(engine: Engine, prompt: list[int], answer: int) -> tuple[float, list[int]]:
    """Seconds from the first token of an answer to its last, alone in the engine, and what drafts brought."""
    batcher, under_way, counts, begun = Batcher(engine.limits), deque[InFlightStep](), np.zeros(3, np.int64), 0.0
    batcher.submit(Request("r", prompt, answer))
    while not batcher.idle or under_way:
        step = batcher.plan()
        if step is not None:
            under_way.append(engine.dispatch(step))
        if step is None or len(under_way) > 1:
            flight = under_way.popleft()
            batcher.absorb(flight.step, flight.tokens())
            counts += flight.drafts()
            begun = begun or time.perf_counter()
    return time.perf_counter() - begun, counts.tolist()


def speculate_part(add: Add, shape: ModelShape, tiny: bool) -> None:
    """One request after another through the batcher, with and without drafts."""
    period, prompt, answer = (64, 1024, 512) if not tiny else (16, 48, 64)
    chance = np.random.default_rng(0)
    texts = {
        "repeats": [i % period for i in range(prompt)],
        "does not": chance.integers(period, shape.vocab, prompt).tolist(),
    }
    before: dict[str, float] = {}
    for draft in (0, 5):
        engine = _engine(
            shape, circling_tree(shape, period), tiny, [(1, 0), (32, 32) if not tiny else (4, 4)], speculate=draft
        )  # fmt: skip
        for name, text in texts.items():
            best = min(_timed(engine, text, answer) for _ in range(3))
            seconds, counts = best
            before.setdefault(name, seconds)
            add(
                "speculate", what=f"text that {name}, {draft} drafted, {answer} tokens",
                ms_per_token=seconds / (answer - 1) * 1e3, proposed=counts[1], accepted=counts[2],
                faster=before[name] / seconds, target=1.5 if draft and name == "repeats" else "",
            )  # fmt: skip
        del engine
        gc.collect()


def lora_part(add: Add, shape: ModelShape, tiny: bool) -> None:
    """What 16 adapters in one batch cost."""
    context, rounds, batches = (1024, 20, (1, 16, 64)) if not tiny else (32, 2, (1, 4))
    sizes = AdapterSizes(16, 16) if not tiny else AdapterSizes(3, 4)
    programs, before = [(batch, 0) for batch in batches], dict[int, float]()
    for adapters in (None, sizes):
        engine = _engine(shape, random_tree(shape), tiny, programs, adapters=adapters)
        if adapters is not None:
            chance = np.random.default_rng(0)
            pairs = {
                name: (
                    (chance.standard_normal((*param.dims[: 1 + param.inputs], sizes.rank), np.float32) * 1e-2),
                    (chance.standard_normal((param.dims[0], sizes.rank, *param.dims[1 + param.inputs :]), np.float32) * 1e-2),
                )
                for name, param in matrices(shape).items()
            }  # fmt: skip
            for number in range(1, sizes.count + 1):
                engine.set_adapter(number, Adapter(sizes.rank, pairs))
        for batch in batches:
            seconds, _ = decode_seconds(engine, batch, context, rounds, sizes.count if adapters else 0)
            before.setdefault(batch, seconds)
            add(
                "lora", what=f"batch {batch}, {sizes.count if adapters else 'no'} adapters of rank {sizes.rank}",
                ms=seconds * 1e3, tokens_per_s=batch / seconds, slower=seconds / before[batch] - 1,
                target=0.10 if adapters else "",
            )  # fmt: skip
        del engine
        gc.collect()
