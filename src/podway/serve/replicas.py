"""From devices to loops: every replica of the model that this host has a part in, and the way to those of other hosts.

    devices --groups of --tp--> replicas --engine, compiled and warm--> loops

On one host: one engine and one loop for each replica. On several hosts every host does the same, in the same order (jax
demands it), and then takes its role:

  front     host 0: has the port; leads its own replicas, and reaches the others' through `RemoteLoop`
  leader    the first host of a replica: has its loop; answers the front
  follower  any other host of a replica: launches what its leader sends (`hosts.py`)
"""

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from socket import socket
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from podway.model import decoder
from podway.model.download import fetch, is_address
from podway.model.layout import SERVE_RULES, MeshShape
from podway.model.mesh import make_mesh
from podway.model.shape import ModelShape
from podway.model.weights import load_weights
from podway.serve.build import Options, budget, build, compute_dtype, device_bytes
from podway.serve.engine import Engine
from podway.serve.hosts import Address, Followers, HostListener, addresses, follow, groups_of, join
from podway.serve.loop import EngineLoop, Loop
from podway.serve.metrics import Metrics
from podway.serve.remote import RemoteLoop, answer_front
from podway.serve.service import Service

_FRONT = 1 << 16  # what the front says its number is when it comes for replica n: _FRONT + n


class CompileReport:
    """How many programs were found on disk since it was made, and how many had to be compiled."""

    def __init__(self) -> None:
        self.found = self.compiled = 0
        jax.monitoring.register_event_listener(self._count)

    def _count(self, event: str, **_: object) -> None:
        self.found += event == "/jax/compilation_cache/cache_hits"
        self.compiled += event == "/jax/compilation_cache/cache_misses"


class Fleet:
    """The replicas of one server, as this host sees them."""

    def __init__(self, service: Service, args: argparse.Namespace, log: Callable[[str], None]) -> None:
        self.service, self.args, self.log = service, args, log
        self.me, self.hosts = jax.process_index(), jax.process_count()
        self.rank = int(os.environ.get("PODWAY_RANK", self.me))
        self.groups = groups_of(jax.devices(), args.tp, args.replicas)
        self.loops: dict[int, EngineLoop] = {}  # that run here
        self._led: list[int] = []
        self._followers: Followers | None = None
        self._book: list[Address] = []
        self._from_front: dict[int, socket] = {}

    def leader(self, number: int) -> int:
        """The host that leads this replica."""
        return self.members(number)[0]

    def members(self, number: int) -> list[int]:
        """The hosts of this replica."""
        return sorted({device.process_index for device in self.groups[number]})

    def warm(self, shape: ModelShape, options: Options) -> dict[int, Engine]:
        """The engines of the replicas that this host has a part in, ready to run."""
        begun, programs = time.monotonic(), CompileReport()
        shown, pages = budget(shape, options, MeshShape(tensor=self.args.tp), device_bytes())
        if self.hosts > 1:  # they must agree, should one have a little less memory
            pages = int(multihost_utils.broadcast_one_to_all(np.int32(pages)))
        self.log(shown.line(options.quantize, options.kv))
        engines = {}
        mine = [number for number in range(len(self.groups)) if self.me in self.members(number)]
        for number in mine:
            name = f"replica {number + 1} of {len(self.groups)}: " if len(self.groups) > 1 else ""
            engines[number] = self._engine(number, name, shape, options, pages)
        known = f"{programs.found} programs found on disk, {programs.compiled} compiled"
        self.log(f"warm after {time.monotonic() - begun:.1f} s: {known}")
        return engines

    def _engine(self, number: int, name: str, shape: ModelShape, options: Options, pages: int) -> Engine:
        begun = time.monotonic()
        group = self.groups[number]
        mesh = None
        if len(group) > 1 or number:
            mesh = make_mesh(MeshShape(tensor=len(group)), group)
        if not self.args.random and is_address(self.args.model):
            self.service.status = f"{name}downloading weights"
            fetch(self.args.model, log=self.log)
        self.service.status = f"{name}loading weights"
        engine = build(shape, weights(self.args, shape, options, mesh), options, pages, mesh)
        loaded = time.monotonic()
        self.log(f"{name}weights loaded in {loaded - begun:.1f} s")

        def progress(what: str, done: int, total: int) -> None:
            self.service.status = f"{name}compiling: {done} of {total}"
            spent = time.monotonic() - loaded
            left = spent / done * (total - done)
            self.log(f"{name}compiled {done}/{total} ({what}), {spent:.0f} s, about {left:.0f} s to go")

        self.service.status = f"{name}compiling"
        engine.compile_all(progress, workers=min(8, os.cpu_count() or 1))
        engine.warm()
        self.log(f"{name}scratch memory of programs: at most {max(engine.memory().values()) / 2**20:.0f} MiB")
        return engine

    def take_roles(self, engines: dict[int, Engine], on_loss: Callable[[int], None]) -> None:
        """Find the other hosts, and begin the loops of the replicas that this one leads. `on_loss` gets the rank of a follower
        that is lost."""
        self._led = [number for number in engines if self.leader(number) == self.me]
        if self.hosts > 1:
            self._meet(engines, on_loss)
        self.loops = {n: EngineLoop(engines[n], Metrics(), self.args.max_queue) for n in self._led}
        for loop in self.loops.values():
            if self._followers is not None:
                loop.is_host_lost = self._followers.is_one_lost
            loop.start()

    def _meet(self, engines: dict[int, Engine], on_loss: Callable[[int], None]) -> None:
        listener = HostListener(self.rank)
        self._book = addresses(listener)
        awaited = sum(len(self.members(n)) - 1 for n in self._led) + (len(self._led) if self.me else 0)
        followers: dict[int, socket] = {}
        for _ in range(awaited):
            peer, number = listener.accept()
            if number >= _FRONT:
                self._from_front[number - _FRONT] = peer
            else:
                followers[self._book[number].rank] = peer
        listener.close()
        if followers:  # a replica of several hosts is the only one of each
            [engine] = engines.values()
            self._followers = Followers(followers, on_loss)
            engine.before_launch = self._followers.broadcast

    def all_loops(self) -> list[Loop]:
        """For the front: its own loops and those of other hosts."""
        loops: list[Loop] = []
        for number in range(len(self.groups)):
            if number in self.loops:
                loops.append(self.loops[number])
            else:
                there = join(self._book[self.leader(number)], _FRONT + number)
                loops.append(RemoteLoop(there, self.args.max_queue))
        return loops

    def run_worker(self, engines: dict[int, Engine]) -> int | None:
        """For any host but the front: lead or follow until the front ends. The rank of a host that was lost, if one was."""
        if not self._led:
            [(number, engine)] = engines.items()
            leader = self._book[self.leader(number)]
            return None if follow(engine, join(leader, self.me)) else leader.rank
        with ThreadPoolExecutor(len(self._led)) as pool:
            grammars = self.service.grammars
            ends = [pool.submit(answer_front, self._from_front[n], self.loops[n], grammars) for n in self._led]
            kept = all(end.result() for end in ends)
        self.end()
        return None if kept else self._book[0].rank

    def end(self) -> None:
        """Stop the loops that run here, then whoever follows them."""
        for loop in self.loops.values():
            loop.stop()
        if self._followers is not None:
            self._followers.end()


def weights(args: argparse.Namespace, shape: ModelShape, options: Options, mesh: jax.sharding.Mesh | None) -> Any:
    """From the folder, or random."""
    dtype = compute_dtype(options)
    if not args.random:
        return load_weights(fetch(args.model), shape, mesh=mesh, rules=SERVE_RULES, dtype=dtype)
    like = decoder.abstract(shape, dtype, mesh, SERVE_RULES)
    places = jax.tree.map(lambda leaf: leaf.sharding, like) if mesh is not None else None
    return jax.jit(lambda: decoder.init(shape, jax.random.key(0), dtype), out_shardings=places)()
