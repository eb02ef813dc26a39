"""Buckets by Google's own client, against the sandbox's storage service."""

import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podway.errors import ProviderError, UserError
from podway.hosts.blobs import BlobStore
from podway.hosts.tree import TreeManifest, scan
from podway.sandbox.running import Running
from podway.storage import downloads
from podway.storage.address import Address, parse, split_login
from podway.storage.downloads import Downloads, Kept, tree_of
from podway.storage.gcs import Buckets, open_buckets

MANY = {f"shard{n:02}/part-{n}.bin": bytes([n]) * (1000 * n) for n in range(20)}


@pytest.fixture
def buckets(storage: Running, tmp_path: Path) -> Buckets:
    return open_buckets(tmp_path)


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def download(buckets: Buckets, address: Address, blobs: BlobStore) -> TreeManifest:
    return Downloads(blobs.root.parent / "cache").tree(buckets, address, blobs)


def fresh() -> Address:
    return Address(f"podway-{uuid.uuid4().hex[:12]}")


def tree(place: Path, files: dict[str, bytes], blobs: BlobStore) -> TreeManifest:
    """A directory with these files, scanned, its contents among the blobs."""
    for name, data in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)
        blobs.put(data)
    return scan(place).manifest


def contents(manifest: TreeManifest, blobs: BlobStore) -> dict[str, bytes]:
    return {entry.path: blobs.read(entry.sha256) for entry in manifest.entries if entry.kind == "file"}


def test_what_goes_up_comes_down_and_only_once(buckets: Buckets, blobs: BlobStore, tmp_path: Path) -> None:
    address = fresh()
    assert buckets.ensure(address, location="us-east5") is True
    assert buckets.ensure(address) is False
    manifest = tree(tmp_path / "source", MANY, blobs)
    below = Address(address.bucket, "runs/one")
    assert buckets.upload(below, manifest, blobs) == 20
    assert buckets.upload(below, manifest, blobs) == 0  # nothing is sent twice
    (tmp_path / "source" / "shard07" / "part-7.bin").write_bytes(b"changed")
    blobs.put(b"changed")
    assert buckets.upload(below, scan(tmp_path / "source").manifest, blobs) == 1
    other = BlobStore(tmp_path / "elsewhere")
    found = download(buckets, below, other)
    assert contents(found, other) == MANY | {"shard07/part-7.bin": b"changed"}
    assert TreeManifest.decode(found.encode()) == found
    assert contents(download(buckets, parse(f"gs://{address.bucket}"), other), other).keys() == {
        f"runs/one/{name}" for name in MANY
    }


def test_a_generation_is_downloaded_once(
    buckets: Buckets, blobs: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = fresh()
    buckets.ensure(address)
    buckets.upload(address, tree(tmp_path / "source", {"a": b"1", "b/c": b"22"}, blobs), blobs)
    other = BlobStore(tmp_path / "elsewhere")
    fetched: list[str] = []

    def watched(one: Any, blobs: BlobStore) -> tuple[str, int]:
        fetched.append(one.name)
        return real(one, blobs)

    real = downloads._fetched
    monkeypatch.setattr(downloads, "_fetched", watched)
    first = download(buckets, address, other)
    assert sorted(fetched) == ["a", "b/c"]
    assert download(buckets, address, other) == first and len(fetched) == 2
    (tmp_path / "source" / "a").write_bytes(b"new")
    blobs.put(b"new")
    buckets.upload(address, scan(tmp_path / "source").manifest, blobs)
    assert contents(download(buckets, address, other), other) == {"a": b"new", "b/c": b"22"}
    assert fetched[2:] == ["a"]


def test_one_object_is_one_file(buckets: Buckets, blobs: BlobStore, tmp_path: Path) -> None:
    address = fresh()
    buckets.ensure(address)
    buckets.upload(address, tree(tmp_path / "source", {"deep/one.txt": b"1", "deep/one.txt.bak": b"2"}, blobs), blobs)
    found = download(buckets, Address(address.bucket, "deep/one.txt"), blobs)
    assert (found.root, contents(found, blobs)) == ("file", {"one.txt": b"1"})
    with pytest.raises(UserError, match=r"deep/on: nothing is there"):
        download(buckets, Address(address.bucket, "deep/on"), blobs)


def test_a_bucket_that_is_not_there_is_said(buckets: Buckets, blobs: BlobStore) -> None:
    address = fresh()
    with pytest.raises(UserError, match=f"gs://{address.bucket} does not exist") as caught:
        download(buckets, address, blobs)
    assert "`name:`" in caught.value.hint


@pytest.mark.parametrize(
    ("method", "action", "permission"),
    [
        ("objects.list", "download", "storage.objects.list"),
        ("objects.get", "download", "storage.objects.get"),
        ("objects.insert", "upload", "storage.objects.create"),
        ("buckets.insert", "ensure", "storage.buckets.create"),
        ("buckets.get", "ensure", "storage.buckets.get"),
    ],
)
def test_each_missing_permission_is_named(
    storage: Running, buckets: Buckets, blobs: BlobStore, tmp_path: Path, method: str, action: str, permission: str
) -> None:
    address = fresh()
    manifest = tree(tmp_path / "source", {"a": b"1"}, blobs)
    if action != "ensure":
        buckets.ensure(address)
        buckets.upload(address, manifest, blobs)
        manifest = tree(tmp_path / "source", {"b": b"2"}, blobs)
    storage.command(
        "POST",
        "faults",
        {"kind": "error", "service": "storage", "method": method, "status": "PERMISSION_DENIED", "times": 99,
         "message": f"ada@example.com does not have {permission} access to the Google Cloud Storage bucket."},
    )  # fmt: skip
    with pytest.raises(UserError, match=f"the permission {permission} is missing") as caught:
        if action == "download":
            download(buckets, address, BlobStore(tmp_path / "other"))
        elif action == "upload":
            buckets.upload(address, manifest, blobs)
        else:
            buckets.ensure(address)
    assert "ada@example.com" in caught.value.what and "gcloud" in caught.value.hint


def test_nobody_answers_may_pass(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, blobs: BlobStore, storage: Running
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    buckets = open_buckets(tmp_path)
    monkeypatch.setattr("google.cloud.storage.retry.DEFAULT_RETRY._timeout", 0.5)
    with pytest.raises(ProviderError, match="gs://nowhere"):
        buckets.check(Address("nowhere"))


PART = st.sampled_from(["a", "b", "c.txt", "..", ".", "", "ü", "x y"])


@settings(max_examples=300)
@given(st.lists(st.lists(PART, min_size=1, max_size=4).map("/".join), max_size=6, unique=True))
def test_any_names_are_a_proper_tree_or_refused(names: list[str]) -> None:
    """Whatever a bucket holds, no file leaves the target and none is lost without a word."""
    objects = {f"p/{name}": Kept(1, "0" * 64, 3) for name in names}
    try:
        manifest = tree_of(Address("b", "p"), objects)
    except UserError as error:
        assert "gs://b" in error.what
        return
    assert TreeManifest.decode(manifest.encode()) == manifest
    assert {entry.path for entry in manifest.entries if entry.kind == "file"} == set(names)


def test_the_login_in_an_emulators_address_stays_out_of_messages(storage: Running, tmp_path: Path) -> None:
    buckets = open_buckets(tmp_path)
    storage.command(
        "POST",
        "faults",
        {"kind": "error", "service": "storage", "status": "FAILED_PRECONDITION", "message": "not today"},
    )
    with pytest.raises(Exception, match="not today") as failed:
        buckets.check(Address("podway-nothing"))
    shown = [failed.value, failed.value.__cause__, failed.value.__context__]
    assert not [one for one in shown if storage.token in str(one)]


@pytest.mark.parametrize(
    ("given_endpoint", "endpoint", "password"),
    [
        ("http://127.0.0.1:9", "http://127.0.0.1:9", ""),
        ("http://sandbox:a-b_c@127.0.0.1:9", "http://127.0.0.1:9", "a-b_c"),
        ("http://a:b@c@host/x", "http://host/x", "b@c"),
        ("host:9", "host:9", ""),
    ],
)
def test_a_login_is_split_from_an_address(given_endpoint: str, endpoint: str, password: str) -> None:
    assert split_login(given_endpoint) == (endpoint, password)
