"""Every program of a server, lowered for a slice of TPUs that is not here.

    programs(find_model("llama3.1-70b"), find_slice("v6e-16"))  ->  [("fill slots", lower), ("decode 1 rows", lower), ...]

1. The slice's topology gives devices to lower for (libtpu's compiler needs no chip); the model is split over all of them, or
   over `tensor` of them where the server would hold several replicas.
2. The budget of a start-up on those chips says how many pages the cache has; nothing is allocated.
3. The same functions that the engine compiles at its start are lowered over abstract arrays (`Limits.programs`).

`compile()` of each then says what the program needs. Call this in a process whose environment keeps libtpu from looking for a
chip (TPU_SKIP_MDS_QUERY=1 and the rest: `tools.bench.aot.environment`).
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import msgspec
from jax.stages import Lowered

from podway.catalog.slices import Slice
from podway.model import decoder
from podway.model.decoder import Tree
from podway.model.layout import SERVE_RULES, MeshShape
from podway.model.mesh import abstract_array, described, make_mesh, named_sharding
from podway.model.params import params
from podway.model.shape import ModelShape
from podway.serve.build import Budget, Options, budget, compute_dtype, compute_for, limits_for, plan_for, spread
from podway.serve.engine import lower_fill_slots, lower_step
from podway.serve.programs import Setup
from podway.serve.quantized import quantizable
from podway.serve.weight_layout import HEADS, turned_place


def programs(
    shape: ModelShape, slice: Slice, options: Options | None = None, tensor: int | None = None
) -> list[tuple[str, Callable[[], Lowered]]]:
    """The names of all programs that `podway serve` compiles on this slice with these options, and what lowers each."""
    options = on_tpu(options or Options())
    sizes = MeshShape(tensor=tensor or slice.devices)
    _, pages = room(shape, slice, options, sizes.tensor)
    shape = spread(shape, sizes.tensor)
    limits = limits_for(shape, options, "tpu", pages)
    setup = Setup(shape, limits, plan_for(shape, options, sizes, limits), compute_for(options, limits.max_len))
    mesh = make_mesh(sizes, described(slice)[: sizes.tensor])
    tree = abstract_tree(shape, options, mesh)

    def under_mesh(lower: Callable[[], Lowered]) -> Callable[[], Lowered]:
        def run() -> Lowered:
            with jax.set_mesh(mesh):
                return lower()

        return run

    found = [("fill slots", under_mesh(partial(lower_fill_slots, setup, mesh)))]
    for rows, blocks in limits.programs():
        prompts = f", {blocks * limits.block} prompt tokens" if blocks else ""
        name = f"{'mixed' if blocks else 'decode'} {rows} rows{prompts}"
        found.append((name, under_mesh(partial(lower_step, setup, tree, rows, blocks, mesh))))
    return found


def room(shape: ModelShape, slice: Slice, options: Options, tensor: int) -> tuple[Budget, int]:
    """The memory of one chip of the slice as `podway serve` would give it out, and the pages of the cache."""
    facts = slice.generation_facts
    usable = (facts.hbm_usable_bytes or facts.chip_hbm_bytes) // facts.devices_per_chip
    return budget(shape, on_tpu(options), MeshShape(tensor=tensor), usable)


def on_tpu(options: Options) -> Options:
    """The options with what a TPU would choose where the machine at hand would choose otherwise."""
    return msgspec.structs.replace(options, backend="tpu", dtype=options.dtype or "bfloat16")


def abstract_tree(shape: ModelShape, options: Options, mesh: jax.sharding.Mesh) -> Tree:
    """The weights as the engine gets them, without their numbers."""
    tree = decoder.abstract(shape, compute_dtype(options), mesh, SERVE_RULES)
    layers, small = dict(tree["layers"]), {param.name for param in quantizable(shape)}
    for param in params(shape):
        name = param.name.removeprefix("layers/")
        if name not in layers or not param.inputs:
            continue
        dims, axes = turned_place(param) if name in HEADS else (param.dims, param.axes)
        quantized = options.quantize == "int8" and param.name in small
        dtype = jnp.int8 if quantized else layers[name].dtype
        layers[name] = abstract_array(dims, dtype, named_sharding(mesh, axes, dims, SERVE_RULES))
        if quantized:
            kept = [0, *range(1 + param.inputs, len(param.dims))]
            dims, axes = tuple(param.dims[i] for i in kept), tuple(param.axes[i] for i in kept)
            layers[f"{name}_scale"] = abstract_array(dims, jnp.float32, named_sharding(mesh, axes, dims, SERVE_RULES))
    return {**tree, "layers": layers}
