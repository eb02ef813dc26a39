"""`podway ssh`: the client makes the command line; nothing that a server sends becomes a command here."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.errors import UserError
from podway.hosts.ssh.endpoint import Endpoint
from podway.server.api import ShellReply
from podway.server.shell import ShellCommand, shell_command

KEY = "lab-1 ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIexample"


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PODWAY_HOME", str(tmp_path))
    return tmp_path


def made(endpoint: Endpoint, command: str | None = None, *, own_server: bool = False, **more: object) -> ShellCommand:
    reply = ShellReply(home="/home/it's", env={"GREETING": "a 'b'; $c"}, endpoint=endpoint, known_hosts=[KEY])
    return shell_command(reply, command, cluster="a/b c", own_server=own_server)


def test_a_teams_server_names_no_file_of_this_machine(own_home: Path) -> None:
    endpoint = Endpoint(
        address="192.0.2.1", port=2222, user="ada", identity_file="/srv/podway/id_ed25519", alias="lab-1"
    )
    words = made(endpoint, "echo hi").argv
    assert words[:2] == ["ssh", "-T"] and "192.0.2.1" in words
    assert not any("id_ed25519" in word for word in words)
    (known,) = (own_home / "known_hosts").iterdir()
    assert known.read_text() == KEY + "\n" and f"UserKnownHostsFile={known}" in words
    assert "StrictHostKeyChecking=yes" in words and "HostKeyAlias=lab-1" in words
    assert any("id_ed25519" in word for word in made(endpoint, own_server=True).argv)  # the same user's own file
    assert words[-1].startswith("cd '/home/it'\"'\"'s/sky_workdir' 2>/dev/null; exec env ")


def test_a_team_server_cannot_open_a_shell_on_this_machine(own_home: Path) -> None:
    (own_home / "sky_workdir").mkdir()
    reply = ShellReply(home=str(own_home), env={"BASH_ENV": "/tmp/evil", "LD_PRELOAD": "/tmp/evil.so"})
    with pytest.raises(UserError, match="not on this machine"):
        shell_command(reply, None, cluster="a", own_server=False)
    assert shell_command(reply, None, cluster="a", own_server=True).cwd == str(own_home / "sky_workdir")


def way_of(machines: int) -> Endpoint:
    return Endpoint(address=f"h{machines}", jump=way_of(machines - 1) if machines > 1 else None)


@pytest.mark.parametrize(
    "endpoint",
    [
        Endpoint(address="-oProxyCommand=touch /tmp/owned"),
        Endpoint(address="host", user="-oProxyCommand=x"),
        Endpoint(address="host", user="a b"),
        Endpoint(address="host; id"),
        Endpoint(address="host\nProxyCommand x"),
        Endpoint(address="%h"),
        Endpoint(address="host", alias="x y"),
        Endpoint(address="host", port=0),
        Endpoint(address="host", port=70000),
        Endpoint(address=""),
        Endpoint(address="host", jump=Endpoint(address="$(id)")),
        way_of(5),
    ],
)
def test_an_address_that_is_none_is_refused(endpoint: Endpoint) -> None:
    with pytest.raises(UserError, match="an address that is none"):
        made(endpoint)


@given(st.text(max_size=40), st.text(max_size=20), st.integers(-5, 80000), st.text(max_size=30))
def test_whatever_a_server_sends_is_one_word_that_is_no_option(address: str, user: str, port: int, alias: str) -> None:
    try:
        words = made(Endpoint(address=address, user=user, port=port, alias=alias)).argv
    except UserError:
        return
    options = words[2:-2]
    assert words[0] == "ssh" and words[-2] == address and not address.startswith("-")
    assert options[::2] == ["-o"] * (len(options) // 2)
    names = {word.partition("=")[0] for word in options[1::2]}
    assert names <= {"Port", "User", "HostKeyAlias", "UserKnownHostsFile", "StrictHostKeyChecking"}
    assert all(character not in "".join(options[1::2]) for character in "\n;$`|&<>'\"\\ ")
