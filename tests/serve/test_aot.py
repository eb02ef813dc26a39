"""Programs of Llama 3.1 8B over 8 chips through the real TPU compiler, without a TPU. (`make bench-aot` compiles all of them.)"""

import json
import os
import subprocess
import sys

import pytest

from tests.serve.test_lower_aot import QUIET

pytest.importorskip("libtpu")
COMPILE = """
import json, sys
from podway.catalog.slices import find_slice
from podway.model.families import find_model
from podway.serve.lower_aot import programs, room
from podway.serve.build import Options
slice, name = find_slice(sys.argv[1]), sys.argv[2]
shape, options = find_model("llama3.1-8b"), Options(max_seqs=64, max_len=2048)
memory = dict(programs(shape, slice, options))[name]().compile().memory_analysis()
shown, _ = room(shape, slice, options, slice.devices)
print(json.dumps({
    "cache": shown.cache, "alias": memory.alias_size_in_bytes, "temp": memory.temp_size_in_bytes,
    "all": memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes,
    "device": shown.device,
}))
"""


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("slice", ["v5litepod-8", "v6e-8"])
@pytest.mark.parametrize("name", ["decode 64 rows", "mixed 64 rows, 1024 prompt tokens"])
def test_programs_compile_for_tpus(slice: str, name: str) -> None:
    environment = {**os.environ, **QUIET, "TPU_ACCELERATOR_TYPE": slice}
    ran = subprocess.run(
        [sys.executable, "-c", COMPILE, slice, name], env=environment, capture_output=True, text=True, timeout=850
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["alias"] >= found["cache"], "the cache is updated in place"
    assert found["temp"] < 700 << 20 and found["all"] < found["device"], found
