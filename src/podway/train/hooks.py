"""Periodic concerns of the training loop, one class each: logging, evaluation, profiling, the guard against divergence.

A hook may look at a step before it is dispatched (`before`) and after it is done (`after`). One that needs the state of
a certain step says so (`wants`); the loop then waits for that step and calls `at`.
"""

from pathlib import Path
from typing import Protocol

import jax

from podway.errors import UserError
from podway.profile_trace import classes_of
from podway.train.config import TrainConfig
from podway.train.metrics import MetricsWriter, ProgressBar, StepReport
from podway.train.run import Run
from podway.train.step import make_eval


class Hook(Protocol):
    """A periodic concern of a run."""

    def before(self, run: Run, number: int) -> None: ...
    def after(self, run: Run, report: StepReport) -> None: ...
    def wants(self, number: int) -> bool: ...
    def at(self, run: Run, number: int) -> None: ...
    def close(self) -> None: ...


class BaseHook:
    """Does nothing; hooks override what they need."""

    def before(self, run: Run, number: int) -> None:
        """Just before step `number` is dispatched."""

    def after(self, run: Run, report: StepReport) -> None:
        """A step is done and has been read; the device is already at the next one."""

    def wants(self, number: int) -> bool:
        """Whether `at` must be called after step `number`, before the next one starts."""
        return False

    def at(self, run: Run, number: int) -> None:
        """Step `number` is done, and `run.state` is its state."""

    def close(self) -> None:
        """The run is over, well or not."""


def make_hooks(run: Run) -> list[Hook]:
    """The hooks that the config asks for; checkpoints are the loop's own (`saving.py`)."""
    config = run.program.config
    writer = MetricsWriter(run.folder, tensorboard=config.logging.tensorboard) if jax.process_index() == 0 else None
    hooks: list[Hook] = [DivergenceGuard(config)]
    if config.evaluation.every:
        hooks.append(EvaluationHook(run, writer))
    if writer is not None:
        hooks.append(LoggingHook(config, writer, run.screen))
    if config.logging.profile_at:
        hooks.append(ProfileHook(config, run.folder))
    return hooks


class LoggingHook(BaseHook):
    """The line of each step, the progress bar, and the writer."""

    def __init__(self, config: TrainConfig, writer: MetricsWriter, screen: ProgressBar) -> None:
        self.every, self.screen, self.writer = config.logging.every, screen, writer

    def after(self, run: Run, report: StepReport) -> None:
        trouble = run.output.publish_sometimes()
        if trouble is not None:
            self.screen.print_line(f"note: {trouble}")
        if report.step % self.every == 0 or report.skipped or report.step == run.steps - 1:
            self.screen.print_line(report.line())
            self.writer.step(report)
        self.screen.draw(report.step + 1, report)

    def close(self) -> None:
        self.writer.close()


class DivergenceGuard(BaseHook):
    """Gives up when nothing has come of several steps, one after the other."""

    def __init__(self, config: TrainConfig) -> None:
        self.limit, self.bad = config.logging.bad_steps, 0

    def after(self, run: Run, report: StepReport) -> None:
        self.bad = self.bad + 1 if report.skipped else 0
        if self.bad >= self.limit:
            raise UserError(
                f"the loss or its gradient was not a number in {self.bad} steps up to step {report.step}; the weights "
                "are as they were before them",
                "lower optimizer.rate, add schedule.warmup, or look at the data of these steps",
            )


class EvaluationHook(BaseHook):
    """Loss on held-out rows, every so many steps."""

    def __init__(self, run: Run, writer: MetricsWriter | None) -> None:
        self.config, self.writer = run.program.config.evaluation, writer
        self.run_batch = make_eval(run.program)

    def wants(self, number: int) -> bool:
        return (number + 1) % self.config.every == 0

    def at(self, run: Run, number: int) -> None:
        if not self.wants(number):
            return
        lost = tokens = 0.0
        for rows in run.data.eval_batches(self.config.batches):
            entropy, seen = jax.device_get(self.run_batch(run.state, run.feed.place(rows)))
            lost, tokens = lost + float(entropy), tokens + float(seen)
        if not tokens:
            raise UserError("there is nothing to evaluate on", "set data.eval_fraction, or evaluation.every=0")
        if self.writer is not None:
            run.screen.print_line(
                f"evaluation after step {number}: loss: {lost / tokens:.4f} over {int(tokens)} tokens"
            )
            self.writer.evaluation(number, lost / tokens, int(tokens))


class ProfileHook(BaseHook):
    """A trace of some steps under `output/profile`, for TensorBoard or Perfetto."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        self.first = config.logging.profile_at
        self.last = self.first + config.logging.profile_steps - 1
        self.folder, self.running = folder / "profile", False

    def before(self, run: Run, number: int) -> None:
        if number == self.first:
            jax.profiler.start_trace(str(self.folder))
            self.running = True

    def wants(self, number: int) -> bool:
        return self.running and number == self.last

    def at(self, run: Run, number: int) -> None:
        if self.wants(number):
            self.close()
            run.screen.print_line(profile_line(self.first, self.last, self.folder))

    def close(self) -> None:
        if self.running:
            jax.profiler.stop_trace()  # type: ignore[no-untyped-call]
            self.running = False


def profile_line(first: int, last: int, folder: Path) -> str:
    """Where a profile is, and the seconds of a step by kind of work where it is of a TPU."""
    try:
        found = classes_of(folder.parent) or {}
    except UserError:
        found = {}  # the profile is still there for TensorBoard and Perfetto
    parts = ", ".join(f"{name} {seconds:.6f} s" for name, seconds in found.items())
    return f"profile of steps {first} to {last}{f': {parts}' if parts else ''} in {folder}"
