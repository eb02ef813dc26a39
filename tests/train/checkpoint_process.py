"""A process that saves and restores checkpoints, alone or as one of several hosts; the tests start and kill it.

    checkpoint_process.py FOLDER --hosts N --host I --port P --devices D ACTION...

Actions: `save:STEP`, `restore:STEP` (and check every value), `keep-saving` (from the last step on, until killed).
"""

import argparse
import os
import sys

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("actions", nargs="+")
parser.add_argument("--hosts", type=int, default=1)
parser.add_argument("--host", type=int, default=0)
parser.add_argument("--port", type=int, default=0)
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--size", type=int, default=64)
options = parser.parse_args()
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={options.devices}"

import jax  # noqa: E402 - after the devices are set
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from podway.errors import UserError  # noqa: E402
from podway.train.checkpoint import Checkpointer  # noqa: E402

if options.hosts > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{options.port}", options.hosts, options.host)
mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
SHAPES = {"wide": (8, options.size), "tall": (options.size, 4), "half": (16,), "step": ()}
KINDS = {"wide": np.float32, "tall": np.float32, "half": jnp.bfloat16, "step": np.int32}


def value(name: str, step: int) -> np.ndarray:
    """What an array holds at a step."""
    random = np.random.default_rng(step)  # noise, so that it fills a disk however well it is compressed
    return (random.random(SHAPES[name]) * 1000).astype(KINDS[name])


def sharding(name: str) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec("fsdp") if SHAPES[name] else PartitionSpec())


def state(step: int) -> dict[str, dict[str, jax.Array]]:
    def make(name: str) -> jax.Array:
        return jax.make_array_from_callback(SHAPES[name], sharding(name), lambda at: value(name, step)[at])

    return {"weights": {name: make(name) for name in SHAPES}}


def abstract() -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    made = {name: jax.ShapeDtypeStruct(SHAPES[name], KINDS[name], sharding=sharding(name)) for name in SHAPES}
    return {"weights": made}


def check(keeper: Checkpointer, step: int) -> None:
    found, extra = keeper.restore(step, abstract())
    assert extra == {"step": step}, extra
    for name, array in found["weights"].items():
        assert array.sharding == sharding(name)
        assert len(array.addressable_shards) == options.devices
        for shard in array.addressable_shards:
            assert (np.asarray(shard.data) == value(name, step)[shard.index]).all(), (name, step)


def say(*words: object) -> None:
    print(*words, flush=True)


def act(keeper: Checkpointer, action: str) -> None:
    verb, _, number = action.partition(":")
    if verb == "save":
        assert keeper.save(int(number), state(int(number)), extra={"step": int(number)}, force=True)
        keeper.wait()
        say("saved", number)
    elif verb == "restore":
        check(keeper, int(number))
        say("restored", number)
    else:
        last = keeper.latest()
        if last is not None:
            check(keeper, last)
        say("resumed", 0 if last is None else last)
        for step in range((last or 0) + 1, 1_000_000):
            keeper.save(step, state(step), extra={"step": step})
            say("began", step)


try:
    with Checkpointer(options.folder, keep=2, every=1) as keeper:
        for action in options.actions:
            act(keeper, action)
except UserError as error:
    say(error)
    sys.exit(1)
