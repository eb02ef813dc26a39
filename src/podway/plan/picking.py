"""Choosing a slice for something that must run: `podway launch --tpu auto`, and the warning before a launch that cannot fit.

`pick_slice(needs)` answers the slice with the least price an hour on which the model fits (or, with a target, the one
whose plan is best); `fits` says whether a slice can hold a training job, and why not.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from podway.catalog.names import find_generation
from podway.catalog.prices import price_of
from podway.catalog.slices import Slice, all_slices, find_slice, slices_of
from podway.errors import UserError
from podway.model.families import find_planned_model
from podway.plan.engine_costs import Precision
from podway.plan.finetune import DEFAULT_SEQUENCES, finetune_template
from podway.plan.search import PlanOptions, plan_train
from podway.plan.serve import Load, search_serve
from podway.plan.training import Adapters, Training


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """What must run, as far as a slice depends on it."""

    model: str  # a name, a Hugging Face id, or the path of a config.json
    kind: Literal["train", "finetune", "serve"] = "train"
    tpu: str = "any"  # `any`, a generation, or one slice
    seq: int = 8192
    batch: int | None = None  # sequences
    tokens: float | None = None
    days: float | None = None
    budget: float | None = None
    adapters: Adapters | None = None
    load: Load | None = None
    precision: Precision = Precision()
    spot: bool = False


def slices_named(text: str) -> tuple[Slice, ...]:
    """`any` and `auto`: all; `v6e`: that generation; `v6e-8`: one. In any spelling of the catalog."""
    word = text.strip().lower()
    if word in ("any", "all", "auto"):
        return all_slices()
    generation = find_generation(word)
    return slices_of(generation) if generation else (find_slice(text),)


def one_slice(tpu: str) -> Slice:
    """The slice of a name that means one."""
    found = slices_named(tpu)
    if len(found) > 1:
        raise UserError(f"{tpu} is {len(found)} slices", f"name one of them, such as --tpu {found[0].accelerator_type}")
    return found[0]


def pick_slice(needs: Needs) -> Slice:
    """The slice to launch on; a UserError where nothing fits."""
    shape, candidates = find_planned_model(needs.model), slices_named(needs.tpu)
    if needs.kind == "serve":
        load = needs.load or Load(prompt=1000, output=250, rate=1.0)
        plans, rejected = search_serve(shape, load, candidates, needs.precision, spot=needs.spot)
        if not plans:
            raise nothing_serves(needs.model, rejected)
        return plans[0].slice
    options = PlanOptions(
        seq=needs.seq,
        batch=needs.batch or (DEFAULT_SEQUENCES if needs.kind == "finetune" else None),
        tokens=needs.tokens,
        days=needs.days,
        budget=needs.budget,
        spot=needs.spot,
        template=_template(needs),
    )
    search = plan_train(shape, options, candidates)
    if options.days or options.budget:
        return search.plans[0].slice
    return min((plan.slice for plan in search.plans), key=lambda slice: _hourly(slice, needs.spot))


def _template(needs: Needs) -> Training | None:
    adapters = needs.adapters
    if needs.kind != "finetune" and adapters is None:
        return None
    return finetune_template(
        rank=adapters.rank if adapters else None, int8_base=adapters is not None and adapters.base == "int8"
    )


def _hourly(slice: Slice, spot: bool) -> tuple[float, int]:
    price = price_of(slice, spot=spot)
    return (float("inf") if price is None else price, slice.chips)


def nothing_serves(model: str, rejected: Sequence[tuple[str, str]]) -> UserError:
    """The error of a search for serving that found nothing."""
    name, reason = rejected[-1] if rejected else ("", "no slice to plan for")
    where = f"{name}: {reason}" if name else reason
    return UserError(
        f"none of {len(rejected)} slices can serve {model}: {where}",
        "use a larger slice, --weights int8, --kv fp8, shorter requests or a longer --ttft",
    )
