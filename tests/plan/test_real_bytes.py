"""Planned state against real arrays: the trainer's own state on a mesh of eight CPU devices, byte by byte."""

import json
import os
import subprocess
import sys

import pytest

from podway.model.families import find_model
from podway.model.layout import MeshShape
from podway.plan.memory import train_memory
from podway.plan.training import Adapters, Training

CASES = [
    ("tiny-llama3", {"fsdp": 4, "tensor": 2}, 0),
    ("tiny-gemma3", {"fsdp": 8}, 0),
    ("tiny-mixtral", {"fsdp": 2, "expert": 2, "tensor": 2}, 0),
    ("tiny-qwen2.5", {"fsdp": 2, "data": 2, "tensor": 2}, 4),
]

# Runs with eight devices of its own: the number is fixed when jax starts.
MEASURE = """
import json, sys
import jax
import numpy
from podway.model.families import find_model
from podway.model.layout import MeshShape
from podway.model.mesh import make_mesh
from podway.train.config import LoraConfig, TrainConfig
from podway.train.state import abstract_state
from podway.train.step import Program

def held(tree):
    sizes = [[s.data.nbytes for s in leaf.addressable_shards] for leaf in jax.tree.leaves(tree)]
    per_device = {sum(column) for column in zip(*sizes)}
    assert len(per_device) <= 1, "devices hold different amounts"
    return per_device.pop() if per_device else 0

found = []
for name, sizes, rank in json.loads(sys.argv[1]):
    mesh = make_mesh(MeshShape(**sizes))
    program = Program(TrainConfig(lora=LoraConfig(rank=rank)), find_model(name), mesh)
    with jax.set_mesh(mesh):
        state = jax.tree.map(lambda a: jax.device_put(numpy.zeros(a.shape, a.dtype), a.sharding), abstract_state(program))
    counters = sum(4 for leaf in jax.tree.leaves(state.moments) if leaf.ndim == 0)
    found.append([held(state.trained), held(state.moments) - counters, held(state.frozen)])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def measured() -> list[list[int]]:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps(CASES)],
        capture_output=True, text=True, timeout=110, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{name}-{MeshShape(**m)}" for name, m, _ in CASES])
def test_weights_and_moments_are_those_on_the_devices(case: int, measured: list[list[int]]) -> None:
    name, sizes, rank = CASES[case]
    mesh, adapters = MeshShape(**sizes), Adapters(rank=rank) if rank else None
    groups = mesh.data * mesh.fsdp * mesh.expert
    memory = train_memory(find_model(name), mesh, Training(seq=64, batch=groups, adapters=adapters), 2**40)
    trained, moments, frozen = measured[case]
    # The planner also counts the bfloat16 copy that a step begins with: half of the float32 weights.
    assert memory.weights == frozen + 1.5 * trained
    assert memory.optimizer == moments
