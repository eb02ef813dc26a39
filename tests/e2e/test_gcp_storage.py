"""Buckets on a pretend cloud's own hosts: each mounts and copies as itself, from where it finds Google's storage."""

import shutil
import uuid
from pathlib import Path

import pytest

from podway.sandbox.running import Running
from tests.e2e.harness import Podway
from tests.e2e.test_gcp import EAST, cloud, podway, sandbox
from tests.e2e.test_storage_copies import client_of, objects, put

__all__ = ["cloud", "sandbox"]

TASK = """
resources: {{infra: gcp/us-east5/us-east5-b, accelerators: tpu-v6e-8}}
file_mounts:
  ~/out/ckpt:
    name: {ckpt}
    mode: MOUNT_CACHED
{more}
run: |
  echo $(whoami) has $(cat ~/data/one.txt 2>/dev/null) and $(ls ~/out/ckpt | wc -l) objects
  echo from $(hostname) > ~/out/ckpt/said.txt
"""


@pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="the kernel has no FUSE here")
@pytest.mark.skipif(shutil.which("rclone") is None, reason="rclone is missing (tools/system-packages installs it)")
def test_a_bucket_is_made_and_mounted_by_the_host_itself(pod: Podway, cloud: Running, tmp_path: Path) -> None:
    data, ckpt = (f"podway-{uuid.uuid4().hex[:8]}" for _ in range(2))
    put(cloud, data, "set/one.txt", b"the first")
    copies = shutil.which("gcloud") is not None  # a TPU VM has it; this machine, whose /usr the hosts see, may not
    more = f"  ~/data: gs://{data}/set" if copies else ""
    file = tmp_path / "task.yaml"
    file.write_text(TASK.format(ckpt=ckpt, more=more))
    shown = podway(pod, "launch", "-y", "-c", "c", str(file), seconds=110)
    assert f"podway has {'the first' if copies else ''} and 0 objects".replace("  ", " ") in shown, shown
    said = objects(cloud, ckpt)
    assert list(said) == ["said.txt"] and said["said.txt"].startswith(b"from t1v-n-")
    assert client_of(cloud).get_bucket(ckpt).location == EAST.rpartition("-")[0].upper()
    podway(pod, "down", "-y", "c")
    for bucket in (data, ckpt):  # Podway deletes none, and the fixture counts them
        client_of(cloud).get_bucket(bucket).delete(force=True)
