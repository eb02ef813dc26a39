"""A character model trained data-parallel over every chip of the slice, in plain JAX.

Nothing here knows Podway: `jax.distributed.initialize()` finds the other hosts by itself, on a simulated slice as on a real one.
The text is this very file, so that there is nothing to download.
"""

import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

CONTEXT, WIDTH, BATCH, STEPS = 16, 64, 256, int(os.environ.get("STEPS", "60"))


def batch(step: int, text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A function of the step alone: every host draws the same batch, and keeps its own part of it."""
    starts = np.random.default_rng(step).integers(0, len(text) - CONTEXT - 1, BATCH)
    windows = np.stack([text[start : start + CONTEXT + 1] for start in starts])
    return windows[:, :-1], windows[:, -1]


def init(key: jax.Array, vocabulary: int) -> dict[str, jax.Array]:
    a, b, c = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(a, (vocabulary, WIDTH)) * 0.1,
        "hidden": jax.random.normal(b, (CONTEXT * WIDTH, 4 * WIDTH)) * (CONTEXT * WIDTH) ** -0.5,
        "out": jax.random.normal(c, (4 * WIDTH, vocabulary)) * (4 * WIDTH) ** -0.5,
    }


def loss(weights: dict[str, jax.Array], inputs: jax.Array, targets: jax.Array) -> jax.Array:
    flat = weights["embed"][inputs].reshape(inputs.shape[0], -1)
    logits = jax.nn.relu(flat @ weights["hidden"]) @ weights["out"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], 1).mean()


@jax.jit
def train_step(weights, inputs, targets):
    value, gradient = jax.value_and_grad(loss)(weights, inputs, targets)
    return jax.tree.map(lambda w, g: w - 0.3 * g, weights, gradient), value


def main() -> None:
    jax.distributed.initialize()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows, everywhere = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    print(f"{jax.process_count()} hosts, {jax.device_count()} chips; this is host {jax.process_index()}", flush=True)
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32)
    weights = jax.jit(lambda: init(jax.random.key(0), 128), out_shardings=everywhere)()
    for step in range(STEPS):
        inputs, targets = (
            jax.make_array_from_callback(part.shape, rows, lambda index, part=part: part[index]) for part in batch(step, text)
        )
        begun = time.perf_counter()
        weights, value = train_step(weights, inputs, targets)
        value = float(value)
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  loss {value:.4f}", flush=True)
            if jax.process_index() == 0:
                print(f"          {(time.perf_counter() - begun) * 1e3:.0f} ms", flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    main()
