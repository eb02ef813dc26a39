"""`python -m podway.serve`: a model folder to a running server, alone or on every host of a slice.

1. On several hosts (PODWAY_NUM_HOSTS) the processes find each other through `jax.distributed`. Host 0 is the front.
2. The front opens the port at once; /health says 503 and why until the model is warm.
3. In a thread: print the memory budget, download (if need be) and load the weights, compile every program (kept on disk, so that the
   next start need not), begin the loops of all replicas (`replicas.py`).
4. SIGTERM or Ctrl-C: /health turns to 503 and new requests are refused; those under way get --drain-seconds to end, and what
   is left then ends with an error event. A second signal ends it at once. The other hosts follow the front until it ends.
"""

import argparse
import gc
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import jax
import uvicorn
from starlette.applications import Starlette

from podway.errors import UserError
from podway.model.compiled import keep_programs
from podway.model.download import fetch, is_address
from podway.model.families import find_model
from podway.model.shape import ModelShape
from podway.model.tokenizer import ModelTokenizer
from podway.serve.adapter_registry import AdapterRegistry
from podway.serve.adapters import AdapterSizes
from podway.serve.build import Options, limits_for
from podway.serve.cache_layout import default_backend
from podway.serve.http import make_app
from podway.serve.options import adapter_modules, adapter_room, api_keys, check, draft_size, parser
from podway.serve.replicas import Fleet
from podway.serve.service import Service

_GRACE = 15  # seconds that other hosts wait for the front's end after a signal, beside the time that it drains
# Seconds that a connection without a request stays open: longer than the pools of clients and proxies keep theirs (httpx 5 s, nginx 60 s,
# Go 90 s, LiteLLM 120 s), else one of them sends a request just when it is closed.
_KEEP_ALIVE = 180
_FLUSH = 2.0  # seconds in which error events of answers that are given up reach their clients


class _Server(uvicorn.Server):
    """A server that ends when told to; uvicorn's own would kill the process with the same signal again."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main(arguments: list[str] | None = None) -> int:
    """Run until it is stopped."""
    args = None
    try:
        args = parser().parse_args(arguments)
        check(args)
        return serve(args, api_keys(args.api_key_file, os.environ.pop("PODWAY_API_KEY", None)))
    except UserError as error:
        print(f"Error: {error.what}\n  {error.hint}", file=sys.stderr, flush=True)
        return 2 if args is None else 1


def serve(args: argparse.Namespace, keys: list[str]) -> int:
    """The role of this host."""
    # On NVIDIA jax takes three quarters of the memory by itself; this process is alone with the device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    rank, hosts = int(os.environ.get("PODWAY_RANK", "0")), int(os.environ.get("PODWAY_NUM_HOSTS", "1"))
    listening = _listen(args.host, args.port) if rank == 0 else None
    # A name that is wrong is told before the device is asked for, which takes seconds.
    folder = Path(args.model) if args.random else fetch(args.model, weights=False, log=log)
    shape = find_model(args.model if args.random else str(folder))
    if hosts > 1:
        jax.distributed.initialize()
    keep_programs(args.compile_cache, Path.home() / ".cache" / "podway" / "compiled")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # type: ignore[no-untyped-call]
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)  # type: ignore[no-untyped-call]
    options = options_of(args)
    limits = limits_for(shape, options, options.backend or default_backend(), 2)
    name = args.name or default_name(args.model)
    service = Service(
        name, ModelTokenizer(folder, shape.vocab), limits.max_len, tool_format=args.tool_format,
        reasoning=args.reasoning,
    )  # fmt: skip
    if options.adapters is not None:
        if hosts > 1:
            raise UserError("LoRA adapters are served on one host", "serve without --enable-lora and --lora-modules")
        service.adapters = AdapterRegistry(options.adapters, shape, name, args.allow_lora_updates)
        for adapter, path in adapter_modules(args):  # what cannot be read is told before anything is compiled
            service.adapters.read(adapter, path)
    fleet = Fleet(service, args, log)
    if listening is None:
        return _worker(fleet, shape, options)
    return _front(fleet, shape, options, listening, keys)


def _front(fleet: Fleet, shape: ModelShape, options: Options, listening: socket.socket, keys: list[str]) -> int:
    """Open the port, warm up beside it, serve."""
    service = fleet.service
    args = fleet.args
    app = make_app(service, keys, origins=args.cors_origin, access_log=log if args.access_log else None)
    config = web_config(app, args.tls_cert, args.tls_key)
    try:
        config.load()
    except (ssl.SSLError, OSError) as error:
        raise UserError(
            f"{args.tls_cert} and {args.tls_key} cannot be used: {error}", "give a PEM certificate and its key"
        ) from None
    server = _Server(config)
    failed: list[UserError] = []

    def stop(*_: object) -> None:
        if service.draining or not service.loops:
            server.should_exit = True
            return
        service.draining = True
        threading.Thread(target=drain, args=(service, server, args.drain_seconds), daemon=True).start()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)

    def warm() -> None:
        try:
            fleet.take_roles(fleet.warm(shape, options), lambda rank: _host_lost(service, rank))
            loops = fleet.all_loops()
            for name, path in adapter_modules(args) if service.adapters else []:
                service.adapters.load(name, path, loops, set)  # type: ignore[union-attr]
                log(f"adapter {name} loaded from {path}")
            gc.collect()
            gc.freeze()  # what is there now stays: collections while it serves need not look at it
            service.loops = loops
            place = listening.getsockname()
            log(f"{service.name} is ready at {'https' if args.tls_cert else 'http'}://{place[0]}:{place[1]}/v1")
        except UserError as error:
            failed.append(error)
            server.should_exit = True
        except BaseException:
            server.should_exit = True
            raise

    thread = threading.Thread(target=warm, name="warm-up", daemon=True)
    thread.start()
    server.run(sockets=[listening])
    served = service.healthy
    for loop in service.loops:
        loop.stop()
    fleet.end()
    if failed:
        raise failed[0]
    return 0 if served else 1


def web_config(app: Starlette, cert: str | None, key: str | None) -> uvicorn.Config:
    """How the port is served."""
    return uvicorn.Config(
        app, log_level="warning", timeout_graceful_shutdown=5, timeout_keep_alive=_KEEP_ALIVE, lifespan="off",
        ssl_certfile=cert, ssl_keyfile=key,
    )  # fmt: skip


def _worker(fleet: Fleet, shape: ModelShape, options: Options) -> int:
    """Any other host: warm up, then follow the front or the leader."""
    engines = fleet.warm(shape, options)

    def ends(*_: object) -> None:
        """The same signal reaches the front, which ends first and says so; this is for when it cannot."""
        timer = threading.Timer(_GRACE + fleet.args.drain_seconds, lambda: os._exit(0))
        timer.daemon = True
        timer.start()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ends)
    fleet.take_roles(engines, lambda rank: _host_lost(fleet.service, rank))
    lost = fleet.run_worker(engines)
    return 0 if lost is None else _host_lost(fleet.service, lost)


def drain(service: Service, server: uvicorn.Server, seconds: float) -> None:
    """Wait for the answers under way, end what is left after that with an error, and then the server."""
    log(f"stopping: {len(service.open)} requests under way have {seconds:g} s to end")
    _wait(lambda: not service.open, seconds)
    if service.open:
        service.fail_all(UserError("the server is stopping", "ask again later", status=503))
        _wait(lambda: not service.open, _FLUSH)
    server.should_exit = True


def _wait(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.02)


def _host_lost(service: Service, rank: int) -> NoReturn:
    """A host is gone. A program over its devices never ends, and no thread that waits for it either: tell the clients, leave."""
    service.draining = True
    what = f"the host of rank {rank} is gone"
    service.fail_all(UserError(what, "ask again later", status=503))
    _wait(lambda: not service.open, _FLUSH)
    print(f"Error: {what}, and the model needs all of its hosts\n  start them again", file=sys.stderr, flush=True)
    os._exit(1)


def default_name(model: str) -> str:
    """What clients call a model: the id of the hub, or the name of its folder."""
    if is_address(model) and not model.startswith("gs://"):
        return model.partition("@")[0]
    return Path(model).name if model.startswith("gs://") else Path(model).resolve().name


def options_of(args: argparse.Namespace) -> Options:
    """The engine's part of the command line."""
    names = ("max_len", "max_seqs", "page", "pages", "prompt_tokens", "decode_steps", "dtype", "quantize", "kv",
             "memory_fraction")  # fmt: skip
    room = adapter_room(args)
    sizes = None if room is None else AdapterSizes(*room)
    return Options(speculate=draft_size(args), adapters=sizes, **{name: getattr(args, name) for name in names})


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


def log(text: str) -> None:
    """One line of the log."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
