"""Loopback networks of simulated clusters: claims in a directory that is ours."""

import os
import tempfile
from pathlib import Path

import pytest

from podway.errors import UserError
from podway.providers.local import subnets


def test_a_registry_that_somebody_else_put_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    own = tmp_path / "elsewhere"
    own.mkdir()
    place = tmp_path / "cluster"
    place.mkdir()
    registry = tmp_path / f"podway-subnets-{os.getuid()}"
    registry.symlink_to(own)
    with pytest.raises(UserError, match="is another user's"):
        subnets.claim_subnet(place)
    registry.unlink()
    subnets.claim_subnet(place)
    assert registry.stat().st_mode & 0o777 == 0o700
    subnets.release_subnet(place)
    assert list(own.iterdir()) == []
