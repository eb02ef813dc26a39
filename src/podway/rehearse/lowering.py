"""From a `Rehearsal` to programs that the compiler can be given: the trainer's step, or one of the engine's.

The devices are described by libtpu (`topology`), not attached: nothing is allocated, and every array is only a shape, a type
and a sharding. What is lowered is what `podway train` and `podway serve` themselves lower.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from podway.catalog.slices import Slice
from podway.decoding import from_plain
from podway.errors import UserError
from podway.model.families import find_model
from podway.model.mesh import described, make_mesh
from podway.rehearse import maxtext_2023
from podway.rehearse.fabric import Place
from podway.rehearse.rehearsal import Rehearsal
from podway.serve import lower_aot
from podway.serve.build import Options
from podway.train.checks import check_fit, check_kernel, resolve_mesh
from podway.train.config import TrainConfig
from podway.train.settings import read_config
from podway.train.state import abstract_state
from podway.train.step import Program, abstract_batch, make_step


class Prepared(NamedTuple):
    """A program, and where the devices it is for lie, in the order of its own numbers."""

    name: str
    lowered: jax.stages.Lowered
    places: tuple[Place, ...]


def prepare(rehearsal: Rehearsal) -> Prepared:
    """The program of a rehearsal."""
    return _serving(rehearsal) if rehearsal.what == "serve" else _training(rehearsal)


def read_settings(rehearsal: Rehearsal) -> TrainConfig:
    """The config that the trainer would read."""
    return read_config(None, [f"model.name={rehearsal.model}", *rehearsal.settings, "model.kernel=splash"])


def _training(rehearsal: Rehearsal) -> Prepared:
    slice, shape = rehearsal.tpu, find_model(rehearsal.model)
    config = read_settings(rehearsal)
    devices = described(slice, rehearsal.slices)
    sizes = resolve_mesh(config, len(devices), rehearsal.slices)
    check_fit(config, shape, sizes)
    check_kernel(config, "tpu", sizes)
    mesh = make_mesh(sizes, devices)
    batch = config.batch.global_size(len(devices))
    with jax.set_mesh(mesh):
        if rehearsal.program == "maxtext-2023":
            lowered = maxtext_2023.lower(shape, mesh, batch, config.batch.length)
        else:
            program = Program(config, shape, mesh)
            asked = jax.ShapeDtypeStruct((mesh.size,), jnp.int32)  # type: ignore[no-untyped-call]
            arrays = abstract_batch(program, batch, config.batch.length)
            state = abstract_state(program)
            lowered = make_step(program, state).lower(state, arrays, asked)  # type: ignore[attr-defined]
    return Prepared("train step", lowered, places_of(mesh.devices.flat, slice))


def _serving(rehearsal: Rehearsal) -> Prepared:
    made = _engine_programs(rehearsal)
    if rehearsal.part not in made:
        raise UserError(f"the engine has no program {rehearsal.part!r}", f"it has {', '.join(made)}")
    slice = rehearsal.tpu
    devices = described(slice)[: rehearsal.tensor or slice.devices]
    return Prepared(rehearsal.part, made[rehearsal.part](), places_of(devices, slice))


def engine_parts(rehearsal: Rehearsal) -> list[str]:
    """The names of all programs of an engine."""
    return list(_engine_programs(rehearsal))


def _engine_programs(rehearsal: Rehearsal) -> dict[str, Callable[[], jax.stages.Lowered]]:
    options = from_plain(rehearsal.options, Options)
    return dict(lower_aot.programs(find_model(rehearsal.model), rehearsal.tpu, options, rehearsal.tensor))


def places_of(devices: Iterable[jax.Device], slice: Slice) -> tuple[Place, ...]:
    """(slice, x, y[, z][, core]) of each device."""
    axes, several = len(slice.topology), slice.generation_facts.devices_per_chip > 1
    found = []
    for device in devices:
        core = (device.core_on_chip,) if several else ()
        found.append((getattr(device, "slice_index", 0) or 0, *device.coords[:axes], *core))
    return tuple(found)
