"""`python -m podway.sandbox`: run the sandbox until SIGTERM. One line of JSON says where it is, once it is ready."""

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import msgspec
import uvicorn

from podway.files import write_atomically
from podway.sandbox.hosts.inside import Listeners
from podway.sandbox.hosts.machines import Machines, make_machines
from podway.sandbox.running import CREDENTIALS_FILE, TOKEN_FILE
from podway.sandbox.sandbox import Sandbox
from podway.sandbox.tpu.rpc import Service
from podway.sandbox.web import Connection, Web

NEVER = "2100-01-01T00:00:00Z"


class Server(uvicorn.Server):
    """uvicorn would take the signals and raise them again when it ends; here they end the sandbox, which ends uvicorn."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield


def main() -> int:
    """Read the options and run."""
    options = _options().parse_args()
    options.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        asyncio.run(_serve(options))
    except (RuntimeError, OSError) as error:
        print(f"the sandbox cannot run: {error}", file=sys.stderr)
        return 1
    return 0


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m podway.sandbox", description=__doc__)
    parser.add_argument("--state", type=Path, required=True, help="Where its files are kept.")
    parser.add_argument("--port", type=int, default=0, help="For HTTP; 0 takes any that is free.")
    parser.add_argument("--grpc-port", type=int, default=0, help="For gRPC; 0 takes any that is free.")
    parser.add_argument("--hosts", choices=("auto", "netns", "loopback", "none"), default="auto", help="Of which kind.")
    parser.add_argument("--home-size", help="Limit each host's home (64m); by default it is limited by memory alone.")
    parser.add_argument("--share", action="append", default=[], help="A directory that hosts may read; repeatable.")
    parser.add_argument("--speed", type=float, default=60.0, help="How much faster than a real cloud things happen.")
    parser.add_argument("--project", default="sandbox", help="The project that exists.")
    parser.add_argument("--zone", default="us-east5-b", help="The zone that clients are told to use.")
    return parser


async def _serve(options: argparse.Namespace) -> None:
    ending = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ending.set)
    # Ports first: where one is taken, no machine has been made yet.
    listener = socket.create_server(("127.0.0.1", options.port), backlog=512)
    rpc = grpc.aio.server()
    grpc_port = rpc.add_insecure_port(f"127.0.0.1:{options.grpc_port}")
    machines = await asyncio.to_thread(_machines, options)
    sandbox = Sandbox(options.state, machines, project=options.project, speed=options.speed)
    rpc.add_generic_rpc_handlers([Service(sandbox.tpu_over_grpc, sandbox.access)])
    await rpc.start()
    app = Web(sandbox)
    sandbox.open_inside(Listeners(Connection), Web(sandbox, inside=True), listener.getsockname()[1])
    web = Server(
        uvicorn.Config(
            app, http=Connection, lifespan="off", log_level="warning", access_log=False, timeout_keep_alive=120
        )
    )
    serving = asyncio.create_task(web.serve([listener]))
    clock = asyncio.create_task(sandbox.run_clock())
    try:
        while not web.started:
            await asyncio.sleep(0.01)
        _announce(options, listener.getsockname()[1], grpc_port, machines, sandbox.access.token)
        # A clock that stops by itself has met a mistake of ours: better no sandbox than one in which nothing happens.
        await asyncio.wait({clock, asyncio.create_task(ending.wait())}, return_when=asyncio.FIRST_COMPLETED)
        if clock.done():
            clock.result()
    finally:
        clock.cancel()
        web.should_exit = web.force_exit = True
        await asyncio.wait([serving], timeout=5)
        await rpc.stop(0)
        await sandbox.close()
        for name in ("sandbox.json", TOKEN_FILE, CREDENTIALS_FILE):
            (options.state / name).unlink(missing_ok=True)


def _machines(options: argparse.Namespace) -> Machines:
    shares = tuple(str(Path(share).resolve(strict=True)) for share in options.share)
    return make_machines(options.hosts, options.state, options.home_size, shares)


def _announce(options: argparse.Namespace, port: int, grpc_port: int, machines: Machines, token: str) -> None:
    """Say where it is: in a file for those who come later, and on standard output for the caller that started it."""
    about = {
        "state": str(options.state.absolute()),
        "token": token,
        "rest": f"http://127.0.0.1:{port}",
        "grpc": f"127.0.0.1:{grpc_port}",
        "project": options.project,
        "zone": options.zone,
        "machines": machines.kind,
        "note": machines.note,
        "login": machines.login,
        "speed": options.speed,
        "pid": os.getpid(),
    }
    line = msgspec.json.encode(about)
    # The token for gcloud, and credentials for Google's libraries: an account whose access token is already there.
    account = {"type": "authorized_user", "client_id": "sandbox", "client_secret": "unused", "refresh_token": "unused"}
    account |= {"token": token, "expiry": NEVER}
    write_atomically(options.state / TOKEN_FILE, token.encode(), mode=0o600)
    write_atomically(options.state / CREDENTIALS_FILE, msgspec.json.encode(account), mode=0o600)
    write_atomically(options.state / "sandbox.json", line + b"\n", mode=0o600)
    print(line.decode(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
