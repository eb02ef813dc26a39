"""`run` calls the CLI as the console does, boundary and all; `stub` is the server it finds."""

import io
import os
import pty
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from podway.cli.main import main
from tests.cli.stub import Stub


class Result(NamedTuple):
    code: int
    out: str
    err: str


class Stdin(io.TextIOWrapper):
    """What is typed or piped in."""

    def __init__(self, text: str, terminal: bool) -> None:
        super().__init__(io.BytesIO(text.encode()))
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


Run = Callable[..., Result]


@pytest.fixture
def home(podway_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    podway_home.mkdir()
    return podway_home


@pytest.fixture
def stub(home: Path, tmp_path: Path) -> Iterator[Stub]:
    server = Stub(tmp_path)
    server.announce(home)
    yield server
    server.close()


@pytest.fixture
def run(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def go(*arguments: str, typed: str = "", terminal: bool = False) -> Result:
        monkeypatch.setattr(sys, "stdin", Stdin(typed, terminal))
        code = main(list(arguments))
        return Result(code, *capsys.readouterr())

    return go


def podway_process(*arguments: str, **options: object) -> "subprocess.Popen[str]":
    """The CLI as a process of its own."""
    argv = [sys.executable, "-m", "podway.cli.main", *arguments]
    return subprocess.Popen(argv, text=True, stderr=subprocess.PIPE, **options)  # type: ignore[call-overload,no-any-return]


def on_terminal(
    *arguments: str, typed: str = "", seconds: float = 80.0, program: tuple[str, ...] = ("-m", "podway.cli.main")
) -> tuple[int, str]:
    """The CLI, or another Python program, on a real terminal: exit code, and all that was shown on it."""
    ours, theirs = pty.openpty()
    argv = [sys.executable, *program, *arguments]
    process = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    os.write(ours, typed.encode())
    shown = b""
    try:
        while select.select([ours], [], [], seconds)[0]:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # the last one who had the terminal open is gone
                break
            if not piece:
                break
            shown += piece
        return process.wait(seconds), shown.decode()
    finally:
        process.kill()
        process.wait()
        os.close(ours)
