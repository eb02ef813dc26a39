"""`python -m podway.bench.aot`: compile whole training steps for TPU slices on a machine that has none.

1. Each job (model, slice, mesh, batch) runs in a process of its own, because libtpu reads its flags once.
2. There the real step is lowered for the devices of the slice's topology and compiled by the real TPU compiler.
3. The table says how much memory a chip needs, whether that fits, and which collectives of the program are asynchronous
   (the chip computes meanwhile) and which are not.

A full compile takes one to three minutes of one core; `--quick` does the smallest jobs only.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import msgspec

from podway.catalog.generations import GIB
from podway.catalog.slices import find_slice
from podway.train.flags import flags_for

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A training step for a slice."""

    name: str
    slice: str
    mesh: str
    words: tuple[str, ...]
    quick: bool = False


def _seed(model: str, mesh: str, batch: int, quick: bool = False) -> Job:
    """One of the published jobs, with its own batch and full remat (facts: MaxText at 5ebcd67fe)."""
    words = (f"model.name={model}", f"batch.sequences={batch}", "batch.length=2048", "remat.policy=full")
    return Job(name=f"{model} (published job)", slice="v5litepod-256", mesh=mesh, words=words, quick=quick)


def _llama(model: str, slice_: str, mesh: str, batch: int, length: int, quick: bool = False) -> Job:
    words = (f"model.name={model}", f"batch.sequences={batch}", f"batch.length={length}", "remat.policy=full")
    return Job(name=f"{model} x{batch}x{length}", slice=slice_, mesh=mesh, words=words, quick=quick)


JOBS = (
    _seed("16b", "fsdp=256", 1536, quick=True),
    _seed("32b", "fsdp=256", 1024),
    _seed("64b", "fsdp=256", 512),
    _seed("128b", "fsdp=16,tensor=16", 256),
    _llama("llama3.1-8b", "v6e-16", "fsdp=16", 32, 8192, quick=True),
    _llama("llama3.1-8b", "v5p-16", "fsdp=8", 16, 8192),
    _llama("llama3.1-70b", "v6e-64", "fsdp=64", 64, 4096),
    _llama("llama3.1-70b", "v5p-128", "fsdp=64", 128, 8192),
)


def environment(job: Job) -> dict[str, str]:
    """Of the process that compiles: no TPU is looked for, and several may compile at once."""
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": job.slice,
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "LIBTPU_INIT_ARGS": " ".join(flags_for(find_slice(job.slice).generation)),
    }


def compile_job(job: Job) -> dict[str, Any]:
    """Memory and collectives of a job; run it inside `environment`."""
    # The parent only draws a table; jax and libtpu are loaded where they compile.
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    from podway.model.families import find_model
    from podway.model.layout import parse_mesh
    from podway.model.mesh import make_mesh
    from podway.train.settings import read_config
    from podway.train.state import abstract_state
    from podway.train.step import Program, abstract_batch, make_step

    tpu = find_slice(job.slice)
    wrap = {"wrap": [int(w) for w in (*tpu.wrap, False)[:3]]} if any(tpu.wrap) else {}
    topology = topologies.get_topology_desc(platform="tpu", topology_name=tpu.aot_name, **wrap)
    config = read_config(None, [*job.words, "model.kernel=splash"])
    mesh = make_mesh(parse_mesh(job.mesh, chips=len(topology.devices)), topology.devices)
    program = Program(config, find_model(config.model.name), mesh)
    size = config.batch.global_size(len(topology.devices))
    began = time.monotonic()
    with jax.set_mesh(mesh):
        asked = jax.ShapeDtypeStruct((mesh.size,), jnp.int32)  # type: ignore[no-untyped-call]
        batch = abstract_batch(program, size, config.batch.length)
        lowered = make_step(program).lower(abstract_state(program), batch, asked)  # type: ignore[attr-defined]
        try:
            compiled = lowered.compile()
        except Exception as error:
            return {"error": out_of_memory(str(error)), "seconds": time.monotonic() - began}
    memory = compiled.memory_analysis()
    used = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    return {
        "gib": (used - memory.alias_size_in_bytes) / GIB,
        "state_gib": memory.argument_size_in_bytes / GIB,
        "collectives": _read_collectives(compiled),
        "seconds": time.monotonic() - began,
    }


def _read_collectives(compiled: Any) -> dict[str, list[int]] | None:
    """None where libtpu writes a program that this jaxlib cannot print (v5p with pipelined gathers, jaxlib 0.10.2)."""
    try:
        return collectives(compiled.as_text())
    except Exception as error:
        if "RET_CHECK" not in str(error):
            raise
        return None


def out_of_memory(text: str) -> str:
    """What the compiler says of a program that does not fit: 'needs 17.21G of 15.75G'."""
    found = re.search(r"Used ([0-9.]+[KMG]) of ([0-9.]+[KMG])", text)
    return f"needs {found[1]} of {found[2]}" if found else text.splitlines()[0][:160]


def collectives(text: str) -> dict[str, list[int]]:
    """{kind: [asynchronous, synchronous]}: how many instructions of a compiled TPU program, loop bodies once.

    An asynchronous one is a pair of fusions (`async-collective-start` and `-done`) or of instructions (`…-start`); its
    own instruction then lies inside a fusion, where it is not counted again.
    """
    kinds, inside = Counter[tuple[str, bool]](), ""
    bodies: dict[str, str] = {}  # computation -> the collective in it
    started: list[str] = []  # computations that asynchronous starts call
    for line in text.splitlines():
        if line and not line.startswith((" ", "}")):
            inside = line.split()[0].lstrip("%")
            continue
        found = re.search(r"= .*? (" + "|".join(COLLECTIVES) + r")(-start)?\(", line)
        if found:
            if inside.startswith(("fused_computation", "async_collective_fusion")):
                bodies[inside] = found[1]
            else:
                kinds[found[1], bool(found[2])] += 1
        if re.match(r"\s*(ROOT )?%async-collective-start", line) and (call := re.search(r"calls=%([\w.-]+)", line)):
            started.append(call[1])
    for called in started:
        kinds[bodies.get(called, "all-gather"), True] += 1
    return {
        kind: [kinds[kind, True], kinds[kind, False]] for kind in COLLECTIVES if kinds[kind, True] + kinds[kind, False]
    }


def row(job: Job, found: dict[str, Any]) -> str:
    """One line of the table."""
    tpu = find_slice(job.slice)
    facts = tpu.generation_facts
    limit = (facts.hbm_usable_bytes or facts.chip_hbm_bytes) / facts.devices_per_chip / GIB
    head = f"| {job.name} | {tpu.accelerator_type} ({tpu.topology_text}) | {job.mesh} |"
    if "error" in found:
        return f"{head} {found['error']} | {limit:.2f} | no | | {found['seconds']:.0f} |"
    counted = found["collectives"]
    told = "cannot be read" if counted is None else ", ".join(f"{k} {a} of {a + s}" for k, (a, s) in counted.items())
    fits = "yes" if found["gib"] <= limit else "no"
    return f"{head} {found['gib']:.2f} | {limit:.2f} | {fits} | {told} | {found['seconds']:.0f} |"


HEAD = (
    "| job | slice | mesh | GiB per chip | usable | fits | asynchronous collectives | seconds |\n"
    "|---|---|---|---|---|---|---|---|"
)


def main() -> int:
    """The table; exit code 1 when a job does not fit or does not compile."""
    parser = argparse.ArgumentParser(description="Compile training steps for TPU slices, without a TPU.")
    parser.add_argument("--quick", action="store_true", help="the smallest jobs only")
    parser.add_argument("--only", default="", help="jobs whose name or slice holds this text")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(compile_job(JOBS[options.one])))
        return 0
    print(HEAD, flush=True)
    failed = False
    for number, job in enumerate(JOBS):
        if (options.quick and not job.quick) or options.only not in f"{job.name} {job.slice}":
            continue
        command = [sys.executable, "-m", "podway.bench.aot", "--one", str(number)]
        done = subprocess.run(command, env=environment(job), capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        found = json.loads(lines[-1]) if lines else {"error": last[0][:160], "seconds": 0}
        failed |= "error" in found
        print(row(job, found), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
