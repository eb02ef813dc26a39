"""The host network set-up of large jobs: what to change on each TPU host, why, and a way to do it (no jax).

    python -m podway.train.preflight           prints the commands
    python -m podway.train.preflight --apply   runs them, on a real TPU host only

Several slices talk over the data-centre network, where Linux's defaults cost a large job a few percent of its speed: a
lost packet waits 200 ms, idle connections start slowly, and packets are small. Sources: MaxText `rto_setup.sh` at
publication (5ebcd67fe) and at e591f30cb; the page of the 16B-128B jobs for the packet size.
"""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from podway.errors import UserError

JUMBO = 8896  # bytes: the packet size of a network made with `gcloud compute networks create --mtu=8896`

# Read by every connection that is opened afterwards.
SYSCTLS = {
    "net.ipv4.tcp_slow_start_after_idle": "0",  # a collective after a pause starts at full speed
    "net.ipv4.tcp_no_metrics_save": "1",  # one bad moment is not remembered
    "net.ipv4.tcp_mtu_probing": "0",
    "net.core.somaxconn": "4096",  # thousands of hosts greet the coordinator at once
    "net.ipv4.tcp_max_syn_backlog": "4096",
    "net.core.optmem_max": "131072",
}


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """One change to a host."""

    words: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        return f"{shlex.join(self.words)}  # {self.why}"


def commands(route: str) -> list[Command]:
    """What to run, given the first line of `ip route show`."""
    found = []
    words = route.split()
    if words and "rto_min" not in words:
        found.append(
            Command(
                words=("ip", "route", "change", *words, "rto_min", "5ms"), why="a lost packet is sent again after 5 ms"
            )
        )
    if "dev" in words[:-1]:
        device = words[words.index("dev") + 1]
        found.append(
            Command(words=("ethtool", "-K", device, "tx-nocache-copy", "on"), why="large sends go past the cache")
        )
    found += [
        Command(words=("sysctl", "-w", f"{name}={value}"), why="see preflight.py") for name, value in SYSCTLS.items()
    ]
    return found


def check_mtu(device: str, root: Path = Path("/sys/class/net")) -> str | None:
    """A line about packets that are smaller than they could be, or None."""
    try:
        size = int((root / device / "mtu").read_text())
    except (OSError, ValueError):
        return f"the packet size of {device} cannot be read"
    if size >= JUMBO:
        return None
    return f"{device} has packets of {size} bytes; a network with --mtu={JUMBO} makes several slices about 2 % faster"


def refuse_elsewhere(environment: Mapping[str, str]) -> None:
    """These commands change a machine: only a real TPU host may have them."""
    if environment.get("PODWAY_SIMULATED") != "0":
        raise UserError(
            "this is not a TPU host that Podway launched",
            "run it inside a task on a real slice, or run the commands by hand",
        )


def main(arguments: Sequence[str]) -> int:
    """Print or apply; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m podway.train.preflight", description="Set up a TPU host's network."
    )
    parser.add_argument("--apply", action="store_true", help="run the commands (needs root)")
    options = parser.parse_args(arguments)
    try:
        if options.apply:
            refuse_elsewhere(os.environ)
        shown = subprocess.run(["ip", "route", "show"], capture_output=True, text=True, check=True).stdout
    except UserError as error:
        print(f"Error: {error.what}\n  {error.hint}", file=sys.stderr)
        return 1
    except (OSError, subprocess.CalledProcessError):
        shown = ""
    route = shown.splitlines()[0] if shown else ""
    failed = 0
    for command in commands(route):
        print(command, flush=True)
        if options.apply:
            failed += subprocess.run(command.words).returncode != 0
    words = route.split()
    note = check_mtu(words[words.index("dev") + 1]) if "dev" in words[:-1] else None
    if note:
        print(f"note: {note}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
