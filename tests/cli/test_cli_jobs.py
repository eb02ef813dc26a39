"""logs, cancel, run and ssh."""

import os
from pathlib import Path
from typing import Any

import pytest

from podway.cli.run import worst
from podway.hosts.ssh.endpoint import Endpoint
from podway.server.api import Frame, ShellReply
from tests.cli import records
from tests.cli.conftest import Run, on_terminal
from tests.cli.stub import Stub

WATCH = "/v1/clusters/demo/jobs/2/watch"


@pytest.fixture
def demo(stub: Stub) -> Stub:
    stub.add(records.cluster())
    stub.jobs["demo"] = [records.job(1), records.job(2, state="FAILED", exits=[records.exit_(0, code=3)])]
    stub.frames = [
        Frame(kind="event", text="is running", state="RUNNING"),
        Frame(kind="log", text="(task, pid=5) hello\n"),
        Frame(kind="end", state="FAILED", reason="run on head (rank 0, 127.20.0.1) exited with code 3"),
    ]
    return stub


def test_logs_of_the_latest_job_to_its_end(run: Run, demo: Stub) -> None:
    result = run("logs", "demo")
    assert result.code == 100
    assert result.out.splitlines() == [
        "(task, pid=5) hello",
        "ERROR: Job 2 failed: run on head (rank 0, 127.20.0.1) exited with code 3 (status: FAILED)",
    ]
    assert demo.asked("GET", WATCH) == [{"tail": "0", "event": "0"}]
    assert run("attach", "demo") == result


def test_logs_flags_reach_the_server(run: Run, demo: Stub) -> None:
    assert run("logs", "demo", "2", "--no-follow", "--tail", "7", "--rank", "3", "--raw", "--timestamps").code == 0
    (query,) = demo.asked("GET", WATCH)
    assert query == {"follow": "false", "tail": "7", "rank": "3", "raw": "true", "timestamps": "true", "event": "0"}


@pytest.mark.parametrize(
    ("state", "code"),
    [("SUCCEEDED", 0), ("FAILED", 100), ("FAILED_SETUP", 100), ("RUNNING", 101), ("PENDING", 101), ("CANCELLED", 103)],
)
def test_logs_status_exit_codes(run: Run, stub: Stub, state: str, code: int) -> None:
    stub.add(records.cluster())
    stub.jobs["demo"] = [records.job(1, state=state)]
    result = run("logs", "demo", "--status")
    assert (result.code, result.out) == (code, f"Job 1: {state}\n")


def test_logs_status_of_nothing(run: Run, stub: Stub) -> None:
    stub.add(records.cluster())
    assert run("logs", "demo", "--status").code == 102
    assert run("logs", "demo", "9", "--status").code == 102
    assert run("logs", "nope", "--status").code == 102
    assert run("logs", "demo") == (102, "", "Error: cluster demo has no jobs\n  submit one: podway exec demo FILE\n")
    assert run("logs", "demo", "99") == (102, "", "Error: cluster demo has no job 99\n  see: podway queue demo\n")
    assert run("logs", "demo", "99", "-s", "saved").code == 102


def test_sync_down_saves_what_each_rank_wrote(run: Run, demo: Stub, tmp_path: Path) -> None:
    demo.output = {(0, "setup"): b"pip\n", (0, "run"): b"\xff\x00raw", (3, "run"): b"x" * 200_000}
    result = run("logs", "demo", "-s", str(tmp_path / "saved"))
    place = tmp_path / "saved" / "demo-2"
    assert result == (0, f"✓ Saved 3 files in {place}\n", "")
    assert sorted(path.name for path in place.iterdir()) == ["rank-0.run.log", "rank-0.setup.log", "rank-3.run.log"]
    assert (place / "rank-0.run.log").read_bytes() == b"\xff\x00raw"
    assert (place / "rank-3.run.log").stat().st_size == 200_000


def test_sync_down_to_a_place_that_cannot_be(run: Run, demo: Stub, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run("logs", "demo", "-s", str(tmp_path / "file"))
    assert result.code == 1
    assert result.err.startswith(f"Error: cannot write {tmp_path}/file/demo-2: Not a directory\n")


def test_cancel_waits_and_says_that_nothing_is_left(run: Run, stub: Stub) -> None:
    stub.add(records.cluster())
    running, waiting = records.job(1, state="RUNNING", ended=None), records.job(2, state="PENDING", ended=None)
    stub.jobs["demo"] = [running, waiting, records.job(3)]
    assert run("cancel", "demo").out == "✓ Job 1 was cancelled; all its processes have ended.\n"
    assert run("cancel", "demo").out == "✓ Job 2 was cancelled; all its processes have ended.\n"
    assert run("cancel", "demo").out == "No job to cancel on cluster demo.\n"
    assert run("cancel", "demo", "3").out == "No job to cancel on cluster demo.\n"
    stub.jobs["demo"] = [running, waiting]
    assert run("cancel", "demo", "-a", "-y").out.count("was cancelled") == 2
    stub.jobs["demo"] = [running, waiting]
    assert run("cancel", "demo", "2", "1").out.count("was cancelled") == 2


def test_cancel_usage(run: Run, stub: Stub) -> None:
    assert run("cancel", "demo", "1", "-a").code == 2
    assert run("cancel", "demo", "zero").code == 2
    assert run("cancel", "demo", "0").code == 2
    assert run("cancel", "nope").code == 1


def test_cancel_asks_on_a_terminal(home: Path, stub: Stub) -> None:
    stub.add(records.cluster())
    stub.jobs["demo"] = [records.job(4, state="RUNNING", ended=None)]
    code, shown = on_terminal("cancel", "demo", typed="n\n")
    assert code == 1
    assert "Cancelling job 4 on cluster demo. Proceed? [Y/n]: " in shown
    assert stub.asked("POST", "/v1/clusters/demo/cancel") == []


def test_run_exits_with_the_worst_code(run: Run, demo: Stub) -> None:
    demo.launch_job = 2
    demo.jobs["demo"][1] = records.job(2, exits=[records.exit_(0), records.exit_(1, code=3), records.exit_(2, code=1)])
    result = run("run", "demo", "--all-hosts", "uptime; exit $PODWAY_RANK")
    assert result.code == 3
    assert result.out.splitlines() == ["(task, pid=5) hello", "rank 1 exited with code 3", "rank 2 exited with code 1"]
    assert demo.asked("POST", "/v1/clusters/demo/run")[0]["command"] == "uptime; exit $PODWAY_RANK"
    demo.frames[-1] = Frame(kind="end", state="SUCCEEDED")
    demo.jobs["demo"][1] = records.job(2, exits=[records.exit_(0), records.exit_(1)])
    assert run("run", "demo", "uptime").code == 0


def test_worst() -> None:
    assert worst([]) == 0
    assert worst([records.exit_(0), records.exit_(1, code=None, signal=9)]) == 137
    assert worst([records.exit_(0, code=1), records.exit_(1, code=None, lost=True)]) == 255


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    monkeypatch.setattr(os, "execvpe", lambda file, argv, env: calls.append((argv, str(Path.cwd()))))
    return calls


def test_ssh_to_a_simulated_host_is_a_shell_in_its_home(
    run: Run, demo: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executed: list[Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sky_workdir").mkdir()
    demo.shell = ShellReply(home=str(tmp_path), env={"PODWAY_RANK": "2", "BAD NAME": "x"})
    assert run("ssh", "demo", "-w", "2").code == 0
    assert run("ssh", "demo", "--", "echo", "a b", "$X").code == 0
    assert demo.asked("GET", "/v1/clusters/demo/shell") == [{"rank": "2"}, {"rank": "0"}]
    for (argv, cwd), end in zip(executed, (["-i"], ["-c", "echo 'a b' $X"]), strict=True):
        assert argv[:2] == ["sh", "-c"] and "PODWAY_RANK=2" in argv and f"HOME={tmp_path}" in argv
        assert argv[-len(end) - 2 :] == ["bash", "--norc", *end] and not any("BAD" in word for word in argv)
        assert cwd == str(tmp_path / "sky_workdir")


def test_ssh_to_a_host_of_another_machine(run: Run, demo: Stub, executed: list[Any]) -> None:
    demo.shell = ShellReply(home="/nowhere/at/all", env={})
    result = run("ssh", "demo")
    assert result.code == 1
    assert "the hosts of cluster demo are not on this machine" in result.err
    assert executed == []


def test_ssh_without_ssh(run: Run, demo: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo.shell = ShellReply(home="/home/ada", env={}, endpoint=Endpoint(address="192.0.2.1"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run("ssh", "demo").err.startswith("Error: ssh is not installed on this machine\n")
