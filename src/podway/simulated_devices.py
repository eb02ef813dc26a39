"""Every chip of a simulated slice in `jax.devices()`, as on a pod, without `jax.distributed.initialize()`.

JAX asks its plugins (the namespace `jax_plugins`) before it makes the CPU client; the Python environment of a simulated host has one,
which is `initialize` here. Nothing of this runs in a program that does not use JAX, or on a slice of one host.

1. `_Rendezvous` waits until a process of every rank of the job is about to make its client, in a directory that the hosts share. A
   rank whose script has ended will never come, and a second process on one host never joins: both then see their own chips alone,
   at once. So do all if one rank does not come in time; they say so.
2. The processes connect to one coordination service, in the process of rank 0. Ranks may end in any order, as on a pod: the service
   and its clients do not watch each other (the job's supervision does), and rank 0 waits at its exit until the others have ended.

A program that calls `jax.distributed.initialize()` itself has done so before JAX asks its plugins; then nothing is left to do.
"""

import atexit
import contextlib
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

CONNECT_S = 120
POLL_S = 0.05
HEARTBEAT_S = 3600  # longer than any pause that is not an end; the job's own supervision sees what dies


def initialize() -> None:
    """What JAX calls: join the other ranks of this job if there are any. Whatever goes wrong, local chips are there."""
    folder, job = os.environ.get("PODWAY_RENDEZVOUS"), os.environ.get("PODWAY_JOB")
    hosts, rank = int(os.environ.get("PODWAY_NUM_HOSTS", "1")), int(os.environ.get("PODWAY_RANK", "0"))
    if not folder or not job or hosts < 2 or os.environ.get("JAX_PLATFORMS") != "cpu":
        return
    from jax._src import distributed

    if distributed.global_state.client is not None:
        return
    address = os.environ["PODWAY_HOST_IPS"].split()[0]
    meeting = _Rendezvous(Path(folder), job, rank, hosts, lambda: _free_port(address))
    port = meeting.join()
    if port is None:
        if meeting.missing:
            ranks = ", ".join(map(str, meeting.missing))
            print(
                f"podway: rank {ranks} started no JAX program: jax.devices() shows the chips of this host",
                file=sys.stderr,
                flush=True,
            )
        return
    _connect(distributed, f"{address}:{port}", hosts, rank)
    if rank == 0:
        atexit.register(meeting.wait_for_others)


def _connect(distributed, address: str, hosts: int, rank: int) -> None:  # type: ignore[no-untyped-def]  # jax's own module
    """As `jax.distributed.initialize` does, except that no rank's end is another's."""
    from jax._src.lib import _jax  # type: ignore[attr-defined]

    state = distributed.global_state
    if rank == 0:
        state.service = _jax.get_distributed_runtime_service(
            address, hosts, heartbeat_timeout=HEARTBEAT_S, shutdown_timeout=CONNECT_S
        )
    client = _jax.get_distributed_runtime_client(
        address,
        rank,
        init_timeout=CONNECT_S,
        heartbeat_timeout=HEARTBEAT_S,
        missed_heartbeat_callback=lambda status: None,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    client.connect()
    state.client, state.process_id, state.num_processes, state.coordinator_address = client, rank, hosts, address
    state.initialize = lambda *args, **kwargs: None  # an explicit call that comes after this has nothing left to do


class _Rendezvous:
    """The ranks of one job that want to join, in rounds: a job may run one JAX program after another."""

    def __init__(self, folder: Path, job: str, rank: int, hosts: int, choose_port: Callable[[], int]) -> None:
        self._hosts_folder = folder.parent
        self._folder = folder / job
        self._job, self._phase = job, os.environ.get("PODWAY_PHASE", "run")
        self._rank, self._hosts = rank, hosts
        self._choose_port = choose_port
        self._members: dict[str, int] = {}
        self.missing: list[int] = []

    def join(self) -> int | None:
        """The port of the round that this process belongs to; None: it stays alone."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._state() as state:
            if _alive(state["joined"].get(str(self._rank), 0)):
                return None  # another process of this host has the chips already
            if state["port"] is not None or state["closed"]:
                state.update(round=state["round"] + 1, members={}, port=None, closed=False)
            state["members"][str(self._rank)] = os.getpid()
            mine = state["round"]
            if len(state["members"]) == self._hosts:
                state.update(port=self._choose_port(), joined=dict(state["members"]))
        return self._wait(mine, time.monotonic() + 60 + 4 * self._hosts)

    def _wait(self, mine: int, until: float) -> int | None:
        while True:
            with self._state() as state:
                here = state["round"] == mine
                self._members = state["members"] if here else {}
                if here and state["port"] is not None:
                    return int(state["port"])
                absent = [rank for rank in range(self._hosts) if str(rank) not in self._members]
                never = [rank for rank in absent if self._has_ended(rank)]
                if not here or state["closed"] or never or time.monotonic() > until:
                    self.missing = never or absent
                    state["closed"] = state["closed"] or here
                    return None
            time.sleep(POLL_S)

    def _has_ended(self, rank: int) -> bool:
        """Whether the script of that rank is over; the agent of its host wrote so (hosts/agent/phase.py)."""
        phase = self._hosts_folder / f"host-{rank}" / ".podway" / "jobs" / self._job / self._phase
        return (phase / "exit.json").exists()

    def wait_for_others(self) -> None:
        """Rank 0 has the coordination service: it ends when no other process of its round needs it."""
        others = [pid for rank, pid in self._members.items() if rank != str(self._rank)]
        while any(map(_alive, others)):
            time.sleep(POLL_S)

    @contextlib.contextmanager
    def _state(self) -> Iterator[dict]:  # type: ignore[type-arg]  # plain JSON
        """What all ranks know, to be read and changed by one at a time."""
        with open(self._folder / "state.json", "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            text = file.read()
            state = (
                json.loads(text) if text else {"round": 0, "members": {}, "port": None, "closed": False, "joined": {}}
            )
            yield state
            changed = json.dumps(state)
            if changed != text:
                file.seek(0)
                file.truncate()
                file.write(changed)


def _alive(pid: int) -> bool:
    """Whether a process of this machine has not ended; one that nobody has waited for has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
