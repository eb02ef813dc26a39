"""What libtpu wrote of small programs (fixtures/make_scan.py), and where their devices lie."""

from itertools import product
from pathlib import Path

from podway.catalog.slices import find_slice
from podway.rehearse.fabric import Fabric

FIXTURES = Path(__file__).parent / "fixtures"


def text(name: str) -> str:
    return (FIXTURES / f"{name}.txt").read_text()


def fabric(slice: str, slices: int = 1) -> Fabric:
    """Devices numbered along the last axis first, slice by slice."""
    found = find_slice(slice)
    one = [tuple(reversed(place)) for place in product(*(range(side) for side in reversed(found.topology)))]
    return Fabric(found, tuple((number, *place) for number in range(slices) for place in one))
