"""When a run saves and what it resumes from: the checkpoint hook of the training loop.

A checkpoint holds the step, what is trained and the optimizer's state (`checkpoint.py` writes them), and beside them the
config it was made with.
"""

import json

import msgspec

from podway.errors import UserError
from podway.train.checkpoint import Checkpointer
from podway.train.config import TrainConfig
from podway.train.data import Data
from podway.train.hooks import BaseHook
from podway.train.metrics import ProgressBar
from podway.train.run import Run
from podway.train.state import abstract_state, start_frozen
from podway.train.step import Program, State


class CheckpointHook(BaseHook):
    """Checkpoints under `output/checkpoints`: the step, what is trained, and the optimizer's state."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.every = config, config.checkpoint.every
        self.checkpointer: Checkpointer | None = None
        self.saved: int | None = None
        self.productive_seconds = 0.0  # of the steps that the restored checkpoint holds
        if config.checkpoint.save:
            self.checkpointer = Checkpointer(config.checkpoints, keep=config.checkpoint.keep, every=None)

    def restore(self, program: Program, data: Data, screen: ProgressBar) -> State | None:
        """The last complete checkpoint, or None where there is none to resume from; `data` goes on where it was."""
        latest = self.checkpointer.latest() if self.checkpointer and self.config.checkpoint.resume else None
        if self.checkpointer is None or latest is None:
            return None
        wanted = abstract_state(program)
        kept, extra = self.checkpointer.restore(latest, wanted._replace(frozen={}))
        _check_same_model(extra, self.config)
        row = _next_row(extra.get("data"), data, latest, self.config)
        data.resume(latest, row)
        seconds = extra.get("productive_seconds")
        self.productive_seconds = float(seconds) if isinstance(seconds, int | float) else 0.0
        self.saved = latest
        screen.print_line(f"resumed from step {latest} in {self.config.output}, row {row:,} of the data")
        return State(kept.step, kept.trained, kept.moments, start_frozen(program))

    def wants(self, number: int) -> bool:
        return self.checkpointer is not None and self.every > 0 and (number + 1) % self.every == 0

    def at(self, run: Run, number: int) -> None:
        if self.wants(number):
            self.save(run)

    def save(self, run: Run) -> None:
        """Save the state as it is, unless that was done already."""
        step = int(run.state.step)
        if self.checkpointer is not None and step != self.saved:
            extra: dict[str, object] = {
                "config": msgspec.to_builtins(self.config),
                "data": {"row": run.data.first_row(step), "order": run.data.order},
                "productive_seconds": run.meter.goodput.productive_seconds,
            }
            self.checkpointer.save(step, run.state._replace(frozen={}), extra=extra, force=True)
            self.saved = step
            run.screen.print_line(f"checkpoint of step {step}, {run.meter.goodput}")

    def wait(self) -> None:
        """Until what is being saved is safe."""
        if self.checkpointer is not None:
            self.checkpointer.wait()

    def close(self) -> None:
        if self.checkpointer is not None:
            self.checkpointer.close()


def _next_row(kept: object, data: Data, step: int, config: TrainConfig) -> int:
    """The row of the data that a resumed run begins with; refused where the rows seen so far cannot be told apart.

    Another batch size goes on with the next row. Another order (seed, mixture, length of rows, files) would show some
    rows again and leave others out.
    """
    if not isinstance(kept, dict):
        return data.first_row(step)  # a checkpoint of a version that did not keep it
    before, now = kept.get("order"), json.loads(json.dumps(data.order))
    if before == now:
        return int(kept["row"])
    if config.checkpoint.restart_data:
        return 0
    before = before if isinstance(before, dict) else {}
    changes = [f"{name} was {before.get(name)} and is now {now.get(name)}"
               for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]  # fmt: skip
    raise UserError(
        f"{config.output} was trained on other rows up to step {step}: {'; '.join(changes)}",
        "use the settings it was begun with, or set checkpoint.restart_data=true to begin with the first row of the data",
    )


def _check_same_model(extra: dict[str, object], config: TrainConfig) -> None:
    """A checkpoint of another model would be refused by its arrays, but not in words."""
    kept = extra.get("config")
    before = json.loads(json.dumps(kept)).get("model", {}).get("name") if isinstance(kept, dict) else None
    if before is not None and before != config.model.name:
        raise UserError(
            f"{config.output} holds checkpoints of {before}, and this run trains {config.model.name}",
            "choose another output, or set checkpoint.resume=false",
        )
