"""`python -m podway.serve`: a model folder to a running server.

1. The port is opened at once; /health says 503 and why until the model is warm.
2. In a thread: read the shape, print the memory budget, load the weights, compile every program (kept on disk, so that the
   next start need not), start the engine's loop.
3. SIGTERM or Ctrl-C: streams get a few seconds to end, then the engine stops.
"""

import argparse
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import uvicorn

from podway.errors import UserError
from podway.model import decoder
from podway.model.families import find_model
from podway.model.layout import SERVE_RULES, MeshShape
from podway.model.mesh import make_mesh
from podway.model.shape import ModelShape
from podway.model.weights import load_weights
from podway.serve.asking import Service
from podway.serve.build import Options, budget, build, compute_dtype, device_bytes, limits_for
from podway.serve.cache import default_backend
from podway.serve.http import make_app
from podway.serve.loop import EngineLoop
from podway.serve.metrics import Metrics
from podway.serve.options import api_keys, check, parser
from podway.serve.text import Tokenizer


class _Server(uvicorn.Server):
    """A server that ends when told to; uvicorn's own would kill the process with the same signal again."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main(arguments: list[str] | None = None) -> int:
    """Run until told to stop."""
    asked = parser().parse_args(arguments)
    try:
        check(asked)
        return serve(asked, api_keys(asked.api_key_file, os.environ.pop("PODWAY_API_KEY", None)))
    except UserError as error:
        print(f"Error: {error.what}\n  {error.hint}", file=sys.stderr, flush=True)
        return 1


def serve(asked: argparse.Namespace, keys: list[str]) -> int:
    """Open the port, warm up beside it, serve."""
    # On NVIDIA jax takes three quarters of the memory by itself; this process is alone with the device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    listening = _listen(asked.host, asked.port)
    keep_programs(asked.compile_cache or Path.home() / ".cache" / "podway" / "compiled")
    shape = find_model(asked.model)
    options = options_of(asked)
    limits = limits_for(shape, options, options.backend or default_backend(), 2)
    name = asked.name or Path(asked.model).resolve().name
    metrics = Metrics()
    service = Service(name, Tokenizer(Path(asked.model), shape.vocab), limits.max_len, metrics)
    config = uvicorn.Config(make_app(service, keys), log_level="warning", timeout_graceful_shutdown=5, lifespan="off")
    server = _Server(config)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)
    failed: list[UserError] = []

    def warm() -> None:
        try:
            warm_up(service, shape, options, asked)
            place = listening.getsockname()
            say(f"{name} is ready at http://{place[0]}:{place[1]}/v1")
        except UserError as error:
            failed.append(error)
            server.should_exit = True
        except BaseException:
            server.should_exit = True
            raise

    thread = threading.Thread(target=warm, name="warm-up", daemon=True)
    thread.start()
    server.run(sockets=[listening])
    if service.loop is not None:
        service.loop.stop()
    if failed:
        raise failed[0]
    return 0 if service.ready else 1


def warm_up(service: Service, shape: ModelShape, options: Options, asked: argparse.Namespace) -> None:
    """Weights, programs, loop."""
    begun = time.monotonic()
    sizes = MeshShape(tensor=asked.tp)
    mesh = None
    if asked.tp > 1:
        if asked.tp > len(jax.devices()):
            raise UserError(f"--tp {asked.tp}, and there are {len(jax.devices())} devices", "lower --tp")
        mesh = make_mesh(sizes, jax.devices()[: asked.tp])
    shown, pages = budget(shape, options, sizes, device_bytes())
    say(shown.line(options.quantize, options.kv))
    service.status = "loading weights"
    tree = weights(asked, shape, options, mesh)
    loaded = time.monotonic()
    say(f"weights loaded in {loaded - begun:.1f} s")
    engine = build(shape, tree, options, pages, mesh)
    del tree

    def progress(what: str, number: int, total: int) -> None:
        service.status = f"compiling: {number} of {total}"
        spent = time.monotonic() - loaded
        say(f"compiled {number}/{total} ({what}), {spent:.0f} s, about {spent / number * (total - number):.0f} s to go")

    service.status = "compiling"
    engine.compile_all(progress, workers=min(8, os.cpu_count() or 1))
    engine.warm()
    say(f"scratch memory of programs: at most {max(engine.memory().values()) / 2**20:.0f} MiB")
    loop = EngineLoop(engine, service.metrics, asked.max_queue)
    loop.start()
    service.loop = loop
    say(f"warm after {time.monotonic() - begun:.1f} s")


def weights(asked: argparse.Namespace, shape: ModelShape, options: Options, mesh: jax.sharding.Mesh | None) -> Any:
    """From the folder, or random."""
    dtype = compute_dtype(options)
    if not asked.random:
        return load_weights(Path(asked.model), shape, mesh=mesh, rules=SERVE_RULES, dtype=dtype)
    like = decoder.abstract(shape, dtype, mesh, SERVE_RULES)
    places = jax.tree.map(lambda leaf: leaf.sharding, like) if mesh is not None else None
    return jax.jit(lambda: decoder.init(shape, jax.random.key(0), dtype), out_shardings=places)()


def options_of(asked: argparse.Namespace) -> Options:
    """The engine's part of the command line."""
    names = ("max_len", "max_seqs", "page", "pages", "prompt_tokens", "decode_steps", "dtype", "quantize", "kv",
             "memory_fraction")  # fmt: skip
    return Options(**{name: getattr(asked, name) for name in names})


def keep_programs(folder: Path) -> None:
    """Compiled programs go to this folder and come from it; jax keys them by program, device and versions."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))  # type: ignore[no-untyped-call]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # type: ignore[no-untyped-call]
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)  # type: ignore[no-untyped-call]


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}:{port}: {error.strerror}", "choose another --port or --host"
        ) from None
    made.set_inheritable(True)
    return made


def say(text: str) -> None:
    """One line to whoever started the server."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
