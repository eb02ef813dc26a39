"""Flags of the TPU compiler and runtime for each generation, as data with their source (no jax).

They must be in the environment before libtpu is loaded, so `__main__` calls `set_flags` before it imports jax. What the
environment already says wins over `compile.flags` of the run, and that wins over this table.

Sources: [a] MaxText `configs/largest_job/*.sh` at 5ebcd67fe, the published 16B-128B jobs on v5e; [b] MaxText
`benchmarks/xla_flags_library.py` and its v5p, v6e and v4 scripts at e591f30cb; [c] seen in the programs that libtpu
0.0.51 makes of Podway's step (docs/training-internals.md has what each gave); [d] tpu-recipes `training/ironwood` and
`training/v5p` of 2026.

tpu7x has no row: libtpu 0.0.51 runs its gathers and reduce-scatters on the SparseCores without being asked [c].
"""

from collections.abc import Iterable, MutableMapping

_DATA_PARALLEL = (
    "--xla_tpu_enable_data_parallel_all_reduce_opt=true",  # [a]
    "--xla_tpu_data_parallel_opt_different_sized_ops=true",  # [a]
)
_ASYNC_GATHER = (
    "--xla_tpu_enable_async_collective_fusion=true",  # [a]
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",  # [a]
    "--xla_tpu_overlap_compute_collective_tc=true",  # [a]
    "--xla_enable_async_all_gather=true",  # [a]
)
# On v5e alone: libtpu 0.0.51 refuses it elsewhere, for fear of wrong results [c].
_FUSE_GATHER = "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true"  # [a]
# The product that makes a gradient and the reduce-scatter of that gradient along a ring become one loop of asynchronous
# permutes (a collective matmul), where a reduce-scatter of its own would be waited for.
_GRADIENT_RINGS = (
    "--xla_tpu_decompose_einsum_reduce_scatter=true",  # [c]
    "--xla_tpu_prefer_einsum_reduce_scatter=true",  # [c]
)
# Gathers of weights and scatters of gradients along one axis of the torus that a SparseCore runs beside the products: all gathers on
# v6e-16, scatters on v6e-64 and v5p-128 [c]. What it cannot take stays as it was.
_SPARSECORE = (
    "--xla_tpu_enable_sparse_core_collective_offload_all_gather=true",  # [b]
    "--xla_tpu_enable_sparse_core_collective_offload_reduce_scatter=true",  # [c]
    "--xla_sc_disable_megacore_partitioning=true",  # [b]
    "--xla_tpu_use_tc_device_shape_on_sc=true",  # [b]
)
# The same over several axes at once: without these no gather of v6e-64, v6e-256 and v5p-128 is asynchronous, with
# them all are [c].
_SPARSECORE_AXES = (
    "--xla_tpu_enable_sparse_core_collective_offload_2d_all_gather=true",  # [d]
    "--xla_tpu_enable_sparse_core_collective_offload_3d_all_gather=true",  # [d]
    "--xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter=true",  # [d]
)
# The scheduler begins transfers from host memory earlier, and looks for less memory a second time [b]: 70B with offloaded activations
# on v6e-64 waits 0.57 s less and needs 3.8 GiB less [c].
_SCHEDULER = (
    "--xla_tpu_enable_ag_backward_pipelining=true",  # [b]
    "--xla_tpu_enable_all_experimental_scheduler_features=true",  # [b]
    "--xla_latency_hiding_scheduler_rerun=2",  # [b]
)
_VMEM_LIMIT = "--xla_tpu_scoped_vmem_limit_kib"
FLAGS: dict[str, tuple[str, ...]] = {
    "v4": ("--xla_enable_async_all_gather=true",),  # [b]
    "v5e": (*_DATA_PARALLEL, *_ASYNC_GATHER, _FUSE_GATHER, *_GRADIENT_RINGS),
    "v5p": (
        *_DATA_PARALLEL,
        *_ASYNC_GATHER,
        *_SPARSECORE,  # and no rings: with both, Llama 3.1 8B on v5p-128 takes 5.05 s, with these alone 4.98 [c]
        "--xla_tpu_megacore_fusion_allow_ags=false",  # [b]
        "--xla_enable_async_collective_permute=true",  # [b]
        "--xla_tpu_enable_ag_backward_pipelining=true",  # [b]
        *_SPARSECORE_AXES,
    ),
    "v6e": (
        *_DATA_PARALLEL,
        *_ASYNC_GATHER,
        *_GRADIENT_RINGS,
        *_SPARSECORE,
        *_SCHEDULER,
        f"{_VMEM_LIMIT}=98304",  # [b] dense models
        *_SPARSECORE_AXES,
    ),
}
# Of the runtime and not the compiler: environment variables of their own.
VARIABLES: dict[str, dict[str, str]] = {"v4": {"TPU_MEGACORE": "MEGACORE_DENSE"}}  # [b]


def flags_for(generation: str | None, more: Iterable[str] = (), *, tuned: bool = True) -> tuple[str, ...]:
    """The flags of a generation, with `more` in place of those of the same name."""
    chosen = {_name(flag): flag for flag in (FLAGS.get(generation or "", ()) if tuned else ())}
    chosen |= {_name(flag): flag for flag in more}
    return tuple(chosen.values())


def set_flags(
    environment: MutableMapping[str, str], generation: str | None, more: Iterable[str] = (), *, tuned: bool = True
) -> tuple[str, ...]:
    """Put the flags in the environment; the flags in force."""
    given = environment.get("LIBTPU_INIT_ARGS", "").split()
    chosen = flags_for(generation, (*more, *given), tuned=tuned) if generation else tuple(given)
    if chosen:
        environment["LIBTPU_INIT_ARGS"] = " ".join(chosen)
    if tuned:
        for name, value in VARIABLES.get(generation or "", {}).items():
            environment.setdefault(name, value)
    return chosen


def kernel_vmem(flags: Iterable[str]) -> int | None:
    """Bytes of VMEM that these flags give a kernel; None: what the compiler gives one."""
    found = [flag.partition("=")[2] for flag in flags if _name(flag) == _VMEM_LIMIT]
    return int(found[-1]) * 1024 if found and found[-1].isdigit() else None


def _name(flag: str) -> str:
    return flag.partition("=")[0]
