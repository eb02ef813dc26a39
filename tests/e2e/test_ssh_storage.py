"""Buckets on machines of one's own, for real: Google's client on the server, rclone and FUSE on the hosts, the sandbox's storage."""

import contextlib
import shutil
import socket
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from podway.sandbox.hosts.netns import NetnsHosts
from podway.sandbox.running import Running, running_sandbox
from tests.conftest import wait_until
from tests.e2e.harness import Podway
from tests.e2e.test_ssh import lab, made, podway
from tests.e2e.test_storage_copies import objects, put

__all__ = ["lab", "made"]

TASK = """
resources: {{infra: ssh/lab, accelerators: tpu-v6e-16}}
file_mounts:
  ~/data: gs://{data}/set
  ~/ckpt:
    name: {ckpt}
    source: {seed}
    store: gcs
    mode: MOUNT_CACHED
run: |
  echo rank $PODWAY_RANK has $(cat ~/data/deep/one.txt) and $(cat ~/ckpt/seed.txt)
  head -c 300000 /dev/urandom > ~/ckpt/rank-$PODWAY_RANK.bin
  echo rank $PODWAY_RANK wrote $(sha256sum < ~/ckpt/rank-$PODWAY_RANK.bin)
"""


@pytest.fixture
def storage(made: NetnsHosts, tmp_path: Path) -> Iterator[Running]:
    if not Path("/dev/fuse").exists():
        pytest.skip("the kernel has no FUSE here")
    if shutil.which("rclone") is None:
        pytest.skip("rclone is missing (tools/system-packages installs it for root)")
    with running_sandbox(tmp_path / "sandbox", hosts="none") as running:
        yield running


@contextlib.contextmanager
def relayed(made: NetnsHosts, to: Running) -> Iterator[str]:
    """The sandbox listens on loopback; hosts reach this machine's end of their bridge. The address they use."""
    address = made.hosts[0].address.rpartition(".")[0] + ".1"
    host, _, port = to.rest.removeprefix("http://").partition(":")

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                inside, _ = listener.accept()
                outside = socket.create_connection((host, int(port)), 10)
                for pair in ((inside, outside), (outside, inside)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    with socket.create_server((address, 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://sandbox:{to.token}@{address}:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def said_by_all(shown: str, line: str) -> bool:
    """Whether all four hosts printed a line, each with its rank: shown once, or each for itself."""
    return f"(all 4 hosts) {line.format(0)}" in shown or all(line.format(rank) in shown for rank in range(4))


def test_a_bucket_is_copied_and_another_made_filled_mounted_and_written_back(
    pod: Podway, lab: NetnsHosts, storage: Running, tmp_path: Path
) -> None:
    data, ckpt = (f"podway-{uuid.uuid4().hex[:8]}" for _ in range(2))
    put(storage, data, "set/deep/one.txt", b"the first")
    seed = tmp_path / "seed"
    seed.mkdir()
    (seed / "seed.txt").write_text("a seed")
    file = tmp_path / "task.yaml"
    file.write_text(TASK.format(data=data, ckpt=ckpt, seed=seed))
    with relayed(lab, storage) as endpoint:
        pod.start(STORAGE_EMULATOR_HOST=endpoint, PODWAY_GCP_PROJECT=storage.project)
        shown = podway(pod, "launch", "-y", "-c", "c", str(file))
        assert said_by_all(shown, "rank {} has the first and a seed"), shown
        assert f"Made the bucket gs://{ckpt}" in shown
        # The job has ended, so what it wrote is in the bucket.
        written = objects(storage, ckpt)
        assert sorted(written) == [*(f"rank-{rank}.bin" for rank in range(4)), "seed.txt"]
        assert all(len(written[f"rank-{rank}.bin"]) == 300_000 for rank in range(4))
        pids = [lab.run(index, "pgrep -x rclone") for index in range(4)]
        put(storage, data, "set/deep/one.txt", b"the second")
        shown = podway(pod, "launch", "-y", "-c", "c", str(file))
        assert said_by_all(shown, "rank {} has the second and a seed") and "Made the bucket" not in shown
        assert [lab.run(index, "pgrep -x rclone") for index in range(4)] == pids  # mounted once
        lab.run(3, "pkill -KILL -x rclone")
        shown = podway(pod, "launch", "-y", "-c", "c", str(file))
        assert said_by_all(shown, "rank {} has the second and a seed")  # a mount that died is made again
        podway(pod, "down", "-y", "c")
        wait_until(lambda: pod.client.clusters() == [], 30, "the end of the cluster")
    for index in range(4):
        assert "rclone" not in lab.run(index, "cat /proc/mounts")


def test_a_mount_that_is_not_allowed_names_the_permission(
    pod: Podway, lab: NetnsHosts, storage: Running, tmp_path: Path
) -> None:
    bucket = f"podway-{uuid.uuid4().hex[:8]}"
    put(storage, bucket, "a", b"1")
    file = tmp_path / "task.yaml"
    file.write_text(
        "resources: {infra: ssh/lab, accelerators: tpu-v6e-16}\n"
        f"file_mounts: {{~/m: {{source: 'gs://{bucket}', mode: MOUNT_CACHED}}}}\nrun: echo never\n"
    )
    said = "tpu@p.iam.gserviceaccount.com does not have storage.objects.list access to the Google Cloud Storage bucket."
    storage.command(
        "POST",
        "faults",
        {"kind": "error", "service": "storage", "method": "objects.list", "status": "PERMISSION_DENIED", "message": said, "times": 999},
    )  # fmt: skip
    with relayed(lab, storage) as endpoint:
        pod.start(STORAGE_EMULATOR_HOST=endpoint, PODWAY_GCP_PROJECT=storage.project)
        shown = podway(pod, "launch", "-y", "-c", "c", str(file), code=100)
        assert f"gs://{bucket}: tpu@p.iam.gserviceaccount.com may not list it" in shown, shown
        assert "the permission storage.objects.list is missing" in shown and "roles/storage.objectViewer" in shown
        podway(pod, "down", "-y", "c")
        wait_until(lambda: pod.client.clusters() == [], 30, "the end of the cluster")
