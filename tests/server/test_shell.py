"""`podway ssh`: the client makes the command line; nothing that a server sends becomes a command here."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.errors import UserError
from podway.hosts.ssh.authority import CertificateAuthority
from podway.hosts.ssh.endpoint import Endpoint
from podway.server.api import NO_CERTIFICATES, ShellReply
from podway.server.shell import ShellCommand, certified, checked_login, shell_command, write_login

KEY = "lab-1 ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIexample"


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PODWAY_HOME", str(tmp_path))
    return tmp_path


def made(endpoint: Endpoint, command: str | None = None, *, own_server: bool = False, **more: object) -> ShellCommand:
    reply = ShellReply(home="/home/it's", env={"GREETING": "a 'b'; $c"}, endpoint=endpoint, known_hosts=[KEY])
    return shell_command(checked_login(reply, cluster="a/b c", own_server=own_server), command, cluster="a/b c")


def test_a_teams_server_names_no_file_of_this_machine(own_home: Path) -> None:
    endpoint = Endpoint(
        address="192.0.2.1", port=2222, user="ada", identity_file="/srv/podway/id_ed25519", alias="lab-1"
    )
    words = made(endpoint, "echo hi").argv
    assert words[:2] == ["ssh", "-T"] and "192.0.2.1" in words
    assert not any("id_ed25519" in word for word in words)
    (known,) = (own_home / "ssh" / "known").iterdir()
    assert known.read_text() == KEY + "\n" and f"UserKnownHostsFile={known}" in words
    assert "StrictHostKeyChecking=yes" in words and "HostKeyAlias=lab-1" in words
    assert any("id_ed25519" in word for word in made(endpoint, own_server=True).argv)  # the same user's own file
    assert words[-1].startswith("cd '/home/it'\"'\"'s/sky_workdir' 2>/dev/null; exec env ")


def test_a_team_server_cannot_open_a_shell_on_this_machine(own_home: Path) -> None:
    (own_home / "sky_workdir").mkdir()
    reply = ShellReply(home=str(own_home), env={"BASH_ENV": "/tmp/evil", "LD_PRELOAD": "/tmp/evil.so"})
    with pytest.raises(UserError, match="not on this machine"):
        checked_login(reply, cluster="a", own_server=False)
    login = checked_login(reply, cluster="a", own_server=True)
    assert shell_command(login, None, cluster="a").cwd == str(own_home / "sky_workdir")


def test_a_teams_server_certifies_a_key_of_this_machine(own_home: Path) -> None:
    authority = CertificateAuthority(own_home / "their" / "authority")
    endpoint = Endpoint(address="192.0.2.1", identity_file="/srv/id", certificate_file="/srv/id-cert.pub")
    reply = ShellReply(home="/home/ada", env={}, endpoint=endpoint, known_hosts=[KEY])
    asked = []

    def sign(public_key: str) -> str:
        asked.append(public_key)
        return authority.sign(public_key, "podway-c0ffee", "podway user=ada").text

    login = checked_login(reply, cluster="c", own_server=False)
    login = certified(login, cluster="c", rank=3, sign=sign)
    assert login.endpoint is not None
    write_login(login, "c", 3)
    lines = (own_home / "ssh" / "logins" / "c.3").read_text()
    assert "/srv" not in lines and f"CertificateFile {own_home}/ssh/logins/c.3-cert.pub" in lines
    words = ["ssh-keygen", "-L", "-f", str(login.endpoint.certificate_file)]
    said = subprocess.run(words, capture_output=True, text=True, timeout=60).stdout
    assert "podway-c0ffee" in said and "user certificate" in said and "permit-pty" in said and "X11" not in said
    for path in (own_home / "ssh").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    (key,) = {line.split()[1] for line in asked}
    assert key not in (own_home / "ssh" / "id_ed25519").read_text()  # what is sent is the public half


@pytest.mark.parametrize(
    "sent",
    ["", "ssh-ed25519 AAAA", "ssh-ed25519-cert-v01@openssh.com x\nHost *", "-----BEGIN OPENSSH PRIVATE KEY-----"],
)
def test_what_is_no_certificate_is_refused(own_home: Path, sent: str) -> None:
    reply = ShellReply(home="/home/ada", env={}, endpoint=Endpoint(address="192.0.2.1"))
    login = checked_login(reply, cluster="c", own_server=False)
    with pytest.raises(UserError, match="a certificate that is none"):
        certified(login, cluster="c", rank=0, sign=lambda public_key: sent)
    assert not list((own_home / "ssh").glob("logins/*"))


def test_hosts_without_certificates_are_reached_with_the_persons_own_keys(own_home: Path) -> None:
    def sign(public_key: str) -> str:
        raise UserError("hosts of lab take no certificates", "", status=409, code=NO_CERTIFICATES)

    reply = ShellReply(home="/home/ada", env={}, endpoint=Endpoint(address="192.0.2.1"))
    login = checked_login(reply, cluster="c", own_server=False)
    assert certified(login, cluster="c", rank=0, sign=sign) == login


@pytest.mark.parametrize("key", ["", "ssh-rsa AAAA", "ssh-ed25519 AAAA", "no key"])
def test_only_a_key_is_certified(own_home: Path, key: str) -> None:
    with pytest.raises(UserError, match="not an ed25519 key"):
        CertificateAuthority(own_home / "authority").sign(key, "p", "w")


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
