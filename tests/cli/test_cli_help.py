"""The command line is frozen here: a flag that comes, goes or changes its meaning changes a golden file."""

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from podway.cli.index import VERBS
from tests.cli import reference
from tests.cli.conftest import Run

UPDATE = bool(os.environ.get("PODWAY_UPDATE_GOLDEN"))
COMMANDS = dict(reference.commands())


def golden(words: str) -> Path:
    return reference.GOLDEN / f"{words.replace(' ', '-') or 'podway'}.txt"


@pytest.mark.parametrize("words", COMMANDS)
def test_help_is_the_golden_text(run: Run, words: str) -> None:
    result = run(*words.split(), "--help")
    assert (result.code, result.err) == (0, "")
    if UPDATE:
        golden(words).write_text(result.out)
    assert result.out == golden(words).read_text()
    assert run(*words.split(), "-h").out == result.out


def test_no_line_of_a_help_is_cut_by_a_narrow_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    for words in COMMANDS:
        wide = [line for line in run(*words.split(), "--help").out.splitlines() if len(line) > 60]
        assert wide == [], words


def test_no_golden_file_without_a_command() -> None:
    assert {path.name for path in reference.GOLDEN.iterdir()} == {golden(words).name for words in COMMANDS}


def test_the_page_is_made_from_the_commands() -> None:
    prose = reference.PAGE.read_text().partition(reference.BEGIN)[0]
    if UPDATE:
        reference.PAGE.write_text(prose + reference.page())
    assert reference.PAGE.read_text() == prose + reference.page()


def test_each_row_tells_what_its_command_tells() -> None:
    first: dict[str, str] = {}
    for verb, (where, text, _) in VERBS.items():
        alias_of = first.setdefault(where, verb)
        if alias_of == verb:
            assert (COMMANDS[verb].help or "").splitlines()[0] == text
        else:
            assert text == f"The same as {alias_of} (as in dstack)."


@pytest.mark.parametrize("words", COMMANDS)
def test_every_option_is_told(words: str) -> None:
    for parameter in COMMANDS[words].params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{words} {parameter.opts}"
            assert parameter.help.endswith((".", "]", "tpus", "...")), f"{words} {parameter.opts}: {parameter.help}"


def test_bare_podway_is_its_help(run: Run) -> None:
    assert run().out == run("--help").out


def test_version(run: Run) -> None:
    assert run("--version").out == run("version").out == "podway 0.1.0\n"


def modules_after(*arguments: str) -> set[str]:
    code = f"import sys; from podway.cli.main import main; main({list(arguments)!r}); print('|', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("|")[2].split())


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_and_version_import_no_verb(arguments: list[str]) -> None:
    loaded = modules_after(*arguments)
    assert {name for name in loaded if name.startswith("podway.")} <= {
        "podway.cli",
        "podway.cli.main",
        "podway.cli.index",
        "podway.cli.safe_terminal",
        "podway.errors",
        "podway.version",
    }
    assert not loaded & {"msgspec", "http.client", "yaml", "rich", "json", "subprocess"}


def test_status_imports_only_what_it_needs(stub: object) -> None:
    loaded = modules_after("status")
    assert "podway.server.client" in loaded
    assert not loaded & {"yaml", "rich", "sqlalchemy", "starlette", "asyncio", "difflib", "shutil", "podway.task.read"}
