"""The planner's part in a launch: the slice for `--tpus auto`, and a warning when a training step cannot fit.

Both read the `podway train` or `podway serve` command in the task (plan/task_needs.py). The planner is imported only when
needed: most launches start without it.
"""

from collections.abc import Sequence

import click
import msgspec

from podway.cli.entrypoint import read_entrypoint, read_entrypoints
from podway.errors import UserError
from podway.order import Order
from podway.task.environment import Overrides
from podway.task.task import Task


def read_sized(words: Sequence[str], overrides: Overrides, model: str | None) -> tuple[Task, ...]:
    """The tasks of an ENTRYPOINT, on the slice that the planner picks where `--tpus auto` asks it to."""
    if (overrides.tpus or "").strip().lower() != "auto":
        if model is not None:
            raise UserError("--model is for --tpus auto", "add --tpus auto, or leave --model out")
        return read_entrypoints(words, overrides)
    from podway.plan.picking import Needs, pick_slice
    from podway.plan.task_needs import needs_of

    task = read_entrypoint(words, msgspec.structs.replace(overrides, tpus="cpu"))
    needs = needs_of(task)
    if model is not None:
        unread = Needs(model=model, kind="serve" if task.service is not None else "train")
        needs = msgspec.structs.replace(needs or unread, model=model)
    if needs is None:
        raise UserError(
            "--tpus auto: the task does not run podway train or podway serve with a model name", "name it with --model"
        )
    chosen = pick_slice(needs)
    click.echo(f"Chosen slice to {needs.kind} {needs.model}: {chosen.accelerator_type}.", err=True)
    return (read_entrypoint(words, msgspec.structs.replace(overrides, tpus=chosen.accelerator_type)),)


def warn_misfit(task: Task, order: Order) -> None:
    """Warn, before anything is paid for, when the planner knows that the task's training step cannot fit; refuse one that the trainer
    has not."""
    if order.accelerator_type is None or "podway" not in task.run:
        return
    from podway.catalog.slices import find_slice
    from podway.plan.task_needs import check_products, misfit_reason

    check_products(task)
    try:
        why = misfit_reason(task, find_slice(order.accelerator_type, order.topology))
    except UserError:  # a config that is not here or not right: the trainer says so, where it is read
        return
    if why is not None:
        click.echo(f"Warning: this does not fit: {why}", err=True)
