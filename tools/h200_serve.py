# ruff: noqa: E402 - the paths must be set before anything is imported
"""Measure the serving engine on one NVIDIA GPU, with a model of Llama 3 8B's shape and random bfloat16 weights.

    python tools/h200_serve.py [--out DIR] [--seconds 380] [--parts check,decode,prefill,engine,http,layers]

Needs jax for CUDA, msgspec, and for `http` starlette, uvicorn, click and tokenizers. Packages that the machine lacks are looked
for in .cache/h200-site, which is made on another machine and carried along:

    pip install --target .cache/h200-site --python-version 3.12 --platform manylinux2014_x86_64 --only-binary=:all: --no-deps \\
        msgspec starlette uvicorn httptools click h11 anyio idna sniffio typing_extensions jinja2 markupsafe

Each result is a line of JSON in DIR/h200_serve.jsonl as soon as it is known; a table comes last. Parts that
the time does not allow are named and left out. `--tiny` runs all of it on a CPU with a small model, to try the script.

  check    the GPU kernel against the reference, on this device
  decode   decode only, 1k of context: fraction of the roofline (weights and cache read once at 4.3 TB/s, 989 TFLOP/s)
  prefill  prompts of 1k and 4k tokens: model FLOPs utilisation
  engine   64 requests at a time through the batcher, 1k in, 1k out
  http     the same over HTTP, with the engine of `engine`
  layers   decode at batch 32 with the layers scanned, beside the layers written out, which all other parts use
"""

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))
SITE = ROOT / ".cache" / "h200-site"
sys.path.append(str(SITE))
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax-gpu"))

import jax
import jax.numpy as jnp
import numpy as np

from podway.model.attention import Pattern
from podway.model.decoder import Compute
from podway.model.families import find_model
from podway.model.layout import SERVE_RULES
from podway.model.params import matrix_count, nest, params
from podway.model.shape import ModelShape
from podway.serve import cache
from podway.serve.batcher import Batcher, Limits, Piece, Request, Row, Step
from podway.serve.build import unstack
from podway.serve.cache import Plan
from podway.serve.engine import Engine

BACKEND: list[cache.Backend] = ["nvidia"]
BANDWIDTH, PEAK = 4.3e12, 989e12  # bytes/s and bf16 FLOP/s of an H200, as measured and as published
TARGETS = {"decode 1": 0.80, "decode 32": 0.80, "decode 128": 0.65, "decode 256": 0.65, "prefill": 0.50, "engine": 0.60}


class Report:
    """Lines of JSON as they come, and the table at the end."""

    def __init__(self, folder: Path, seconds: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / "h200_serve.jsonl").open("w")
        self.begun, self.seconds = time.monotonic(), seconds
        self.rows: list[dict[str, object]] = []

    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.begun)

    def add(self, part: str, **facts: object) -> None:
        row = {"part": part, "at": round(time.monotonic() - self.begun, 1), **facts}
        self.rows.append(row)
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        print(json.dumps(row), flush=True)

    def table(self) -> None:
        print("\n| part | what | result | target |\n|---|---|---|---|")
        for row in self.rows:
            facts = {k: v for k, v in row.items() if k not in ("part", "at", "what", "target")}
            shown = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in facts.items())
            print(f"| {row['part']} | {row.get('what', '')} | {shown} | {row.get('target', '')} |")


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


def check(report: Report, tiny: bool) -> None:
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
        (jnp.int8, 1, 5, odd),
    )
    for dtype, queries, blocks, pattern in cases:
        kernel = Plan("nvidia", 2, pages, page, kv, d, dtype, interpret=tiny)
        worst = _worst(kernel, rng, queries, blocks, heads, pattern)
        what = f"{jnp.dtype(dtype).name} cache, {queries} queries, window {pattern.window}, softcap {pattern.softcap}"
        report.add("check", what=what, error=worst, ok=bool(worst < 0.02))


def _worst(kernel: Plan, rng: np.random.Generator, queries: int, blocks: int, heads: int, pattern: Pattern) -> float:
    reference = kernel._replace(backend="reference")
    made = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), cache.abstract(kernel))
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


def make_engine(
    shape: ModelShape, tree: object, limits: Limits, tiny: bool, programs: list[tuple[int, int]]
) -> tuple[Engine, float]:
    """An engine with just these programs compiled, and the seconds that took."""
    backend: cache.Backend = "reference" if tiny else BACKEND[0]
    plan = Plan(backend, shape.layers, limits.pages, limits.page, shape.kv_heads, shape.d_head, jnp.bfloat16)
    engine = Engine(
        shape, tree, limits, compute=Compute(dtype=jnp.bfloat16, rules=SERVE_RULES, kernel="reference"), plan=plan
    )
    begun = time.monotonic()
    engine.compile_all(workers=8, wanted=programs)
    return engine, time.monotonic() - begun


def limits_of(
    slots: int, context: int, rows: tuple[int, ...], blocks: tuple[int, ...], steps: int, tiny: bool
) -> Limits:
    page, block = (64, 32) if not tiny else (16, 16)
    pages = slots * (-(-context // page)) + 1
    return Limits(
        slots=slots, max_len=context, page=page, pages=pages, block=block, blocks=blocks, rows=rows, steps=steps
    )


def decode_seconds(engine: Engine, batch: int, context: int, rounds: int) -> tuple[float, float]:
    """Seconds of one step at this batch and context, and the mean context; steps follow each other as in the server."""
    limits = engine.limits
    each = -(-limits.max_len // limits.page)
    requests = []
    for number in range(batch):
        request = Request(str(number), [number % 100 + 1] * context, limits.max_len - context)
        request.slot = number
        request.pages = list(range(1 + number * each, 1 + (number + 1) * each))
        requests.append(request)
    rows = [Row(request, request.slot or 0, -1) for request in requests]
    bucket = next(size for size in limits.rows if size >= batch)  # as the batcher chooses

    def step(seats: list[Request]) -> Step:
        return Step(seats=seats, rows=rows, pieces=[], steps=limits.steps, row_bucket=bucket, block_bucket=0)

    engine.dispatch(step(requests)).tokens()  # seats, and warms up
    begun = time.perf_counter()
    flights = [engine.dispatch(step([]))]
    for _ in range(rounds - 1):
        flights.append(engine.dispatch(step([])))
        made = flights[-2].tokens()
        assert all(len(row) == limits.steps for row in made), "a row ended early"
    flights[-1].tokens()
    seconds = (time.perf_counter() - begun) / (rounds * limits.steps)
    return seconds, context + limits.steps + rounds * limits.steps / 2


def decode_limit(shape: ModelShape, batch: int, context: float) -> float:
    """The fewest seconds of a step: every weight and every key and value read once; or the matrix products, if slower."""
    matrices = matrix_count(shape)
    cached = 2 * shape.layers * shape.kv_heads * shape.d_head * 2 * context * batch
    return max(2 * matrices / BANDWIDTH, 2 * matrices * batch / PEAK) + cached / BANDWIDTH


def decode_part(report: Report, shape: ModelShape, tree: object, tiny: bool, note: str) -> None:
    batches = (1, 32, 128, 256) if not tiny else (1, 4)
    context, steps, rounds = (1024, 8, 6) if not tiny else (64, 4, 2)
    # (rounds + 1) * steps tokens are generated in all, and one row ends nowhere.
    limits = limits_of(batches[-1], context + (rounds + 2) * steps, batches[1:], (4,), steps, tiny)
    engine, compiling = make_engine(shape, tree, limits, tiny, [(b, 0) for b in batches[1:]])
    report.add(
        "decode", what="compile", seconds=compiling, scratch_mib={str(k): v >> 20 for k, v in engine.memory().items()}
    )
    for batch in batches:
        if report.left() < 20:
            report.add("decode", what=f"batch {batch}", skipped="no time left")
            continue
        seconds, mean = decode_seconds(engine, batch, context, rounds)
        share = decode_limit(shape, batch, mean) / seconds
        report.add(
            "decode", what=f"batch {batch}, {note}", ms=seconds * 1e3, tokens_per_s=batch / seconds, of_roofline=share,
            target=TARGETS.get(f"decode {batch}", ""),
        )  # fmt: skip


def layers_part(report: Report, shape: ModelShape, tree: object, tiny: bool, note: str) -> None:
    """What the scan costs: the compiler may copy each layer's weights out of the stack."""
    batch, steps, rounds = (32, 8, 4) if not tiny else (2, 4, 2)
    context = 1024 if not tiny else 64
    limits = limits_of(batch, context + (rounds + 2) * steps, (batch,), (4,), steps, tiny)
    engine, compiling = make_engine(shape, random_tree(shape), limits, tiny, [(batch, 0)])
    seconds, mean = decode_seconds(engine, batch, context, rounds)
    share = decode_limit(shape, batch, mean) / seconds
    report.add("layers", what=f"batch {batch}, scanned", compile_s=compiling, ms=seconds * 1e3, of_roofline=share)


def prefill_part(report: Report, shape: ModelShape, tree: object, tiny: bool, note: str) -> None:
    sizes = (1024, 4096) if not tiny else (32, 64)
    block = 32 if not tiny else 16
    limits = limits_of(1, sizes[-1] + block, (1,), tuple(s // block for s in sizes), 1, tiny)
    engine, compiling = make_engine(shape, tree, limits, tiny, [(1, s // block) for s in sizes])
    report.add(
        "prefill", what="compile", seconds=compiling, scratch_mib={str(k): v >> 20 for k, v in engine.memory().items()}
    )
    matrices = matrix_count(shape) - shape.d_model * shape.vocab  # the head sees one token of the prompt
    for size in sizes:
        request = Request("p", [7] * size, 1)
        request.slot, request.pages = 0, list(range(1, 1 + -(-size // limits.page)))
        step = Step(
            seats=[request], rows=[Row(request, 0, 0)], pieces=[Piece(request, 0, 0, size, 0)], steps=1, row_bucket=1,
            block_bucket=size // block,
        )  # fmt: skip
        engine.dispatch(step).tokens()
        times = []
        for _ in range(5):
            begun = time.perf_counter()
            engine.dispatch(step).tokens()
            times.append(time.perf_counter() - begun)
        seconds = sorted(times)[2]
        flops = 2 * matrices * size + 2 * size * size * shape.layers * shape.heads * shape.d_head
        report.add(
            "prefill", what=f"{size} tokens, {note}", ms=seconds * 1e3, tokens_per_s=size / seconds,
            mfu=flops / seconds / PEAK, target=TARGETS["prefill"],
        )  # fmt: skip


KEPT: dict[Limits, Engine] = {}


def whole_engine(report: Report, shape: ModelShape, tree: object, limits: Limits, tiny: bool) -> Engine:
    """With every program that the batcher asks for; `engine` and `http` use the same one."""
    if limits not in KEPT:
        wanted = [(limits.slots, 0), *((r, b) for r in limits.mixed_rows for b in limits.blocks)]
        KEPT[limits], compiling = make_engine(shape, tree, limits, tiny, wanted)
        report.add("engine", what="compile", seconds=compiling)
        KEPT[limits].warm()
    return KEPT[limits]


def engine_part(report: Report, shape: ModelShape, tree: object, tiny: bool, note: str) -> None:
    """Concurrency 64 through the batcher; a new request takes the place of each that ends."""
    together, prompt, answer, total = (64, 1024, 1024, 128) if not tiny else (4, 32, 16, 8)
    block = 32 if not tiny else 16
    blocks = (2048 // block,) if not tiny else (4,)
    limits = limits_of(together, prompt + answer, (together,), blocks, 8, tiny)
    engine = whole_engine(report, shape, tree, limits, tiny)
    batcher, chance = Batcher(limits), np.random.default_rng(0)
    made, under_way, waits, first = [], [], {}, {}
    launcher = ThreadPoolExecutor(1)  # as in `podway.serve.loop`
    begun = time.perf_counter()
    host = 0.0

    def arrive() -> None:
        tokens = chance.integers(1, shape.vocab, prompt).tolist()
        made.append(Request(str(len(made)), tokens, answer))
        batcher.submit(made[-1])
        waits[made[-1].id] = time.perf_counter()

    for _ in range(together):
        arrive()
    while not batcher.idle or under_way:
        if report.left() < 5:
            break
        at = time.perf_counter()
        step = batcher.plan()
        if step is not None:
            under_way.append(launcher.submit(engine.launch, engine.prepare(step)))
        host += time.perf_counter() - at
        if under_way and (step is None or len(under_way) > 1):
            flight = under_way.pop(0).result()
            tokens = flight.tokens()
            at = time.perf_counter()
            for emitted in batcher.absorb(flight.step, tokens):
                first.setdefault(emitted.request.id, time.perf_counter() - waits[emitted.request.id])
                if emitted.finish and len(made) < total:
                    arrive()
            host += time.perf_counter() - at
    seconds = time.perf_counter() - begun
    made_tokens = sum(len(request.answer) for request in made)
    limit = decode_limit(shape, together, prompt + answer / 2)
    report.add(
        "engine", what=f"{total} requests, {together} at a time, {prompt} in, {answer} out, {note}", seconds=seconds,
        output_tokens_per_s=made_tokens / seconds, of_decode_limit=made_tokens / seconds * limit / together,
        ttft_p99_ms=1e3 * float(np.percentile(list(first.values()) or [0], 99)), host_share=host / seconds,
        target=TARGETS["engine"],
    )  # fmt: skip


def http_part(report: Report, shape: ModelShape, tree: object, tiny: bool, note: str) -> None:
    """The whole server in a thread, and the load client of `podway bench serve` in a process of its own."""
    import uvicorn  # a bare machine lacks these, and the other parts do without

    from podway.serve.asking import Service
    from podway.serve.http import make_app
    from podway.serve.loop import EngineLoop
    from podway.serve.metrics import Metrics
    from podway.serve.text import Tokenizer

    together, prompt, answer, total = (64, 1024, 1024, 128) if not tiny else (4, 24, 8, 8)
    block = 32 if not tiny else 16
    blocks = (2048 // block,) if not tiny else (4,)
    limits = limits_of(together, prompt + answer, (together,), blocks, 8, tiny)
    engine = whole_engine(report, shape, tree, limits, tiny)
    folder = Path(tempfile.mkdtemp())
    write_tokenizer(folder, shape.vocab)
    metrics = Metrics()
    service = Service("trial", Tokenizer(folder, shape.vocab), limits.max_len, metrics)
    service.loop = EngineLoop(engine, metrics)
    service.loop.start()
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(service), log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        client(url, folder / "warm.json", together, prompt, 4, together, 60)
        found = client(url, folder / "run.json", together, prompt, answer, total, max(20.0, report.left() - 10))
    finally:
        server.should_exit = True
        service.loop.stop()
        thread.join(10)
    speed = found["output_tokens"] / found["seconds"]
    limit = decode_limit(shape, together, prompt + answer / 2)
    kept = (
        "successful",
        "failed",
        "seconds",
        "median_ttft_ms",
        "p99_ttft_ms",
        "median_tpot_after_first_ms",
        "p99_itl_ms",
    )
    report.add(
        "http", what=f"{total} requests, {together} at a time, {prompt} in, {answer} out, {note}",
        output_tokens_per_s=speed, of_decode_limit=speed * limit / together, **{k: found[k] for k in kept},
        target=TARGETS["engine"],
    )  # fmt: skip


def client(
    url: str, saved: Path, together: int, prompt: int, answer: int, total: int, seconds: float
) -> dict[str, float]:
    """`podway bench serve`, in a process of its own so that it takes no time from the engine's."""
    # Packages that were carried along come after the machine's own.
    begin = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); sys.path.append({str(SITE)!r}); "
    command = [
        sys.executable, "-c", begin + "from podway.cli.bench import command; command()", "serve", "--url", url,
        "--num-prompts", str(total), "--concurrency", str(together), "--input-len", str(prompt), "--output-len",
        str(answer), "--seed", str(total), "--save-result", str(saved),
    ]  # fmt: skip
    ran = subprocess.run(command, timeout=seconds, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"the load client failed: {ran.stderr[-1000:]} {ran.stdout[-500:]}")
    print(ran.stdout, flush=True)
    found: dict[str, float] = json.loads(saved.read_text())
    return found


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A word for each id, so that decoding costs about what it does with a real tokenizer."""
    model = {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(vocab)}, "unk_token": "w0"}
    whole = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None, "model": model,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(whole))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "."), type=Path)
    parser.add_argument("--seconds", default=380.0, type=float, help="leave out what does not fit")
    parser.add_argument("--parts", default="check,decode,prefill,engine,http,layers")
    parser.add_argument(
        "--backend", default="nvidia", choices=["nvidia", "reference"], help="of attention, after `check`"
    )
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    parts, tiny = arguments.parts.split(","), arguments.tiny
    BACKEND[0] = arguments.backend
    report = Report(arguments.out, arguments.seconds)
    report.add("machine", what=str(jax.devices()[0]), jax=jax.__version__, backend=jax.default_backend())
    shape = find_model("llama3-8b") if not tiny else find_model("tiny-llama3")
    tree: object = None
    todo = {
        "decode": decode_part,
        "prefill": prefill_part,
        "engine": engine_part,
        "http": http_part,
        "layers": layers_part,
    }
    for part in parts:
        if report.left() < 30:
            report.add(part, skipped="no time left")
            continue
        try:
            if part == "check":
                check(report, tiny)
                continue
            if part == "layers":
                KEPT.clear()
                tree = None  # room for the stacked weights
                gc.collect()
            elif tree is None:
                tree = unstack(random_tree(shape), shape.layers)
            todo[part](report, shape, tree, tiny, "written out")
        except Exception as error:  # one part that fails must not cost the others
            report.add(part, failed=f"{type(error).__name__}: {str(error)[:2000]}")
        gc.collect()
    report.table()
    return 0


if __name__ == "__main__":
    sys.exit(main())
