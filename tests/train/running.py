"""What the trainer's tests share: a small program on one device, batches, and training in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podway.model.families import find_model
from podway.model.layout import parse_mesh
from podway.model.mesh import make_mesh, named_sharding
from podway.train.settings import read_config
from podway.train.state import start_state
from podway.train.step import Program, State, make_step

EXACT = ("precision.compute=float32", "model.kernel=reference")


def program(words: Sequence[str] = (), mesh: str = "data=1", length: int = 32) -> Program:
    """A tiny model in float32 on the first devices."""
    config = read_config(None, [*EXACT, f"batch.length={length}", *words])
    sizes = parse_mesh(mesh)
    return Program(config, find_model(config.model.name), make_mesh(sizes, jax.devices()[: sizes.chips]))


def batch(made: Program, size: int, number: int = 0) -> dict[str, jax.Array]:
    """Random rows in which some tokens do not count."""
    length = made.config.batch.length
    rows = np.random.default_rng(number).integers(0, made.shape.vocab, (size, length + 1), dtype=np.int32)
    arrays = {"inputs": rows[:, :-1], "targets": rows[:, 1:], "loss_mask": (rows[:, 1:] > 40).astype(np.float32)}
    where = named_sharding(made.mesh, ("batch", "length"), (size, length), made.rules)
    return {name: jax.device_put(array, where) for name, array in arrays.items()}


def steps(made: Program, size: int, count: int = 2, *, same: bool = False) -> tuple[State, list[Any]]:
    """(last state, the metrics of each step)."""
    metrics = []
    with jax.set_mesh(made.mesh):
        state = start_state(made)
        step = make_step(made, state)
        for number in range(count):
            rows = batch(made, size, 0 if same else number)
            state, one = step(state, rows, jnp.zeros((made.mesh.size,), jnp.int32))
            metrics.append(jax.device_get(one))
    return state, metrics


def environment(devices: int = 1, **more: str) -> dict[str, str]:
    """Of a process that trains."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    return {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", **more}


def train(*words: str, devices: int = 1, timeout: float = 240, **more: str) -> subprocess.CompletedProcess[str]:
    """`python -m podway.train` to its end."""
    command = [sys.executable, "-m", "podway.train", *words]
    return subprocess.run(command, env=environment(devices, **more), capture_output=True, text=True, timeout=timeout)


def journal(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
