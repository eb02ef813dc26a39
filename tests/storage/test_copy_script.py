"""The script that copies a bucket on a host of its own identity, run with the real gcloud where there is one."""

import os
import shutil
import subprocess
import uuid
from pathlib import Path

import pytest

from podway.hosts.blobs import BlobStore
from podway.hosts.tree import scan
from podway.sandbox.running import Running
from podway.storage.address import Address
from podway.storage.gcs import open_buckets
from podway.storage.render import HostMount, script
from podway.task.task import Bucket

FILES = {"deep/one.txt": b"1", "two words.bin": bytes(range(256))}


def copied(uri: str, home: Path, storage: Running) -> Path:
    mount = HostMount(source=Bucket(uri=uri, mode="COPY"), target="~/here", endpoint=storage.rest)
    env = {"HOME": str(home), "PATH": os.environ["PATH"], "CLOUDSDK_CORE_PROJECT": "sandbox"}
    env["CLOUDSDK_AUTH_ACCESS_TOKEN_FILE"] = storage.environment(home)["CLOUDSDK_AUTH_ACCESS_TOKEN_FILE"]
    done = subprocess.run(["bash", "-c", script(mount)], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return home / "here"


@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")
def test_gcloud_copies_a_prefix_and_an_object(storage: Running, tmp_path: Path) -> None:
    blobs, buckets = BlobStore(tmp_path / "blobs"), open_buckets(tmp_path)
    address = Address(f"podway-{uuid.uuid4().hex[:12]}", "set")
    for name, data in FILES.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        blobs.put(data)
    buckets.ensure(address)
    buckets.upload(address, scan(tmp_path / "source").manifest, blobs)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    there = copied(str(address), tmp_path / "a", storage)
    assert {str(path.relative_to(there)): path.read_bytes() for path in there.rglob("*") if path.is_file()} == FILES
    assert copied(f"{address}/deep/one.txt", tmp_path / "b", storage).read_bytes() == b"1"
