"""Intervals: their width is that of the published rows, and they hold what was published."""

import pytest

from podway.plan.evidence import jobs
from podway.plan.evidence_training import judged_training, median
from podway.plan.uncertainty import (
    COVERAGE,
    GENERATION_EVIDENCE,
    SPREAD,
    evidence_text,
    relative_width,
    uncertainty_of,
)


def test_the_spread_is_that_of_the_unseen_rows() -> None:
    errors = [one.unseen_error for one in judged_training() if one.kind == "dense"]
    assert (sum(error**2 for error in errors) / len(errors)) ** 0.5 == pytest.approx(SPREAD, abs=0.003)


def test_the_evidence_is_what_the_tables_say() -> None:
    for generation, known in GENERATION_EVIDENCE.items():
        if generation == "v5e":
            errors = [abs(one.error) for one in jobs()]
        else:
            errors = [abs(one.unseen_error) for one in judged_training() if one.generation == generation]
        assert known.rows == len(errors)
        assert median(errors) == pytest.approx(known.median_error, abs=0.006), generation


def test_eight_in_ten_published_steps_lie_inside() -> None:
    """By the interval that a planner without the row's model would give: of every generation, v4's only model included."""
    inside: dict[str, list[bool]] = {}
    for one in judged_training():
        found = uncertainty_of(one.unseen, one.generation, one.kind, models=one.others)
        inside.setdefault(one.generation, []).append(found.low <= one.published <= found.high)
    for generation, ours in inside.items():
        assert sum(ours) / len(ours) >= COVERAGE, generation


def test_a_rate_that_one_model_sets_is_less_certain() -> None:
    assert relative_width("v6e", "dense") < relative_width("v4", "dense") < relative_width("v3", "dense")
    assert relative_width("v4", "dense", models=0) == relative_width("v3", "dense")


def test_less_evidence_is_a_wider_interval() -> None:
    assert relative_width("v6e", "dense") < relative_width("v6e", "mixture") < relative_width("v3", "mixture")
    assert "no published step of v2" in evidence_text("v2", "dense")
    joined = uncertainty_of(10.0, "v5p", "mixture", slices=2, offloads=True)
    assert joined.low < 10 < joined.high and len(joined.not_modelled) == 6
