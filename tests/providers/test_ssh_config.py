"""`ssh NAME-worker3`: the files are what OpenSSH itself makes of them, whoever writes them at the same time."""

import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from podway.hosts.ssh.config import (
    SshFiles,
    endpoint_options,
    entry_text,
    include,
    is_included,
    names_taken,
    proxied_options,
    team_entry_text,
)
from podway.hosts.ssh.endpoint import Endpoint
from podway.hosts.ssh.keys import key_pair

HOSTS = [
    Endpoint(address="10.0.0.1", user="ada", identity_file="/keys/lab key"),
    Endpoint(address="10.0.0.2", port=2222, jump=Endpoint(address="bastion", user="gate", port=2200)),
]
NOBODY = frozenset[str]()


@pytest.fixture
def files(tmp_path: Path) -> SshFiles:
    if shutil.which("ssh") is None:
        pytest.skip("ssh is not installed (tools/system-packages installs it for root)")
    return SshFiles(tmp_path / "home with 100% space")


def parsed(files: SshFiles, name: str) -> dict[str, str]:
    done = subprocess.run(["ssh", "-F", files.config, "-G", name], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)


def write(files: SshFiles, name: str, hosts: list[Endpoint], taken: frozenset[str] = NOBODY) -> None:
    known = files.known_hosts(name)
    files.write_entry(name, entry_text(name, [endpoint_options(one, known) for one in hosts], taken), ["10.0.0.1 key"])


def test_openssh_reads_it(files: SshFiles) -> None:
    write(files, "train", HOSTS)
    write(files, "other.one_2", HOSTS[:1])
    for name in ("train", "train-worker0", "other.one_2"):
        head = parsed(files, name)
        assert (head["hostname"], head["user"], head["port"]) == ("10.0.0.1", "ada", "22")
        assert head["identityfile"] == "/keys/lab key"
        assert head["stricthostkeychecking"] in ("yes", "true")
    assert parsed(files, "train")["userknownhostsfile"] == str(files.known_hosts("train"))
    worker = parsed(files, "train-worker1")
    assert (worker["hostname"], worker["port"]) == ("10.0.0.2", "2222")
    assert "gate" in worker["proxycommand"] and worker["proxycommand"].endswith("bastion -W '[%h]:%p'")
    assert parsed(files, "train-worker2")["hostname"] == "train-worker2"  # no such host: nothing is said about it
    for path in files.folder.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    files.remove_entry("train")
    assert parsed(files, "train")["hostname"] == "train" and not files.known_hosts("train").exists()
    assert parsed(files, "other.one_2")["hostname"] == "10.0.0.1"


def test_a_simulated_host_is_a_command_and_a_teams_is_fetched_first(files: SshFiles) -> None:
    known = files.known_hosts("sim")
    blocks = [
        proxied_options("sim", rank, files.home, known, {"PODWAY_ATTACHED": f"own/sim-{rank}"}) for rank in (0, 1)
    ]
    files.write_entry("sim", entry_text("sim", blocks, NOBODY))
    command = parsed(files, "sim-worker1")["proxycommand"]
    assert command.endswith("-P -m podway.cli.main ssh-proxy sim 1") and "PODWAY_ATTACHED=own/sim-1" in command
    # `ssh -G` runs the command of a Match line: here it cannot reach a server, and so nothing is said of the host.
    files.write_entry("team", team_entry_text("team", 2, SshFiles(Path("/nonexistent")), NOBODY))
    text = files.entry("team").read_text()
    assert "Match originalhost team,team-worker0 exec " in text and "ssh-login team 1" in text
    assert "Include /nonexistent/ssh/logins/team.1" in text


@pytest.mark.parametrize(
    "name", ["", "-oProxyCommand=x", "a b", "a\nHost *", "../../x", "*", "a/b", ".hidden", "a" * 99]
)
def test_a_name_that_is_none_is_refused(files: SshFiles, name: str) -> None:
    with pytest.raises(ValueError, match="cannot be a name"):
        files.write_entry(name, "Host x\n")
    with pytest.raises(ValueError, match="cannot be a name"):
        files.remove_entry(name)


def test_a_host_of_the_persons_own_keeps_its_name(files: SshFiles, tmp_path: Path) -> None:
    config = tmp_path / "config"
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "work").write_text("host=build Deploy\n")
    config.write_text('Include more/*\nHost "Train" *.lab !x\n  User me\nInclude config\nMatch all\n')
    include(files.config, config)
    taken = names_taken(config, files.config)
    assert taken == {"train", "build", "deploy"}
    write(files, "train", HOSTS, taken)
    assert parsed(files, "train")["hostname"] == "train" and parsed(files, "train-worker0")["hostname"] == "10.0.0.1"
    assert names_taken(config, files.config) == taken  # our own entries do not count


def test_include_is_added_once_and_first(tmp_path: Path) -> None:
    real = tmp_path / "dotfiles-config"
    real.write_bytes(b"Host *\n    ForwardAgent no # caf\xe9\n")
    real.chmod(0o640)
    config = tmp_path / "config"
    config.symlink_to(real)
    ours = tmp_path / "podway home" / "config"
    assert include(ours, config) and not include(ours, config) and is_included(ours, config)
    lines = real.read_bytes().splitlines()
    assert lines[0] == f'Include "{ours}"'.encode() and lines[2] == b"Host *" and len(lines) == 4
    assert lines[3].endswith(b"caf\xe9") and config.is_symlink() and real.stat().st_mode & 0o777 == 0o640


def test_include_makes_the_file_where_there_is_none(tmp_path: Path) -> None:
    config = tmp_path / ".ssh" / "config"
    assert include(tmp_path / "c", config)
    assert config.read_text() == f"Include {tmp_path / 'c'}\n"
    assert config.stat().st_mode & 0o777 == 0o600 and config.parent.stat().st_mode & 0o777 == 0o700


def test_writers_at_once_do_not_meet(files: SshFiles) -> None:
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        list(pool.map(_write_often, [files] * 4, [f"c{number % 3}" for number in range(4)]))
    for number in range(3):
        assert parsed(files, f"c{number}")["hostname"] == "10.0.0.1"
    assert sorted(path.name for path in (files.folder / "hosts").iterdir()) == ["c0", "c1", "c2"]


def _write_often(files: SshFiles, name: str) -> None:
    for count in range(60):
        write(files, name, HOSTS[: 1 + count % 2])


def test_a_writer_that_is_killed_leaves_nothing_that_ssh_reads(files: SshFiles) -> None:
    write(files, "c", HOSTS)
    script = (
        "import sys; from pathlib import Path; from podway.hosts.ssh.config import SshFiles\n"
        "files = SshFiles(Path(sys.argv[1])); print('go', flush=True); count = 0\n"
        "while True: count += 1; files.write_entry('c', f'Host c\\n' + f'    Port {1 + count % 60000}\\n' * 4000)\n"
    )
    for _ in range(5):
        child = subprocess.Popen([sys.executable, "-c", script, str(files.home)], stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == b"go\n"
        time.sleep(0.05)
        os.kill(child.pid, signal.SIGKILL)
        child.wait(60)
        child.stdout.close()
        text = files.entry("c").read_text()
        assert text.count("Port") in (2, 4000) and parsed(files, "c")
        assert [path.name for path in (files.folder / "hosts").glob("[!.]*")] == ["c"]


def test_two_makers_of_a_key_have_the_same_one(tmp_path: Path) -> None:
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        publics = set(pool.map(_public, [tmp_path / "ssh" / "key"] * 8))
    assert len(publics) == 1 and (tmp_path / "ssh" / "key").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in (tmp_path / "ssh").iterdir()] == ["key"]
    said = subprocess.run(["ssh-keygen", "-y", "-f", tmp_path / "ssh" / "key"], capture_output=True, text=True)
    assert said.stdout.split()[:2] == publics.pop().split()


def _public(path: Path) -> str:
    return key_pair(path).public
