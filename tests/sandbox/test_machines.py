"""Which machines a sandbox gets where the best kind is not available, and what it says then."""

import os
import pwd
import stat
from pathlib import Path

import pytest

from podway.sandbox.hosts import machines, sshd
from podway.sandbox.hosts.loopback import PLAIN_USER, LoopbackHosts, plain_user
from podway.sandbox.hosts.machines import make_machines
from podway.sandbox.hosts.sshd import why_no_hosts
from podway.sandbox.running import running_sandbox
from tests.sandbox.test_hosts import Lab

WHY = "namespaces are not allowed here: unshare failed"


def test_without_sshd_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sshd, "SSHD", tmp_path / "sshd")
    found = make_machines("auto", tmp_path)
    assert found.kind == "none"
    assert found.note.startswith("nodes have addresses but no machines behind them: sshd is not installed")
    for kind in ("netns", "loopback"):
        with pytest.raises(RuntimeError, match="sshd is not installed"):
            make_machines(kind, tmp_path)


@pytest.mark.skipif(bool(why_no_hosts()), reason=str(why_no_hosts()))
def test_without_namespaces_it_falls_back_to_a_plain_user_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "why_no_namespaces", lambda: WHY)
    found = make_machines("auto", tmp_path)
    assert found.kind == "loopback"
    assert WHY in found.note and "not confined" in found.note
    assert found.login not in ("", "root")
    with pytest.raises(RuntimeError, match="namespaces are not allowed"):
        make_machines("netns", tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has somebody else run its hosts")
def test_the_plain_user_of_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUDO_USER", raising=False)
    assert plain_user() == PLAIN_USER == plain_user()
    assert pwd.getpwnam(PLAIN_USER).pw_uid != 0
    monkeypatch.setenv("SUDO_USER", "nobody")
    assert plain_user() == "nobody"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has somebody else run its hosts")
@pytest.mark.skipif(bool(why_no_hosts()), reason=str(why_no_hosts()))
def test_hosts_of_a_plain_user_have_no_rights_of_root(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("what only root may know")
    secret.chmod(0o600)
    with running_sandbox(tmp_path / "state", hosts="loopback", speed=1000) as sandbox:
        lab = Lab(sandbox, tmp_path)
        node = lab.create("loop")
        port = lab.port(node.name)
        address = node.network_endpoints[0].ip_address
        done = lab.ssh(address, f"id -u; cat {secret}; cat {sandbox.state}/token; sudo -n id", sandbox.login, port)
        assert done.stdout.split() == [str(pwd.getpwnam(sandbox.login).pw_uid)]
        assert lab.ssh(address, "true", "root", port).returncode == 255
        lab.client.delete_node(name=node.name).result(timeout=30)


def test_files_of_hosts_on_loopback_are_their_users_alone() -> None:
    if why_no_hosts():
        pytest.skip(str(why_no_hosts()))
    made = LoopbackHosts(1)
    try:
        place = made.key.parent
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
        assert stat.S_IMODE(made.key.stat().st_mode) == 0o600
    finally:
        made.close()
    assert not place.exists()
