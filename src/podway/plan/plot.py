"""Plans as pictures: tokens per second over chips, and memory by part. Needs matplotlib, the extra `plot`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podway.errors import UserError
from podway.extras import load
from podway.plan.memory import GIB
from podway.plan.plans import TrainPlan

SUFFIXES = (".png", ".svg")
_BARS = 8
# One colour a part, in the order of Memory.parts; distinguishable in grey as well (Okabe and Ito).
_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7", "#999999")


def check_path(path: Path) -> None:
    """Refuses a file that could not be drawn, before any work is done."""
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"cannot draw {path.name!r}", f"end the name in {' or '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise UserError(f"{path.parent}: no such directory", "create it, or choose another place")


def draw(plans: Sequence[TrainPlan], title: str, path: Path) -> None:
    """Writes the picture."""
    matplotlib = load("matplotlib", "plot", "--plot")  # 0.5 s that only --plot should pay for
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5.2), constrained_layout=True)
    figure.suptitle(title)
    _scaling(left, plans)
    _memory(right, plans[:_BARS])
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _scaling(axes: Any, plans: Sequence[TrainPlan]) -> None:
    """Tokens per second over chips, a line a generation: the fastest plan of each number of chips."""
    best: dict[str, dict[int, TrainPlan]] = {}
    for plan in plans:
        row = best.setdefault(plan.slice.generation, {})
        if plan.chips not in row or plan.tokens_per_second > row[plan.chips].tokens_per_second:
            row[plan.chips] = plan
    for generation, row in best.items():
        chips = sorted(row)
        axes.plot(chips, [row[c].tokens_per_second for c in chips], marker="o", markersize=3, label=generation)
    axes.set(xscale="log", yscale="log", xlabel="chips", ylabel="tokens per second", title="Scaling")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend()


def _memory(axes: Any, plans: Sequence[TrainPlan]) -> None:
    """HBM of a device by part, a bar a plan, with the limit."""
    labels = [_label(plan) for plan in plans]
    bottom = [0.0] * len(plans)
    for colour, name in zip(_COLOURS, plans[0].memory.parts, strict=True):
        sizes = [_height(plan, name) for plan in plans]
        axes.bar(labels, sizes, bottom=bottom, color=colour, label=name, width=0.6)
        bottom = [low + size for low, size in zip(bottom, sizes, strict=True)]
    for index, plan in enumerate(plans):
        limit = plan.memory.limit / GIB
        axes.hlines(limit, index - 0.4, index + 0.4, colors="black", linestyles="dashed", linewidth=1)
    axes.set(ylabel="GiB a device (dashed: usable)", title="Memory of the best plans")
    # Turned about their right end, so that a long one ends beside its bar and not below the next.
    axes.set_xticks(range(len(labels)), labels, rotation=30, ha="right", rotation_mode="anchor", fontsize=8)
    axes.legend(fontsize=8)


def _height(plan: TrainPlan, name: str) -> float:
    """Logits and temp live one after the other: only the larger one takes space."""
    if name in ("logits", "temp"):
        larger = "logits" if plan.memory.logits > plan.memory.temp else "temp"
        return plan.memory.parts[name] / GIB if name == larger else 0.0
    return plan.memory.parts[name] / GIB


def _label(plan: TrainPlan) -> str:
    name = plan.slice.accelerator_type if plan.slices == 1 else f"{plan.slices} x {plan.slice.accelerator_type}"
    return f"{name}\n{plan.training.remat}, mb {plan.training.microbatches}"
