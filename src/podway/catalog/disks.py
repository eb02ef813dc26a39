"""What disks cost, where anyone has published it.

`disk_prices.csv` holds dollars per GiB and month by the kind of disk, each with its source, as they are in the United States; other
regions differ. An unknown price is None: never 0.
"""

import csv
import functools
from pathlib import Path

HOURS_A_MONTH = 730.0  # as Google counts


@functools.cache
def disk_prices() -> dict[str, float]:
    """Dollars per GiB and month, by kind."""
    with open(Path(__file__).with_name("disk_prices.csv"), encoding="utf-8", newline="") as file:
        return {row["disk_type"]: float(row["price_per_gib_month"]) for row in csv.DictReader(file)}


def disk_hourly_cost(disk_type: str | None, size_gb: int | None) -> float | None:
    """Dollars per hour of a disk, attached or not; None where its kind has no known price."""
    price = disk_prices().get(disk_type or "")
    return None if price is None or not size_gb else price * size_gb / HOURS_A_MONTH
