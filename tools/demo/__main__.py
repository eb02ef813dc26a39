"""`make demo`: plan, rehearse, launch, train, serve and measure, as a newcomer would type it, in about two minutes.

1. What it needs is installed into .venv, unless it is there (`install.py`).
2. Each act runs real commands and shows what matters of their output (`screen.py`): on a terminal in colour with a line of
   progress, elsewhere as plain lines.
3. Everything happens in a PODWAY_HOME of its own. Clusters, server, processes and files are removed at the end, also after
   an error or Ctrl-C.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from install import install
from screen import Screen

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PROMPT = "We the People"
STEP = re.compile(r"completed step: (\d+), .*loss: ([\d.]+)")
FIGURES = ("Output token throughput", "Mean TTFT", "Mean TPOT")


class Failed(Exception):
    """A command of the demo ended with an error; its output was shown."""


class Demo:
    """The acts, in order; each is one heading on the screen."""

    def __init__(self, screen: Screen, home: Path) -> None:
        self.screen, self.home = screen, home
        self.out = home / "trained"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]

    def plan(self) -> None:
        """Three slices that the planner ranks first for a 70B model."""
        self.screen.act("Plan", "Llama 3.1 70B: which slice, how fast, for how much")
        answer = "".join(self._run("podway plan train llama3.1-70b --top 3", hidden=" -o json"))
        for plan in json.loads(answer)["plans"][:3]:
            mesh = ",".join(f"{axis}={size}" for axis, size in plan["mesh"].items() if axis != "tile" and size > 1)
            self.screen.line(
                f"{plan['slice']:<14} {mesh:<17} {plan['time']['total']:6.1f} s/step  {plan['mfu']:.0%} MFU  "
                f"${plan['dollars_per_million_tokens']:.2f} per 1M tokens"
            )

    def rehearse(self) -> None:
        """The real TPU compiler on a step that the planner chose."""
        self.screen.act("Rehearse", "Llama 3.2 1B: its step through the real TPU compiler, with no TPU")
        for line in self._run("podway rehearse train llama3.2-1b --tpu v6e-8 --seq 4096"):
            if line.startswith("llama3.2-1b train on v6e-8: "):
                self.screen.progress(line.partition(": ")[2].partition(",")[0])
            elif line.startswith(("  HBM a device  ", "  step  ", "  speed  ")):
                self.screen.line(line.strip())
            elif line.startswith("  step ") and " in 80% of cases" in line:
                self.screen.line(f"{'':15}{line.split(maxsplit=1)[1].partition(':')[0]}")

    def train(self) -> None:
        """A gang of simulated hosts that train one model together."""
        self.screen.act("Launch and train", "a tiny Llama on a simulated v5p-16: 2 hosts of 4 chips")
        total, first, loss = 64, None, 0.0
        command = f"podway launch -y -c demo {EXAMPLES.name}/learn-by-heart.yaml"
        for line in self._run(command, hidden=f" --env OUT={self.out} --env STEPS={total}"):
            step = STEP.search(line)
            if step:
                done, loss = int(step[1]) + 1, float(step[2])
                first = first or loss
                self.screen.bar(done, total, f"loss {loss:.3f}")
            elif " mesh: " in line:
                self.screen.line(line.partition(") ")[2])
            elif "number parameters" in line:
                self.screen.progress("compiling on every host")
        self.screen.line(f"loss {first:.2f} -> {loss:.3f}, saved as a Hugging Face model")

    def serve(self) -> None:
        """The trained model behind an OpenAI-compatible API, on one chip."""
        self.screen.act("Serve", "what was trained, with an OpenAI-compatible API")
        settings = f" --env MODEL={self.out}/model --env PORT={self.port}"
        flags = " --env FLAGS='--max-len 512 --max-seqs 8'"
        list(
            self._run(
                f"podway launch -y -d -c chat --tpus v5p-8 {EXAMPLES.name}/serve-llama2-7b.yaml",
                hidden=settings + flags,
            )
        )
        while not self._ready():
            self.screen.progress("loading and compiling")
            time.sleep(0.3)
        self.screen.line(f"ready at http://127.0.0.1:{self.port}/v1")

    def ask(self) -> None:
        """One completion, shown as it arrives."""
        self.screen.act("Ask", f'"{PROMPT}" and let it go on')
        body = {"prompt": PROMPT, "max_tokens": 400, "temperature": 0}
        self.screen.command(f"curl 127.0.0.1:{self.port}/v1/completions \\")
        self.screen.line(f"    -d '{json.dumps(body)}'")
        body["stream"] = True  # only so that it can be shown as it arrives
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=120) as reply:
            self.screen.prose(PROMPT, (chunk["choices"][0]["text"] for chunk in _events(reply)))

    def measure(self) -> None:
        """Load on the server, and the figures that people compare."""
        self.screen.act("Measure", "20 requests at once")
        command = f"podway exec chat {EXAMPLES.name}/benchmark-llama2-7b.yaml"
        for line in self._run(command, hidden=f" --env PORT={self.port} --env NUM_PROMPTS=20"):
            text = line.partition(") ")[2]
            if text.split(":")[0].split(" (")[0] in FIGURES:
                name, _, value = text.partition(":")
                self.screen.line(f"{name:<32} {value.strip():>10}")

    def clean_up(self) -> None:
        """Delete both clusters and stop the server."""
        self.screen.act("Clean up", "clusters and processes; what was measured and printed is kept")
        list(self._run("podway down -y demo chat"))
        list(self._run("podway server stop"))
        left = [line for line in _processes() if str(self.home) in line]
        if left:
            raise Failed("left behind:\n" + "\n".join(left))
        self.screen.line("nothing is left running")

    def _run(self, command: str, hidden: str = "") -> Iterator[str]:
        """Show a command and run it (with options that only the demo needs); its lines, as they come."""
        self.screen.command(command)
        shown: list[str] = []
        process = subprocess.Popen(
            ["bash", "-c", "exec " + command + hidden],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                shown.append(line)
                yield line.rstrip("\n")
        finally:
            if process.poll() is None and sys.exc_info()[0] is not None:
                process.terminate()
            code = process.wait()
        if code:
            raise Failed(f"`{command}` ended with {code}:\n" + "".join(shown[-30:]))

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False


def _events(reply: Iterator[bytes]) -> Iterator[dict]:
    """Server-sent events, as JSON."""
    for line in reply:
        data = line.decode().removeprefix("data: ").strip()
        if data and data != "[DONE]":
            yield json.loads(data)


def _processes() -> list[str]:
    listing = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True).stdout
    return [line for line in listing.splitlines() if str(os.getpid()) not in line.split()[:1]]


def fresh_home() -> Path:
    """Where the demo keeps what it did, for `podway ui` afterwards; what an earlier one left is removed."""
    home = Path(tempfile.gettempdir()) / f"podway-demo-{os.getuid()}"
    if home.is_symlink() or (home.exists() and home.stat().st_uid != os.getuid()):
        return Path(tempfile.mkdtemp(prefix="podway-demo."))
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(mode=0o700)
    return home


def main() -> int:
    """The exit code of the demo."""
    screen = Screen()
    install(ROOT, screen)
    home = fresh_home()
    os.environ |= {
        "PODWAY_HOME": str(home),
        "PATH": f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(home / "cache"),
    }
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    demo = Demo(screen, home)
    try:
        for act in (demo.plan, demo.rehearse, demo.train, demo.serve, demo.ask, demo.measure, demo.clean_up):
            act()
        screen.end(home)
        return 0
    except (Failed, KeyboardInterrupt) as error:
        screen.error(str(error) or "interrupted")
        return 1
    finally:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run(["podway", "down", "-y", "demo", "chat"], **quiet)
        subprocess.run(["podway", "server", "stop"], **quiet)


if __name__ == "__main__":
    sys.exit(main())
