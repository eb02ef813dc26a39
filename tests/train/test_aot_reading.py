"""Reading a compiled TPU program: which collectives it waits for."""

from podway.bench.aot import JOBS, collectives, environment, out_of_memory, row
from podway.catalog.slices import find_slice
from podway.model.families import find_model
from podway.model.layout import parse_mesh
from podway.train.checks import check_fit
from podway.train.settings import read_config

PROGRAM = """\
HloModule jit_step

%fused_computation.3 (param_0: bf16[4,8]) -> bf16[64,8] {
  ROOT %all-gather.1 = bf16[64,8]{1,0} all-gather(%param_0), channel_id=1
}

%async_collective_fusion.2 (param_0: bf16[4,8]) -> bf16[64,8] {
  ROOT %all-gather.2 = bf16[64,8]{1,0} all-gather(%param_0), channel_id=1
}

%body (p: (bf16[64,8])) -> (bf16[64,8]) {
  %async-collective-start.1 = (bf16[64,8]) fusion(%p), kind=kCustom, calls=%fused_computation.3, backend_config={}
  %x = bf16[64,8]{1,0} fusion(%p), kind=kOutput, calls=%async_collective_fusion.2
  %async-collective-done.1 = bf16[64,8]{1,0} fusion(%async-collective-start.1), kind=kCustom, calls=%other
  %reduce_scatter.9 = bf16[4,8]{1,0} reduce-scatter(%x), channel_id=3
}

ENTRY %main (a: bf16[4,8]) -> bf16[4,8] {
  %collective-permute-start.1 = (bf16[4,8], bf16[4,8]) collective-permute-start(%a), channel_id=5
  %all-reduce.7 = f32[] all-reduce(%b), channel_id=6
}
"""


def test_asynchronous_and_not() -> None:
    assert collectives(PROGRAM) == {
        "all-gather": [1, 0],
        "reduce-scatter": [0, 1],
        "all-reduce": [0, 1],
        "collective-permute": [1, 0],
    }


def test_the_compiler_on_memory() -> None:
    said = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 17.21G of 15.75G hbm."
    assert out_of_memory(said) == "needs 17.21G of 15.75G"


def test_every_job_can_be_asked_for() -> None:
    for job in JOBS:
        config = read_config(None, list(job.words))
        mesh = parse_mesh(job.mesh, chips=find_slice(job.slice).chips)
        check_fit(config, find_model(config.model.name), mesh)
        assert "xla" in environment(job)["LIBTPU_INIT_ARGS"]
    assert any(job.quick for job in JOBS)
    assert "| no |" in row(JOBS[0], {"error": "needs 17G of 15G", "seconds": 3})
