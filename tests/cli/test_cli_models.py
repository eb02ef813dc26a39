"""serve and train: their mistakes and help are those of every other verb, though another program does the work."""

import os
import sys
from pathlib import Path

import pytest

from podway.cli import serve, serve_services
from podway.errors import UserError
from podway.serve.options import parser
from tests.cli import records
from tests.cli.conftest import Run
from tests.cli.stub import Stub

MISTAKES = [
    ("serve", "Missing argument 'MODEL'."),
    ("serve m n", "Got unexpected extra argument (n)"),
    ("serve m --port x", "Invalid value for '--port': 'x' is not a valid integer."),
    ("serve m --quantize int4", "Invalid value for '--quantize': 'int4' is not one of 'none', 'int8'."),
    ("serve m --replica 2", "No such option '--replica'. Did you mean '--replicas'?"),
    ("serve m --name -x", "Argument --name: expected one argument."),
    ("train --nope", "No such option '--nope'."),
    ("train --candidate-limit x", "Invalid value for '--candidate-limit': 'x' is not a valid float."),
]


@pytest.mark.parametrize(("words", "what"), MISTAKES)
def test_a_mistake_is_told_as_by_every_verb(run: Run, words: str, what: str) -> None:
    result = run(*words.split())
    verb = words.split()[0]
    first, usage, see = result.err.splitlines()
    assert (result.code, result.out) == (2, "")
    assert first == f"Error: {what}"
    assert usage.startswith(f"  Usage: podway {verb} ") and see == f"  see: podway {verb} --help"


def test_a_wrong_value_is_told_before_anything_is_loaded(run: Run, tmp_path: Path) -> None:
    result = run("serve", str(tmp_path), "--port", "70000")
    assert (result.code, result.err) == (1, "Error: --port is 70000\n  a port lies between 0 and 65535\n")


@pytest.mark.parametrize(
    "words",
    [
        "m --lora-modules a=x b=y --port 1",
        "m --lora-modules a=x --lora-modules b=y --no-reasoning --cors-origin * --cors-origin b",
        "--tp 2 --lora-modules a=x -- m",
    ],
)
def test_the_server_gets_the_words_as_typed(run: Run, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """Those that click cannot read as the server does too: several words after one option."""
    became: list[list[str]] = []
    monkeypatch.setattr(serve, "check", lambda options: None)
    monkeypatch.setattr(serve, "require", lambda extra, what: None)
    monkeypatch.setattr(os, "execv", lambda program, argv: became.append(argv))
    result = run("serve", *words.split())
    assert (result.code, result.err) == (0, "")
    assert became == [[sys.executable, "-m", "podway.serve", *words.split()]]
    assert parser().parse_args(words.split()).model == "m"


def test_services_by_habit_are_read_by_their_own_verbs(run: Run, stub: Stub) -> None:
    stub.services["llama"] = records.service("llama")
    assert "llama" in run("serve", "status", "llama").out
    result = run("serve", "status", "--nope")
    assert (result.code, result.err.splitlines()[-1]) == (2, "  see: podway serve status --help")
    assert run("serve", "up", "--help").out.startswith("Usage: podway serve up [OPTIONS] FILE")


def test_services_by_habit_end_as_their_verbs_do(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_services, "read_file", lambda file, overrides: file)
    monkeypatch.setattr(serve_services, "apply_service", lambda *of: 3)
    assert run("serve", "up", "llama.yaml").code == 3


def test_the_parser_itself_says_what_is_wrong() -> None:
    with pytest.raises(UserError, match="unrecognized arguments: --nope"):
        parser().parse_args(["m", "--nope"])


def test_a_wrong_model_name_is_told_before_the_server_starts(run: Run) -> None:
    result = run("serve", "lama3-8b", "--random")
    assert result.code == 1 and "unknown model 'lama3-8b'" in result.err and "did you mean llama3-8b" in result.err
