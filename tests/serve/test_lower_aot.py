"""What a server would compile on a TPU slice, lowered here without one; and that it asks for no more memory than there is."""

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import pytest

from podway.catalog.slices import find_slice
from podway.errors import UserError
from podway.model.families import find_model
from podway.model.layout import SERVE_RULES, MeshShape, bytes_per_chip
from podway.model.params import count, params
from podway.serve.build import GIB, Options, limits_for, spread
from podway.serve.lower_aot import on_tpu, room

pytest.importorskip("libtpu")
QUIET = {
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "XLA_FLAGS": "",
}  # fmt: skip
# In a process of its own: libtpu is configured once. A tiny model, so that lowering and one compilation take seconds.
LOWER = """
import json, sys
from podway.catalog.slices import find_slice
from podway.model.families import find_model
from podway.serve.lower_aot import programs
from podway.serve.build import Options
model, slice, quantize = sys.argv[1:]
options = Options(max_seqs=32, max_len=512, prompt_tokens=256, pages=64, quantize=quantize)
found = [(name, lower()) for name, lower in programs(find_model(model), find_slice(slice), options)]
compiled = dict(found)["fill slots"].compile()
texts = {name: lowered.as_text() for name, lowered in found}
print(json.dumps({
    "names": list(texts), "devices": ["num_partitions = 16" in text for text in texts.values()],
    "int8": ["xi8>" in text for text in texts.values()], "fill slots": compiled.memory_analysis().argument_size_in_bytes,
}))
"""


@pytest.mark.timeout(300)
def test_every_program_of_the_engine_is_lowered_for_all_hosts() -> None:
    """A v6e-16 is four hosts; the two key/value heads of the model are less than its chips; its matrices are in int8."""
    ran = subprocess.run(
        [sys.executable, "-c", LOWER, "tiny-llama3", "v6e-16", "int8"],
        env={**os.environ, **QUIET, "TPU_ACCELERATOR_TYPE": "v6e-16"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    options = on_tpu(Options(max_seqs=32, max_len=512, prompt_tokens=256))
    expected = limits_for(spread(find_model("tiny-llama3"), 16), options, "tpu", 64).programs()
    assert len(found["names"]) == len(set(found["names"])) == 1 + len(expected)
    assert all(found["devices"]) and found["fill slots"] > 0
    assert not found["int8"][0] and all(found["int8"][1:])


def test_key_and_value_heads_are_repeated_and_not_kept_whole() -> None:
    """70B has 8 of them: over 16 chips each is on two, and a chip holds the matrices of one."""
    shape, mesh = find_model("llama3.1-70b"), MeshShape(tensor=16)
    wide = spread(shape, 16)
    assert wide.kv_heads == 16 and spread(wide, 16) == wide and spread(shape, 8) == shape
    whole, split = bytes_per_chip(shape, mesh, SERVE_RULES, 2), bytes_per_chip(wide, mesh, SERVE_RULES, 2)
    assert (whole - split) / GIB > 2, "2.5 GiB of keys' and values' matrices on every chip, against 0.3"
    twice = sum(p.size for p in params(shape) if "kv_heads" in p.axes)
    norms = sum(p.size for p in params(shape) if "norm" in p.axes)
    assert split == pytest.approx(2 * ((count(shape) + twice - norms) / 16 + norms))


@pytest.mark.parametrize(
    ("model", "slice", "gib"), [("llama3.1-8b", "v5litepod-8", 1.87), ("llama3.1-8b", "v6e-8", 1.87), ("llama3.1-70b", "v6e-16", 8.37)]
)  # fmt: skip
def test_the_budget_of_real_models(model: str, slice: str, gib: float) -> None:
    tpu = find_slice(slice)
    shown, pages = room(find_model(model), tpu, Options(), tpu.devices)
    assert shown.weights / GIB == pytest.approx(gib, abs=0.01)
    assert shown.weights + shown.cache + shown.slots < 0.9 * shown.device
    assert shown.kv_tokens == (pages - 1) * 64 > 100_000


def test_a_model_that_does_not_fit_is_said() -> None:
    with pytest.raises(UserError, match="leave no room"):
        room(find_model("llama3.1-70b"), find_slice("v5litepod-8"), Options(), 8)
    assert on_tpu(Options()).dtype == jnp.dtype("bfloat16").name
