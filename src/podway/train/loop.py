"""The training loop: everything that happens between a config and its last step.

1. A run that is finished already says so. Otherwise `prepare.py` makes the mesh, opens the data, and starts or restores
   the state.
2. `run_steps` goes through the steps. The device works one step ahead: while it computes step n, the host reads what
   step n - 1 reported, so that nothing waits for a print or a file.
3. After each step the hooks of the run look at it: metrics, progress, checkpoint, evaluation, profile, NaN guard.
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

import jax
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-untyped]
from jax.experimental import multihost_utils

from podway.errors import UserError
from podway.model.decoder import Tree
from podway.model.download import fetch
from podway.model.mesh import spec
from podway.train import lora
from podway.train.adapter import save_adapter
from podway.train.checks import check_settings
from podway.train.config import TrainConfig
from podway.train.data import own_template, tokenizer_folder
from podway.train.hooks import Hook, make_hooks
from podway.train.output import Output, RunRecord, identity, read_record, write_record
from podway.train.prepare import prepare
from podway.train.run import Run
from podway.train.saving import CheckpointHook
from podway.train.step import Batch, State, StepMetrics, make_step

COMPILED_WITHIN_S = 3600  # a host that has not compiled its step an hour after another is lost
STOPPED = 143  # as a shell counts a process that SIGTERM ended: an orchestrator sees that the run was not done
_GO, _FINISHED, _EXPORTED = range(3)  # what host 0 finds in the output

Step = Callable[[State, Batch, jax.Array], tuple[State, StepMetrics]]


def train(config: TrainConfig) -> int:
    """Train from a config to its end; the exit code."""
    check_settings(config)
    output = Output(config)
    launches = _begin(config, output)
    if launches is None:
        return 0
    run, saving = prepare(config, output, launches)
    with jax.set_mesh(run.program.mesh), _signals(run.stop):
        hooks = [saving, *make_hooks(run)]
        try:
            stopped = run_steps(run, hooks)
            finish(run, saving, stopped)
        finally:
            for hook in hooks:
                hook.close()
        if run.screen.first:
            if not stopped:
                write_record(output.folder, RunRecord(settings=identity(config), launches=launches, finished=run.steps))
            output.publish()
    return STOPPED if stopped else 0


def _begin(config: TrainConfig, output: Output) -> tuple[float, ...] | None:
    """When this run was launched, now included; None where it is finished already.

    Host 0 decides and all follow: the others may not see its folder.
    """
    verdict = _GO
    launches: tuple[float, ...] = (time.time(),)
    if jax.process_index() == 0:
        output.fetch()
        record = read_record(output.folder) if config.checkpoint.resume else None
        if record is not None and record.is_finished(config):
            verdict = _FINISHED
            print(f"this run is finished: {config.schedule.steps} steps, results in {config.output}", flush=True)
            print("  to run it again, set checkpoint.resume=false or another output", flush=True)
        elif config.checkpoint.export and output.exists("model"):
            verdict = _EXPORTED
        elif record is not None and record.finished is None and config.checkpoint.save:
            launches = (*record.launches, *launches)
        if verdict == _GO:
            write_record(output.folder, RunRecord(settings=identity(config), launches=launches))
    if jax.process_count() > 1:
        verdict = int(multihost_utils.broadcast_one_to_all(np.int32(verdict)))
    if verdict == _EXPORTED:
        raise UserError(
            f"{config.output}/model exists already, and the run exports to it",
            "remove it, choose another output, or set checkpoint.export=false",
        )
    return None if verdict == _FINISHED else launches


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
                pending, ended = None, time.monotonic()
                run.meter.add_pause(ended - began)
                began = ended
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
    """Wait for a step and pass its metrics to the hooks; the time at which it was done."""
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
        export(run)
    run.screen.print_line(str(run.meter.goodput))
    run.screen.print_line(run.meter.block(run.data.epoch(int(run.state.step))))


def export(run: Run) -> None:
    """The trained model as Hugging Face files, and LoRA's adapters as PEFT's; every host takes part."""
    from podway.model.export import save_weights  # a run that exports nothing needs no safetensors

    config, output = run.program.config, run.output
    wanted = (
        ("merged",)
        if not config.lora.rank
        else {"both": ("adapter", "merged")}.get(config.lora.export, (config.lora.export,))
    )
    if "adapter" in wanted:
        save_adapter(run.state.trained, config, run.program.shape, output.folder / "adapter")
        run.screen.print_line(f"exported to {config.output}/adapter")
    if "merged" in wanted:
        source = fetch(config.model.weights) if config.model.weights else tokenizer_folder(config.data)
        template = own_template(config.data) if config.data.form == "chat" else None
        kind = np.dtype(config.checkpoint.export_dtype)
        place, shape = output.folder / "model", run.program.shape
        save_weights(final_weights(run), shape, place, source=source, template=template, dtype=kind)
        run.screen.print_line(f"exported to {config.output}/model")


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
