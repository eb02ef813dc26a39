"""Prices of disks: each with its source, and an unknown one is unknown."""

import csv
from pathlib import Path

import pytest

from podway.catalog import disks


def test_prices_have_sources() -> None:
    with open(Path(disks.__file__).with_name("disk_prices.csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(row["source"] and 0 < float(row["price_per_gib_month"]) < 1 for row in rows)
    assert {"pd-balanced", "hyperdisk-balanced"} <= {row["disk_type"] for row in rows}, "what volumes are made of"


def test_cost_of_a_month() -> None:
    hourly = disks.disk_hourly_cost("pd-balanced", 200)
    assert hourly is not None and hourly * disks.HOURS_A_MONTH == pytest.approx(20.0)
    assert disks.disk_hourly_cost("local-ssd", 200) is None and disks.disk_hourly_cost("pd-ssd", None) is None
