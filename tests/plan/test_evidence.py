"""The planner against published results, and the constants against the rows they were fitted on."""

from collections import Counter

import pytest
from tools.bench.plan import BEGIN, END, report, write_between

from podway.plan.chips import STRAGGLER_LOSS_PER_DOUBLING, device_of
from podway.plan.engine_costs import HOST_SECONDS, PAGE_OVERHEAD
from podway.plan.evidence import compiled_hbm, fitted, jobs, spearman, t5_ran
from podway.plan.evidence_training import judged_training, median, published_seconds
from podway.plan.published_rows import rows_of
from podway.plan.t5 import T5X_MATRIX_EFFICIENCY

TABLES = ("training", "v5e_jobs", "t5_v4", "llama3_v6e", "memory_tables", "serving")


def test_mfu_of_the_16b_to_128b_jobs() -> None:
    compared = jobs()
    assert len(compared) == 24
    errors = [abs(one.error) for one in compared]
    assert sum(errors) / 24 <= 0.06 and max(errors) <= 0.12
    judged = [abs(one.error) for one in compared if not one.calibration]
    assert len(judged) == 22 and sum(judged) / 22 <= 0.06


@pytest.mark.parametrize("slices", ["1", "2", "4", "8", "16", "32"])
def test_order_of_the_four_sizes(slices: str) -> None:
    cells = [one for one in jobs() if one.row.rpartition("-")[2] == slices]
    assert sorted(cells, key=lambda c: c.predicted) == sorted(cells, key=lambda c: c.published)


def test_rank_of_the_t5_trials() -> None:
    ran = [one for one in t5_ran() if one.row.startswith("t5-11b")]
    assert len(ran) == 17 and spearman(ran) >= 0.9


def test_memory_is_that_of_the_compiler() -> None:
    for one in compiled_hbm():
        assert abs(one.error) <= 0.10, one


def test_constants_are_their_fit() -> None:
    rates = ("v4", "v5e", "v5p", "v6e", "tpu7x")
    used = {("matrix_efficiency", generation): device_of(generation).matrix_efficiency for generation in rates} | {
        ("t5x_matrix_efficiency", "v4"): T5X_MATRIX_EFFICIENCY,
        ("straggler_loss_per_doubling", "v5e"): STRAGGLER_LOSS_PER_DOUBLING,
        ("host_seconds", "vllm"): HOST_SECONDS,
        ("page_overhead", "vllm"): PAGE_OVERHEAD,
    }
    assert fitted().keys() == used.keys()
    for key, value in fitted().items():
        assert used[key] == pytest.approx(value, abs=0.002)


def test_at_most_two_constants_a_generation() -> None:
    constants = {(row["generation"], row["constant"]) for row in rows_of("calibration")}
    assert max(Counter(generation for generation, _ in constants).values()) <= 2


def test_every_row_either_calibrates_or_judges() -> None:
    calibration = {(row["table"], row["row"]) for row in rows_of("calibration")}
    judging = {(row["table"], row["row"]) for row in rows_of("judging")}
    every = {(name, row["row"]) for name in TABLES for row in rows_of(name)}
    unknown = {("t5_v4", row["row"]) for row in rows_of("t5_v4") if not row["tokens_per_second"]}
    assert calibration.isdisjoint(judging)
    assert calibration | judging == every - unknown
    assert sum(table != "training" for table, _ in calibration) < len(judging) / 8


def test_rates_hold_for_models_they_were_not_fitted_on() -> None:
    """Generations with more than one dense model; mixtures and quantised steps calibrate nothing at all."""
    for one in judged_training():
        if one.generation in ("v5p", "v6e") or one.kind != "dense":
            assert abs(one.unseen_error) <= 0.12, one
    mixtures = [abs(one.error) for one in judged_training() if one.kind == "mixture"]
    assert len(mixtures) == 3 and median(mixtures) <= 0.12


def test_published_speed_is_what_the_row_says_it_is() -> None:
    """Where a row gives both a step time and TFLOP/s, its model, batch and convention must agree on them."""
    for row in rows_of("training"):
        if row["step_seconds"]:
            alone = published_seconds(row | {"step_seconds": ""})
            assert alone == pytest.approx(float(row["step_seconds"]), rel=0.01), row["row"]


def test_every_published_row_names_its_source() -> None:
    for name in (*TABLES, "compiled_hbm"):
        assert all(row["source"] for row in rows_of(name))


def test_the_report_holds_its_bounds(tmp_path: object) -> None:
    text, checks = report()
    # CPU time on a busy machine is not for a test to judge.
    broken = [what for what, ok in checks if not ok and "CPU" not in what and " ms" not in what]
    assert not broken
    assert "OOM" in text and "v5litepod-1 does" in text


def test_tables_are_written_between_the_markers(tmp_path) -> None:  # type: ignore[no-untyped-def]
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_between(page, "new")
    assert page.read_text() == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
