"""Plans as people read them: a ranked table, then the best one by part, then why others were left out."""

from collections.abc import Sequence

from podway.cli.tables import table
from podway.model.params import active_count, count
from podway.model.shape import ModelShape
from podway.plan.measured import Compared, MeasuredRun
from podway.plan.memory import GIB, Memory
from podway.plan.plans import TrainPlan
from podway.plan.search import PlanOptions, Rejected, Search, deadline_met
from podway.plan.serve import ServePlan
from podway.plan.steptime import StepTime
from podway.plan.uncertainty import Uncertainty, relative_width
from podway.quantities import format_dollars, format_hours, format_number, format_seconds

_SHORT = {"bfloat16": "bf16"}


def train_page(title: str, search: Search, options: PlanOptions, *, top: int, why: bool, notes: Sequence[str]) -> str:
    """Everything `podway plan train` shows."""
    best = search.plans[0]
    parts = [title, train_table(search.plans[:top], options), "", plan_page(best, options, notes)]
    hidden = len(search.plans) - top
    if hidden > 0:
        parts.insert(2, f"… and {hidden} more (--top {len(search.plans)})")
    if search.rejected:
        parts += ["", rejected_page(search.rejected, everything=why)]
    return "\n".join(parts)


def train_table(plans: Sequence[TrainPlan], options: PlanOptions) -> str:
    """A row for each plan."""
    headers = [
        "SLICE",
        "N",
        "MESH",
        "TILE",
        "MB",
        "REMAT",
        "OPT",
        "HBM",
        "STEP",
        "80%",
        "TOK/S",
        "MFU",
        "$/H",
        "$/1M TOK",
    ]
    right = {"N", "MB", "HBM", "STEP", "80%", "TOK/S", "MFU", "$/H", "$/1M TOK", "TIME", "COST $"}
    if options.tokens is not None:
        headers += ["TIME", "COST $"]
    return table(headers, [_row(plan, options) for plan in plans], right=right)


def _row(plan: TrainPlan, options: PlanOptions) -> list[object]:
    tile = "x".join(map(str, plan.mesh.tile)) if plan.mesh.tile else None
    training, memory = plan.training, plan.memory
    optimizer = training.optimizer if training.moments == "float32" else f"{training.optimizer} bf16"
    if training.adapters is not None:
        optimizer = f"LoRA {training.adapters.rank} ({training.adapters.base})"
    row: list[object] = [
        plan.slice.accelerator_type,
        plan.slices,
        _mesh_text(plan),
        tile,
        training.microbatches,
        training.remat if not training.offload else f"offload {'+'.join(training.offload)}",
        optimizer,
        f"{plan.hbm_bytes / GIB:.1f}/{memory.limit / GIB:.1f}",
        format_seconds(plan.seconds) + ("*" if plan.rehearsed else ""),
        f"±{100 * relative_width(plan.slice.generation, plan.kind):.0f}%",
        format_number(plan.tokens_per_second),
        f"{100 * plan.mfu:.1f}%",
        format_dollars(plan.dollars_per_hour),
        format_dollars(plan.dollars_per_million_tokens, 4),
    ]
    if options.tokens is not None:
        late = "" if deadline_met(plan, options) else " !"
        row += [format_hours(plan.hours(options.tokens)) + late, format_dollars(plan.dollars(options.tokens), 0)]
    return row


def _mesh_text(plan: TrainPlan) -> str:
    text = str(plan.mesh)
    return text.partition(",")[2] or "data=1" if text.startswith("slices=") else text


def plan_page(plan: TrainPlan, options: PlanOptions, notes: Sequence[str]) -> str:
    """One plan by part."""
    name = plan.slice.accelerator_type if plan.slices == 1 else f"{plan.slices} x {plan.slice.accelerator_type}"
    batch = f"{plan.training.batch:,} sequences of {plan.training.seq:,} ({format_number(plan.training.tokens)} tokens)"
    lines = [
        f"{name} ({plan.slice.topology_text} a slice, {plan.chips:,} chips): {plan.mesh}, batch {batch}",
        f"  bound by {plan.time.binds}",
        *_rehearsed_lines(plan),
        *uncertainty_lines(plan.uncertainty),
        "",
        memory_table(plan.memory),
        "",
        time_table(plan.time),
    ]
    if options.tokens is not None:
        cost = format_dollars(plan.dollars(options.tokens), 0)
        lines += [
            "",
            f"{format_number(options.tokens)} tokens: {format_hours(plan.hours(options.tokens))}, ${cost or '-'}",
        ]
        if not deadline_met(plan, options):
            lines.append("  ! misses the deadline or the budget; no plan found does better")
    return "\n".join(lines + [f"  note: {note}" for note in notes])


def _rehearsed_lines(plan: TrainPlan) -> list[str]:
    if plan.rehearsed is None:
        return []
    return [
        f"  compiled: {format_seconds(plan.rehearsed.seconds)} a step, {plan.rehearsed.bytes / GIB:.2f} GiB a device; by part below, "
        f"as planned ({format_seconds(plan.time.total)}, {plan.memory.total / GIB:.2f} GiB)"
    ]


def uncertainty_lines(found: Uncertainty) -> list[str]:
    """The interval, the evidence, and what is left out."""
    return [
        f"  step {format_span(found.low, found.high)} in {100 * found.coverage:.0f}% of cases: {found.evidence}",
        f"  not modelled: {', '.join(found.not_modelled)}",
    ]


def format_span(low: float, high: float) -> str:
    """`35.44–39.41 s`."""
    first, last = format_seconds(low), format_seconds(high)
    number, unit = first.rsplit(" ", 1)
    return f"{number if last.endswith(f' {unit}') else first}–{last}"


def memory_table(memory: Memory) -> str:
    """HBM of a device by part."""
    rows: list[list[object]] = []
    for name, size in memory.parts.items():
        beside = name in ("logits", "temp") and size < max(memory.logits, memory.temp)
        text = "shares the space above" if beside else f"{100 * size / memory.limit:.0f}%"
        rows.append([f"  {name}", f"{size / GIB:.2f}", text])
    rows.append(["  total", f"{memory.total / GIB:.2f}", f"of {memory.limit / GIB:.2f} usable"])
    if memory.host:
        rows.append(
            ["  host memory", f"{memory.host / GIB:.2f}", f"of {memory.host_limit / GIB:.0f}, offloaded activations"]
        )
    return table(["HBM A DEVICE", "GIB", ""], rows, right=(1,))


def time_table(time: StepTime) -> str:
    """A step by part."""
    hidden = {f"ICI {t.axis} {t.direction}": t.seconds - t.exposed for t in time.traffic}
    rows: list[list[object]] = []
    for name, seconds in time.parts.items():
        beside = hidden.get(name, 0.0)
        if seconds or beside:
            text = f"{100 * seconds / time.total:.1f}%"
            if beside > 1e-6:
                text += f"  (and {format_seconds(beside)} beside the products)"
            rows.append([f"  {name}", format_seconds(seconds), text])
    rows.append(["  total", format_seconds(time.total), ""])
    return table(["STEP", "TIME", ""], rows, right=(1,))


def rejected_page(rejected: Sequence[Rejected], *, everything: bool) -> str:
    """Why slices were left out: all of them, or the few that came closest."""
    shown = rejected if everything else sorted(rejected, key=lambda one: one.excess)[:4]
    rows = [[one.where, one.reason] for one in shown]
    more = "" if len(shown) == len(rejected) else f"\n… and {len(rejected) - len(shown)} more (--why)"
    return table(["DOES NOT WORK", "BECAUSE"], rows) + more


def compare_page(plan: TrainPlan, run: MeasuredRun, rows: Sequence[Compared]) -> str:
    """A measured run beside its plan."""
    shown = []
    for row in rows:
        both = row.planned and row.measured
        error = f"{100 * (row.planned / row.measured - 1):+.1f}%" if both and row.planned and row.measured else None
        times = [None if value is None else format_seconds(value) for value in (row.planned, row.measured)]
        shown.append([f"  {row.part}", *times, error])
    found = plan.uncertainty
    inside = found.low <= run.seconds <= found.high
    lines = [
        f"{plan.slice.accelerator_type} ({plan.mesh}), {run.steps} steps after warm-up, their median:",
        table(["PART", "PLANNED", "MEASURED", "ERROR"], shown, right=(1, 2, 3)),
        f"The measured step is {'inside' if inside else 'outside'} the planned interval {format_span(found.low, found.high)}.",
    ]
    if all(row.measured is None for row in rows[:-1]):
        lines.append("No profile of a TPU in the folder: train with logging.profile_at=10 to measure the classes too.")
    return "\n".join(lines)


def model_line(name: str, shape: ModelShape) -> str:
    """`llama3.1-8b: 8.03 B parameters`."""
    total, active = count(shape), active_count(shape)
    text = f"{name}: {total / 1e9:.2f} B parameters"
    return text if total == active else f"{text}, {active / 1e9:.2f} B for each token"


def _serve_row(plan: ServePlan) -> list[object]:
    found = plan.simulated
    if found is not None:
        times = [format_seconds(value) for value in (found.ttft[0], found.ttft[2], found.tpot[0], found.tpot[2])]
    else:
        times = [f"({format_seconds(plan.ttft)})", "-", f"({format_seconds(plan.tpot)})", "-"]
    return [
        plan.slice.accelerator_type,
        plan.slices,
        plan.tensor,
        plan.replicas,
        "/".join(_SHORT.get(name, name) for name in plan.precision),
        f"{plan.weights_bytes / GIB:.1f}/{plan.hbm_limit / GIB:.1f}",
        f"{plan.kv_tokens:,}",
        f"{found.batch if found else plan.batch:.0f}",
        *times,
        format_seconds(plan.tpot_limit),
        format_number(plan.output_tokens_per_second),
        format_dollars(plan.dollars_per_hour),
        format_dollars(plan.dollars_per_million),
        plan.binds,
    ]


def serve_page(
    title: str, plans: Sequence[ServePlan], rejected: Sequence[tuple[str, str]], *, top: int, why: bool
) -> str:
    """Everything `podway plan serve` shows."""
    headers = [
        "SLICE",
        "N",
        "TP",
        "REPLICAS",
        "STORED",
        "WEIGHTS",
        "KV TOKENS",
        "BATCH",
        "TTFT P50",
        "P99",
        "TPOT P50",
        "P99",
    ]
    headers += ["LIMIT", "OUT TOK/S", "$/H", "$/1M OUT", "BOUND BY"]
    rows = [_serve_row(plan) for plan in plans[:top]]
    lines = [title, table(headers, rows, right=set(headers) - {"SLICE", "STORED", "BOUND BY"})]
    if len(plans) > top:
        lines.append(f"… and {len(plans) - top} more (--top {len(plans)})")
    lines.append(
        "TP: chips of a replica. STORED: weights/cache. Times are of a simulation of one replica under its share of the load, with random\n"
        "arrivals and lengths; in brackets, of an average request, not simulated. LIMIT: the TPOT that no engine beats with this batch\n"
        "(nominal HBM bandwidth, peak FLOPs). OUT TOK/S is at full use, $/1M at the load asked for. Calibrated on two results of vLLM\n"
        "with 70B on v6e-8; a third (8B on v6e-1) is planned 11% too fast."
    )
    if rejected:
        shown = rejected if why else rejected[:4]
        lines += ["", table(["DOES NOT WORK", "BECAUSE"], [list(row) for row in shown])]
        if len(shown) < len(rejected):
            lines.append(f"… and {len(rejected) - len(shown)} more (--why)")
    return "\n".join(lines)
