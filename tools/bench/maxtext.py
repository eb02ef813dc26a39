"""`make bench-maxtext`: MaxText's own training step through the same TPU compiler and reader as Podway's, without a TPU.

1. MaxText comes from PyPI into an environment of its own (.cache/maxtext: it declares Python 3.12), with the jax and libtpu of Podway.
2. Each row is one of its published recipes (settings and flags as data below, with their source): `tools/maxtext_step.py` lowers the
   step by MaxText's own functions in that environment, and `podway.rehearse` reads what the compiler wrote.
3. The same job is planned by `podway plan train`, and the first proposal is rehearsed: the two stand side by side in docs/aot.md.
   Rows that were measured are kept in docs/measurements/maxtext.json; `--fresh` starts over.

Both are compiled as far as their schedule (`--full`: to the end), so both estimates have the same sources.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
from tools.bench.aot import ROOT, planned_rehearsal
from tools.bench.report import machine, table, write_section

from podway.decoding import from_json
from podway.errors import UserError
from podway.plan.memory import GIB
from podway.plan.training import Dtype
from podway.rehearse.fabric import Fabric
from podway.rehearse.rehearsal import CompileReport, Rehearsal
from podway.rehearse.running import _Worker, environment, rehearse
from podway.rehearse.timeline import estimate

PAGE, KEPT = ROOT / "docs" / "aot.md", ROOT / "docs" / "measurements" / "maxtext.json"
HOME = ROOT / ".cache" / "maxtext"
REQUIREMENTS = Path(__file__).with_name("maxtext-requirements.txt")

# Settings and flags: tpu-recipes training/trillium/*/README.md (MaxText @tpu-recipes-v0.1.4, Mixtral @v0.1.2), training/v5p/*, and
# MaxText configs/tpu/v5p/llama2_70b.sh; of the flags without those that libtpu 0.0.51 refuses on v6e and v5p (fuse_all_gather) and those
# that are of another libtpu (2a886c8_chip_config_name).
_FLASH = (
    "attention=flash", "sa_use_fused_bwd_kernel=true", *(
        f"sa_block_{name}=2048"
        for name in ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    ),
)  # fmt: skip
_OFFLOAD = tuple(f"{name}=offload" for name in ("decoder_layer_input", "query_proj", "key_proj", "value_proj"))
_OVERLAP = (
    "--xla_tpu_enable_data_parallel_all_reduce_opt=true",
    "--xla_tpu_data_parallel_opt_different_sized_ops=true",
    "--xla_tpu_enable_async_collective_fusion=true",
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
    "--xla_tpu_overlap_compute_collective_tc=true",
    "--xla_enable_async_all_gather=true",
)
_V6E = (
    "--xla_tpu_scoped_vmem_limit_kib=98304",
    "--xla_tpu_use_minor_sharding_for_major_trivial_input=true",
    "--xla_tpu_relayout_group_size_threshold_for_reduce_scatter=1",
    "--xla_tpu_assign_all_reduce_scatter_layout=true",
    *_OVERLAP,
    "--xla_tpu_enable_all_experimental_scheduler_features=true",
    "--xla_tpu_enable_scheduler_memory_pressure_tracking=true",
    "--xla_tpu_host_transfer_overlap_limit=24",
    "--xla_tpu_aggressive_opt_barrier_removal=ENABLED",
    "--xla_lhs_prioritize_async_depth_over_stall=ENABLED",
    "--xla_tpu_enable_ag_backward_pipelining=true",
    "--xla_should_allow_loop_variant_parameter_in_chain=ENABLED",
    "--xla_should_add_loop_invariant_op_in_chain=ENABLED",
    "--xla_max_concurrent_host_send_recv=100",
    "--xla_tpu_scheduler_percent_shared_memory_limit=100",
    "--xla_latency_hiding_scheduler_rerun=2",
)
_8B = (
    *_V6E,
    "--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000",  # no collective matmul: the recipe is named after it
    "--xla_sc_disable_megacore_partitioning=true",
    "--xla_tpu_enable_all_reduce_offload_tracing=true",
    "--xla_tpu_use_tc_device_shape_on_sc=true",
    "--xla_tpu_enable_sparse_core_collective_offload_all_reduce=true",
    "--xla_sc_enable_instruction_fusion=false",
    "--xla_sc_disjoint_spmem=false",
)
_V5P = (
    *_OVERLAP,
    "--xla_tpu_megacore_fusion_allow_ags=false",
    "--xla_enable_async_collective_permute=true",
    "--xla_tpu_enable_ag_backward_pipelining=true",
)


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """One job: the same batch for both trainers."""

    name: str
    model: str  # of Podway and of MaxText
    slice: str
    batch: int
    length: int
    published: float  # seconds of the step that its authors measured on TPUs, in the file that has the recipe
    settings: tuple[str, ...]
    flags: tuple[str, ...]
    weights: Dtype = "float32"  # as both trainers store them


RECIPES = (
    Recipe(
        name="Llama 3.1 8B", model="llama3.1-8b", slice="v6e-16", published=3.393, batch=48, length=8192,
        settings=("remat_policy=custom", "out_proj=offload", *_OFFLOAD, *_FLASH), flags=_8B,
    ),
    Recipe(
        name="Llama 3.1 70B", model="llama3.1-70b", slice="v6e-64", published=18.688, batch=128, length=8192,
        settings=("remat_policy=custom", *_OFFLOAD, *_FLASH), flags=_V6E,
    ),
    Recipe(
        name="Llama 3.1 8B", model="llama3.1-8b", slice="v6e-64", published=5.652, batch=320, length=8192,
        settings=("remat_policy=custom", "out_proj=offload", *_OFFLOAD, *_FLASH), flags=_8B,
    ),
    Recipe(
        name="Llama 3.1 70B", model="llama3.1-70b", slice="v6e-256", published=42.656, batch=1280, length=8192,
        settings=("remat_policy=custom", *_OFFLOAD, *_FLASH), flags=_V6E,
    ),
    Recipe(
        name="Mixtral 8x7B", model="mixtral-8x7b", slice="v6e-256", published=13.484, batch=3072, length=4096,
        settings=(
            "remat_policy=custom", "out_proj=offload", *_OFFLOAD, "attention=flash", "sa_block_q=2048", "sa_block_q_dkv=2048",
            "sa_block_q_dq=2048", "megablox=false", "sparse_matmul=false", "capacity_factor=1.25",
        ),
        flags=("--xla_tpu_scoped_vmem_limit_kib=81920", *_OVERLAP),
    ),
    Recipe(  # published as 65 % of the peak (getting_started/Run_Llama2.md): 428.4 GFLOP a token by its count of that time
        name="Llama 2 70B", model="llama2-70b", slice="v5p-128", published=23.53, batch=256, length=4096,
        settings=("remat_policy=save_dot_except_mlpwi",), flags=_V5P,
    ),
    Recipe(  # published as 251.94 TFLOP/s a chip (end_to_end/tpu/mixtral/Run_Mixtral.md): 79.7 GFLOP a token
        name="Mixtral 8x7B", model="mixtral-8x7b", slice="v5p-128", published=46.66, batch=2304, length=4096,
        settings=("weight_dtype=bfloat16", "attention=flash", "use_iota_embed=false"),
        flags=(*_V5P, "--xla_tpu_scoped_vmem_limit_kib=81920"), weights="bfloat16",
    ),
)  # fmt: skip


class Side(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One trainer's step."""

    gib: float | None = None  # None: it does not compile
    limit: float = 0.0
    step: float | None = None
    parts: dict[str, float] = {}
    failed: str = ""


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """A row: MaxText's recipe, and what Podway's planner proposes for the job."""

    name: str
    slice: str
    published: float
    maxtext: Side | None  # None: not compiled here
    podway: Side
    proposal: str
    versions: str


class _MaxTextWorker(_Worker):
    """The compiler's process with MaxText's step in it; it speaks as Podway's own does."""

    def __init__(self, recipe: Recipe, rehearsal: Rehearsal, folder: Path) -> None:
        self.rehearsal, self.folder, self.peak, self.listener = rehearsal, folder, 0, None
        self.errors = open(folder / "stderr", "w+b")  # noqa: SIM115 - closed in end()
        settings = [
            f"model_name={recipe.model}", f"compile_topology={recipe.slice}", "compile_topology_num_slices=1",
            f"per_device_batch_size={recipe.batch // rehearsal.tpu.devices}", f"max_target_length={recipe.length}",
            "ici_fsdp_parallelism=-1", "run_name=bench", f"base_output_directory={folder}", "dataset_type=synthetic",
            "enable_checkpointing=false", "use_iota_embed=true", *recipe.settings,
        ]  # fmt: skip
        variables = environment(rehearsal) | {
            "LIBTPU_INIT_ARGS": " ".join((*recipe.flags, "--xla_tpu_spmd_rng_bit_generator_unsafe=true")),
            "MAXTEXT_SETTINGS": json.dumps(settings),
            "PYTHONPATH": str(ROOT / "src"),
        }
        self.process = subprocess.Popen(
            [HOME / "venv" / "bin" / "python", "-P", ROOT / "tools" / "maxtext_step.py", str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, env=variables, start_new_session=True,
        )  # fmt: skip


def install() -> None:
    """MaxText and what its step imports, once."""
    if (HOME / "installed").exists():
        return
    python = shutil.which("python3.12") or shutil.which("python3.13")
    if python is None:
        raise UserError("MaxText needs Python 3.12 or later", "install python3.12 and run the command again")
    subprocess.run([python, "-m", "venv", HOME / "venv"], check=True)
    # Without dependencies: MaxText declares a newer jax than the one it is compiled with here, and 200 packages that no step imports.
    subprocess.run([HOME / "venv" / "bin" / "pip", "install", "-q", "--no-deps", "-r", REQUIREMENTS], check=True)
    (HOME / "installed").touch()


def measure(recipe: Recipe, *, fast: bool, theirs: Side | None, compile_theirs: bool) -> Pair:
    """Both steps of a job; without `compile_theirs` only Podway's, beside what is known of MaxText's."""
    ours = msgspec.structs.replace(
        planned_rehearsal(recipe.model, recipe.slice, recipe.batch, recipe.length, recipe.weights), fast=fast
    )
    asked = Rehearsal(model=recipe.model, slice=recipe.slice, fast=fast)
    if compile_theirs:
        with tempfile.TemporaryDirectory(prefix="podway-maxtext-") as folder:
            report = _MaxTextWorker(recipe, asked, Path(folder)).answer(fresh=True, progress=lambda stage: None)
        theirs = _side(report, asked)
    report = rehearse([ours], jobs=1)[0]
    words = [
        word
        for word in ours.settings
        if not word.startswith(("batch.sequences", "batch.length", "optimizer", "precision"))
    ]
    return Pair(
        name=f"{recipe.name}, {recipe.batch} x {recipe.length}", slice=recipe.slice, published=recipe.published,
        maxtext=theirs,
        podway=_side(report, ours), proposal=" ".join(words), versions=f"jax {report.jax}, libtpu {report.libtpu}",
    )  # fmt: skip


def _side(report: CompileReport, asked: Rehearsal) -> Side:
    if report.memory is None or report.program is None:
        return Side(failed=report.failed)
    guess = estimate(report.program, Fabric(asked.tpu))
    return Side(
        gib=round(report.memory.total / GIB, 2), limit=round(report.memory.limit / GIB, 2), step=round(guess.point, 3),
        parts={kind: round(seconds, 3) for kind, seconds in guess.parts.items()},
    )  # fmt: skip


def page_of(pairs: list[Pair]) -> str:
    """The table, side by side."""
    headers = ["job", "slice", "MaxText, published: step s", "MaxText, compiled here: GiB a chip", "step s"]
    headers += ["Podway's first proposal", "GiB a chip", "step s", "of the published"]
    rows = []
    for pair in pairs:
        left, right = pair.maxtext, pair.podway
        ratio = f"{right.step / pair.published:.2f}" if right.step else "-"
        rows.append(
            [pair.name, pair.slice, f"{pair.published:.2f}", *_cells(left), f"`{pair.proposal}`", *_cells(right), ratio]
        )
    versions = ", ".join(sorted({pair.versions for pair in pairs}))
    return f"Measured on {machine()}; {versions}.\n\n{table(headers, rows)}"


def _cells(side: Side | None) -> list[str]:
    if side is None:
        return ["-", "-"]
    if side.gib is None:
        return ["does not compile", side.failed[:80]]
    over = "" if side.gib <= side.limit else f" (does not fit in {side.limit:.2f})"
    return [f"{side.gib:.2f}{over}", f"{side.step:.2f}"]


def main() -> int:
    """Exit code 1 where a row does not compile."""
    parser = argparse.ArgumentParser(
        description="MaxText's published recipes beside Podway's plans, compiled without a TPU."
    )
    parser.add_argument("--fresh", action="store_true", help="measure every row again")
    parser.add_argument("--full", action="store_true", help="compile to the end: minutes a row")
    parser.add_argument(
        "--podway", action="store_true", help="compile Podway's steps only; MaxText's stay as they were measured"
    )
    parser.add_argument("--only", default="", help="rows whose name or slice holds this text")
    options = parser.parse_args()
    if not options.podway:
        install()
    kept = from_json(KEPT.read_bytes(), dict[str, Pair]) if KEPT.exists() else {}
    for recipe in RECIPES:
        label = f"{recipe.name} on {recipe.slice}"
        if options.only not in label or (label in kept and not options.fresh):
            continue
        theirs = kept[label].maxtext if label in kept else None
        kept[label] = measure(recipe, fast=not options.full, theirs=theirs, compile_theirs=not options.podway)
        print(page_of([kept[label]]), flush=True)
        KEPT.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
        write_section("bench-maxtext", page_of(list(kept.values())), PAGE)
    return int(
        any(side is not None and side.gib is None for pair in kept.values() for side in (pair.maxtext, pair.podway))
    )


if __name__ == "__main__":
    sys.exit(main())
