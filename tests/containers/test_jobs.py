"""Tasks with an image, end to end: on a simulated slice, and on machines of one's own with a private registry."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from podway.sandbox.hosts import pool_text, why_no_hosts
from podway.sandbox.hosts.netns import NetnsHosts, why_no_namespaces
from podway.task.task import Accelerator, LocalDir, Placement, Registry, Resources, Task, Volume
from tests.conftest import wait_until
from tests.containers.tools import PASSWORD, POLICY, STORAGE, USER, Store, registry, root_archive, why_no_containers
from tests.e2e.harness import Podway, files_with

IMAGE = "localhost/tiny:1"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    if why := why_no_containers():
        pytest.skip(why)
    made = Store(tmp_path_factory.mktemp("store"))
    made.build(IMAGE, 'CMD ["sh", "-c", "echo own command of rank $PODWAY_RANK"]')
    yield made
    made.remove()


@pytest.fixture
def pod(podway_home: Path, store: Store) -> Iterator[Podway]:
    podway = Podway(podway_home)
    podway.start(**store.env)
    yield podway
    podway.close()


def with_image(run: str, image: str = IMAGE, *, tpu: str = "v4-16", where: str = "local", **more: object) -> Task:
    place = Placement(provider="ssh", region="lab") if where == "ssh" else Placement(provider="local")
    resources = Resources(accelerator=Accelerator(type=tpu), placement=place, image=f"docker:{image}")
    return Task(run=run, resources=(resources,), **{"shell": "sh", **more})  # type: ignore[arg-type]


def test_on_a_simulated_slice(pod: Podway, store: Store, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "hello.sh").write_text(
        "cat /etc/image-of-the-tests; echo rank $PODWAY_RANK of $SKYPILOT_NUM_NODES $TPU_WORKER_ID $1\n"
    )
    setup = "echo from setup > /etc/kept; cat hello.sh > ~/copied"
    task = with_image("sh hello.sh $TOK; cat /etc/kept; echo $PODWAY_RANK > /data/rank; [ -s ~/copied ]", setup=setup,
                      volumes=(Volume(path="/data", instance_path="/mnt/d"),), secrets={"TOK": "s3cret-of-many-words"},
                      workdir=LocalDir(path=str(work)))  # fmt: skip
    launched = pod.client.launch(task, cluster="c")
    assert launched.job == 1 and pod.finished("c", 1) == "SUCCEEDED"
    text = pod.log_text("c", 1)
    assert "rank 0 of 2 0 ***" in text and "rank 1 of 2 1 ***" in text and text.count("busybox") == 2
    assert text.count("from setup") == 2
    # A directory of the host is each host's own, below its home.
    for rank in (0, 1):
        assert (pod.home / "local" / "c" / f"host-{rank}" / ".podway/disk/mnt/d/rank").read_text() == f"{rank}\n"
    # A job that names no image runs in its cluster's, and finds what setup left; a failure is its rank's own exit code.
    pod.client.exec("c", Task(run="cat /etc/kept /etc/image-of-the-tests; exit 42", shell="sh"))
    assert pod.finished("c", 2) == "FAILED" and "code 42" in pod.client.job("c", 2).reason
    assert "from setup" in pod.log_text("c", 2) and "busybox" in pod.log_text("c", 2)
    pod.client.exec(
        "c", Task(run="trap '' TERM; echo ready; while :; do sleep 1000; done", shell="sh", stop_duration_s=1)
    )
    wait_until(lambda: pod.log_text("c", 3, follow=False).count("ready") == 2, 60, "the third job")
    pod.client.cancel("c")
    assert pod.finished("c", 3) == "CANCELLED"
    commands = [" ".join(process.info["cmdline"]) for process in pod.host_processes()]
    assert [command for command in commands if "agent-" not in command] == []
    assert len(store.containers()) == 2  # one for each host
    pod.down("c")
    assert store.containers() == []
    assert files_with(pod.home, "s3cret-of-many-words") == []


def test_a_dstack_file_runs_the_images_own_command(pod: Podway, tmp_path: Path) -> None:
    file = tmp_path / "own.dstack.yml"
    file.write_text(f"type: task\nname: own\nimage: {IMAGE}\nresources: {{gpu: v5litepod-8}}\n")
    shown = podway(pod, "launch", "-y", "-c", "own", "--infra", "local", str(file))
    assert "own command of rank 0" in shown
    pod.down("own")


def test_an_image_that_cannot_be_pulled_fails_the_setup_with_one_sentence(pod: Podway, store: Store) -> None:
    pod.client.launch(with_image("echo never", "127.0.0.1:9/none:1", tpu="v5litepod-8"), cluster="c")
    assert pod.finished("c", 1) == "FAILED_SETUP"
    reason = pod.client.job("c", 1).reason
    assert "the image 127.0.0.1:9/none:1 cannot be pulled: the registry cannot be reached from this host" in reason
    pod.down("c")


def test_refused_where_no_runtime_works_in_the_words_of_check(podway_home: Path, tmp_path: Path) -> None:
    pod = Podway(podway_home)
    file = tmp_path / "task.yaml"
    file.write_text(
        f"resources: {{accelerators: tpu-v5litepod-8, image_id: 'docker:{IMAGE}', infra: local}}\nrun: echo plain\n"
    )
    bare = tmp_path / "bin"
    bare.mkdir()
    for program in ("bash", "sh", "env", "cat", "mkdir", "ls"):
        (bare / program).symlink_to(Path("/bin", program))
    (bare / "python3").symlink_to(sys.executable)
    path = {"PATH": str(bare)}
    pod.start(**path)
    said = podway(pod, "launch", "-y", "-c", "c", str(file), code=1, env=path)
    why = f"image {IMAGE} cannot be used here: this host has neither Docker nor podman"
    assert why in said and "--ignore-image" in said
    assert why in podway(pod, "check", str(file), env=path)
    said = podway(pod, "launch", "-y", "-c", "c", "--ignore-image", str(file), env=path)
    assert "plain" in said and f"image {IMAGE}: ignored" in said
    pod.down("c")
    pod.close()


def podway(pod: Podway, *words: str, code: int = 0, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "podway.cli.main", *words],
        env={**os.environ, "PODWAY_HOME": str(pod.home), **(env or {})},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def machines() -> Iterator[NetnsHosts]:
    why = why_no_containers() or why_no_hosts() or why_no_namespaces()
    if why:
        pytest.skip(why)
    hosts = NetnsHosts(2, containers=True)
    yield hosts
    hosts.close()


def test_on_machines_of_ones_own_from_a_private_registry(
    pod: Podway, store: Store, machines: NetnsHosts, tmp_path: Path
) -> None:
    (pod.home / "ssh").mkdir()
    (pod.home / "ssh" / "lab.yaml").write_text(pool_text(machines, "v4-16"))
    bridge = machines.hosts[0].address.rpartition(".")[0] + ".1"
    with registry(tmp_path / "registry", bridge) as at:
        store.trust(at)
        store.podman("push", "--creds", f"{USER}:{PASSWORD}", IMAGE, f"{at}/team/tiny:1")
        settings = {
            "policy.json": POLICY,
            "storage.conf": STORAGE.format(root="/var/lib/containers/storage", run="/run/containers"),
            "registries.conf": f'[[registry]]\nlocation = "{at}"\ninsecure = true\n',
        }
        for index in range(2):
            for name, text in settings.items():
                machines.run(index, f"mkdir -p /etc/containers; cat > /etc/containers/{name}", text)
        private = Registry(username=USER, password_secret="PULL")
        task = with_image("cat /etc/image-of-the-tests; echo rank $PODWAY_RANK at $PODWAY_HOST_IP; touch result", f"{at}/team/tiny:1",
                          where="ssh", setup="echo setup", registry=private, secrets={"PULL": PASSWORD})  # fmt: skip
        pod.client.launch(task, cluster="c")
        assert pod.finished("c", 1, 120) == "SUCCEEDED", pod.client.job("c", 1).reason
        text = pod.log_text("c", 1)
        for rank, host in enumerate(machines.hosts):
            assert f"rank {rank} at {host.address}" in text
        assert text.count(f"podway: pulling {at}/team/tiny:1") == 2  # once on each host, in setup, and not again in run
        assert PASSWORD not in text and files_with(pod.home, PASSWORD) == []
    for index in range(2):
        inspected = machines.run(index, "podman inspect $(podman ps -aq)")
        assert json.loads(inspected)[0]["Config"]["Labels"] and PASSWORD not in inspected
        assert machines.run(index, "ls /root/sky_workdir").split() == ["result"]
    pod.client.exec(
        "c",
        Task(run="(nohup env -i sleep 1000 >/dev/null 2>&1 &) ; echo ready; sleep 1001", shell="sh", stop_duration_s=1),
    )
    wait_until(lambda: pod.log_text("c", 2, follow=False).count("ready") == 2, 60, "the second job")
    pod.client.cancel("c")
    assert pod.finished("c", 2) == "CANCELLED"
    assert all("sleep" not in line for index in range(2) for line in machines.processes(index))
    pod.client.down("c")
    wait_until(lambda: pod.client.clusters() == [], 60, "the end of the cluster")
    for index in range(2):
        assert machines.processes(index) == []
        assert machines.run(index, "podman ps -aq; ls -A /root/.podway 2>/dev/null; true") == ""


def test_a_login_that_is_not_root_but_may_sudo(pod: Podway, machines: NetnsHosts) -> None:
    """As on Google Cloud: root in the image, and what it writes into the task's directories is the login's own afterwards."""
    for index in range(2):
        given = "useradd -m -p '*' -s /bin/bash dev; echo 'dev ALL=(ALL) NOPASSWD:ALL' > /etc/sudoers.d/dev; chmod 440 /etc/sudoers.d/dev"
        machines.run(index, f"id dev 2>/dev/null || {{ {given}; }}")
        machines.run(index, "mkdir -p /etc/containers; cat > /etc/containers/policy.json", POLICY)
        storage = STORAGE.format(root="/var/lib/containers/storage", run="/run/containers")
        machines.run(index, "cat > /etc/containers/storage.conf", storage)
        (machines.files(index) / "tmp" / "tiny.tar").write_bytes(root_archive())
        machines.run(index, f"podman image exists {IMAGE} || podman import /tmp/tiny.tar {IMAGE}; rm /tmp/tiny.tar")
    (pod.home / "ssh").mkdir()
    (pod.home / "ssh" / "lab.yaml").write_text(pool_text(machines, "v4-16").replace("root", "dev"))
    run = "id -u; mkdir -p made && echo x > made/x; trap '' TERM; echo ready; while :; do sleep 1000; done"
    pod.client.launch(with_image(run, where="ssh", stop_duration_s=1), cluster="c")
    wait_until(lambda: pod.log_text("c", 1, follow=False).count("ready") == 2, 120, "the job")
    assert "0\n" in pod.log_text("c", 1, follow=False)
    pod.client.cancel("c")
    assert pod.finished("c", 1) == "CANCELLED"
    for index in range(2):
        assert all("sleep" not in line for line in machines.processes(index))
        owners = machines.run(
            index, "stat -c %U /home/dev/sky_workdir /home/dev/sky_workdir/made /home/dev/sky_workdir/made/x"
        )
        assert owners.split() == ["dev"] * 3
    pod.client.down("c")
    wait_until(lambda: pod.client.clusters() == [], 60, "the end of the cluster")
    for index in range(2):
        assert machines.processes(index) == []
        assert machines.run(index, "podman ps -aq; ls -A /home/dev/.podway 2>/dev/null; true") == ""
