"""Train a few steps on every mesh named on the command line, in one process with 16 CPU devices; prints a JSON line each.

Only the step is compiled for each mesh: the state starts on one device and is laid out from there, and what comes back
is compared on the host.
"""

import json
import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podway.model.compiled import keep_programs
from podway.train.state import abstract_state, start_state
from podway.train.step import Program, State, make_step
from tests.train.running import batch, program

STEPS = 2


def train(made: Program, start: State, size: int) -> list[float]:
    """Loss and norm of the gradient of each step, then the sum of each parameter's magnitudes."""
    numbers = []
    with jax.set_mesh(made.mesh):
        wanted = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(made))
        state = jax.device_put(start, wanted)
        step = make_step(made, state)
        for number in range(STEPS):
            rows = batch(made, size, number)
            if made.config.batch.length > 128:  # packed: three documents in a row
                documents = jnp.broadcast_to(jnp.arange(made.config.batch.length) // 100 + 1, rows["inputs"].shape)
                rows["segment_ids"] = jax.device_put(documents, rows["inputs"].sharding)
            state, metrics = step(state, rows, jnp.zeros((made.mesh.size,), jnp.int32))
            numbers += [float(metrics.loss), float(metrics.grad_norm)]
        lies = jax.tree.map(lambda leaf: leaf.sharding, state)
        assert lies == wanted, "the next step would be another program"
    weights: list[np.ndarray[Any, Any]] = jax.device_get(jax.tree.leaves(state.trained))
    return numbers + [float(np.abs(leaf).sum(dtype=np.float64)) for leaf in weights]


def main() -> None:
    keep_programs(None)
    words, meshes = sys.argv[1].split(), sys.argv[2:]
    splash = any("splash" in word for word in words)  # the TPU kernel, which cuts sequences into blocks of 128
    length, size = (256, 2) if splash else (16, 16)
    alone = program(words, "data=1", length=length)
    start = jax.device_get(start_state(alone))
    for mesh in meshes:
        made = replace(program(words, mesh, length=length), interpret=True)
        print(json.dumps({mesh: train(made, start, size)}), flush=True)


if __name__ == "__main__":
    main()
