"""Every kind of serving program through the real TPU compiler, without a TPU: sizes of Llama 3 8B over 8 chips."""

import os

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from podway.model import decoder
from podway.model.decoder import Compute
from podway.model.families import find_model
from podway.model.layout import SERVE_RULES, MeshShape
from podway.model.mesh import make_mesh
from podway.serve.batcher import Limits
from podway.serve.cache import Plan
from podway.serve.engine import lower_step
from podway.serve.programs import cache_heads

pytest.importorskip("libtpu")


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("chip", ["v5e:2x4", "v6e:2x4"])
@pytest.mark.parametrize(("rows", "blocks"), [(64, 0), (32, 4)])
def test_programs_compile_for_tpus(chip: str, rows: int, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    }.items():  # fmt: skip
        monkeypatch.setitem(os.environ, name, value)
    shape = find_model("llama3-8b")
    limits = Limits(slots=64, max_len=2048, page=64, pages=1024, block=128, blocks=(4, 16), rows=(64,), steps=8)
    described = topologies.get_topology_desc(platform="tpu", topology_name=chip)
    mesh = make_mesh(MeshShape(tensor=8), described.devices)
    plan = Plan("tpu", shape.layers, limits.pages, limits.page, cache_heads(shape, 8), shape.d_head, jnp.bfloat16)
    compute = Compute(dtype=jnp.bfloat16, rules=SERVE_RULES, kernel="reference")
    tree = decoder.abstract(shape, jnp.bfloat16, mesh, SERVE_RULES)
    with jax.set_mesh(mesh):
        compiled = lower_step(shape, limits, plan, compute, tree, rows, blocks, mesh).compile()
    memory = compiled.memory_analysis()
    cache_bytes = 128 * 1024 * limits.pages * limits.page // 8
    assert memory.alias_size_in_bytes >= cache_bytes, "the cache is updated in place"
    assert memory.temp_size_in_bytes < cache_bytes / 2, f"{memory.temp_size_in_bytes >> 20} MiB of scratch"
