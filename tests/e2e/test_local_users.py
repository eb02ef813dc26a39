"""Simulated hosts on a server that a team shares: each cluster is an operating-system user of its own, and a hostile job gets nowhere.

The server runs as root from a Python that all users can run. Where this one lies in a directory of root's alone, a copy is made.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import podway
from podway.errors import UserError
from podway.providers.local import isolation
from podway.providers.local.provider import LocalProvider
from podway.server.client import Client
from podway.task.task import Task
from tests.conftest import wait_until
from tests.e2e.harness import Podway, task

# What a job tries; each line it prints is `NAME OUTCOME`. All must be refused but the last.
ATTACK = r"""
python3 - <<'EOF'
import ctypes, os, socket, sys
home, server, other, agent = sys.argv[1:] if len(sys.argv) > 1 else os.environ["TARGETS"].split(":")
libc = ctypes.CDLL(None, use_errno=True)

def ptrace(pid):
    if libc.ptrace(16, int(pid), 0, 0) < 0:  # PTRACE_ATTACH
        raise OSError(ctypes.get_errno(), "")

def connect(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(path)

tries = {
    "list-home": lambda: os.listdir(home),
    "token": lambda: open(f"{home}/server.json").read(),
    "database": lambda: open(f"{home}/podway.db", "rb").read(),
    "key": lambda: open(f"{home}/secret.key", "rb").read(),
    "environ": lambda: open(f"/proc/{server}/environ").read(),
    "memory": lambda: open(f"/proc/{server}/mem", "rb"),
    "files": lambda: os.listdir(f"/proc/{server}/fd"),
    "root": lambda: os.listdir(f"/proc/{server}/root/"),
    "signal": lambda: os.kill(int(server), 15),
    "ptrace": lambda: ptrace(server),
    "become-root": lambda: os.setuid(0),
    "other-list": lambda: os.listdir(other),
    "other-write": lambda: open(f"{other}/sky_workdir/planted", "w").write("x"),
    "other-replace": lambda: os.rename(other, other + "-away"),
    "other-agent": lambda: connect(f"{other}/.podway/agent.sock"),
    "other-process": lambda: os.kill(int(agent), 9),
    "own-home": lambda: open(os.path.expanduser("~/mine"), "w").write("x"),
}
for name, act in tries.items():
    try:
        act()
        print(name, "DONE", flush=True)
    except OSError as error:
        print(name, "refused", error.errno, flush=True)
print("user", os.getuid(), os.getgid(), os.getgroups(), flush=True)
EOF
"""


@pytest.fixture
def common_place() -> Iterator[Path]:
    """A directory that every user can pass through, unlike pytest's own."""
    place = Path(tempfile.mkdtemp(prefix="podway-users-", dir="/tmp"))
    place.chmod(0o711)
    yield place
    shutil.rmtree(place)


@pytest.fixture
def team(pod: Podway, common_place: Path) -> Iterator[Podway]:
    if os.geteuid() != 0:
        pytest.skip("only root can run jobs as other users")
    start_for_team(pod, common_place)
    yield pod
    with contextlib.suppress(UserError):
        for cluster in pod.client.clusters():
            pod.down(cluster.name)


def start_for_team(pod: Podway, common_place: Path) -> None:
    pod.python = python_for_all(common_place)
    packages = [str(Path(podway.__file__).parents[1]), *(path for path in sys.path if path.endswith("-packages"))]
    homes = common_place / "homes"
    pod.start(PODWAY_ALLOW_LOCAL="1", PODWAY_LOCAL_HOMES=str(homes), PYTHONPATH=":".join(packages))


def python_for_all(place: Path) -> str:
    if isolation.why_not_isolated() is None:
        return sys.executable
    copy = place / "python"
    unneeded = shutil.ignore_patterns("test", "site-packages", "__pycache__", "idlelib", "include", "share", "*.a")
    if not copy.exists():
        shutil.copytree(sys.base_prefix, copy, symlinks=True, ignore=unneeded, copy_function=link_or_copy)
    copy.chmod(0o755)
    return str(copy / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def user_of(team: Podway, name: str) -> Client:
    token = team.client.make_token(name)
    return Client(json.loads((team.home / "server.json").read_text())["url"], token)


def lines(client: Client, cluster: str, job: int) -> dict[str, str]:
    text = "".join(client.logs(cluster, job))
    return dict(line.split(") ", 1)[1].split(" ", 1) for line in text.splitlines() if ") " in line)


def processes_of_user(user: int) -> list[int]:
    found = psutil.process_iter(["uids", "status"])
    return [
        process.pid
        for process in found
        if process.info["uids"] and process.info["uids"].real == user and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def test_a_hostile_job_reaches_neither_the_server_nor_anothers_host(team: Podway, common_place: Path) -> None:
    ann, bob = user_of(team, "ann"), user_of(team, "bob")
    bob.launch(task("echo secret > ~/secret; sleep 1000", tpu="v6e-8"), cluster="bobs", provider="local")
    wait_until(lambda: bob.job("bobs", 1).state == "RUNNING", what="bob's job")
    home_of_bob = Path(bob.cluster("bobs").hosts[0].home)
    wait_until((home_of_bob / "secret").exists, what="bob's secret")
    agent = (home_of_bob / ".podway" / "agent.pid").read_text().strip()
    targets = f"{team.home}:{team.child.pid}:{home_of_bob}:{agent}"
    ann.launch(task(f"export TARGETS={targets}\n{ATTACK}", tpu="v6e-8"), cluster="anns", provider="local")
    assert team.finished("anns", 1) == "SUCCEEDED"
    said = lines(ann, "anns", 1)
    user, group, groups = said.pop("user").split(" ", 2)
    assert said.pop("own-home") == "DONE"
    assert {name: word.split()[0] for name, word in said.items()} == dict.fromkeys(said, "refused"), said
    assert len(said) == 16
    assert user == group and groups in ("[]", f"[{user}]") and int(user) > 60_000
    assert int(user) != home_of_bob.stat().st_uid != 0
    # The server lives, its secrets are as they were, and bob's host too.
    assert team.client.info().user and psutil.pid_exists(int(agent))
    assert bob.job("bobs", 1).state == "RUNNING"
    # A process that hides from every mark of its host goes with the cluster all the same.
    ann.exec("anns", Task(run="setsid env -i python3 -c 'import time; time.sleep(1000)' & sleep 0.5"))
    team.finished("anns", 2)
    for cluster in ("anns", "bobs"):
        team.down(cluster)
    wait_until(lambda: processes_of_user(int(user)) == [], what="the end of what hid")
    assert [path.name for path in (common_place / "homes").rglob("*") if path.is_dir()] == [
        LocalProvider(team.home).owner
    ]


def test_isolated_hosts_stop_start_and_outlive_their_server(team: Podway, common_place: Path) -> None:
    client = team.client
    client.launch(task("echo kept > ~/file; id -u", tpu="v4-16"), cluster="a", provider="local")
    assert team.finished("a", 1) == "SUCCEEDED"
    user = Path(client.cluster("a").hosts[0].home).stat().st_uid
    client.stop("a")
    wait_until(lambda: client.cluster("a").state == "STOPPED", what="the stop")
    client.start("a")
    wait_until(lambda: client.cluster("a").state == "UP", what="the start")
    team.kill_server()
    start_for_team(team, common_place)
    team.client.exec("a", Task(run="cat ~/file; id -u; echo $TMPDIR; test -w $TMPDIR"))
    assert team.finished("a", 2) == "SUCCEEDED"
    assert team.log_text("a", 2).count(str(user)) == 2 and "kept" in team.log_text("a", 2)
    with pytest.raises(UserError, match="as a user of their own"):
        team.client.shell("a")
    team.down("a")


def test_a_cluster_from_before_the_team_is_not_for_the_team(pod: Podway, common_place: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can run jobs as other users")
    pod.start()
    pod.client.launch(task("id -u", tpu="v6e-8"), cluster="old", provider="local")
    assert pod.finished("old", 1) == "SUCCEEDED"
    pod.child.send_signal(signal.SIGTERM)
    pod.child.wait(20)
    start_for_team(pod, common_place)
    ann = user_of(pod, "ann")
    pod.client.share("old", "ann")
    for attempt in (
        lambda: ann.exec("old", Task(run="id -u")),
        lambda: ann.run("old", "id -u"),
        lambda: ann.launch(task("id -u", tpu="v6e-8"), cluster="old"),
    ):
        with pytest.raises(UserError, match="from before this server had users"):
            attempt()
    pod.down("old")


def test_without_root_it_is_refused_with_a_sentence(podway_home: Path) -> None:
    program = "import os, sys; os.geteuid = lambda: 1000; from podway.server.main import main; sys.exit(main(['--allow-local']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "simulated hosts cannot run as users of their own: only root can" in done.stderr
    assert "Traceback" not in done.stderr
