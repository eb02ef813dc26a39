"""The commands as a person types them, against a real server: output, exit codes, files on hosts, Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.e2e.harness import Podway

PODWAY = str(Path(sys.executable).parent / "podway")
EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def podway(*arguments: str, code: int = 0, stdin: str = "", **env: str) -> str:
    done = subprocess.run(
        [PODWAY, *arguments], capture_output=True, text=True, input=stdin, timeout=90, env={**os.environ, **env}
    )
    assert done.returncode == code, f"{arguments}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def test_hello_on_every_host(pod: Podway) -> None:
    shown = podway("launch", "-y", "--raw", "-c", "hi", str(EXAMPLES / "hello.yaml"))
    assert "simulated" in shown.lower()
    assert "(worker3, rank=3, pid=" in shown
    assert "Job finished (status: SUCCEEDED)" in shown
    status = json.loads(podway("status", "-o", "json"))
    assert "UP" in json.dumps(status)
    assert "hi" in podway("status")
    podway("down", "-y", "hi")
    assert "No existing clusters." in podway("status")
    assert pod.host_processes() == []


def test_files_follow_the_laptop_with_deletions_and_ignores(pod: Podway, tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "sub").mkdir(parents=True)
    (work / "a.txt").write_text("one")
    (work / "sub" / "b.txt").write_text("two")
    (work / "skip.log").write_text("x")
    (work / ".gitignore").write_text("*.log\n")
    (work / "link").symlink_to("a.txt")
    mounted = tmp_path / "mounted.txt"
    mounted.write_text("mounted")
    file = tmp_path / "t.yaml"
    file.write_text(
        f"resources: {{accelerators: tpu-v4-16}}\nworkdir: {work}\nfile_mounts: {{~/data/m.txt: {mounted}}}\n"
        "run: |\n  find . -type f -o -type l | sort | tr '\\n' ' '; cat ~/data/m.txt; echo; touch made-by-job\n"
    )
    shown = podway("launch", "-y", "-c", "f", str(file))
    assert "./.gitignore ./a.txt ./link ./sub/b.txt mounted" in shown
    (work / "a.txt").write_text("changed")
    (work / "sub" / "b.txt").unlink()
    (work / "sub").rmdir()
    shown = podway("exec", "f", "--workdir", str(work), "cat a.txt; echo; ls -A | tr '\\n' ' '; echo")
    assert podway("logs", "f", "2", "--raw", "--no-follow").count(") changed") == 2
    assert "made-by-job" in shown and "sub" not in shown.split("changed")[1].split("Useful")[0].replace("submitted", "")
    podway("down", "-y", "f")


def test_exit_codes(pod: Podway) -> None:
    podway("launch", "-y", "-c", "e", "--tpus", "v6e-8", "exit 3", code=100)
    podway("logs", "e", "1", "--status", code=100)
    podway("logs", "e", "9", "--status", code=102)
    podway("exec", "e", "true")
    podway("logs", "e", "2", "--status")
    podway("exec", "e", "-d", "sleep 1000")
    podway("logs", "e", "3", "--status", code=101)
    podway("cancel", "-y", "e", "3")
    podway("logs", "e", "3", "--status", code=103)
    podway("down", "-y", "e")


def test_ctrl_c_stops_watching_and_not_the_job(pod: Podway) -> None:
    child = subprocess.Popen(
        [PODWAY, "launch", "-y", "-c", "k", "--tpus", "v6e-8", "echo begun; sleep 2; echo finished"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    for line in child.stdout:
        if "begun" in line and line.startswith("("):
            break
    child.send_signal(signal.SIGINT)
    rest = child.stdout.read()
    assert child.wait(20) == 130
    assert "podway logs k" in rest and "Traceback" not in rest
    wait_until(lambda: pod.client.job("k", 1).state == "SUCCEEDED")
    podway("down", "-y", "k")


def test_logs_come_home(pod: Podway, tmp_path: Path) -> None:
    podway("launch", "-y", "-c", "s", "--tpus", "v4-16", "echo from $PODWAY_RANK")
    podway("logs", "s", "1", "--sync-down", str(tmp_path / "logs"))
    texts = sorted(
        path.read_text() for path in (tmp_path / "logs").rglob("*") if path.is_file() and "from" in path.read_text()
    )
    assert texts == ["from 0\n", "from 1\n"]
    podway("down", "-y", "s")


def test_what_each_rank_uses(pod: Podway) -> None:
    podway("launch", "-y", "-d", "-c", "u", "--tpus", "v4-16", "sleep 30")
    wait_until(lambda: pod.client.job("u", 1).state == "RUNNING" and "RUNNING" in podway("top", "u"))
    ranks = json.loads(podway("top", "u", "-o", "json"))
    assert [rank["rank"] for rank in ranks] == [0, 1] and all(rank["processes"] >= 1 for rank in ranks)
    podway("cancel", "-y", "u")
    assert "signal 15" in podway("top", "u", "1")
    podway("down", "-y", "u")


def test_a_shell_on_a_host(pod: Podway) -> None:
    podway("launch", "-y", "-c", "h", "--tpus", "v4-16", "true")
    shown = podway("ssh", "h", "-w", "1", "--", "echo $PODWAY_RANK in $PWD")
    assert "1 in " in shown and "host-1/sky_workdir" in shown
    podway("down", "-y", "h")


def test_a_server_that_nobody_buries_is_stopped_all_the_same(pod: Podway) -> None:
    """Its parent, this test, does not ask for its exit code: it stays a zombie, as under the first process of many containers."""
    pod.start()
    assert "The Podway server is stopped." in podway("server", "stop")
    assert pod.child.wait(0) == -signal.SIGTERM


def test_dryrun_prints_the_request_and_makes_nothing(pod: Podway) -> None:
    done = subprocess.run(
        [PODWAY, "launch", "--dryrun", "-c", "d", "--tpus", "v6e-16", "true"], capture_output=True, text=True
    )
    assert len(json.loads(done.stdout)["steps"]) == 4
    assert json.loads(podway("status", "-o", "json")) in ([], {"clusters": []})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["launch", "-y", "--tpus", "v6e-7", "true"], "v6e-8"),
        (["launch", "-y", "--tpus", "A100", "true"], "TPU"),
        (["launch", "-y", "missing.yaml"], "missing.yaml"),
        (["launch", "-y", "-c", "bad/name", "--tpus", "v6e-8", "true"], "bad/name"),
        (["exec", "nowhere", "true"], "nowhere"),
        (["logs", "nowhere"], "nowhere"),
        (["down", "-y", "nowhere"], "nowhere"),
        (["launch", "-y", "--env", "NOT_SET_ANYWHERE", "true"], "NOT_SET_ANYWHERE"),
        (["launch", "-y", "--infra", "aws", "--tpus", "v6e-8", "true"], "aws"),
    ],
)
def test_bad_input_is_one_clear_line(pod: Podway, arguments: list[str], expected: str) -> None:
    done = subprocess.run([PODWAY, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert expected in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 6, done.stderr


def test_a_typo_in_a_task_file_is_pointed_at(pod: Podway, tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    file.write_text("name: x\nresources:\n  acelerators: tpu-v6e-8\nrun: true\n")
    shown = podway("launch", "-y", str(file), code=1)
    assert "t.yaml:3:3" in shown and "accelerators" in shown


def test_secrets_are_not_in_any_argument(pod: Podway) -> None:
    value = "argv-secret-value"
    podway("launch", "-y", "-d", "-c", "a", "--tpus", "v6e-8", "--secret", "TOK", "sleep 5", TOK=value)
    wait_until(lambda: pod.client.job("a", 1).state == "RUNNING")
    time.sleep(0.3)
    for process in pod.host_processes():
        assert value not in " ".join(process.info["cmdline"])
    podway("down", "-y", "a")


def test_a_server_on_the_network_wants_a_token(pod: Podway, tmp_path: Path) -> None:
    pod.start()
    found = json.loads((pod.home / "server.json").read_text())
    other = {"PODWAY_HOME": str(tmp_path / "laptop")}
    token = next(word for word in podway("server", "token", "bob").split() if word.startswith("pw_"))
    assert "token" in podway("login", found["url"], "--token", "wrong", code=1, **other)
    podway("login", found["url"], "--token", token, **other)
    assert oct((tmp_path / "laptop" / "remote.json").stat().st_mode)[-3:] == "600"
    # A job on a simulated host would be the server's own user, with its admin token and its database.
    for words in (("--infra", "local"), ()):
        refused = podway("launch", "-y", "-c", "team", *words, "--tpus", "v6e-8", "echo hi", code=1, **other)
        assert "local is off on this server" in refused and "--allow-local" in refused
    podway("logout", **other)
