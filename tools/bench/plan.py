"""`make bench-plan`: what the planner predicts beside what was published, with the error, and how fast it is.

`python -m tools.bench.plan` prints all tables; `--write FILE` also puts them between the markers of a Markdown file
(docs/planning.md). What the compiler report is read from docs/measurements; `--fresh` asks it again first, which needs libtpu and
about ten minutes. It ends with exit code 1 if a bound that the planner is held to is broken.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tools.bench import ranking, rehearsed

from podway.catalog.slices import all_slices, find_slice, slices_of
from podway.cli.tables import table
from podway.model.families import find_model
from podway.model.layout import MeshShape
from podway.model.params import count, params
from podway.plan.chips import STRAGGLER_LOSS_PER_DOUBLING, device_of
from podway.plan.engine_costs import HOST_SECONDS, PAGE_OVERHEAD, Precision
from podway.plan.evidence import (
    Comparison,
    compiled_hbm,
    fitted,
    jobs,
    serving,
    serving_limit,
    spearman,
    t5_plan,
    t5_ran,
)
from podway.plan.evidence_training import COMPILER_RATES, Judged, judged_training, median, training_plan
from podway.plan.finetune import finetune_template
from podway.plan.memory import GIB, SPREAD
from podway.plan.plans import TrainPlan, evaluate
from podway.plan.published_rows import row_of, rows_of
from podway.plan.search import PlanOptions, search_train
from podway.plan.serve import Load, search_serve, weights_per_device
from podway.plan.t5 import T5X_MATRIX_EFFICIENCY
from podway.plan.training import BYTES, Program, Training
from podway.plan.uncertainty import uncertainty_of

BEGIN, END = "<!-- bench-plan: begin -->", "<!-- bench-plan: end -->"
Checks = list[tuple[str, bool]]


def constants(checks: Checks) -> str:
    """Calibrated constants beside the value that their rows give."""
    used = {("matrix_efficiency", name): device_of(name).matrix_efficiency for name in COMPILER_RATES} | {
        ("t5x_matrix_efficiency", "v4"): T5X_MATRIX_EFFICIENCY,
        ("straggler_loss_per_doubling", "v5e"): STRAGGLER_LOSS_PER_DOUBLING,
        ("host_seconds", "vllm"): HOST_SECONDS,
        ("page_overhead", "vllm"): PAGE_OVERHEAD,
    }
    rows = [
        [name, generation, f"{fit:.3f}", f"{used[name, generation]:.3f}"]
        for (name, generation), fit in fitted().items()
    ]
    checks.append(("constants equal their fit to 0.002", all(abs(used[k] - v) < 0.002 for k, v in fitted().items())))
    return table(["CONSTANT", "FITTED ON", "FIT", "USED"], rows, right=("FIT", "USED"))


def training_section(checks: Checks) -> str:
    """Published steps of every generation: planned, and planned by rates that were fitted without the row's model."""
    rows, judged = [], judged_training()
    plans = {row["row"]: training_plan(row) for row in rows_of("training")}
    for one in judged:
        name = one.row + ("*" if one.calibration else "")
        rows.append(
            [name, one.kind, f"{one.published:.2f} s", f"{one.predicted:.2f} s", f"{100 * one.error:+.1f}%",
             f"{100 * one.unseen_error:+.1f}%", "yes" if _inside(one) else "no", plans[one.row].memory.verdict]
        )  # fmt: skip
    lines = []
    for generation in dict.fromkeys(one.generation for one in judged):
        ours = [one for one in judged if one.generation == generation]
        bias = sum(one.error for one in ours) / len(ours)
        lines.append(
            f"{generation}: {len(ours)} rows, bias {100 * bias:+.1f}%, {_spread([o.unseen_error for o in ours])}, "
            f"{sum(map(_inside, ours))} of {len(ours)} inside their interval"
        )
    for kind in ("dense", "mixture", "quantised"):
        lines.append(f"{kind}: {_spread([one.unseen_error for one in judged if one.kind == kind])}")
    spread = median(abs(one.unseen_error) for one in judged)
    checks.append((f"published steps, each model unseen: median |error| {100 * spread:.1f}% <= 6%", spread <= 0.06))
    mixtures = median(abs(one.unseen_error) for one in judged if one.kind == "mixture")
    checks.append((f"published mixtures of experts: median |error| {100 * mixtures:.1f}% <= 12%", mixtures <= 0.12))
    share = sum(map(_inside, judged)) / len(judged)
    checks.append(
        (
            f"published steps inside the interval of a plan that has not seen their model: {100 * share:.0f}% >= 80%",
            share >= 0.8,
        )
    )
    least = min(
        sum(map(_inside, ours)) / len(ours)
        for ours in ([one for one in judged if one.generation == g] for g in {one.generation for one in judged})
    )
    checks.append((f"the same for each generation: {100 * least:.0f}% or more >= 80%", least >= 0.8))
    refused = [name for name, plan in plans.items() if plan.memory.verdict == "does not fit"]
    checks.append(
        (f"published steps, all of which ran, that are said not to fit: {len(refused)} of {len(plans)}", not refused)
    )
    headers = ["ROW", "KIND", "PUBLISHED", "PLANNED", "SPEED", "MODEL UNSEEN", "INSIDE 80%", "MEMORY"]
    return table(headers, rows, right=(2, 3, 4, 5)) + "\n" + "\n".join(lines)


def _inside(one: Judged) -> bool:
    """Whether a published step lies in the interval around what is planned without having seen its model."""
    found = uncertainty_of(one.unseen, one.generation, one.kind, models=one.others)
    return found.low <= one.published <= found.high


def _spread(errors: list[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"with the model unseen median |error| {100 * median(sizes):.1f}%, largest {100 * max(sizes):.1f}%"


def jobs_section(checks: Checks) -> str:
    """The 16B-128B jobs on 1 to 32 slices of v5e-256."""
    compared = jobs()
    rows = [[_marked(c), f"{c.published:.2f}", f"{c.predicted:.2f}", f"{100 * c.error:+.1f}%"] for c in compared]
    errors = [abs(c.error) for c in compared]
    mean, worst = sum(errors) / len(errors), max(errors)
    order = _same_order(compared)
    checks.append((f"16B-128B: mean |error| of MFU {100 * mean:.1f}% <= 6%", mean <= 0.06))
    checks.append((f"16B-128B: largest |error| {100 * worst:.1f}% <= 12%", worst <= 0.12))
    checks.append(("16B-128B: the four sizes in the published order at every number of slices", order))
    judged = [abs(c.error) for c in compared if not c.calibration]
    tail = f"mean |error| {100 * mean:.1f}%, largest {100 * worst:.1f}%; "
    tail += f"without calibration rows (*) {100 * sum(judged) / len(judged):.1f}%"
    return table(["JOB-SLICES", "MFU PUBLISHED", "PREDICTED", "ERROR"], rows, right=(1, 2, 3)) + "\n" + tail


def _same_order(compared: list[Comparison]) -> bool:
    """Whether the four sizes rank alike in both columns, for each number of slices."""
    by_slices: dict[str, list[Comparison]] = {}
    for one in compared:
        by_slices.setdefault(one.row.rpartition("-")[2], []).append(one)
    return all(
        [c.row for c in sorted(group, key=lambda c: c.published)]
        == [c.row for c in sorted(group, key=lambda c: c.predicted)]
        for group in by_slices.values()
    )


def rehearsed_jobs_section(checks: Checks) -> str:
    """The four jobs on one slice, estimated of the programs that the compiler makes of them."""
    compared, found = rehearsed.jobs()
    rows = []
    for one in compared:
        report, guess = found[one.row]
        span = [one.predicted * guess.point / seconds for seconds in (guess.high, guess.low)]
        gib = f"{report.memory.total / GIB:.2f}" if report.memory else "-"
        rows.append(
            [_marked(one), f"{one.published:.2f}", f"{one.predicted:.2f}", f"{span[0]:.1f} to {span[1]:.1f}",
             f"{100 * one.error:+.1f}%", gib, f"{report.compile_seconds:.0f} s"]
        )  # fmt: skip
    errors = [abs(one.error) for one in compared]
    mean = sum(errors) / len(errors)
    judged = [abs(one.error) for one in compared if not one.calibration]
    checks.append((f"rehearsed 16B-128B: mean |error| of MFU {100 * mean:.1f}% <= 5%", len(rows) == 4 and mean <= 0.05))
    checks.append((f"rehearsed 16B-128B: largest |error| {100 * max(errors):.1f}% <= 12%", max(errors) <= 0.12))
    checks.append(("rehearsed 16B-128B: the four sizes in the published order", _same_order(compared)))
    headers = ["JOB-SLICES", "MFU PUBLISHED", "REHEARSED", "INTERVAL", "ERROR", "GIB", "COMPILED IN"]
    tail = f"mean |error| {100 * mean:.1f}%; without the calibration row (*) {100 * sum(judged) / len(judged):.1f}%. "
    tail += f"{rehearsed.versions()}; schedule and buffers only"
    return table(headers, rows, right=range(1, 7)) + "\n" + tail


def rehearsed_bytes_section(checks: Checks) -> str:
    """HBM of Podway's own step over a grid of models and meshes: compiled, and planned."""
    compared = rehearsed.weighed()
    rows = [[c.row, f"{c.published:.2f}", f"{c.predicted:.2f}", f"{100 * c.error:+.1f}%"] for c in compared]
    worst = max(abs(c.error) for c in compared)
    mean = sum(abs(c.error) for c in compared) / len(compared)
    checks.append(
        (
            f"HBM of {len(rows)} steps of Podway's trainer within 9% of the compiler ({100 * worst:.1f}%)",
            worst <= SPREAD,
        )
    )
    near = sum(abs(c.error) <= 0.05 for c in compared)
    checks.append((f"HBM within 5% of what is compiled: {near} of {len(rows)} >= 95%", near >= 0.95 * len(rows)))
    tail = f"mean |error| {100 * mean:.1f}%, largest {100 * worst:.1f}%, {near} of {len(rows)} within 5%; {rehearsed.versions()}"
    headers = ["MODEL SLICE MESH BATCH", "GIB COMPILED", "PLANNED", "ERROR"]
    return table(headers, rows, right=(1, 2, 3)) + "\n" + tail


def rehearsed_steps_section(checks: Checks) -> str:
    """Steps of Podway's trainer: planned, and estimated of the program that the compiler makes of them."""
    compared = rehearsed.timed()
    rows = [[c.row, f"{c.published:.3f} s", f"{c.predicted:.3f} s", f"{100 * c.error:+.1f}%"] for c in compared]
    sizes = [abs(c.error) for c in compared]
    mean = sum(sizes) / len(sizes)
    checks.append(
        (
            f"{len(rows)} steps planned and rehearsed: median |error| {100 * median(sizes):.1f}% <= 8%",
            median(sizes) <= 0.08,
        )
    )
    near = sum(size <= 0.08 for size in sizes)
    checks.append(
        (f"steps planned within 8% of what is rehearsed: {near} of {len(rows)} >= 95%", near >= 0.95 * len(rows))
    )
    tail = f"mean |error| {100 * mean:.1f}%, largest {100 * max(sizes):.1f}%, {near} of {len(rows)} within 8%"
    return table(["MODEL SLICE MESH BATCH", "REHEARSED", "PLANNED", "ERROR"], rows, right=(1, 2, 3)) + "\n" + tail


def compiled_section(checks: Checks) -> str:
    """HBM of a device beside what the TPU compiler allocates for the same programs."""
    compared = compiled_hbm()
    rows = [[c.row, f"{c.published:.2f}", f"{c.predicted:.2f}", f"{100 * c.error:+.1f}%"] for c in compared]
    worst = max(abs(c.error) for c in compared)
    checks.append((f"HBM of {len(rows)} programs within 10% of the compiler ({100 * worst:.1f}%)", worst <= 0.10))
    return table(["PROGRAM-MODEL-SLICE-SEQUENCES", "GIB COMPILED", "PLANNED", "ERROR"], rows, right=(1, 2, 3))


def t5_section(checks: Checks) -> str:
    """The T5 trials on v4."""
    rows: list[list[object]] = []
    outcomes = []
    for row in rows_of("t5_v4"):
        plan, report = t5_plan(row), row["tokens_per_second"]
        predicted = plan.tokens_per_second
        ran = report not in ("", "OOM")
        if report:
            outcomes.append(ran == plan.memory.fits)
        hbm = f"{plan.memory.total / GIB:.1f}/{plan.memory.limit / GIB:.1f}"
        error = f"{100 * (predicted / float(report) - 1):+.0f}%" if ran else ""
        outcome = "fits" if plan.memory.fits else "OOM"
        published = f"{float(report):,.0f}" if ran else report or "(none)"
        rows.append([row["row"], hbm, outcome, published, f"{predicted:,.0f}" if plan.memory.fits else "", error])
    ranks = spearman([c for c in t5_ran() if c.row.startswith("t5-11b")])
    fast, slow = (t5_plan(row_of("t5_v4", f"t5-11b-{tile}-896-4")) for tile in ("4x2x2", "2x2x4"))
    checks.append((f"T5: all {len(outcomes)} outcomes (OOM or ran) right", all(outcomes)))
    checks.append((f"T5-11B: rank correlation of tokens/s {ranks:.3f} >= 0.9", ranks >= 0.9))
    checks.append(("T5-11B: tile 4x2x2 faster than 2x2x4", fast.tokens_per_second > slow.tokens_per_second))
    gain = f"tile 4x2x2 over 2x2x4 at batch 896: predicted +{fast.tokens_per_second - slow.tokens_per_second:,.0f} tokens/s, "
    gain += f"published +{_tokens('4x2x2') - _tokens('2x2x4'):,.0f} (the text says +35k); sums over the tile "
    gain += f"{_tensor_seconds(fast):.2f} s instead of {_tensor_seconds(slow):.2f} s a step"
    headers = [
        "ROW (MODEL-TILE-BATCH-MICROBATCHES)",
        "HBM GIB",
        "PREDICTED",
        "TOKENS/S PUBLISHED",
        "PREDICTED",
        "ERROR",
    ]
    return (
        table(headers, rows, right=(1, 3, 4, 5)) + f"\nrank correlation of the 11B rows that ran: {ranks:.3f}; {gain}"
    )


def _tokens(tile: str) -> float:
    return float(row_of("t5_v4", f"t5-11b-{tile}-896-4")["tokens_per_second"])


def _tensor_seconds(plan: TrainPlan) -> float:
    return sum(t.seconds for t in plan.time.traffic if t.axis == "tensor")


def llama3_section(checks: Checks) -> str:
    """Two 20-step runs of Llama 3 8B on v6e with PyTorch/XLA: what the printed throughput means."""
    program = Program(name="torch-xla", gradients="all-reduce", casts_once=False, logits_share=None)
    rows, shares = [], []
    for row in rows_of("llama3_v6e"):
        slice, batch, seq = find_slice(row["slice"]), int(row["batch"]), int(row["seq"])
        training = Training(seq=seq, batch=batch, optimizer="adafactor", params="bfloat16", program=program)
        plan = evaluate(find_model(row["model"]), slice, MeshShape(fsdp=slice.chips), training)
        published = float(row["samples_per_second"])
        mfu = plan.model_flops / batch * published / slice.peak_bf16
        steps = int(row["steps"]) * plan.time.total
        shares.append(steps / float(row["runtime_seconds"]))
        rows.append(
            [
                row["row"],
                f"{published:.3f}",
                f"{100 * mfu:.1f}%",
                f"{plan.time.total:.2f} s",
                f"{batch / plan.time.total:.2f}",
                f"{100 * plan.mfu:.1f}%",
                f"{steps:.0f} of {float(row['runtime_seconds']):.0f} s",
            ]
        )
    checks.append(
        ("v6e Llama 3 8B: both runs explained by the same share of set-up", abs(shares[0] - shares[1]) < 0.02)
    )
    headers = ["SLICE", "SAMPLES/S", "ITS MFU", "STEP PLANNED", "SAMPLES/S THEN", "MFU THEN", "20 STEPS TAKE"]
    return table(headers, rows, right=range(1, 7)) + (
        "\nUnder XLA_USE_SPMD the batch flag is the global batch: 16 and 32 sequences of 8192, two a chip in both runs. The"
        "\nthroughput is 20 steps over the whole runtime, which holds tracing, compiling and the first transfer of weights;"
        "\nwith the same work for each chip both runs took 673 s. Planned at steady state, 20 steps are a small part of that:"
        "\nthe printed figure measures start-up, not training. (The second page asks for v6e-32; its log has the four hosts"
        "\nof a v6e-16.) What cannot be told from the logs is how fast the steps themselves were: a longer run would."
    )


def memory_tables(checks: Checks) -> str:
    """The two tables of memory for serving and LoRA on v5e, from Podway's own arithmetic."""
    rows: list[list[object]] = []
    smaller = 0
    for row in rows_of("memory_tables"):
        report = int(row["slice"].rpartition("-")[2])
        own, least, remark = _lora(row) if row["use"] == "lora" else _serving(row)
        if least is not None and least < report:
            remark = f"v5litepod-{least} does; {remark}"
            smaller += 1
        elif least is None or least > report:
            remark = f"{row['slice']} does not; {remark}"
        fits = f"v5litepod-{least}" if least else "none"
        rows.append([row["row"], f"{row['gigabytes']} GB", f"{own:,.0f} GB", row["slice"], fits, remark])
    checks.append(("memory tables: slices smaller than the published ones found", smaller > 0))
    return table(
        ["USE-MODEL", "PUBLISHED", "OWN", "ITS SLICE", "LEAST THAT FITS", "WHERE IT IS NOT RIGHT"], rows, right=(1, 2)
    )


def _serving(row: dict[str, str]) -> tuple[float, int | None, str]:
    """Gigabytes of weights, and the smallest slice that serves one request of 4096 tokens (as the page sets it)."""
    shape, stored = find_model(row["model"]), row["use"]
    own = weights_per_device(shape, 1, stored) / 1e9
    load = Load(prompt=3840, output=256, rate=0.01)
    plans, rejected = search_serve(shape, load, slices_of("v5e"), Precision(weights=stored))
    best = min(plans, key=lambda plan: plan.slice.chips, default=None)
    what = "weights only" if stored == "bfloat16" else "weights only, and embeddings stay bfloat16"
    if best is None:
        whole = sum(p.size for p in params(shape) if p.name in ("layers/k", "layers/v")) * BYTES[stored] / GIB
        why = (
            f"Podway's engine keeps the matrices of all {shape.kv_heads} key/value heads ({whole:.1f} GiB) on each chip"
        )
        return own, None, f"{what}; {rejected[-1][1]}: {why} of a group larger than that"
    return own, best.slice.chips, f"{what}; {best.kv_tokens:,} tokens of KV cache left there"


def _lora(row: dict[str, str]) -> tuple[float, int | None, str]:
    """Gigabytes of a LoRA step on the published slice, and the smallest slice that runs one."""
    shape, template = find_model(row["model"]), finetune_template(rank=16, int8_base=False)
    fitting: list[TrainPlan] = []
    reason = ""
    for slice in slices_of("v5e"):
        search = search_train(shape, PlanOptions(seq=1024, batch=slice.chips, template=template), [slice])
        fitting += search.plans[:1]
        if slice.accelerator_type == row["slice"] and search.rejected:
            reason = search.rejected[0].reason
    least = min((plan.slice.chips for plan in fitting), default=None)
    there = [plan for plan in fitting if plan.slice.accelerator_type == row["slice"]]
    base = count(shape) * 2 / 1e9
    if not there:
        return base, least, f"{base:,.0f} GB is the frozen base alone; {reason}"
    own = there[0].memory.total * there[0].chips / 1e9
    return own, least, f"base {base:,.0f} GB, the rest is gathered weights and activations"


def serving_section(checks: Checks) -> str:
    """The planned cost of a step beside engines, and the limit that none may beat."""
    rows, beaten = [], []
    for one in serving():
        row = row_of("serving", one.row)
        unit = "ms/token" if row["tpot_ms"] else "requests/s"
        limit = serving_limit(row) if row["tpot_ms"] else None
        if limit is not None and one.published < limit:
            beaten.append(one.row)
        bound = "" if limit is None else f"{limit:.1f}"
        rows.append(
            [
                _marked(one),
                row["engine"],
                f"{one.published:g}",
                f"{one.predicted:.1f}",
                unit,
                f"{100 * one.error:+.0f}%",
                bound,
            ]
        )
    checks.append(("serving: no engine is faster than the limit", not beaten))
    return table(["ROW", "ENGINE", "PUBLISHED", "PLANNED", "", "ERROR", "LIMIT"], rows, right=(2, 3, 5, 6))


def speed_section(checks: Checks) -> str:
    """CPU time of a search over the whole catalog, and of one configuration."""
    rows, slowest = [], 0.0
    for name in ("llama3.1-8b", "llama3.1-405b", "mixtral-8x22b", "qwen3-235b-a22b"):
        shape = find_model(name)
        begin, wall = time.process_time(), time.perf_counter()
        search = search_train(shape, PlanOptions(seq=8192), all_slices())
        costs, waited = time.process_time() - begin, time.perf_counter() - wall
        plan = search.plans[0]
        begin = time.process_time()
        for _ in range(100):
            evaluate(shape, plan.slice, plan.mesh, plan.training)
        once = (time.process_time() - begin) / 100
        slowest = max(slowest, costs)
        found = f"{len(search.plans)} of {len(search.plans) + len(search.rejected)}"
        rows.append([name, found, f"{costs:.2f} s", f"{waited:.2f} s", f"{1e3 * once:.2f} ms"])
        checks.append((f"{name}: one configuration in {1e3 * once:.2f} ms < 5 ms", once < 0.005))
    checks.append((f"a search over {len(all_slices())} slices in {slowest:.2f} s of CPU < 1 s", slowest < 1))
    return table(["MODEL", "SLICES THAT FIT", "SEARCH (CPU)", "(WALL)", "ONE PLAN (CPU)"], rows, right=range(1, 5))


def _marked(one: Comparison) -> str:
    return one.row + ("*" if one.calibration else "")


SECTIONS: dict[str, Callable[[Checks], str]] = {
    "Calibrated constants": constants,
    "Published training steps": training_section,
    "MFU of the 16B-128B jobs on v5e-256": jobs_section,
    "The same jobs on one slice, rehearsed": rehearsed_jobs_section,
    "HBM of a device in MaxText's programs, planned and compiled": compiled_section,
    "HBM of a device in Podway's step, planned and compiled": rehearsed_bytes_section,
    "Steps of Podway's trainer, planned and rehearsed": rehearsed_steps_section,
    "The first five plans, in the planner's order and in the compiler's": ranking.section,
    "T5-11B and 68B on v4": t5_section,
    "Llama 3 8B on v6e with PyTorch/XLA": llama3_section,
    "Memory tables for serving and LoRA on v5e": memory_tables,
    "Serving": serving_section,
    "Speed": speed_section,
}


def report() -> tuple[str, Checks]:
    """All sections, and the bounds with whether they hold."""
    checks: Checks = []
    parts = []
    for title, section in SECTIONS.items():
        parts += [f"### {title}", "```", section(checks), "```", ""]
    verdicts = [[("ok" if ok else "FAILED"), what] for what, ok in checks]
    parts += ["### Bounds", "```", table(["", "BOUND"], verdicts), "```"]
    return "\n".join(parts), checks


def write_between(path: Path, text: str) -> None:
    """Replaces what stands between the markers of a file."""
    page = path.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the tables between the markers of FILE")
    parser.add_argument("--fresh", action="store_true", help="ask the compiler again (minutes; needs podway[rehearse])")
    parser.add_argument("--missing", action="store_true", help="ask the compiler about what is not recorded yet")
    arguments = parser.parse_args()
    failed = rehearsed.record_jobs() if arguments.fresh else []
    if arguments.fresh or arguments.missing:
        failed += rehearsed.record_steps(again=arguments.fresh) + ranking.record(again=arguments.fresh)
    for line in failed:
        print(line, file=sys.stderr)
    text, checks = report()
    print(text.replace("```\n", "").replace("```", ""))
    if arguments.write:
        write_between(arguments.write, text)
    sys.exit(0 if all(ok for _, ok in checks) else 1)


if __name__ == "__main__":
    main()
