"""A storage service on loopback (the sandbox's), and Podway's buckets on it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from podway.sandbox.running import Running, running_sandbox

pytest.importorskip("google.cloud.storage")


@pytest.fixture(scope="session")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_sandbox(tmp_path_factory.mktemp("sandbox"), hosts="none") as running:
        yield running


@pytest.fixture
def storage(sandbox: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Running]:
    """The variables with which Google's client finds it; faults go with the test."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", sandbox.storage)
    monkeypatch.setenv("PODWAY_GCP_PROJECT", sandbox.project)
    yield sandbox
    sandbox.command("DELETE", "faults")
