"""S3 by AWS's own client against moto's server, and the hub by Hugging Face's own against a small one: copied, once, by their errors."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from botocore.config import Config

from podway.errors import UserError
from podway.hosts.blobs import BlobStore
from podway.hosts.tree import TreeManifest
from podway.storage import downloads
from podway.storage.address import Address, parse
from podway.storage.downloads import Downloads, ObjectStore
from tests.model.hub import Hub, running

KEYS = {"AWS_ACCESS_KEY_ID": "AKIDTASK", "AWS_SECRET_ACCESS_KEY": "task-secret-value"}
FILES = {"set/a/one.txt": b"one", "set/two.bin": bytes(range(256)) * 5000, "set-of-others": b"x"}


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    """moto's server in a process of its own, which says its port."""
    code = "from moto.server import ThreadedMotoServer as S; s = S(ip_address='127.0.0.1', port=0, verbose=False); s.start()\n"
    code += "print(s.get_host_and_port()[1], flush=True); s._thread.join()"
    server = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "MOTO_S3_CUSTOM_ENDPOINTS": ""},
    )
    with server:
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            client = boto3.client(
                "s3",
                endpoint_url=url,
                region_name="us-east-1",
                aws_access_key_id="a",
                aws_secret_access_key="b",
                config=Config(read_timeout=120),
            )
            client.create_bucket(Bucket="numbers")
            for name, data in FILES.items():
                client.put_object(Bucket="numbers", Key=name, Body=data, ACL="public-read")
            client.put_object(Bucket="numbers", Key="private/key", Body=b"x")
            yield url
        finally:
            server.kill()


@pytest.fixture
def s3(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    from podway.storage.s3 import S3Store

    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_url)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return S3Store(KEYS)


def contents(manifest: TreeManifest, blobs: BlobStore) -> dict[str, bytes]:
    return {entry.path: blobs.read(entry.sha256) for entry in manifest.entries if entry.kind == "file"}


def test_a_prefix_an_object_and_a_second_copy(s3: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs, kept = BlobStore(tmp_path / "blobs"), Downloads(tmp_path / "cache")
    address = parse("s3://numbers/set")
    assert address == Address("numbers", "set", "s3") and str(address) == "s3://numbers/set"
    found = kept.tree(s3, address, blobs)
    assert contents(found, blobs) == {"a/one.txt": b"one", "two.bin": FILES["set/two.bin"]}
    alone = kept.tree(s3, parse("s3://numbers/set/a/one.txt"), blobs)
    assert (alone.root, contents(alone, blobs)) == ("file", {"one.txt": b"one"})
    monkeypatch.setattr(downloads, "_fetched", lambda one, blobs: pytest.fail(f"{one.name} was fetched again"))
    assert kept.tree(s3, address, blobs) == found
    with pytest.raises(UserError, match=r"s3://numbers/nope: nothing is there"):
        kept.tree(s3, parse("s3://numbers/nope"), blobs)
    with pytest.raises(UserError, match="s3://nowhere does not exist"):
        kept.tree(s3, parse("s3://nowhere"), blobs)


def test_what_has_no_credentials_is_asked_for_without_a_signature(s3: ObjectStore, tmp_path: Path) -> None:
    from podway.storage.s3 import S3Store

    blobs, kept = BlobStore(tmp_path / "blobs"), Downloads(tmp_path / "cache")
    assert len(kept.tree(S3Store({}), parse("s3://numbers/set"), blobs).entries) == 3
    with pytest.raises(UserError, match="access is denied") as caught:
        kept.tree(S3Store({}), parse("s3://numbers/private"), blobs)
    assert "--secret" in caught.value.hint


def test_credentials_are_in_no_log_and_in_no_file(
    s3: ObjectStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    Downloads(tmp_path / "cache").tree(s3, parse("s3://numbers/set"), BlobStore(tmp_path / "blobs"))
    with pytest.raises(UserError) as caught:
        Downloads(tmp_path / "cache").tree(s3, parse("s3://nowhere"), BlobStore(tmp_path / "blobs"))
    secret = KEYS["AWS_SECRET_ACCESS_KEY"]
    assert secret not in caplog.text and secret not in str(caught.value)
    assert not any(secret.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    files = {"config.json": b"{}", "deep/weights.bin": b"w" * 3000}
    with running(Hub({"org/open": files, "org/gated": files}, gated=frozenset({"org/gated"}))) as serving:
        yield serving


# In a process of its own: the client reads its endpoint once.
COPY = """
import json, sys
from pathlib import Path
from podway.errors import UserError
from podway.hosts.blobs import BlobStore
from podway.storage.address import parse
from podway.storage.downloads import Downloads
from podway.storage.hub import HubStore

place = Path(sys.argv[1])
blobs = BlobStore(place / "blobs")
for address, token in json.loads(sys.stdin.read()):
    try:
        tree = Downloads(place / "cache").tree(HubStore({"HF_TOKEN": token}), parse(address), blobs)
        print(json.dumps({one.path: blobs.read(one.sha256).hex() for one in tree.entries if one.kind == "file"}))
    except UserError as error:
        print(json.dumps(error.what))
"""


def test_repositories_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    asked = [
        ("hf://org/open@main", ""),
        ("hf://org/open/deep", ""),
        ("hf://org/gated", "hf_allowed"),
        ("hf://org/gated", ""),
        ("hf://org/none", ""),
        ("hf://org/open@other", ""),
    ]
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
    env.pop("HF_TOKEN", None)
    ended = subprocess.run(
        [sys.executable, "-c", COPY, str(tmp_path)], input=json.dumps(asked), env=env, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    whole, part, allowed, gated, none, revision = [json.loads(line) for line in ended.stdout.splitlines()]
    assert whole == allowed == {"config.json": b"{}".hex(), "deep/weights.bin": (b"w" * 3000).hex()}
    assert part == {"weights.bin": (b"w" * 3000).hex()}
    assert "is gated" in gated and "does not exist (or it is private)" in none and "no such revision" in revision
    kept = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert kept and not any(b"hf_allowed" in data for data in kept)
    assert "hf_allowed" not in ended.stdout + ended.stderr
