"""A person's own measured runs, kept under PODWAY_HOME and used by the planner: `podway calibrate`.

Each run gives the rate that products of its generation must have had (`measured.needed_rate_of`). Where there are such runs, their
mean takes the place of the published rate of that generation, and plans say so. Commands call `use_own_rates` before they plan:
the planner itself reads no file.
"""

from math import exp, log
from pathlib import Path

import msgspec

from podway.decoding import from_json
from podway.errors import UserError
from podway.files import write_atomically
from podway.home import home
from podway.plan.chips import set_rates
from podway.plan.uncertainty import set_own_runs


class OwnRun(msgspec.Struct, frozen=True, kw_only=True):
    """One measured run."""

    generation: str
    model: str
    slice: str
    slices: int
    seconds: float  # of a step
    planned: float  # by the rate of published steps
    rate: float  # the part of peak that its products must have reached
    folder: str


def _path() -> Path:
    return home() / "calibration.json"


def own_runs() -> list[OwnRun]:
    """All that are kept."""
    try:
        return from_json(_path().read_bytes(), list[OwnRun])
    except FileNotFoundError:
        return []
    except msgspec.MsgspecError as error:
        raise UserError(
            f"{_path()} cannot be read: {error}", "run `podway calibrate --forget all`, or repair it"
        ) from None


def keep_run(run: OwnRun) -> None:
    """Add a run; one of the same folder is replaced."""
    if not 0.05 <= run.rate <= 1.0:
        raise UserError(
            f"the run would need products at {run.rate:.2f} of the chips' peak",
            "check that --tpu is the slice it ran on, and that its steps were not waiting for data",
        )
    others = [one for one in own_runs() if one.folder != run.folder]
    _write([*others, run])


def forget_runs(generation: str) -> int:
    """Forget the runs of a generation, or `all`; how many there were."""
    if generation == "all":
        number = len(own_runs()) if _path().exists() and _readable() else 0
        _path().unlink(missing_ok=True)
        return number
    runs = own_runs()
    kept = [one for one in runs if one.generation != generation]
    _write(kept)
    return len(runs) - len(kept)


def _readable() -> bool:
    try:
        own_runs()
    except UserError:
        return False
    return True


def _write(runs: list[OwnRun]) -> None:
    _path().parent.mkdir(parents=True, exist_ok=True)
    write_atomically(_path(), msgspec.json.format(msgspec.json.encode(runs), indent=1) + b"\n")


def use_own_rates() -> None:
    """Plan by the rates of one's own runs from here on, where there are any."""
    by_generation: dict[str, list[OwnRun]] = {}
    for run in own_runs():
        by_generation.setdefault(run.generation, []).append(run)
    set_rates({name: exp(sum(log(run.rate) for run in runs) / len(runs)) for name, runs in by_generation.items()})
    set_own_runs({name: len(runs) for name, runs in by_generation.items()})
