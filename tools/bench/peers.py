"""SkyPilot and dstack, installed into throw-away environments, to be measured in the same run as Podway."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from podway.hosts.agent import linux, processes

CACHE = Path(".cache/peers")
PEERS = {"sky": "skypilot", "dstack": "dstack[server]", "litellm": "litellm[proxy]"}


def install(peer: str) -> Path | None:
    """The directory of the peer's command; None (with the reason printed) when it cannot be had here."""
    place = CACHE / peer
    command = place / "bin" / peer
    if not command.exists():
        print(f"installing {PEERS[peer]} to compare with (a few minutes)…", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        done = subprocess.run([place / "bin" / "pip", "install", "-q", PEERS[peer]], capture_output=True, text=True)
        if done.returncode != 0 or not command.exists():
            print(f"{peer} could not be installed: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
            shutil.rmtree(place, ignore_errors=True)
            return None
    return (place / "bin").resolve()


def version(peer: str, bin_dir: Path) -> str:
    """As pip knows it."""
    name = PEERS[peer].split("[")[0]
    shown = subprocess.run([bin_dir / "pip", "show", name], capture_output=True, text=True).stdout
    return next((line.split(": ")[1] for line in shown.splitlines() if line.startswith("Version")), "?")


@contextlib.contextmanager
def home_of(peer: str, bin_dir: Path) -> Iterator[dict[str, str]]:
    """An environment with a home of its own and the peer's server running in it; whatever was started is ended afterwards."""
    home = CACHE.resolve() / f"{peer}-home-{os.getpid()}"
    home.mkdir(parents=True)
    env = {
        "PATH": f"{bin_dir}:{os.environ['PATH']}",
        "HOME": str(home),
        "USER": "bench",
        "DSTACK_SERVER_ADMIN_TOKEN": "bench",
        "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
        "TERM": "dumb",
    }
    linux.become("podway-bench")
    before = processes.descendants(processes.snapshot(), [os.getpid()])
    try:
        _start_server(peer, env, home)
        yield env
    finally:
        _end_all(before)
        shutil.rmtree(home, ignore_errors=True)


def _start_server(peer: str, env: dict[str, str], home: Path) -> None:
    log = (home / "server.log").open("wb")
    if peer == "sky":
        subprocess.run(["sky", "api", "start"], env=env, stdout=log, stderr=log, timeout=180, check=False)
        return
    subprocess.Popen(
        ["dstack", "server", "-y", "--port", "33127"], env=env, stdout=log, stderr=log, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        probe = subprocess.run(["dstack", "ps"], env=env, capture_output=True)
        if probe.returncode == 0:
            return
        time.sleep(1)


def _end_all(before: set[int]) -> None:
    """SIGKILL everything that was started meanwhile, children of children too.

    SkyPilot's executors outlive its own `api stop`, leave their session, and write over their environment; but whatever is orphaned
    comes to this process, which is a child subreaper.
    """
    for _ in range(50):
        started = processes.descendants(processes.snapshot(), [os.getpid()]) - before
        if not started:
            return
        processes.send(started, signal.SIGKILL)
        time.sleep(0.1)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
