"""Compile one training step with the real TPU compiler for a slice that is not here; prints what it needs as JSON.

    aot_process.py SLICE MESH key=value ...

The model is as small as the kernels of a TPU allow: heads of 128 channels, sequences of 128 tokens a chip.
"""

import json
import os
import sys

from podway.catalog.slices import find_slice
from podway.rehearse.rehearsal import Rehearsal
from podway.rehearse.running import environment

SLICE, MESH, *WORDS = sys.argv[1:]
os.environ |= environment(Rehearsal(model="", slice=SLICE))

import jax  # noqa: E402 - libtpu reads the environment when it is loaded
import jax.numpy as jnp  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from msgspec.structs import replace  # noqa: E402

from podway.model.families import find_model  # noqa: E402
from podway.model.layout import parse_mesh  # noqa: E402
from podway.model.mesh import make_mesh  # noqa: E402
from podway.train.settings import read_config  # noqa: E402
from podway.train.state import abstract_state  # noqa: E402
from podway.train.step import Program, abstract_batch, make_step  # noqa: E402


def main() -> None:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=find_slice(SLICE).aot_name).devices
    sizes = parse_mesh(MESH, chips=len(devices))
    config = read_config(None, [f"batch.length={128 * sizes.context}", "model.kernel=splash", *WORDS])
    shape = replace(find_model(config.model.name), d_model=256, heads=4, kv_heads=2, d_head=128, vocab=512)
    program = Program(config, shape, make_mesh(sizes, devices))
    with jax.set_mesh(program.mesh):
        rows = abstract_batch(program, config.batch.global_size(len(devices)), config.batch.length, packed=True)
        asked = jax.ShapeDtypeStruct((len(devices),), jnp.int32)  # type: ignore[no-untyped-call]
        state = abstract_state(program)
        lowered = make_step(program, state).lower(state, rows, asked)  # type: ignore[attr-defined]
        memory = lowered.compile().memory_analysis()
    print(json.dumps({"device": memory.temp_size_in_bytes, "host": memory.host_temp_size_in_bytes}))


if __name__ == "__main__":
    main()
