"""From a model and options to a ranked list of plans.

1. For each slice (and number of slices) the meshes worth trying: tensor groups of 1 to 16 chips that divide the heads,
   the experts of a mixture split or not, the sequence split where there are fewer sequences than chips; the rest is
   fsdp, which shards weights and tokens alike.
2. For each mesh and remat policy, from the one that computes least again: as few microbatches as fit in HBM. A policy
   that needs no fewer microbatches than one that computes less is not worth trying.
3. What does not fit is kept with the reason that came closest, so that a person sees why.
4. Ranking: the cheapest that meets a deadline; the fastest within a budget; else the cheapest per token, or for one
   slice the fastest. A slice without a published price comes after all that have one.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import ceil, prod
from typing import NamedTuple

import msgspec

from podway.catalog.slices import Slice, find_slice
from podway.errors import UserError
from podway.model.layout import MeshShape
from podway.model.params import count
from podway.model.shape import ModelShape
from podway.plan.chips import LANES, device_of
from podway.plan.memory import GIB, SPREAD, Memory, train_memory
from podway.plan.network import check_tile, divisors
from podway.plan.plans import HOUR, TrainPlan, check_products, evaluate
from podway.plan.training import BYTES, REMAT, Training, saved_names

# Of HBM that a recommended plan may fill: but for one on tpu7x, no compiled step of the grid needs over 7% more than planned.
ROOM = 0.93
DEFAULT_BATCH_TOKENS = 4 * 2**20  # Llama 3 starts with 4M (arXiv 2407.21783); nearest multiple that divides
SLICE_COUNTS = (1, 2, 4, 8, 16, 32)


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for; None: whatever is best."""

    seq: int
    batch: int | None = None  # sequences
    microbatches: int | None = None
    remat: str | None = None
    offload: tuple[str, ...] | None = None  # activations kept in host memory
    mesh: MeshShape | None = None
    tile: tuple[int, ...] | None = None
    slices: int | None = None
    tokens: float | None = None
    days: float | None = None
    budget: float | None = None  # dollars
    spot: bool = False
    template: Training | None = None  # optimizer, precision, adapters, program; batch and remat are replaced

    def __post_init__(self) -> None:
        for name, least in (("seq", 1), ("batch", 1), ("microbatches", 1), ("slices", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name} is {value}", f"{name} must be at least {least}")
        for name in ("tokens", "days", "budget"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"{name} is {value:g}", f"{name} must be above 0")
        if self.remat is not None:
            saved_names(self.remat)
        if (self.days or self.budget) and self.tokens is None:
            raise UserError("a deadline or a budget needs a number of tokens", "add --tokens, such as --tokens 15T")


class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    """A slice on which nothing works, and what came closest."""

    slice: str
    slices: int
    reason: str
    excess: float = float(
        "inf"
    )  # bytes of HBM that are missing on a device; infinite where it is not for want of memory
    state_alone: bool = False  # the weights and their moments do not fit, whatever the step does

    @property
    def where(self) -> str:
        """`v6e-8`, `2 x v6e-8`."""
        return self.slice if self.slices == 1 else f"{self.slices} x {self.slice}"


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """Plans, best first, and what was rejected."""

    plans: tuple[TrainPlan, ...]
    rejected: tuple[Rejected, ...]


def search_train(shape: ModelShape, options: PlanOptions, candidates: Sequence[Slice]) -> Search:
    """All that fits on these slices, ranked; several slices: the best plan of each."""
    if options.seq % LANES:
        nearest = max(1, round(options.seq / LANES)) * LANES
        what = f"a sequence of {options.seq} tokens cannot be cut into the attention kernel's blocks of {LANES}"
        raise UserError(what, f"use a multiple of {LANES}: --seq {nearest}")
    if options.template is not None:
        check_products(shape, options.template)
    distinct = list({(s.accelerator_type, s.topology): s for s in reversed(candidates)}.values())[::-1]
    counts = (options.slices,) if options.slices else SLICE_COUNTS if options.days else (1,)
    plans: list[TrainPlan] = []
    rejected: list[Rejected] = []
    for slice in distinct:
        unjoined = device_of(slice.generation).dcn_bandwidth is None and options.slices is None
        for number in counts[:1] if unjoined else counts:
            found, near = _on(shape, options, slice, number, thorough=len(distinct) == 1)
            if not found:
                alone = _least_state(shape, options, slice, number) > device_of(slice.generation).hbm_limit
                where = slice.accelerator_type
                rejected.append(
                    Rejected(slice=where, slices=number, reason=near.reason, excess=near.excess, state_alone=alone)
                )
                continue
            found.sort(key=lambda plan: plan.time.total / plan.training.tokens)
            plans += found if len(distinct) == 1 else found[:1]
            if options.days and options.tokens and found[0].hours(options.tokens) <= 24 * options.days:
                break  # more slices of a kind that is already in time only cost more
    return Search(plans=tuple(ranked(plans, options, one_kind=len(distinct) == 1)), rejected=tuple(rejected))


def plan_train(shape: ModelShape, options: PlanOptions, candidates: Sequence[Slice]) -> Search:
    """`search_train`, with a UserError where nothing fits."""
    search = search_train(shape, options, candidates)
    if not search.plans:
        raise nothing_fits(shape, options, search)
    return search


def nothing_fits(shape: ModelShape, options: PlanOptions, search: Search) -> UserError:
    """The error of an empty search: the reason of what came closest."""
    if not search.rejected:
        return UserError("no slice to plan for", "name one with --tpu; `podway tpus` lists them")
    near = min(search.rejected, key=lambda one: one.excess)
    size = f"a model of {count(shape) / 1e9:.1f} B parameters"
    what = f"{size} does not fit on {near.where}: {near.reason}"
    if len(search.rejected) > 1:
        what = f"{size} fits on none of {len(search.rejected)} slices; closest is {near.where}: {near.reason}"
    if near.excess == float("inf"):
        return UserError(what, "change " + _listed(_changeable(options)))
    return UserError(what, "use " + _listed(_savings(options, near)))


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _changeable(options: PlanOptions) -> list[str]:
    """What was given and may be what nothing divides by; the batch, where nothing was."""
    given = {
        "--mesh": options.mesh,
        "--tile": options.tile,
        "--microbatches": options.microbatches,
        "--slices": options.slices,
    }
    return ["--batch", *(name for name, value in given.items() if value is not None)]


def _savings(options: PlanOptions, near: Rejected) -> list[str]:
    """What would need less memory and is not asked for already. Weights that do not fit by themselves are helped neither by a
    smaller step nor by more slices, each of which has a copy."""
    base = options.template or Training(seq=options.seq, batch=1)
    words = ["a larger slice"]
    devices = find_slice(near.slice).devices
    if not near.state_alone:
        if options.batch is not None and options.batch % devices and options.mesh is None:
            words.append(f"a --batch that {devices} divides, so that weights can be split over all chips")
        if options.batch is None or options.batch > (options.slices or 1):
            words.append("more --slices" if options.slices else "--slices")
        words += ["a smaller --batch"] if options.batch is None or options.batch > 1 else []
        words += ["--remat full"] if options.remat not in (None, "full") else []
    if base.adapters is None:
        words += ["--optimizer adafactor"] if base.optimizer != "adafactor" else []
        words += ["--opt-dtype bf16"] if base.optimizer == "adamw" and base.moments != "bfloat16" else []
    elif base.adapters.base != "int8":
        words.append("--int8-base")
    return words


def ranked(plans: Iterable[TrainPlan], options: PlanOptions, *, one_kind: bool) -> list[TrainPlan]:
    """Best first; see the module's docstring."""
    never = float("inf")

    def per_token(plan: TrainPlan) -> float:
        cost = plan.dollars_per_million_tokens
        return never if cost is None else cost

    def key(plan: TrainPlan) -> tuple[float, float, float]:
        seconds = plan.seconds / plan.training.tokens
        if options.tokens is not None and options.days is not None:
            late = max(0.0, plan.hours(options.tokens) - 24 * options.days)
            return (late, per_token(plan), seconds)
        if options.tokens is not None and options.budget is not None:
            cost = plan.dollars(options.tokens)
            over = never if cost is None else max(0.0, cost - options.budget)
            return (over, seconds, per_token(plan))
        return (seconds, 0.0, 0.0) if one_kind else (per_token(plan), seconds, 0.0)

    return sorted(plans, key=key)


class _Near(NamedTuple):
    """How close came what does not work: bytes too many, and why. Most of them nobody asks: their words are found when one does."""

    excess: float = float("inf")
    why: str = ""  # where it is not for want of memory
    tried: tuple[Memory, MeshShape, Training, int] | None = None  # with the bytes that a program may use

    @property
    def reason(self) -> str:
        """In words: against all that a program may use if it is above that."""
        if self.tried is None:
            return self.why
        memory, mesh, policy, usable = self.tried
        whole = msgspec.structs.replace(memory, limit=usable)
        return f"{(memory if whole.fits else whole).excess} ({mesh}, {policy_text(policy)})"


def _on(
    shape: ModelShape, options: PlanOptions, slice: Slice, number: int, *, thorough: bool = False
) -> tuple[list[TrainPlan], _Near]:
    """The plans of one slice, or how close it came where there is none."""
    device, infinite = device_of(slice.generation), float("inf")
    if number > 1 and device.dcn_bandwidth is None:
        return [], _Near(why=f"{slice.generation} slices cannot be joined (multislice starts at v4)")
    if options.tile is not None:
        try:
            check_tile(options.tile, slice)
        except UserError as error:
            if thorough:  # the only slice there is
                raise
            return [], _Near(why=error.what)
    missing = _least_state(shape, options, slice, number) - device.hbm_limit
    if missing > 0:
        return [], _Near(missing, f"OOM by {missing / GIB:.1f} GiB in weights and optimizer state alone")
    plans: list[TrainPlan] = []
    closest = _Near(why="no mesh divides its chips, the heads and the batch")
    best_family = infinite
    for family in _meshes(shape, options, slice, number):
        best = infinite
        for mesh in family:
            try:
                found, near = _with_mesh(shape, options, slice, mesh, thorough=thorough)
            except UserError as error:
                if options.mesh is not None:
                    raise
                found, near = [], _Near(why=error.what)
            plans += found
            closest = near if near.excess < closest.excess or (closest.excess == infinite and near.why) else closest
            fastest = min((plan.time.total / plan.training.tokens for plan in found), default=infinite)
            if found and fastest >= best and not thorough:
                break  # wider tensor groups have begun to cost more than they save
            best = min(best, fastest)
        if best >= best_family < infinite and not thorough:
            break  # and so have more splits of the experts
        best_family = min(best_family, best)
    return plans, closest


def _least_state(shape: ModelShape, options: PlanOptions, slice: Slice, number: int) -> float:
    """Bytes of weights, moments and gradients on a device if everything were split over the slice, or over all that share them."""
    template = options.template or Training(seq=1, batch=1)
    if template.adapters is not None:
        return count(shape) / slice.devices * BYTES[template.adapters.base]
    moments = 2 * BYTES[template.moments] if template.optimizer == "adamw" else 0.0
    shared = number if template.state_over_slices else 1
    return count(shape) / slice.devices * (BYTES[template.params] + (BYTES[template.params] + moments) / shared)


def _meshes(shape: ModelShape, options: PlanOptions, slice: Slice, number: int) -> list[list[MeshShape]]:
    """The meshes worth trying on `number` slices: for each split of the experts, tensor groups from narrow to wide."""
    if options.mesh is not None:
        return [[msgspec.structs.replace(options.mesh, slices=number, tile=options.tile or options.mesh.tile)]]
    widths = (prod(options.tile),) if options.tile else (1, 2, 4, 8, 16)
    families = []
    for expert in (1, 2, 4, 8) if shape.experts else (1,):
        family = []
        for tensor in widths:
            rest = slice.devices // (tensor * expert)
            if slice.devices % (tensor * expert) or shape.heads % tensor:
                continue
            if shape.experts and shape.experts.count % expert:
                continue
            context = _context(options, rest * expert, number)
            if context and rest % context == 0:
                sizes = {"fsdp": rest // context, "expert": expert, "context": context, "tensor": tensor}
                family.append(MeshShape(slices=number, tile=options.tile, **sizes))
        families.append(family)
    return families


def _context(options: PlanOptions, groups: int, number: int) -> int:
    """How many chips share a sequence: 1, or as many as it takes to give every chip something; 0: it cannot be."""
    sequences = options.batch or max(1, DEFAULT_BATCH_TOKENS // options.seq)
    needed = ceil(groups * number / sequences)
    if options.batch is None and needed <= 2:
        return 1  # the batch may grow a little
    context = 1 << (needed - 1).bit_length()
    return context if options.seq % (context * 128) == 0 else 0


def _batch(options: PlanOptions, groups: int) -> int:
    """Sequences of a step: those asked for, or the multiple of the groups nearest to the default."""
    if options.batch is not None:
        return options.batch
    return max(1, round(DEFAULT_BATCH_TOKENS / options.seq / groups)) * groups


def _with_mesh(
    shape: ModelShape, options: PlanOptions, slice: Slice, mesh: MeshShape, *, thorough: bool
) -> tuple[list[TrainPlan], _Near]:
    """The plans of one mesh; how close the best of the others came, where there is none."""
    device = device_of(slice.generation)
    groups = mesh.slices * mesh.data * mesh.fsdp * mesh.expert
    batch = _batch(options, groups)
    base = options.template or Training(seq=options.seq, batch=batch)
    base = msgspec.structs.replace(base, seq=options.seq, batch=batch, microbatches=1)
    if batch % groups:
        return [], _Near(why=f"{batch} sequences do not divide over {groups} groups of chips ({mesh})")
    # A configuration that is given in full is answered as it is, also where only the compiler can tell whether it fits.
    limit = int(device.hbm_limit * (1 + SPREAD if options.mesh and options.microbatches else ROOM))
    plans: list[TrainPlan] = []
    closest = _Near()
    memory_of = partial(
        train_memory,
        shape,
        mesh,
        limit=limit,
        usable=device.hbm_limit,
        host_limit=device.host_bytes,
        device=device,
    )
    for choices in _policies(options, base, thorough=thorough):
        frugal = _replaced(base, choices[-1])
        if any(plan.training.microbatches == 1 and "qkv" in plan.training.saved for plan in plans):
            break  # what is cheap to keep is kept in HBM already
        fewest = None
        least = _most_frugal(options, mesh, frugal, memory_of)
        if not least.fits:
            closest = _closer(closest, least, mesh, frugal, device.hbm_limit)
            continue
        for names in choices:
            policy = _replaced(base, names)
            training, memory = _fewest_microbatches(options, mesh, policy, memory_of)
            if not memory.fits:
                closest = _closer(closest, memory, mesh, policy, device.hbm_limit)
                continue
            if fewest is not None and training.microbatches >= fewest:
                continue
            fewest = training.microbatches
            plans.append(evaluate(shape, slice, mesh, training, spot=options.spot))
            if fewest == (options.microbatches or 1):
                break  # those that compute more again cannot have fewer
    return plans, closest


def _closer(closest: _Near, memory: Memory, mesh: MeshShape, policy: Training, usable: int) -> _Near:
    """The nearer one of two that do not fit."""
    excess = max(memory.total - memory.limit, memory.host - memory.host_limit)
    return closest if excess >= closest.excess else _Near(excess, tried=(memory, mesh, policy, usable))


# What a step may keep in host memory instead of computing it again, from the most to the least.
_OFFLOADS = (("residual", "qkv", "context"), ("residual", "qkv"), ("residual",))


_Policy = tuple[str, tuple[str, ...]]  # remat, what is offloaded


def _policies(options: PlanOptions, base: Training, *, thorough: bool) -> list[list[_Policy]]:
    """What to keep and where, in families of which each begins with the one that computes least again: in HBM, in host memory."""
    if options.remat or options.offload is not None:
        return [[(name, options.offload or ()) for name in ([options.remat] if options.remat else REMAT)]]
    inside: list[_Policy] = [(name, base.offload) for name in REMAT]
    if base.adapters is not None:
        return [inside]
    offloads = _OFFLOADS if thorough else _OFFLOADS[:1]  # a search over many slices must stay fast
    return [inside, [("full", names) for names in offloads]]


def _replaced(base: Training, policy: _Policy) -> Training:
    return msgspec.structs.replace(base, remat=policy[0], offload=policy[1])


def policy_text(training: Training) -> str:
    """`remat full`, `remat full, offload residual+qkv`."""
    return f"remat {training.remat}" + (f", offload {'+'.join(training.offload)}" if training.offload else "")


def _most_frugal(
    options: PlanOptions, mesh: MeshShape, base: Training, memory_of: Callable[[Training], Memory]
) -> Memory:
    """The least memory that a mesh can do with: everything computed again, as many microbatches as there are rows."""
    rows = base.batch // (mesh.slices * mesh.data * mesh.fsdp * mesh.expert)
    one = msgspec.structs.replace(base, microbatches=options.microbatches or rows)
    least = memory_of(one)
    if options.microbatches is None and rows > 1 and not least.fits:  # a single microbatch needs no sum of gradients
        whole = memory_of(msgspec.structs.replace(one, microbatches=1))
        return min(least, whole, key=lambda memory: memory.total)
    return least


def _fewest_microbatches(
    options: PlanOptions, mesh: MeshShape, base: Training, memory_of: Callable[[Training], Memory]
) -> tuple[Training, Memory]:
    """The training with the fewest microbatches that fits; the one with the most where none does."""
    rows = base.batch // (mesh.slices * mesh.data * mesh.fsdp * mesh.expert)
    choices = divisors(rows) if options.microbatches is None else (options.microbatches,)
    low, high = 0, len(choices) - 1

    def at(index: int) -> tuple[Training, Memory]:
        one = msgspec.structs.replace(base, microbatches=choices[index])
        return one, memory_of(one)

    first = at(0)
    if first[1].fits or high == 0:
        return first
    best = at(high)
    if not best[1].fits:
        return best
    while high - low > 1:  # more microbatches never need more memory, but for the step from one to two
        middle = (low + high) // 2
        tried = at(middle)
        if tried[1].fits:
            high, best = middle, tried
        else:
            low = middle
    return best


def deadline_met(plan: TrainPlan, options: PlanOptions) -> bool:
    """Whether a plan keeps to the days and dollars asked for."""
    if options.tokens is None:
        return True
    in_time = options.days is None or plan.hours(options.tokens) * HOUR <= options.days * 24 * HOUR
    cost = plan.dollars(options.tokens)
    return in_time and (options.budget is None or (cost is not None and cost <= options.budget))
