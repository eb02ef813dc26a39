"""The real TPU compiler takes the step on meshes that split everything, and keeps offloaded tensors in host memory."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: podway[rehearse]")


def compiled(slice_: str, mesh: str, *words: str) -> dict[str, int]:
    """Bytes of temporary memory of a chip and of its host."""
    command = [sys.executable, "-m", "tests.train.aot_process", slice_, mesh, *words]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.long
@pytest.mark.timeout(900)  # fifteen seconds of one core; much more where others use it too
def test_every_axis_split_and_tensors_in_host_memory() -> None:
    found = compiled("v6e-16", "data=2,fsdp=2,context=2,tensor=2", "remat.policy=minimal_offloaded")
    assert found["device"] > 0
    assert found["host"] > 0


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("slice_", "mesh", "words"),
    [
        ("v5e-16", "data=2,fsdp=2,context=2,tensor=2", ("model.name=tiny-llama3",)),
        ("v5e-16", "fsdp=2,expert=2,context=2,tensor=2", ("model.name=tiny-mixtral",)),
        ("v6e-16", "fsdp=2,expert=2,context=2,tensor=2", ("model.name=tiny-mixtral", "batch.microbatches=2")),
        ("v6e-16", "fsdp=2,context=2,tensor=4", ("model.name=tiny-gemma2", "remat.policy=save_attention_offloaded")),
        ("v5p-16", "fsdp=2,context=2,tensor=2", ("model.name=tiny-llama3", "remat.policy=minimal")),
        ("v5p-16", "expert=2,context=2,tensor=2", ("model.name=tiny-mixtral",)),
        ("v5e-16", "fsdp=4,context=2,tensor=2", ("lora.rank=4", "lora.base=int8", "compile.unroll=true")),
    ],
)
def test_more_meshes(slice_: str, mesh: str, words: tuple[str, ...]) -> None:
    assert compiled(slice_, mesh, *words)["device"] > 0
