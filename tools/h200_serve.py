# ruff: noqa: E402 - the paths must be set before anything is imported
"""Measure the serving engine on one NVIDIA GPU, with a model of Llama 3 8B's shape and random bfloat16 weights.

    python tools/h200_serve.py [--out DIR] [--seconds 380] [--parts hf,check,int8,speculate,lora,decode,prefill,mix,engine,http]

Needs jax for CUDA, msgspec, and for `http` starlette, uvicorn, click and tokenizers. Packages that the machine lacks are looked
for in .cache/h200-site, which is made on another machine and carried along:

    pip install --target .cache/h200-site --python-version 3.12 --platform manylinux2014_x86_64 --only-binary=:all: --no-deps \\
        msgspec starlette uvicorn httptools click h11 anyio idna sniffio typing_extensions jinja2 markupsafe prometheus_client

Each result is a line of JSON in DIR/h200_serve.jsonl as soon as it is known; a table comes last. Parts that
the time does not allow are named and left out. `--tiny` runs all of it on a CPU with a small model, to try the script.

  check    kernels against the reference and tokens against the decoder without a cache, on this device (tools/h200_check.py)
  decode   decode only, 1k of context: fraction of the roofline (weights and cache read once at 4.3 TB/s, 989 TFLOP/s)
  int8, speculate, lora   engines of their own, before the others take the memory (tools/h200_engines.py)
  prefill  prompts of 1k and 4k tokens: model FLOPs utilisation
  engine   64 requests at a time through the batcher, 1k in, 1k out
  http     64 and 256 at a time over HTTP, 1k in, 1k out: the sizes and programs of `podway serve` and the client of
           `podway bench serve`, a process of its own
  mix      over HTTP, 100 requests at once with lengths as in ShareGPT
  hf       Hugging Face transformers on the requests of `mix` (tools/h200_hf.py); runs first, while jax holds no memory
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
sys.path.insert(0, str(ROOT / "tools"))
SITE = ROOT / ".cache" / "h200-site"
sys.path.append(str(SITE))
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax-gpu"))

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from h200_check import check, check_tokens
from h200_engines import PEAK, decode_limit, decode_seconds, int8_part, lora_part, random_tree, speculate_part

from podway.model.families import find_model
from podway.model.layout import MeshShape
from podway.model.params import matrix_count
from podway.model.shape import ModelShape
from podway.serve.batcher import Batcher, Request
from podway.serve.build import Options, budget, compute_for, device_bytes, limits_for
from podway.serve.cache_layout import Backend, Plan
from podway.serve.engine import Engine
from podway.serve.weight_layout import fuse, unstack

ENGINE: list[Engine] = []
BACKEND: list[Backend] = ["nvidia"]
ALONE = {
    "int8": int8_part,
    "speculate": speculate_part,
    "lora": lora_part,
}  # with engines of their own: name them before the others
TARGETS = {
    "decode 1": 0.80,
    "decode 16": 0.80,
    "decode 32": 0.80,
    "decode 128": 0.65,
    "decode 256": 0.65,
    "prefill": 0.50,
    "engine": 0.60,
}


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


def whole_engine(report: Report, shape: ModelShape, tree: object, tiny: bool) -> Engine:
    """The engine of `podway serve` on this machine, with its plain programs (all requests here are greedy)."""
    if not ENGINE:
        options = Options(max_len=4224) if not tiny else Options(max_len=80, max_seqs=4, page=16, prompt_tokens=64)
        backend: Backend = "reference" if tiny else BACKEND[0]
        shown, pages = budget(shape, options, MeshShape(), device_bytes())
        limits = limits_for(shape, options, backend, pages)
        options = msgspec.structs.replace(options, backend=backend, dtype="bfloat16")
        compute = compute_for(options, limits.max_len, turned=True)
        plan = Plan(backend, shape.layers, pages, limits.page, shape.kv_heads, shape.d_head, jnp.bfloat16)
        ENGINE.append(Engine(shape, tree, limits, compute=compute, plan=plan))
        begun = time.monotonic()
        ENGINE[0].compile_all(workers=14, twins=(not tiny,))
        scratch = {str(key): size >> 20 for key, size in ENGINE[0].memory().items()}
        report.add(
            "engine", what="compile", seconds=time.monotonic() - begun, kv_tokens=shown.kv_tokens, slots=limits.slots,
            scratch_mib=scratch,
        )  # fmt: skip
        ENGINE[0].warm()
    return ENGINE[0]


def decode_part(report: Report, shape: ModelShape, tree: object, tiny: bool, note: str) -> None:
    batches = (1, 16, 32, 64, 128, 256) if not tiny else (1, 4)
    context, rounds = (1024, 20) if not tiny else (32, 2)
    engine = whole_engine(report, shape, tree, tiny)
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


def prefill_part(report: Report, shape: ModelShape, tree: object, tiny: bool, note: str) -> None:
    """Alone in the engine; a prompt longer than one step takes is computed in pieces, as it is in the server."""
    engine = whole_engine(report, shape, tree, tiny)
    limits = engine.limits
    matrices = matrix_count(shape) - shape.d_model * shape.vocab  # the head sees one token of the prompt
    for size in (1024, 4096) if not tiny else (32, 64):
        times = []
        for _ in range(6):
            batcher = Batcher(limits)  # a new one: no prefix is known
            batcher.submit(Request("p", [7] * size, 1))
            begun, steps = time.perf_counter(), []
            while (step := batcher.plan()) is not None:
                steps.append(engine.dispatch(step))
            for flight in steps:
                batcher.absorb(flight.step, flight.tokens())
            times.append(time.perf_counter() - begun)
        seconds = sorted(times[1:])[2]
        flops = 2 * matrices * size + 2 * size * size * shape.layers * shape.heads * shape.d_head
        report.add(
            "prefill", what=f"{size} tokens in {len(steps)} steps, {note}", ms=seconds * 1e3,
            tokens_per_s=size / seconds, mfu=flops / seconds / PEAK, target=TARGETS["prefill"],
        )  # fmt: skip


def engine_part(report: Report, shape: ModelShape, tree: object, tiny: bool, note: str) -> None:
    """Concurrency 64 through the batcher; a new request takes the place of each that ends."""
    together, prompt, answer, total = (64, 1024, 1024, 128) if not tiny else (4, 32, 16, 8)
    engine = whole_engine(report, shape, tree, tiny)
    limits = engine.limits
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


class Served:
    """The whole server in threads of this process; made once for all loads over HTTP."""

    def __init__(self, report: Report, shape: ModelShape, tree: object, tiny: bool) -> None:
        import uvicorn  # a bare machine lacks these, and the other parts do without

        from podway.model.tokenizer import ModelTokenizer
        from podway.serve.http import make_app
        from podway.serve.loop import EngineLoop
        from podway.serve.metrics import Metrics
        from podway.serve.service import Service

        engine = whole_engine(report, shape, tree, tiny)
        self.folder = Path(tempfile.mkdtemp())
        write_tokenizer(self.folder, shape.vocab)
        service = Service("trial", ModelTokenizer(self.folder, shape.vocab), engine.limits.max_len)
        self.loop = EngineLoop(engine, Metrics(), max_queue=1024)
        self.loop.start()
        service.loops = [self.loop]
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self.server = uvicorn.Server(uvicorn.Config(make_app(service), log_level="warning", lifespan="off"))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listening]}, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.server.should_exit = True
        self.loop.stop()
        self.thread.join(10)


SERVED: list[Served] = []
KEPT_OF_A_LOAD = (
    "successful", "failed", "seconds", "median_ttft_ms", "p99_ttft_ms", "median_tpot_after_first_ms", "p99_itl_ms",
)  # fmt: skip


def served(report: Report, shape: ModelShape, tree: object, tiny: bool) -> Served:
    if not SERVED:
        SERVED.append(Served(report, shape, tree, tiny))
    return SERVED[0]


def http_part(report: Report, shape: ModelShape, tree: object, tiny: bool, note: str) -> None:
    server = served(report, shape, tree, tiny)
    loads = ((64, 1024, 1024, 256), (256, 1024, 1024, 1024)) if not tiny else ((4, 24, 8, 8),)  # four a stream
    for together, prompt, answer, total in loads:
        if report.left() < 40:
            report.add("http", what=f"{together} at a time", skipped="no time left")
            continue
        # Each load has a seed of its own: a prompt that an earlier one sent would be found in the cache.
        sizes = ["--concurrency", str(together), "--input-len", str(prompt)]
        client(server, 60, [*sizes, "--output-len", "4", "--num-prompts", str(together), "--seed", str(together)])
        arguments = [*sizes, "--output-len", str(answer), "--num-prompts", str(total), "--seed", str(10_000 + total)]
        found = client(server, max(20.0, report.left() - 10), arguments)
        speed = found["output_tokens"] / found["seconds"]
        limit = decode_limit(shape, together, prompt + answer / 2)
        report.add(
            "http", what=f"{total} requests, {together} at a time, {prompt} in, {answer} out, {note}",
            output_tokens_per_s=speed, of_decode_limit=speed * limit / together,
            **{k: found[k] for k in KEPT_OF_A_LOAD}, target=TARGETS["engine"],
        )  # fmt: skip


def write_mix(path: Path, tiny: bool) -> None:
    """100 requests with ShareGPT's mean lengths (161 in, 338 out: the vLLM paper, section 6.1), log-normal, seeded; answers
    have at most 512 tokens, for the time that the slowest of those compared takes."""
    chance = np.random.default_rng(0)
    lines = []
    for _ in range(100 if not tiny else 6):
        means, most = ((161, 338), (1024, 512)) if not tiny else ((8, 8), (24, 24))
        asked, made = (
            int(np.clip(chance.lognormal(np.log(m) - 0.5, 1.0), 4, t)) for m, t in zip(means, most, strict=True)
        )
        prompt = chance.integers(1, 256, asked).tolist()
        lines.append(json.dumps({"prompt": prompt, "max_tokens": made}))
    path.write_text("\n".join(lines) + "\n")


def mix_part(report: Report, shape: ModelShape, tree: object, tiny: bool, note: str) -> None:
    server = served(report, shape, tree, tiny)
    path = server.folder / "mix.jsonl"
    write_mix(path, tiny)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    arguments = ["--dataset", "file", "--dataset-path", str(path), "--num-prompts", str(len(rows))]
    found = client(server, max(20.0, report.left() - 10), arguments)
    report.add(
        "mix", what=f"{len(rows)} requests at once, lengths as in ShareGPT, {note}",
        input_tokens=sum(len(row["prompt"]) for row in rows), output_tokens=found["output_tokens"],
        output_tokens_per_s=found["output_tokens"] / found["seconds"], **{k: found[k] for k in KEPT_OF_A_LOAD},
    )  # fmt: skip


def hf_part(report: Report, tiny: bool) -> None:
    path = Path(tempfile.mkdtemp()) / "mix.jsonl"
    write_mix(path, tiny)
    command = [sys.executable, str(ROOT / "tools" / "h200_hf.py"), "--mix", str(path), *(["--tiny"] if tiny else [])]
    ran = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, errors = ran.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        ran.kill()
        out, errors = ran.communicate()
    for line in out.splitlines():
        if line.startswith("{"):
            report.add("hf", **json.loads(line))
    if ran.returncode:
        report.add("hf", failed=errors[-1500:])


def client(server: Served, seconds: float, arguments: list[str]) -> dict[str, float]:
    """`podway bench serve`, in a process of its own so that it takes no time from the engine's."""
    # Packages that were carried along come after the machine's own.
    begin = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); sys.path.append({str(SITE)!r}); "
    saved = server.folder / "found.json"
    command = [
        sys.executable, "-c", begin + "from podway.cli.bench import command; command()", "serve", "--url", server.url,
        *arguments, "--save-result", str(saved),
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
    parser.add_argument("--parts", default="hf,check,decode,prefill,mix,engine,http")
    parser.add_argument(
        "--backend", default="nvidia", choices=["nvidia", "reference"], help="of attention, after `check`"
    )
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    parts, tiny = arguments.parts.split(","), arguments.tiny
    BACKEND[0] = arguments.backend
    report = Report(arguments.out, arguments.seconds)
    if "hf" in parts:
        hf_part(report, tiny)
        parts.remove("hf")
    report.add("machine", what=str(jax.devices()[0]), jax=jax.__version__, backend=jax.default_backend())
    shape = find_model("llama3-8b") if not tiny else find_model("tiny-llama3")
    tree: object = None
    todo = {
        "decode": decode_part,
        "prefill": prefill_part,
        "engine": engine_part,
        "http": http_part,
        "mix": mix_part,
    }
    for part in parts:
        if report.left() < 30:
            report.add(part, skipped="no time left")
            continue
        try:
            if part == "check":
                check(report.add, tiny)
                check_tokens(report.add, tiny)
                continue
            if part in ALONE:
                ALONE[part](report.add, shape, tiny)
                gc.collect()
                continue
            if tree is None:
                tree = fuse(unstack(random_tree(shape), shape.layers))
            todo[part](report, shape, tree, tiny, "written out")
        except Exception as error:  # one part that fails must not cost the others
            report.add(part, failed=f"{type(error).__name__}: {str(error)[:2000]}")
        gc.collect()
    while SERVED:
        SERVED.pop().stop()
    report.table()
    return 0


if __name__ == "__main__":
    sys.exit(main())
