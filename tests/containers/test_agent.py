"""Phases of a job in an image, by a real agent: the environment, users, exit codes, cancel, and what is left behind."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podway.hosts.agent import container, processes
from tests.containers.tools import PASSWORD, USER, Store, registry, why_no_containers
from tests.hosts.agent_host import Host, until

IMAGE = "localhost/tiny:1"
SEEN = [["~/sky_workdir", "~/sky_workdir", False]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    if why := why_no_containers():
        pytest.skip(why)
    made = Store(tmp_path_factory.mktemp("store"))
    made.build(
        IMAGE,
        "ENV FLAVOUR=plain",
        "WORKDIR /srv/own",
        'CMD ["sh", "-c", "echo own command in $PWD as $FLAVOUR; exit 7"]',
    )
    made.build("localhost/app:1", "USER app")
    made.build("localhost/other:1", "USER nobody-here")
    yield made
    made.remove()


@pytest.fixture
def host(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    for name, value in store.env.items():
        monkeypatch.setenv(name, value)
    with Host(tmp_path) as made:
        yield made
        container.remove([made.host_id])
    assert store.containers() == []


def start(host: Host, job: str, script: str, *, image: str = IMAGE, cwd: str = "~/sky_workdir", **more: Any) -> None:
    told = {"image": image, "mounts": SEEN, **more.pop("container", {})}
    more.setdefault("interpreter", ["sh"])
    host.call("start", job=job, phase="run", script=script, cwd=cwd, container=told, **more)


def ended(host: Host, job: str) -> tuple[int | None, str]:
    """(exit code, what it printed)"""
    reply = until(
        lambda: (found := host.call("status", job=job, phase="run", wait=5.0))["state"] == "exited" and found, 120
    )
    return reply["code"], (host.state / "jobs" / job / "run" / "output").read_text()


def test_a_script_runs_in_the_image_with_the_hosts_home_and_devices(host: Host) -> None:
    start(
        host, "a",
        "cat /etc/image-of-the-tests; echo $HOME $PWD $FLAVOUR $RANK $TOKEN; ls /dev/null /proc/self/status; touch made; exit 3",
        env={"RANK": "5"}, secrets={"TOKEN": "very-secret-token"}, interpreter=["bash"],
    )  # fmt: skip
    code, said = ended(host, "a")
    assert code == 3
    assert said.splitlines() == [
        "podway: the image has no bash; the script runs with sh",
        "busybox",
        f"{host.home} {host.home}/sky_workdir plain 5 ***",
        "/dev/null",
        "/proc/self/status",
    ]
    assert (host.home / "sky_workdir" / "made").is_file()


def test_what_one_job_leaves_in_the_image_the_next_one_finds(host: Host, store: Store) -> None:
    start(host, "a", "echo kept > /etc/kept; echo $PATH")
    code, said = ended(host, "a")
    assert code == 0 and str(host.home) not in said  # the host's own programs are no part of the image
    start(host, "b", "cat /etc/kept; ls -A /.podway-host")
    assert ended(host, "b") == (0, "kept\n")
    assert len(store.containers()) == 1


def test_the_images_own_command_directory_and_environment(host: Host) -> None:
    start(host, "a", "", cwd="")
    assert ended(host, "a") == (7, "own command in /srv/own as plain\n")
    start(host, "b", "pwd", cwd="/not/in/the/image")
    assert ended(host, "b") == (0, "/not/in/the/image\n")


def test_directories_of_the_host_are_made_and_seen(host: Host, tmp_path: Path) -> None:
    disk = tmp_path / "disk" / "data"
    volumes = [[str(disk), "/data", False], ["~/own", "/mnt/ro", True]]
    start(host, "a", "echo kept > /data/file; touch /mnt/ro/x || echo read-only", container={"volumes": volumes})
    code, said = ended(host, "a")
    assert code == 0 and said.endswith("read-only\n")
    assert (disk / "file").read_text() == "kept\n" and (host.home / "own").is_dir()
    start(host, "b", "true", container={"volumes": [["/proc/nowhere", "/data", False]]})
    code, said = ended(host, "b")
    assert code == 125 and said.startswith("podway: volumes: /proc/nowhere cannot be made on this host: ")


def test_an_image_of_another_user(host: Host) -> None:
    work = host.home / "sky_workdir"
    (work / "given").mkdir(parents=True)
    (work / "given" / "data").write_text("x")
    (work / "link").symlink_to("/etc/shadow")
    shadow = Path("/etc/shadow").stat()
    script = "id -u; id -G; echo $HOME; echo more >> given/data; cat given/data; ls -A ..; echo no > /etc/passwd"
    start(host, "a", script, image="localhost/app:1")
    code, said = ended(host, "a")
    assert code == 1 and "Permission denied" in said
    assert said.splitlines()[:5] == ["1234", "1234 77", "/home/app", "xmore", "sky_workdir"]
    assert (Path("/etc/shadow").stat().st_uid, Path("/etc/shadow").stat().st_mode) == (shadow.st_uid, shadow.st_mode)
    start(host, "b", "id -u", image="localhost/app:1", container={"user": "0"})
    assert ended(host, "b") == (0, "0\n")
    start(host, "c", "id -u", image="localhost/other:1")
    assert ended(host, "c") == (125, "podway: the image has no user 'nobody-here'\n")


@pytest.mark.parametrize("name", ["tiny;touch /tmp/x", "$(reboot)", "-v", "--help", "a b", "../../etc", "x\ny", ""])
def test_names_that_are_not_names(host: Host, name: str) -> None:
    start(host, "a", "echo hi", image=name or "-")
    code, said = ended(host, "a")
    assert code == 125 and "is not the name of an image" in said and said.count("\n") == 1


def test_cancel_leaves_no_process_whatever_it_does(host: Host) -> None:
    hostile = (
        "trap '' TERM\n(nohup sleep 1000 >/dev/null 2>&1 &)\n(yes flood > /dev/null &)\nenv -i /bin/sleep 1001 &\n"
        "echo ready\nwhile :; do sleep 1000; done"
    )
    start(host, "a", hostile, image="localhost/app:1")
    until(lambda: "ready" in (host.state / "jobs" / "a" / "run" / "output").read_text(), 120)
    reply = host.call("cancel", job="a", grace=0.2, wait=60.0)
    assert reply["gone"]
    assert left_of(host) == []


def test_a_killed_runner_and_agent_leave_nothing_running(host: Host, store: Store) -> None:
    start(host, "a", "env -i /bin/sleep 1002 & echo ready; wait")
    until(lambda: "ready" in (host.state / "jobs" / "a" / "run" / "output").read_text(), 120)
    os.kill(processes_named(host, processes.RUNNER_NAME)[0], signal.SIGKILL)
    until(lambda: host.call("status", job="a", phase="run")["state"] == "lost", 60)
    assert left_of(host) == []
    start(host, "b", "echo ready; sleep 1003")
    until(lambda: "ready" in (host.state / "jobs" / "b" / "run" / "output").read_text(), 120)
    host.kill_agent()
    host.start_agent()
    assert host.call("status", job="b", phase="run")["state"] == "running"
    assert host.call("cancel", job="b", grace=0.2, wait=60.0)["gone"]
    assert left_of(host) == [] and len(store.containers()) == 1  # known by its label: the fixture removes it


def test_two_jobs_at_once(host: Host, store: Store) -> None:
    for job in ("a", "b"):
        start(host, job, f"until [ -e go ]; do sleep 0.1; done; echo {job}")
    (host.home / "sky_workdir" / "go").touch()
    assert [ended(host, job) for job in ("a", "b")] == [(0, "a\n"), (0, "b\n")]
    assert len(store.containers()) == 1


def test_a_private_registry(host: Host, store: Store, tmp_path: Path) -> None:
    with registry(tmp_path / "registry") as at:
        store.trust(at)
        store.podman("push", "--creds", f"{USER}:{PASSWORD}", IMAGE, f"{at}/team/tiny:1")
        good = {"username": USER, "password": PASSWORD}
        cases = {
            "anonymous": (None, "team/tiny:1", "the registry refuses these credentials"),
            "wrong": ({**good, "password": "wrong-password"}, "team/tiny:1", "the registry refuses these credentials"),
            "absent": (good, "team/none:1", "it is not found: check its name and tag"),
        }
        for job, (who, name, why) in cases.items():
            start(host, job, "echo hi", image=f"{at}/{name}", container={"registry": who})
            code, said = ended(host, job)
            assert code == 125 and why in said.splitlines()[-1], said
            assert "wrong-password" not in said and PASSWORD not in said
        start(host, "good", "cat /etc/image-of-the-tests", image=f"{at}/team/tiny:1", container={"registry": good})
        code, said = ended(host, "good")
        assert code == 0 and said.splitlines()[0] == f"podway: pulling {at}/team/tiny:1" and said.endswith("busybox\n")
    assert list(Path("/dev/shm").glob("podway-auth-*")) == []
    start(host, "again", "echo there", image=f"{at}/team/tiny:1")  # the registry is gone, and nothing is pulled
    assert ended(host, "again") == (0, "there\n")
    start(host, "gone", "echo there", image=f"{at}/team/other:1")
    code, said = ended(host, "gone")
    assert code == 125 and "the registry cannot be reached from this host" in said
    for path in host.home.rglob("*"):
        assert not path.is_file() or PASSWORD not in path.read_text(errors="replace")


def left_of(host: Host) -> list[int]:
    """Processes that carry the host's mark or have the image's root, the agent apart."""
    deadline = time.monotonic() + 10
    while True:
        procs = processes.snapshot()
        found = processes.with_variable(procs, processes.HOST_ID_VARIABLE, host.host_id) - {host.pid}
        found |= {pid for pid in procs if pid != os.getpid() and _is_ours(pid)}
        if not found or time.monotonic() > deadline:
            return sorted(found)
        time.sleep(0.05)


def _is_ours(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/root/etc/image-of-the-tests").exists()
    except OSError:
        return False


def processes_named(host: Host, name: str) -> list[int]:
    procs = processes.snapshot()
    mine = processes.with_variable(procs, processes.HOST_ID_VARIABLE, host.host_id)
    return [pid for pid in mine if procs[pid].name == name]
