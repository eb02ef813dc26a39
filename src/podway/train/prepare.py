"""From a config to a run that is ready for its first step: everything that can fail before step 0 fails here.

1. Mesh, model, kernel and batch are held against the devices.
2. The data is opened (and tokenized where that was not done yet).
3. Host 0 prints what the run is: settings that are not the defaults (all of them go to a file), mesh, model, data.
4. The state is restored from the last checkpoint, or started.
"""

import os
from collections.abc import Sequence

import jax
import msgspec

from podway.files import write_atomically
from podway.model.download import fetch_shape
from podway.model.layout import MeshShape
from podway.model.mesh import make_mesh
from podway.model.params import count
from podway.model.shape import ModelShape
from podway.quantities import format_number
from podway.train import lora
from podway.train.checks import check_fit, check_kernel, resolve_mesh
from podway.train.config import TrainConfig
from podway.train.data import open_data
from podway.train.devices import count_slices, peak_flops
from podway.train.feed import Feed
from podway.train.goodput import Goodput
from podway.train.metrics import Meter, ProgressBar
from podway.train.output import Output
from podway.train.run import Run
from podway.train.saving import CheckpointHook
from podway.train.settings import changed_settings, config_yaml
from podway.train.shared import check_shared
from podway.train.state import start_state
from podway.train.step import Program

SETTINGS_FILE = "settings.yaml"  # under output: every setting, as `podway train` reads them


def prepare(config: TrainConfig, output: Output, launches: Sequence[float] = ()) -> tuple[Run, CheckpointHook]:
    """The run, and the hook that saves it. `launches` are the times at which this run was started, this one included."""
    shape = fetch_shape(config.model.name)
    devices = jax.devices()
    sizes = resolve_mesh(config, len(devices), count_slices(devices, os.environ))
    notes = check_fit(config, shape, sizes)
    if jax.default_backend() == "cpu" and len(devices) > 1 and config.precision.compute == "bfloat16":
        # XLA's CPU compiler aborts on sums of bfloat16 over devices (seen with jaxlib 0.10.2).
        precision = msgspec.structs.replace(config.precision, compute="float32")
        config = msgspec.structs.replace(config, precision=precision)
        notes.append("computing in float32: CPU devices do not sum bfloat16")
    if sizes.tile is not None and jax.default_backend() == "cpu":
        sizes = msgspec.structs.replace(sizes, tile=None)
        notes.append("mesh.tile is left out: CPU devices do not lie in a torus")
    if config.checkpoint.save or config.checkpoint.export:
        check_shared(config.output)
    check_kernel(config, jax.default_backend(), sizes)
    if config.lora.rank:
        lora.targets_of(config.lora, shape)
    program = Program(config, shape, make_mesh(sizes, devices))
    size, length = config.batch.global_size(len(devices)), config.batch.length
    feed = Feed(program, size, length)
    data = open_data(
        config.data, batch=size, seq=length, process=feed.process, processes=feed.processes, vocab=shape.vocab
    )
    meter = Meter(
        shape, batch=size, length=length, devices=len(devices), peak=peak_flops(devices[0].device_kind),
        warmup=config.logging.warmup, convention=config.logging.convention, goodput=Goodput(launches),
    )  # fmt: skip
    screen = ProgressBar(config.schedule.steps, first=jax.process_index() == 0)
    if screen.first:
        write_atomically(output.folder / SETTINGS_FILE, config_yaml(config))
        for line in _summary(config, sizes, shape, meter, [data.describe(), *notes]):
            screen.print_line(line)
    saving = CheckpointHook(config)
    with jax.set_mesh(program.mesh):
        state = saving.restore(program, data, screen) or start_state(program)
    meter.goodput.productive_seconds = saving.productive_seconds
    return Run(program, feed, data, state, meter, screen, output), saving


def _summary(config: TrainConfig, mesh: MeshShape, shape: ModelShape, meter: Meter, notes: Sequence[str]) -> list[str]:
    about, *rest = notes
    return [
        f"settings that are not the defaults (all of them: {config.output}/{SETTINGS_FILE}):",
        *(f"  {line}" for line in changed_settings(config)),
        f"mesh: {mesh} over {mesh.chips} x {jax.devices()[0].device_kind}",
        f"number parameters: {format_number(count(shape))}",
        f"data: {about}",
        *(f"note: {note}" for note in rest),
        f"per step and device: {format_number(meter.flops / mesh.chips)} FLOPs ({config.logging.convention} attention)",
    ]
