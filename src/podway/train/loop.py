"""The training loop: everything that happens between a config and its last step.

1. `prepare` makes the mesh, checks that the run fits it, opens the data, and starts or restores the state.
2. `run_steps` goes through the steps. The device works one step ahead: while it computes step n, the host reads what
   step n - 1 said, so that nothing waits for a print or a file.
3. After each step the hooks of the run look at it: journal, progress, checkpoint, evaluation, profile, NaN guard.
4. `finish` saves the last state, exports the model, and prints the last words.

Ctrl-C or SIGTERM (a preemption) sets a flag. It travels through the next step to all hosts, they leave the loop after
the same step, save, and exit with code 143.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import jax
import msgspec
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-untyped]

from podway.model.decoder import Tree
from podway.model.families import find_model
from podway.model.mesh import make_mesh, spec
from podway.model.params import count
from podway.train import lora
from podway.train.checks import check_fit, check_kernel, check_settings, resolve_mesh
from podway.train.config import TrainConfig
from podway.train.data import open_data
from podway.train.devices import peak_flops
from podway.train.feed import Feed
from podway.train.hooks import Hook, make_hooks
from podway.train.metrics import Meter, ProgressBar
from podway.train.run import Run
from podway.train.saving import CheckpointHook
from podway.train.settings import print_config
from podway.train.shared import check_shared
from podway.train.state import start_state
from podway.train.step import Batch, Program, State, StepMetrics, make_step

COMPILED_WITHIN_S = 3600  # a host that has not compiled its step an hour after another is lost
STOPPED = 143  # as a shell counts a process that SIGTERM ended: an orchestrator sees that the run was not done

Step = Callable[[State, Batch, jax.Array], tuple[State, StepMetrics]]


def train(config: TrainConfig) -> int:
    """Train from a config to its end; the exit code."""
    check_settings(config)
    run, saving = prepare(config)
    with jax.set_mesh(run.program.mesh), _signals(run.stop):
        hooks = [saving, *make_hooks(run)]
        try:
            stopped = run_steps(run, hooks)
            finish(run, saving, stopped)
        finally:
            for hook in hooks:
                hook.close()
    return STOPPED if stopped else 0


def prepare(config: TrainConfig) -> tuple[Run, CheckpointHook]:
    """Everything that can fail before step 0 does it here."""
    shape = find_model(config.model.name)
    devices = jax.devices()
    slices = len({getattr(device, "slice_index", 0) or 0 for device in devices})
    sizes = resolve_mesh(config, len(devices), slices)
    notes = check_fit(config, shape, sizes)
    if jax.default_backend() == "cpu" and len(devices) > 1 and config.precision.compute == "bfloat16":
        # XLA's CPU compiler aborts on sums of bfloat16 over devices (seen with jaxlib 0.10.2).
        precision = msgspec.structs.replace(config.precision, compute="float32")
        config = msgspec.structs.replace(config, precision=precision)
        notes.append("computing in float32: CPU devices do not sum bfloat16")
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
        warmup=config.logging.warmup, convention=config.logging.convention,
    )  # fmt: skip
    screen = ProgressBar(config.schedule.steps)
    if jax.process_index() == 0:
        screen.print_line(print_config(config))
        screen.print_line(f"mesh: {sizes} over {len(devices)} x {devices[0].device_kind}")
        screen.print_line(f"number parameters: {count(shape) / 1e9:.3f} billion")
        screen.print_line(f"data: {data.describe()}")
        for note in notes:
            screen.print_line(f"note: {note}")
        flops = meter.flops / len(devices) / 1e12
        screen.print_line(f"per step and device: {flops:.2f} TFLOPs ({config.logging.convention} attention)")
    saving = CheckpointHook(config)
    with jax.set_mesh(program.mesh):
        state = saving.restore(program, screen) or start_state(program)
    return Run(program, feed, data, state, meter, screen), saving


def run_steps(run: Run, hooks: Sequence[Hook]) -> bool:
    """All steps that are left; True when the run was asked to stop before the last."""
    step, first = make_step(run.program, run.state), int(run.state.step)
    pending: StepMetrics | None = None
    began = time.monotonic()
    with run.data.prefetch(first) as batches:
        for number, rows in zip(range(first, run.steps), batches, strict=False):
            for hook in hooks:
                hook.before(run, number)
            arguments = (run.state, run.feed.place(rows), _stop_flags(run))
            if number == first and jax.process_count() > 1:
                step = _compile_on_all_hosts(step, arguments)
            run.state, metrics = step(*arguments)
            del arguments  # the step has used the state up
            if pending is not None:
                began = _publish(run, hooks, number - 1, pending, began)
                if pending.stop:
                    break
            pending = metrics
            if any(hook.wants(number) for hook in hooks):  # a hook needs this very state: do not run ahead of it
                began = _publish(run, hooks, number, metrics, began)
                for hook in hooks:
                    hook.at(run, number)
                pending, began = None, time.monotonic()
                if metrics.stop:
                    break
    if pending is not None:
        _publish(run, hooks, int(run.state.step) - 1, metrics, began)
    return int(run.state.step) < run.steps


def _compile_on_all_hosts(step: Step, arguments: tuple[State, Batch, jax.Array]) -> Step:
    """The step, compiled on every host before any of them begins.

    Hosts compile for different lengths of time, and collectives between CPU devices give up on one that is 30 s late.
    """
    compiled: Step = step.lower(*arguments).compile()  # type: ignore[attr-defined]
    ocp.multihost.get_barrier_sync_fn()(key="podway:compiled", timeout_ms=COMPILED_WITHIN_S * 1000)
    return compiled


def _publish(run: Run, hooks: Sequence[Hook], number: int, metrics: StepMetrics, began: float) -> float:
    """Wait for a step, and tell the hooks what it said; the time at which it was done."""
    read = jax.device_get(metrics)
    now = time.monotonic()
    report = run.meter.report(
        number, max(now - began, 1e-9), loss=float(read.loss), grad_norm=float(read.grad_norm),
        rate=float(read.rate), good=bool(read.good),
    )  # fmt: skip
    for hook in hooks:
        hook.after(run, report)
    return now


def _stop_flags(run: Run) -> jax.Array:
    """One number for each device: whether its host was asked to stop."""
    mesh = run.program.mesh
    where = jax.sharding.NamedSharding(mesh, spec(mesh.axis_names))
    mine = np.full((1,), int(run.stop.is_set()), np.int32)
    return jax.make_array_from_callback((mesh.size,), where, lambda _: mine)


def finish(run: Run, saving: CheckpointHook, stopped: bool) -> None:
    """Save, export, and say how it went."""
    saving.save(run)
    saving.wait()
    config = run.program.config
    if stopped:
        run.screen.print_line(f"asked to stop: left after step {int(run.state.step) - 1} of {run.steps}")
    elif config.checkpoint.export:
        from podway.model.export import save_weights  # a run that exports nothing needs no safetensors

        source = Path(config.model.weights).expanduser() if config.model.weights else None
        kind = config.checkpoint.export_dtype
        save_weights(final_weights(run), run.program.shape, run.folder / "model", source=source, dtype=np.dtype(kind))
        run.screen.print_line(f"exported to {run.folder / 'model'}")
    run.screen.print_line(run.meter.block(run.data.epoch(int(run.state.step))))


def final_weights(run: Run) -> Tree:
    """The plain weights of the trained model; LoRA's are merged into its base."""
    state, config = run.state, run.program.config
    if not config.lora.rank:
        return state.trained
    merge: Callable[[Tree, Tree], Tree] = jax.jit(
        lambda trained, frozen: lora.merge(trained, frozen, config.lora, run.program.shape)
    )
    return merge(state.trained, state.frozen)


@contextmanager
def _signals(stop: threading.Event) -> Iterator[None]:
    """SIGTERM and the first Ctrl-C ask the run to stop; a second Ctrl-C ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, _: object) -> None:
        if number == signal.SIGINT and stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        print("asked to stop: saving after this step", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
