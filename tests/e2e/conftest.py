"""Every end-to-end test gets a Podway of its own, and leaves no process behind."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import processes_of
from tests.e2e.harness import Podway


@pytest.fixture
def pod(podway_home: Path) -> Iterator[Podway]:
    podway = Podway(podway_home)
    yield podway
    podway.close()
    assert [process.cmdline() for process in processes_of(podway_home)] == []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/e2e/" in str(item.fspath):
            item.add_marker(pytest.mark.e2e)
