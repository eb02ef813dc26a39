"""Podway's directory: private to its user, and where it cannot be used, a sentence."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from podway.errors import UserError
from podway.home import home


def test_a_home_that_others_could_read_is_made_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "home"
    place.mkdir()
    place.chmod(0o755)
    monkeypatch.setenv("PODWAY_HOME", str(place))
    assert home() == place
    assert place.stat().st_mode & 0o777 == 0o700
    place.chmod(0o500)  # stricter than needed is its owner's affair
    home()
    assert place.stat().st_mode & 0o777 == 0o500


@pytest.mark.parametrize("where", ["/proc/nowhere", "FILE", "FILE/below"])
def test_what_cannot_be_a_home_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PODWAY_HOME", where.replace("FILE", str(tmp_path / "file")))
    with pytest.raises(UserError, match="cannot be Podway's home"):
        home()


def test_another_users_home_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make another user's directory")
    place = tmp_path / "home"
    place.mkdir()
    os.chown(place, 12345, 12345)
    monkeypatch.setenv("PODWAY_HOME", str(place))
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(UserError, match="it is another user's"):
        home()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m,mode=700", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can mount a small disk")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def podway(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "podway.cli.main", *words],
        env={**os.environ, "PODWAY_HOME": str(place)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def check_sentence(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 1, done
    assert done.stderr.startswith("Error: ") and len(done.stderr.splitlines()) == 2, done.stderr
    assert any(word in done.stderr for word in words), done.stderr


def test_a_read_only_home_is_a_sentence(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    check_sentence(podway(small_disk, "status"), "Read-only file system")
    check_sentence(podway(small_disk, "server", "start"), "Read-only file system")


def test_a_full_disk_is_a_sentence(small_disk: Path) -> None:
    """When the server starts, when it runs, and when there is room again it goes on."""
    fill(small_disk)
    check_sentence(podway(small_disk, "status"), "No space left", "full")
    (small_disk / "filler").unlink()
    assert podway(small_disk, "status").returncode == 0
    try:
        fill(small_disk)
        check_sentence(podway(small_disk, "server", "token", "ann"), "disk is full")
        assert podway(small_disk, "status").returncode == 0  # reading needs no room
        (small_disk / "filler").unlink()
        assert podway(small_disk, "server", "token", "ann").returncode == 0
    finally:
        shutil.rmtree(small_disk / "filler", ignore_errors=True)
        podway(small_disk, "server", "stop")


def fill(place: Path) -> None:
    with (place / "filler").open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while file.write(b"\0" * size):
                    pass
            except OSError:
                continue
