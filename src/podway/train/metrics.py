"""What a run reports about itself: a line a step, `metrics.jsonl`, TensorBoard, and the block at the end (no jax).

`Meter` turns the time and loss of a step into rates. The first steps compile and fill queues, so they are shown but left
out of every average. FLOPs are those of the model by the named convention (`model/flops.py`); recomputation counts
nothing, so MFU is of useful work.
"""

import json
import math
import sys
import time
from pathlib import Path
from typing import TextIO

import msgspec

from podway.model.flops import Convention, flops_per_token
from podway.model.shape import ModelShape
from podway.train.events import EventFile
from podway.train.goodput import Goodput

GIGAFLOP = 1 << 30  # the block at the end counts them as Hugging Face's Trainer does


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """One step as people read it; rates are per device."""

    step: int
    seconds: float
    tflops: float
    tokens_per_second: float
    loss: float
    grad_norm: float
    rate: float
    mfu: float | None = None
    goodput: float | None = None  # over all launches of the run
    skipped: bool = False

    def line(self) -> str:
        mfu = "" if self.mfu is None else f", MFU: {self.mfu:.4f}"
        speed = (
            f"TFLOP/s/device: {self.tflops:.3f}" if self.tflops >= 0.1 else f"GFLOP/s/device: {self.tflops * 1e3:.3f}"
        )
        goodput = "" if self.goodput is None else f", goodput: {self.goodput:.4f}"
        skipped = ", SKIPPED: the loss or its gradient is not a number" if self.skipped else ""
        return (
            f"completed step: {self.step}, seconds: {self.seconds:.3f}, {speed}, "
            f"Tokens/s/device: {self.tokens_per_second:.3f}, loss: {self.loss:.3f}{mfu}, "
            f"grad_norm: {self.grad_norm:.3f}, lr: {self.rate:.3e}{goodput}{skipped}"
        )


class Meter:
    """Counts steps, time and loss of one run."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        batch: int,
        length: int,
        devices: int,
        peak: float | None,
        warmup: int,
        convention: Convention,
        goodput: Goodput | None = None,
    ) -> None:
        self.goodput = goodput or Goodput()
        self.batch, self.devices, self.peak, self.warmup = batch, devices, peak, warmup
        self.tokens = batch * length
        self.flops = flops_per_token(shape, length, convention) * self.tokens
        self.steps = 0
        self.losses = 0.0
        self.counted_steps, self.counted_seconds = 0, 0.0
        self.began = time.monotonic()

    def report(
        self, step: int, seconds: float, *, loss: float, grad_norm: float, rate: float, good: bool
    ) -> StepReport:
        """Take one finished step in."""
        self.steps += 1
        self.goodput.add_step(seconds, good=good)
        if math.isfinite(loss):
            self.losses += loss
        if self.steps > self.warmup:
            self.counted_steps += 1
            self.counted_seconds += seconds
        per_second = self.flops / seconds / self.devices
        return StepReport(
            step=step,
            seconds=seconds,
            tflops=per_second / 1e12,
            tokens_per_second=self.tokens / seconds / self.devices,
            loss=loss,
            grad_norm=grad_norm,
            rate=rate,
            mfu=per_second / self.peak if self.peak else None,
            goodput=self.goodput.share,
            skipped=not good,
        )

    def add_pause(self, seconds: float) -> None:
        """Time between steps: saving, evaluation. Rates over the run include it; the seconds of a step do not."""
        if self.steps >= self.warmup:
            self.counted_seconds += seconds

    def block(self, epoch: float) -> str:
        """The last words of a run, in the form that Hugging Face's Trainer made known."""
        runtime = time.monotonic() - self.began
        # Rates are over the time after the warm-up, with its saves and evaluations; where a run had no more, over all of it.
        steps, seconds = (self.counted_steps, self.counted_seconds) if self.counted_steps else (self.steps, runtime)
        rows = {
            "epoch": f"{epoch:.4f}".rstrip("0").rstrip("."),
            "total_flos": f"{int(self.flops * self.steps) // GIGAFLOP}GF",
            "train_loss": f"{self.losses / max(self.steps, 1):.4f}",
            "train_runtime": clock(runtime),
            "train_samples": str(self.batch * self.steps),
            "train_samples_per_second": f"{self.batch * steps / seconds:.3f}" if seconds else "0",
            "train_steps_per_second": f"{steps / seconds:.3f}" if seconds else "0",
            "train_tokens_per_second": f"{self.tokens * steps / seconds:.1f}" if seconds else "0",
        }
        if self.peak and seconds:
            rows["train_mfu"] = f"{self.flops * steps / seconds / self.devices / self.peak:.4f}"
        rows["train_goodput"] = f"{self.goodput.share:.4f}"
        rows["train_launches"] = str(len(self.goodput.launches))
        wide, long = max(map(len, rows)), max(map(len, rows.values()))
        return "\n".join(["***** train metrics *****", *(f"  {k:<{wide}} = {v:>{long}}" for k, v in rows.items())])


def clock(seconds: float) -> str:
    """0:11:12.77"""
    hundredths = round(seconds * 100)
    minutes, rest = divmod(hundredths, 6000)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest // 100:02d}.{rest % 100:02d}"


class MetricsWriter:
    """`metrics.jsonl` and the TensorBoard file of a run; one host writes them."""

    def __init__(self, folder: Path, *, tensorboard: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lines: TextIO = (folder / "metrics.jsonl").open("a")
        self._events = EventFile(folder / "tensorboard") if tensorboard else None

    def step(self, report: StepReport) -> None:
        self._write({"step": report.step, "time": time.time(), **msgspec.to_builtins(report)})
        if self._events:
            values = {
                "learning/loss": report.loss,
                "learning/grad_norm": report.grad_norm,
                "learning/current_learning_rate": report.rate,
                "perf/step_time_seconds": report.seconds,
                "perf/per_device_tflops_per_sec": report.tflops,
                "perf/per_device_tokens_per_sec": report.tokens_per_second,
            }
            optional = {"perf/mfu": report.mfu, "perf/goodput": report.goodput}
            known = {name: value for name, value in optional.items() if value is not None}
            self._events.add(report.step, values | known)

    def evaluation(self, step: int, loss: float, tokens: int) -> None:
        self._write({"step": step, "time": time.time(), "eval_loss": loss, "eval_tokens": tokens})
        if self._events:
            self._events.add(step, {"evaluation/loss": loss})

    def close(self) -> None:
        self._lines.close()
        if self._events:
            self._events.close()

    def _write(self, row: dict[str, object]) -> None:
        # JSON has no NaN, and a skipped step has one.
        safe = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._lines.write(json.dumps(safe) + "\n")
        self._lines.flush()


class ProgressBar:
    """Lines of output, and one of progress at the foot of a terminal; `first` alone of several hosts shows any."""

    def __init__(self, total: int, *, first: bool = True) -> None:
        self.total, self.first, self.shown = total, first, first and sys.stderr.isatty()

    def draw(self, done: int, report: StepReport) -> None:
        if self.shown:
            filled = 30 * done // max(self.total, 1)
            left = report.seconds * (self.total - done)
            bar = "█" * filled + "░" * (30 - filled)
            text = f"{bar} {done}/{self.total}  loss {report.loss:.3f}  {report.seconds:.2f} s/step  {clock(left)} left"
            sys.stderr.write(f"\r\033[K{text}")
            sys.stderr.flush()

    def print_line(self, line: str) -> None:
        """A line above the bar."""
        if self.shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
        if self.first:
            print(line, flush=True)
