"""Files written whole or not at all."""

import os
import threading
from pathlib import Path

import pytest

from podway.files import write_atomically


def test_mode_and_content_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_atomically(tmp_path / "a", b"one")
        write_atomically(tmp_path / "b", b"two", mode=0o755)
    finally:
        os.umask(before)
    assert [(path.read_bytes(), path.stat().st_mode & 0o777) for path in sorted(tmp_path.iterdir())] == [
        (b"one", 0o644),
        (b"two", 0o755),
    ]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    write_atomically(path, b"old")
    with pytest.raises(TypeError):
        write_atomically(path, "no bytes")  # type: ignore[arg-type]
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("kept", b"old")]


def test_threads_that_write_the_same_file_leave_one_of_theirs_whole(tmp_path: Path) -> None:
    path = tmp_path / "shared"
    contents = [bytes([number]) * 100_000 for number in range(8)]
    threads = [
        threading.Thread(target=lambda data=data: [write_atomically(path, data) for _ in range(20)])
        for data in contents
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() in contents
    assert list(tmp_path.iterdir()) == [path]
