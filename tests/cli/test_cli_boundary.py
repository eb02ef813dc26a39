"""Each way a command can end, and its look."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from podway.cli.error_lines import fold
from podway.errors import UserError
from podway.server.api import Frame
from tests.cli import records
from tests.cli.conftest import Run, on_terminal, podway_process
from tests.cli.stub import Stub


def test_user_error_is_two_lines_on_stderr(run: Run, stub: Stub) -> None:
    stub.refuse["/v1/clusters"] = UserError("the moon is in the way", "wait an hour")
    result = run("status")
    assert result == (1, "", "Error: the moon is in the way\n  wait an hour\n")


def test_control_characters_of_an_error_are_shown_not_obeyed(run: Run, stub: Stub) -> None:
    stub.refuse["/v1/clusters"] = UserError("bad \x1b[31mname\x07", "no \r tricks")
    assert run("status").err == "Error: bad \\x1b[31mname\\x07\n  no \\r tricks\n"


def test_an_error_at_a_narrow_terminal_is_folded_between_words() -> None:
    words = "resources.accelerators: 'A100:8' is not a TPU, and Podway runs TPUs only: --tpus /a/path/that-is-longer/than-the-terminal"
    for width in range(20, 130):
        lines = fold(f"Error: {words}", width, "       ")
        assert " ".join(line.strip() for line in lines) == f"Error: {words}"
        assert all(len(line) <= width or len(line.split()) == 1 for line in lines)
    assert fold(words, 0) == [words]


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (("autostop", "c", "-i", "abc"), "'abc' is not a number."),
        (("logs", "c", "abc"), "'abc' is not a whole number."),
        (("bench", "serve", "--url", "http://127.0.0.1:9"), "no server at 127.0.0.1:9: Connection refused"),
    ],
)
def test_a_mistake_is_told_in_plain_words(run: Run, typed: tuple[str, ...], told: str) -> None:
    result = run(*typed)
    assert result.code != 0
    assert result.err.splitlines()[0].endswith(told)


@pytest.mark.parametrize(
    ("typed", "near"),
    [("lanch", "launch"), ("statsu", "status"), ("cancle", "cancel")],
)
def test_unknown_command_names_the_nearest(run: Run, typed: str, near: str) -> None:
    result = run(typed)
    assert result.code == 2
    assert result.err.splitlines()[0] == f"Error: No such command {typed!r}. Did you mean {near!r}?"


def test_unknown_command_with_nothing_near(run: Run) -> None:
    result = run("xyzzy")
    assert result.code == 2
    assert result.err.splitlines()[0] == "Error: No such command 'xyzzy'."


def test_unknown_option_names_the_nearest_and_the_way_out(run: Run) -> None:
    result = run("launch", "--clustr", "x", "echo")
    assert result.code == 2
    assert "'--clustr'" in result.err
    assert "Did you mean one of: '--cloud', '--cluster'?" in result.err
    result = run("exec", "demo", "python", "x.py", "--lr", "1")
    assert "  if --lr belongs to the command to run, quote that command or put it after --\n" in result.err


def test_missing_argument_shows_the_usage(run: Run) -> None:
    result = run("exec")
    assert result.code == 2
    assert result.err.splitlines()[1:] == [
        "  Usage: podway exec [OPTIONS] CLUSTER ENTRYPOINT...",
        "  see: podway exec --help",
    ]


def test_what_a_server_sends_and_cannot_be_read_is_one_line(run: Run, stub: Stub) -> None:
    stub.garbage = True
    result = run("status")
    assert result.code == 1
    assert result.err.startswith("Error: this is Podway ") and "cannot read what the server" in result.err
    assert "Traceback" not in result.err


def test_own_fault_is_one_line(run: Run, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise LookupError("nothing there")

    monkeypatch.setattr("podway.server.client.Client.overview", broken)
    result = run("status")
    assert result.code == 70
    assert result.err.startswith("Podway itself failed: LookupError: ")
    assert result.err.count("\n") == 1
    monkeypatch.setenv("PODWAY_DEBUG", "1")
    result = run("status")
    assert result.code == 70
    assert result.err.startswith("Traceback (most recent call last):")


def test_interrupt_without_a_job(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("podway.server.client.Client.overview", interrupted)
    result = run("status")
    assert result.code == 130
    assert result.err == "\nInterrupted. What was already requested continues; see: podway status\n"


def test_ctrl_c_while_watching_leaves_the_job(home: Path, stub: Stub) -> None:
    stub.add(records.cluster())
    stub.jobs["demo"] = [records.job(3, state="RUNNING", ended=None)]
    stub.frames = [Frame(kind="log", text="(task, pid=1) step 1\n")]
    stub.hold = True
    process = podway_process("logs", "demo", stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "(task, pid=1) step 1\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err == "\nJob 3 keeps running. Follow it: podway logs demo 3   Cancel it: podway cancel demo 3\n"
    assert stub.asked("POST", "/v1/clusters/demo/cancel") == []


def test_a_reader_that_left_is_silence(home: Path, stub: Stub) -> None:
    stub.add(*(records.cluster(f"c{number}") for number in range(2000)))
    reader, writer = os.pipe()
    os.close(reader)
    process = podway_process("status", stdout=writer)
    os.close(writer)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (141, "")


def test_closed_stdout_is_no_error(home: Path, stub: Stub) -> None:
    done = subprocess.run(
        ["bash", "-c", '"$0" -m podway.cli.main status >&-', sys.executable], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_that_cannot_show_a_character(home: Path, stub: Stub) -> None:
    stub.add(records.cluster())
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    process = podway_process("down", "demo", stdout=subprocess.PIPE, env=environment)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert out == "? Cluster demo is deleted.\n"


def test_colour_on_a_terminal_unless_it_is_not_wanted(home: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    code, shown = on_terminal("down", "nope")
    assert code == 1
    assert "\x1b[31m" in shown
    monkeypatch.setenv("NO_COLOR", "1")
    code, shown = on_terminal("down", "nope")
    assert code == 1
    assert "\x1b[" not in shown


@pytest.mark.parametrize(
    "words",
    [
        ("launch", "-y", "-c", "demo", "true"),  # steps, the log with its prefixes, the end of a job
        ("logs", "demo", "1"),
        ("cancel", "-y", "demo"),
        ("down", "-y", "demo"),
        ("doctor", "ssh"),
        ("status", "--no-such-option"),
    ],
    ids=lambda words: words[0],
)
def test_no_command_paints_where_colour_is_not_wanted(
    home: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    stub.add(records.cluster())
    stub.jobs["demo"] = [records.job(1)]
    failed = Frame(kind="end", state="FAILED", reason="\x1b[31mred\x1b[0m", tail="\x1b[32mgreen\x1b[0m")
    stub.frames = [Frame(kind="log", text="(task, pid=7) \x1b[35mpurple\x1b[0m\n", cursor="a"), failed]
    monkeypatch.setenv("NO_COLOR", "1")
    _, shown = on_terminal(*words)
    assert shown and re.search(r"\x1b\[[0-9;:]*m", shown) is None, shown


EVERY_COMMAND = """
import sys
import click
from podway.cli.index import VERBS, podway
from podway.cli.main import main
def commands(group, words):
    for name in group.list_commands(None) if isinstance(group, click.Group) else ():
        yield [*words, name]
        with podway.make_context("podway", [], resilient_parsing=True) as ctx:
            yield from commands(group.get_command(ctx, name), [*words, name])
seen, terminal = list(commands(podway, [])), (sys.stdout, sys.stderr)
for words in seen:
    for option in ("--help", "--no-such-option"):
        sys.stdout, sys.stderr = terminal
        main([*words, option])
print(len(seen), "commands", len(VERBS))
"""


def test_no_help_and_no_mistake_of_any_command_is_painted_where_colour_is_not_wanted(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole table of commands, in one process on a terminal."""
    monkeypatch.setenv("NO_COLOR", "1")
    code, shown = on_terminal("-c", EVERY_COMMAND, program=())
    assert code == 0 and re.search(r"\b([5-9][0-9]|[1-9][0-9]{2}) commands", shown), shown[-500:]
    assert shown.count("No such option") > 50
    assert re.search(r"\x1b\[[0-9;:]*m", shown) is None
