"""login, logout, server, and completion."""

import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.cli.login import checked_url
from podway.errors import UserError
from podway.server.api import AuditView, MemberView, TokenView
from tests.cli import records
from tests.cli.conftest import Run
from tests.cli.stub import TOKEN, Stub


def test_login_proves_the_token_and_keeps_it_private(run: Run, home: Path, tmp_path: Path) -> None:
    team = Stub(tmp_path)
    team.add(records.cluster("theirs"))
    try:
        result = run("login", team.url, typed=f"{TOKEN}\n")
        assert result == (0, f"Logged in to {team.url} as ada (administrator).\n", "")
        remote = home / "remote.json"
        assert json.loads(remote.read_text()) == {"url": team.url, "token": TOKEN}
        assert stat.S_IMODE(remote.stat().st_mode) == 0o600
        assert "theirs" in run("status").out
        assert "(the team's server)" in run("server", "status").out
        assert json.loads(run("server", "status", "-o", "json").out)["team"] is True
    finally:
        team.close()
    assert run("logout").out == "Logged out. Commands go to this machine's own server.\n"
    assert not remote.exists()
    assert run("logout").out == "You are not logged in to a team's server.\n"


def test_login_with_a_wrong_token_changes_nothing(run: Run, home: Path, stub: Stub) -> None:
    result = run("login", stub.url, "--token", "wrong")
    assert result.code == 1
    assert result.err.startswith("Error: this token is not known here\n")
    assert not (home / "remote.json").exists()


def test_login_where_nobody_answers(run: Run, home: Path) -> None:
    result = run("login", "http://127.0.0.1:1", "--token", "x")
    assert result.code == 1
    assert "127.0.0.1:1" in result.err
    assert run("login", "http://no-such-host.invalid", "--token", "x").code == 1


def test_login_without_a_token(run: Run) -> None:
    assert run("login", "http://127.0.0.1:1").err.startswith("Error: no token given\n")
    assert run("login", "http://127.0.0.1:1", typed="é\n").err.startswith("Error: no token given\n")


def test_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    assert checked_url("https://podway.example.org/") == "https://podway.example.org"
    assert checked_url("localhost:8080") == "http://localhost:8080"
    assert capsys.readouterr().err == ""
    assert checked_url("http://far:80/base/") == "http://far:80/base"
    assert "can read your token" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["ftp://x", "http://", "http://x:port", "http://a:99999", "http://u:p@x", "http://x?q=1"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(UserError):
        checked_url(text)


@given(st.text())
def test_any_text_is_an_address_or_a_mistake(text: str) -> None:
    with contextlib.suppress(UserError):
        assert checked_url(text).startswith(("http://", "https://"))


def test_server_status_and_stop_when_none_runs(run: Run, home: Path) -> None:
    result = run("server", "status")
    assert (result.code, result.out.partition(";")[0]) == (3, "No Podway server is running on this machine")
    assert json.loads(run("server", "status", "-o", "json").out) == {
        "running": False,
        "url": None,
        "team": False,
        "info": None,
    }
    assert run("server", "stop").out == "No Podway server is running on this machine.\n"
    assert run("server", "logs").code == 1
    (home / "server.json").write_text("{half")
    assert run("server", "status").code == 3


def test_server_status_when_one_runs(run: Run, stub: Stub) -> None:
    assert run("server", "status").out.splitlines() == [
        "SERVER   running",
        f"URL      {stub.url} (this machine's own server)",
        "VERSION  0.1.0",
        "PID      4000000",
        "YOU      ada (admin)",
    ]
    assert run("server", "start").out == "The Podway server is running (pid 4000000).\n"


def test_server_logs(run: Run, home: Path) -> None:
    (home / "server.log").write_text("".join(f"line {n}\n" for n in range(300)))
    assert run("server", "logs", "--tail", "2").out == "line 298\nline 299\n"
    assert run("server", "logs").out.count("\n") == 100
    assert run("server", "logs", "--tail", "0").out.count("\n") == 300


@pytest.mark.parametrize("words", [["server"], ["server", "run"]])
def test_server_becomes_the_process(run: Run, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda file, argv, env: calls.append((argv[1:], env.get("PODWAY_DB"))))
    assert run(*words, "--host", "0.0.0.0", "--port", "80", "--db", "postgresql://u:pw@h/d", "--foreground").code == 0
    assert run("server").code == 0
    assert calls == [
        (["-m", "podway.server.main", "--host", "0.0.0.0", "--port", "80", "--foreground"], "postgresql://u:pw@h/d"),
        (["-m", "podway.server.main", "--host", "127.0.0.1", "--port", "0"], None),
    ]
    assert run(*words, "--port", "99999").code == 2


def test_tokens(run: Run, stub: Stub) -> None:
    result = run("server", "token", "bob", "--role", "viewer", "--name", "laptop", "--expires", "2h")
    assert (result.code, result.out) == (0, "pw_new\n")
    assert run("server", "token", "bob", "--expires", "never").code == 0
    assert "not a duration" in run("server", "token", "bob", "--expires", "soon").err
    assert stub.asked("POST", "/v1/tokens") == [
        {"user": "bob", "role": "viewer", "name": "laptop", "lifetime_s": 7200.0},
        {"user": "bob", "role": "member", "name": "", "lifetime_s": None},
    ]
    assert run("server", "users").out == "No tokens yet; create one with: podway server token USER\n"
    stub.tokens = [TokenView(id="ab12", user="bob", name="laptop", role="viewer", created=0.0, expires=1.0)]
    shown = run("server", "users").out.splitlines()[1].split()
    assert shown[:3] == ["bob", "viewer", "laptop"] and shown[-2:] == ["expired", "ab12"]
    assert json.loads(run("server", "users", "-o", "json").out)[0]["user"] == "bob"
    assert run("server", "revoke", "b/ob").out == "b/ob can no longer use this server.\n"
    assert stub.calls[-1][1] == "/v1/users/b%2Fob"
    assert run("server", "revoke", "--token", "ab12").out == "Token ab12 is no longer valid.\n"
    assert run("server", "revoke").code == run("server", "revoke", "bob", "--token", "ab12").code == 2


def test_projects_and_shares(run: Run, stub: Stub) -> None:
    stub.add(records.cluster())
    assert run("server", "member", "vision", "bob", "--role", "viewer").out == "bob is a viewer of vision.\n"
    assert stub.calls[-1] == ("PUT", "/v1/projects/vision/members/bob", {"role": "viewer"})
    assert run("server", "member", "vision", "bob", "--remove").out == "bob is no longer in vision.\n"
    assert stub.calls[-1][:2] == ("DELETE", "/v1/projects/vision/members/bob")
    stub.members = [MemberView(project="vision", user="bob", role="member")]
    assert run("server", "members").out.splitlines()[1].split() == ["vision", "bob", "member"]
    assert run("share", "demo", "bob").out == "bob may use cluster demo.\n"
    assert stub.calls[-1] == ("PUT", "/v1/clusters/demo/grants/bob", {"right": "use"})
    assert run("share", "demo", "bob", "--view").out == "bob may view cluster demo.\n"
    assert run("share", "demo", "bob", "--remove").out == "Cluster demo is no longer shared with bob.\n"
    stub.services["llama"] = records.service("llama")
    assert run("share", "llama", "bob").out == "bob may use service llama.\n"
    assert stub.calls[-1] == ("PUT", "/v1/services/llama/grants/bob", {"right": "use"})
    assert run("share", "llama", "bob", "--remove").out == "Service llama is no longer shared with bob.\n"
    neither = run("share", "nope", "bob")
    assert (neither.code, neither.err.splitlines()[0]) == (1, "Error: there is no cluster and no service 'nope'")
    stub.refuse["/clusters/llama/grants/bob"] = UserError("bob may not manage llama", "ask them", status=403)
    assert "may not manage" in run("share", "llama", "bob").err  # a cluster there is: its refusal is the answer
    stub.refuse.clear()
    stub.entries = [
        AuditView(time=0.0, user="bob", token="laptop", address="10.0.0.1", action="down", target="demo", status=403)
    ]
    shown = run("server", "audit").out.splitlines()[1].split()
    assert shown == ["1970-01-01", "00:00:00", "bob", "laptop", "10.0.0.1", "down", "demo", "403"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(run: Run, shell: str) -> None:
    result = run("completion", shell)
    assert result.code == 0
    assert f"_PODWAY_COMPLETE={shell}_complete" in result.out
    assert run("completion", "tcsh").code == 2


def completions(run: Run, monkeypatch: pytest.MonkeyPatch, line: str) -> list[str]:
    """What a bash would offer after this line."""
    monkeypatch.setenv("_PODWAY_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
    shown = run().out.splitlines()
    monkeypatch.delenv("_PODWAY_COMPLETE")
    return [item.partition(",")[2] for item in shown if item]


def test_completion_of_verbs_and_options(run: Run, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    assert completions(run, monkeypatch, "podway l") == ["launch", "logs", "login", "logout"]
    assert completions(run, monkeypatch, "podway launch --use") == ["--use-spot"]
    assert completions(run, monkeypatch, "podway server to") == ["token"]


def test_completion_of_clusters_only_if_a_server_runs(
    run: Run, monkeypatch: pytest.MonkeyPatch, home: Path, stub: Stub
) -> None:
    stub.add(records.cluster("exp-1"), records.cluster("exp-2"), records.cluster("other"))
    for line in ("podway down exp", "podway logs e", "podway launch -c ex", "podway down other exp-"):
        assert completions(run, monkeypatch, line) == ["exp-1", "exp-2"]
    (home / "server.json").unlink()
    assert completions(run, monkeypatch, "podway down exp") == []
    assert sorted(path.name for path in home.iterdir()) == []
    (home / "server.json").write_text('{"url": "http://127.0.0.1:1", "token": "x"}')
    assert completions(run, monkeypatch, "podway down exp") == []
