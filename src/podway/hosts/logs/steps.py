"""The steps of a training run, read from what its first rank prints. Pure.

The line of a step is the one that MaxText made known and that `podway train` prints too, so that runs of both are understood:

    completed step: 12, seconds: 1.204, TFLOP/s/device: 61.3, Tokens/s/device: 3402.1, loss: 3.412, MFU: 0.3111, grad_norm: 0.92, …

Numbers come by name; a name that is not known is left out, and one that is not a number (`nan`) is None. Besides steps there are
evaluations and the summary of a profile (`train/hooks.py` prints both). Lines may be cut anywhere between two reads, and a line
without end is not kept: memory is bounded whatever a job prints.
"""

import math
import re

import msgspec

LONGEST_LINE = 8 << 10
_STEP = re.compile(r"completed step: (\d{1,12}), (.{1,2000})")
_EVALUATION = re.compile(r"evaluation after step (\d{1,12}): loss: (\S{1,40})")
_PROFILE = re.compile(r"profile of steps (\d{1,12}) to (\d{1,12}): (.{1,1000}?)(?: in |$)")
_NUMBER = re.compile(r"([A-Za-z][\w/ ]{0,40}): ([-+.\w]{1,40})")
_FIELDS = {
    "seconds": "seconds",
    "loss": "loss",
    "MFU": "mfu",
    "grad_norm": "grad_norm",
    "lr": "rate",
    "goodput": "goodput",
    "Tokens/s/device": "tokens_per_second",
    "TFLOP/s/device": "tflops",
}


class TrainingStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step as it was printed; rates are of one device. An evaluation has a step and `eval_loss` alone."""

    step: int
    seconds: float | None = None
    loss: float | None = None
    eval_loss: float | None = None
    grad_norm: float | None = None
    rate: float | None = None
    tokens_per_second: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    goodput: float | None = None
    skipped: bool = False


class StepProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step by kind of work, from a profile of the steps from `first` to `last`."""

    first: int
    last: int
    seconds: dict[str, float]


class StepReader:
    """Bytes of a log in, steps out; what is cut off waits for its rest."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[TrainingStep | StepProfile]:
        """Everything that is whole now."""
        *whole, rest = (self._rest + data).split(b"\n")
        self._rest = rest if len(rest) <= LONGEST_LINE else b""
        return [found for line in whole if (found := read_line(line)) is not None]

    @property
    def waiting(self) -> int:
        """Bytes of the line that has begun: reading goes on before them."""
        return len(self._rest)


def read_line(line: bytes) -> TrainingStep | StepProfile | None:
    """What one line says of a step; None for all other lines."""
    if len(line) > LONGEST_LINE:
        return None
    if b"completed step: " in line:
        found = _STEP.search(line.decode("utf-8", "replace"))
        return _step(int(found[1]), found[2]) if found else None
    if b"evaluation after step " in line:
        found = _EVALUATION.search(line.decode("utf-8", "replace"))
        return TrainingStep(step=int(found[1]), eval_loss=_number(found[2])) if found else None
    if b"profile of steps " in line:
        found = _PROFILE.search(line.decode("utf-8", "replace"))
        return _profile(found) if found else None
    return None


def _step(number: int, text: str) -> TrainingStep:
    values = {name: _number(value) for name, value in _NUMBER.findall(text)}
    known = {field: values[name] for name, field in _FIELDS.items() if name in values}
    slow = values.get("GFLOP/s/device")
    if slow is not None:
        known["tflops"] = slow / 1e3
    return TrainingStep(step=number, skipped="SKIPPED" in text, **known)


def _profile(found: re.Match[str]) -> StepProfile | None:
    parts = re.findall(r"([a-z]{1,40}) ([0-9.e+-]{1,20}) s(?:,|$)", found[3])
    seconds = {name: value for name, text in parts if (value := _number(text)) is not None}
    return StepProfile(first=int(found[1]), last=int(found[2]), seconds=seconds) if seconds else None


def _number(text: str) -> float | None:
    try:
        value = float(text.rstrip(","))
    except ValueError:
        return None
    return value if math.isfinite(value) else None
