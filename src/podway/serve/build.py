"""From a model and what a person asks for to an engine: sizes, memory and programs (before anything is allocated).

1. `Options` is what can be asked for; `limits_for` turns it into the sizes of the programs.
2. `budget` counts bytes on one device: weights, cache, state of the slots, and scratch of the programs. Without `--pages`
   the cache takes what the rest leaves of `memory_fraction` of the device.
3. `build` lays the weights out for serving and makes the engine.

A tensor group larger than the number of key/value heads has each of them on several chips. `spread` makes that a property of
the model: its key and value matrices are repeated head by head, so that they divide over the group, each chip holds (and
computes, and caches) only what its own queries read, and nothing after it knows of the case.
"""

from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import msgspec

from podway.errors import UserError
from podway.model.attention import Kernel
from podway.model.decoder import Compute, Tree
from podway.model.layout import SERVE_RULES, MeshShape, bytes_per_chip, kv_repeats, shard_shape
from podway.model.mesh import named_sharding
from podway.model.params import params
from podway.model.shape import ModelShape
from podway.serve import cache_layout, norm_nvidia
from podway.serve.adapters import AdapterSizes, adapter_bytes, join, with_room
from podway.serve.batcher import Limits
from podway.serve.cache_layout import Backend, KvDtype, Plan
from podway.serve.engine import Engine
from podway.serve.quantized import quantizable, quantize, quantize_head, quantized_compute
from podway.serve.weight_layout import fuse, over_turned_heads, turn, turn_heads, unstack

GIB = 1 << 30


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a person may choose; None: by the machine and the model."""

    max_len: int | None = None
    max_seqs: int | None = None
    page: int | None = None
    pages: int | None = None
    prompt_tokens: int | None = None  # of prompts in one step at most
    decode_steps: int = 8
    speculate: int = 0  # tokens that are drafted
    adapters: AdapterSizes | None = None  # room for LoRA adapters
    dtype: str | None = None
    quantize: str = "none"  # none or int8
    kv: KvDtype = "auto"
    memory_fraction: float = 0.9
    backend: Backend | None = None
    interpret: bool = False
    unroll: bool | None = None  # layers written out instead of scanned


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one device."""

    device: int  # 0: unknown
    weights: int
    cache: int
    slots: int
    kv_tokens: int  # that the cache holds

    def line(self, quantize: str, kv: str) -> str:
        """For people."""
        parts = f"weights {self.weights / GIB:.2f} GiB ({quantize}), cache {self.cache / GIB:.2f} GiB ({kv}), "
        parts += f"slots {self.slots / GIB:.2f} GiB"
        of = f" of {self.device / GIB:.1f} GiB" if self.device else ""
        return f"memory on each device{of}: {parts}; the cache holds {self.kv_tokens:,} tokens"


def limits_for(shape: ModelShape, options: Options, backend: Backend, page_count: int) -> Limits:
    """The sizes of the programs."""
    small = backend == "reference"
    shared = shape.heads // shape.kv_heads
    max_len = options.max_len or min(shape.max_position, 2048 if small else 8192)
    if max_len > shape.max_position:
        raise UserError(
            f"--max-len {max_len} is more than the {shape.max_position} positions of the model", "lower --max-len"
        )
    slots = options.max_seqs or (16 if small else 256)
    # NVIDIA: the tile of a block is 128 rows of the matrix units; TPU: as many queries as the kernel takes at once.
    block = 16 if small else 128 if backend == "tpu" else max(16, min(128, 128 // shared))
    # More tokens of prompts in a step: fewer steps that hold the others up, each for longer.
    most = options.prompt_tokens or (256 if small else 4096 if backend == "nvidia" else 2048)
    if slots < 1 or max_len < 2 or most < block:
        raise UserError(
            f"max_seqs {slots}, max_len {max_len} and {most} prompt tokens are too few",
            f"ask for at least one sequence, 2 tokens, and {block} prompt tokens in a step",
        )
    parts = (16, 4, 2, 1) if backend == "nvidia" else (8, 2, 1)
    blocks = tuple(sorted({max(1, most // block // part) for part in parts}))
    # Tiles of the matrix units have 16 rows on NVIDIA and 8 on TPUs: what is less costs as much, but for one row.
    sizes = (1, 16, 32, 64, 128, 256) if backend == "nvidia" else (1, 8, 32, 64, 128, 256)
    rows = tuple(sorted({min(slots, size) for size in sizes} | {slots}))
    page = options.page or (16 if small else 64)
    return Limits(
        slots=slots, max_len=max_len, page=page, pages=page_count, block=block, blocks=blocks, rows=rows,
        steps=options.decode_steps, draft=options.speculate,
    )  # fmt: skip


def compute_dtype(options: Options) -> Any:
    """bfloat16 on accelerators, float32 on CPUs, or what was asked for."""
    name = options.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    if name not in ("float32", "bfloat16", "float16"):
        raise UserError(f"unknown dtype {name!r}", "use bfloat16, float16 or float32")
    return jnp.dtype(name)


def budget(shape: ModelShape, options: Options, mesh: MeshShape, device_bytes: int) -> tuple[Budget, int]:
    """What goes where on one device, and how many pages the cache gets."""
    shape = spread(shape, mesh.tensor)
    backend = options.backend or cache_layout.default_backend()
    limits = limits_for(shape, options, backend, 2)
    dtype = compute_dtype(options)
    weights = bytes_per_chip(shape, mesh, SERVE_RULES, dtype.itemsize)
    if options.quantize == "int8":
        shrunk = sum(prod(shard_shape(p, mesh, SERVE_RULES)) for p in quantizable(shape))
        if not shape.embedding.tied and _alone(options, backend, mesh.tensor):
            shrunk += shape.d_model * shape.vocab  # `quantize_head`
        weights -= shrunk * (dtype.itemsize - 1)
    if options.adapters is not None:
        weights += adapter_bytes(shape, options.adapters, dtype.itemsize)
    slots = (limits.slots + 1) * (4 * shape.vocab // mesh.tensor + 4 * limits.max_len + 4096)
    # Logits of all rows and a step's activations, in float32, a few copies of each: found enough on the CPU and the H200.
    tokens = limits.slots + limits.blocks[-1] * limits.block
    widest = max(shape.d_ff, shape.heads * shape.d_head, shape.d_model)
    scratch = 4 * limits.slots * shape.vocab * 3 // mesh.tensor + tokens * widest * 4 * 6
    plan = plan_for(shape, options, mesh, limits)
    page_bytes = cache_layout.token_bytes(plan) * limits.page // (mesh.tensor if plan.heads % mesh.tensor == 0 else 1)
    every = limits.slots * limits.table_width + 1
    if options.pages:
        count = options.pages
    elif device_bytes:
        left = int(device_bytes * options.memory_fraction) - weights - slots - scratch
        count = min(every, left // page_bytes)
    else:
        count = min(every, max(2, 2 * GIB // page_bytes))
    if count < limits.table_width:
        raise UserError(
            f"{weights / GIB:.1f} GiB of weights leave no room for one request of {limits.max_len} tokens",
            "lower --max-len or --max-seqs, use --quantize int8, or more devices with --tp",
        )
    shown = Budget(
        device=device_bytes, weights=weights, cache=count * page_bytes, slots=slots,
        kv_tokens=(count - 1) * limits.page,
    )  # fmt: skip
    return shown, count


def plan_for(shape: ModelShape, options: Options, mesh: MeshShape, limits: Limits) -> Plan:
    """The layout of the cache of a model that was spread over the mesh."""
    backend = options.backend or cache_layout.default_backend()
    dtype = cache_layout.stored_dtype(options.kv, compute_dtype(options), backend)
    if backend == "tpu" and options.kv == "fp8" and shape.kv_heads // mesh.tensor < 2:
        raise UserError(
            f"the TPU kernel cannot read fp8 keys and values of a single head on a chip (--tp {mesh.tensor})",
            "lower --tp to half the key/value heads, or use --kv auto",
        )
    return Plan(
        backend, shape.layers, limits.pages, limits.page, shape.kv_heads, shape.d_head, dtype, options.interpret
    )


def device_bytes() -> int:
    """Memory of one device; 0 where it does not say (CPU)."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit", 0))


def build(
    shape: ModelShape, tree: Tree, options: Options, page_count: int, mesh: jax.sharding.Mesh | None = None
) -> Engine:
    """The engine, with nothing compiled yet."""
    backend = options.backend or cache_layout.default_backend()
    sizes = MeshShape(tensor=mesh.shape["tensor"]) if mesh is not None else MeshShape()
    tree, shape = spread_weights(tree, shape, mesh), spread(shape, sizes.tensor)
    limits = limits_for(shape, options, backend, page_count)
    alone = _alone(options, backend, sizes.tensor) and mesh is None
    compute = compute_for(options, limits.max_len, alone)
    if options.quantize == "int8":
        tree = quantize(tree, shape)
    if options.adapters is not None:
        tree = with_room(tree, shape, options.adapters, compute_dtype(options), mesh)
    if _unroll(options, backend):
        tree = unstack(tree, shape.layers)
    if heads_turned(options, backend):
        tree = turn_heads(tree, shape, mesh)
    if alone:
        tree = turn(fuse(tree), shape)
        if options.quantize == "int8":
            tree = quantize_head(tree)
        elif options.adapters is not None:
            tree = join(tree, shape)
    plan = plan_for(shape, options, sizes, limits)
    return Engine(shape, tree, limits, compute=compute, plan=plan, mesh=mesh, adapters=options.adapters)


def _unroll(options: Options, backend: Backend) -> bool:
    return options.unroll if options.unroll is not None else backend == "nvidia"


def heads_turned(options: Options, backend: Backend) -> bool:
    """Whether the matrices of heads are stored with the outputs first. CPUs would turn them back for every product."""
    return backend == "tpu" and not _unroll(options, backend)


def _alone(options: Options, backend: Backend, tensor: int) -> bool:
    """Whether matrices are laid out for one device; over a mesh each is split by itself."""
    return _unroll(options, backend) and tensor == 1


def compute_for(options: Options, max_len: int, turned: bool = False) -> Compute:
    """How the decoder computes for a server of requests that long; `turned`: over the tree of `turn`."""
    kernel: Kernel = "reference"  # of whole sequences: never called here
    backend = options.backend or cache_layout.default_backend()
    compute = Compute(dtype=compute_dtype(options), rules=SERVE_RULES, kernel=kernel, longest=max_len)
    if turned and backend == "nvidia":
        compute = replace(compute, add_norm=partial(norm_nvidia.add_norm, interpret=options.interpret))
    if options.quantize not in ("none", "int8"):
        raise UserError(f"unknown quantization {options.quantize!r}", "use none or int8")
    if options.quantize == "int8":
        compute = quantized_compute(compute, turned)
    return over_turned_heads(compute) if heads_turned(options, backend) else compute


def spread(shape: ModelShape, tensor: int) -> ModelShape:
    """The model as a tensor group of this size serves it: with as many key/value heads as divide over it."""
    repeats = kv_repeats(shape.heads, shape.kv_heads, tensor)
    return msgspec.structs.replace(shape, kv_heads=shape.kv_heads * repeats)


def spread_weights(tree: Tree, shape: ModelShape, mesh: jax.sharding.Mesh | None) -> Tree:
    """The weights of `spread`: those of each key/value head as often as it is there, one array at a time."""
    wide = spread(shape, mesh.shape["tensor"]) if mesh is not None else shape
    if mesh is None or wide == shape:
        return tree
    layers = dict(tree["layers"])
    for param in params(wide):
        if "kv_heads" not in param.axes:
            continue
        name, axis = param.name.removeprefix("layers/"), param.axes.index("kv_heads")
        place = named_sharding(mesh, param.axes, param.dims, SERVE_RULES)
        repeat = partial(jnp.repeat, repeats=wide.kv_heads // shape.kv_heads, axis=axis)
        layers[name] = jax.jit(repeat, out_shardings=place)(layers[name])
    return {**tree, "layers": layers}
