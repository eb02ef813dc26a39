"""What hangs on the loop: each hook is one periodic concern, and knows nothing of the others.

A hook may look at a step before it is dispatched (`before`) and after it is done (`after`). One that needs the state of
a certain step says so (`wants`); the loop then waits for that step and calls `at`.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import jax
import msgspec

from podway.errors import UserError
from podway.train.checkpoint import Checkpointer
from podway.train.config import TrainConfig
from podway.train.metrics import Journal, ProgressBar, StepReport
from podway.train.state import abstract_state, start_frozen
from podway.train.step import Program, State, make_eval

if TYPE_CHECKING:
    from podway.train.loop import Run


class Hook(Protocol):
    """Something that happens beside the steps."""

    def before(self, run: "Run", number: int) -> None: ...
    def after(self, run: "Run", report: StepReport) -> None: ...
    def wants(self, number: int) -> bool: ...
    def at(self, run: "Run", number: int) -> None: ...
    def close(self) -> None: ...


class Quiet:
    """Does nothing at any time: what hooks start from."""

    def before(self, run: "Run", number: int) -> None:
        """Just before step `number` is dispatched."""

    def after(self, run: "Run", report: StepReport) -> None:
        """A step is done and has been read; the device is already at the next one."""

    def wants(self, number: int) -> bool:
        """Whether `at` must be called after step `number`, before the next one starts."""
        return False

    def at(self, run: "Run", number: int) -> None:
        """Step `number` is done, and `run.state` is its state."""

    def close(self) -> None:
        """The run is over, well or not."""


def hooks_of(run: "Run") -> list[Hook]:
    """The hooks that the config asks for."""
    config = run.program.config
    journal = Journal(run.folder, tensorboard=config.logging.tensorboard) if jax.process_index() == 0 else None
    hooks: list[Hook] = [Guard(config), run.saving]
    if config.evaluation.every:
        hooks.append(Evaluation(run, journal))
    if journal is not None:
        hooks.append(Telling(config, journal, run.screen))
    if config.logging.profile_at:
        hooks.append(Profile(config, run.folder))
    return hooks


class Telling(Quiet):
    """The line of each step, the progress bar, and the journal."""

    def __init__(self, config: TrainConfig, journal: Journal, screen: ProgressBar) -> None:
        self.every, self.screen, self.journal = config.logging.every, screen, journal

    def after(self, run: "Run", report: StepReport) -> None:
        if report.step % self.every == 0 or report.skipped or report.step == run.steps - 1:
            self.screen.say(report.line())
            self.journal.step(report)
        self.screen.draw(report.step + 1, report)

    def close(self) -> None:
        self.journal.close()


class Guard(Quiet):
    """Gives up when nothing has come of several steps, one after the other."""

    def __init__(self, config: TrainConfig) -> None:
        self.limit, self.bad = config.logging.bad_steps, 0

    def after(self, run: "Run", report: StepReport) -> None:
        self.bad = self.bad + 1 if report.skipped else 0
        if self.bad >= self.limit:
            raise UserError(
                f"the loss or its gradient was not a number in {self.bad} steps up to step {report.step}; the weights "
                "are as they were before them",
                "lower optimizer.rate, add schedule.warmup, or look at the data of these steps",
            )


class Saving(Quiet):
    """Checkpoints under `output/checkpoints`: the step, what is trained, and the optimizer's state."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.every = config, config.checkpoint.every
        self.keeper: Checkpointer | None = None
        self.saved: int | None = None
        if config.checkpoint.save:
            self.keeper = Checkpointer(config.checkpoints, keep=config.checkpoint.keep, every=None)

    def restore(self, program: Program, screen: ProgressBar) -> State | None:
        """The last complete checkpoint, or None where there is none to resume from."""
        latest = self.keeper.latest() if self.keeper and self.config.checkpoint.resume else None
        if self.keeper is None or latest is None:
            return None
        wanted = abstract_state(program)
        kept, extra = self.keeper.restore(latest, wanted._replace(frozen={}))
        _check_same_model(extra, self.config)
        self.saved = latest
        if jax.process_index() == 0:
            screen.say(f"resumed from step {latest} in {self.config.output}")
        return State(kept.step, kept.trained, kept.moments, start_frozen(program))

    def wants(self, number: int) -> bool:
        return self.keeper is not None and self.every > 0 and (number + 1) % self.every == 0

    def at(self, run: "Run", number: int) -> None:
        if self.wants(number):
            self.save(run)

    def save(self, run: "Run") -> None:
        """Save the state as it is, unless that was done already."""
        step = int(run.state.step)
        if self.keeper is not None and step != self.saved:
            extra = {"config": msgspec.to_builtins(self.config), "seconds": run.meter.counted_seconds}
            self.keeper.save(step, run.state._replace(frozen={}), extra=extra, force=True)
            self.saved = step

    def wait(self) -> None:
        """Until what is being saved is safe."""
        if self.keeper is not None:
            self.keeper.wait()

    def close(self) -> None:
        if self.keeper is not None:
            self.keeper.close()


def _check_same_model(extra: dict[str, object], config: TrainConfig) -> None:
    """A checkpoint of another model would be refused by its arrays, but not in words."""
    kept = extra.get("config")
    before = json.loads(json.dumps(kept)).get("model", {}).get("name") if isinstance(kept, dict) else None
    if before is not None and before != config.model.name:
        raise UserError(
            f"{config.output} holds checkpoints of {before}, and this run trains {config.model.name}",
            "choose another output, or set checkpoint.resume=false",
        )


class Evaluation(Quiet):
    """Loss on held-out rows, every so many steps."""

    def __init__(self, run: "Run", journal: Journal | None) -> None:
        self.config, self.journal = run.program.config.evaluation, journal
        self.run_batch = make_eval(run.program)

    def wants(self, number: int) -> bool:
        return (number + 1) % self.config.every == 0

    def at(self, run: "Run", number: int) -> None:
        if not self.wants(number):
            return
        lost = tokens = 0.0
        for rows in run.data.eval_batches(self.config.batches):
            entropy, seen = jax.device_get(self.run_batch(run.state, run.feed.place(rows)))
            lost, tokens = lost + float(entropy), tokens + float(seen)
        if not tokens:
            raise UserError("there is nothing to evaluate on", "set data.eval_fraction, or evaluation.every=0")
        if self.journal is not None:
            run.screen.say(f"evaluation after step {number}: loss: {lost / tokens:.4f} over {int(tokens)} tokens")
            self.journal.evaluation(number, lost / tokens, int(tokens))


class Profile(Quiet):
    """A trace of some steps under `output/profile`, for TensorBoard or Perfetto."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        self.first = config.logging.profile_at
        self.last = self.first + config.logging.profile_steps - 1
        self.folder, self.running = folder / "profile", False

    def before(self, run: "Run", number: int) -> None:
        if number == self.first:
            jax.profiler.start_trace(str(self.folder))
            self.running = True

    def wants(self, number: int) -> bool:
        return self.running and number == self.last

    def at(self, run: "Run", number: int) -> None:
        if self.wants(number):
            self.close()
            run.screen.say(f"profile of steps {self.first} to {self.last} in {self.folder}")

    def close(self) -> None:
        if self.running:
            jax.profiler.stop_trace()  # type: ignore[no-untyped-call]
            self.running = False
