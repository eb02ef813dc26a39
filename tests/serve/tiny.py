"""Small models with random weights, and what they answer when every token is computed from scratch."""

from collections import deque
from functools import cache, partial

import jax
import jax.numpy as jnp
import msgspec

from podway.model import decoder
from podway.model.decoder import Compute, Tree
from podway.model.layout import SERVE_RULES
from podway.model.shape import Attention, Embedding, Experts, ModelShape, Norm, Rope
from podway.serve.batcher import Batcher, Request, Step
from podway.serve.build import Options, build
from podway.serve.engine import Engine, InFlightStep
from podway.serve.sampling_params import SamplingParams

LLAMA = ModelShape(
    family="llama", layers=2, d_model=32, heads=4, kv_heads=2, d_head=8, d_ff=48, vocab=97, max_position=128,
    embedding=Embedding(tied=False),
)  # fmt: skip
GEMMA = ModelShape(
    family="gemma3", layers=3, d_model=32, heads=4, kv_heads=1, d_head=8, d_ff=48, vocab=97, max_position=128,
    block="sandwich", norm=Norm(plus_one=True), activation="gelu-gated", rope=Rope(theta=1e4, local_theta=1e3),
    attention=Attention(qk_norm=True, window=6, windowed=(True, True, False), softcap=20.0),
    embedding=Embedding(tied=True, scale=32**0.5, logit_softcap=10.0),
)  # fmt: skip
MIXTRAL = ModelShape(
    family="mixtral", layers=2, d_model=32, heads=4, kv_heads=4, d_head=8, d_ff=48, vocab=97, max_position=128,
    experts=Experts(count=4, per_token=2, d_ff=24),
)  # fmt: skip
OPTIONS = Options(max_len=64, max_seqs=4, page=4, pages=60, prompt_tokens=32, decode_steps=4)


@cache
def weights(shape: ModelShape) -> Tree:
    # Larger than at the start of training, so that the most likely token stands out.
    return jax.tree.map(lambda w: w * 1.5, decoder.init(shape, jax.random.key(1), jnp.float32))


def engine_for(
    shape: ModelShape, options: Options = OPTIONS, mesh: jax.sharding.Mesh | None = None, programs=None, **changes
) -> Engine:  # type: ignore[no-untyped-def]
    options = msgspec.structs.replace(options, **changes)
    tree = jax.tree.map(jnp.copy, weights(shape))
    if mesh is not None:
        like = decoder.abstract(shape, jnp.float32, mesh, SERVE_RULES)
        tree = jax.tree.map(lambda w, a: jax.device_put(w, a.sharding), tree, like)
    engine = build(shape, tree, options, options.pages or 60, mesh)
    engine.compile_all(wanted=programs)
    return engine


@partial(jax.jit, static_argnums=0)
def _logits(shape: ModelShape, tree: Tree, tokens: jax.Array) -> jax.Array:
    compute = Compute(dtype=jnp.float32, rules=SERVE_RULES, kernel="reference")
    hidden = decoder.forward(tree, tokens[None], shape, compute).hidden_BSD
    return decoder.logits(tree, hidden[0], shape, compute)


def all_logits(shape: ModelShape, tokens: list[int], tree: Tree | None = None) -> jax.Array:
    """(length, V): the logits after each token, without any cache."""
    padded = jnp.zeros(shape.max_position, jnp.int32).at[: len(tokens)].set(jnp.asarray(tokens, jnp.int32))
    return _logits(shape, weights(shape) if tree is None else tree, padded)[: len(tokens)]


def greedy(shape: ModelShape, prompt: list[int], count: int, stop: frozenset[int] = frozenset()) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(int(all_logits(shape, tokens)[-1].argmax()))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


class Runner:
    """The loop of the server without the server: stays `depth` steps ahead of what it has read."""

    def __init__(self, engine: Engine, depth: int = 1) -> None:
        self.engine = engine
        self.batcher = Batcher(engine.limits)
        self.depth = depth
        self.under_way: deque[tuple[Step, InFlightStep]] = deque()
        self.flights: list[InFlightStep] = []

    def submit(self, prompt: list[int], count: int, sampling: SamplingParams = SamplingParams(), **more) -> Request:  # type: ignore[no-untyped-def]
        request = Request(str(self.batcher), prompt, count, owner=sampling, **more)
        self.batcher.submit(request)
        return request

    def turn(self) -> bool:
        step = self.batcher.plan()
        if step is not None:
            flight = self.engine.dispatch(step)
            self.flights.append(flight)
            self.under_way.append((step, flight))
        if self.under_way and (step is None or len(self.under_way) > self.depth):
            done, flight = self.under_way.popleft()
            self.batcher.absorb(done, flight.tokens())
            return True
        return step is not None

    def finish(self) -> None:
        while self.turn():
            pass
        assert self.batcher.idle and self.batcher.pool.held == 0


def run(
    engine: Engine, prompt: list[int], count: int, sampling: SamplingParams = SamplingParams(), **more
) -> list[int]:  # type: ignore[no-untyped-def]
    runner = Runner(engine)
    request = runner.submit(prompt, count, sampling, **more)
    runner.finish()
    return request.answer
