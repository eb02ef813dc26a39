"""The server's store of contents, and the packs they travel in."""

import errno
import hashlib
import io
import os
import tempfile
import tracemalloc
from pathlib import Path

import pytest
from file_trees import MEMORY
from hypothesis import given, settings
from hypothesis import strategies as st

from podway.errors import UserError
from podway.hosts.agent import packs, receive
from podway.hosts.blobs import BlobStore


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def frame(data: bytes, name: str | None = None) -> bytes:
    return packs.FRAME.pack(bytes.fromhex(name or digest(data)), len(data)) + data


@settings(max_examples=60)
@given(st.lists(st.binary(max_size=300), max_size=8), st.integers(1, 200))
def test_packs_carry_anything_in_pieces_of_any_size(contents: list[bytes], size: int) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        one, two = BlobStore(Path(folder, "1")), BlobStore(Path(folder, "2"))
        digests = [one.put(data) for data in contents]
        pack = b"".join(one.pack(digests))
        assert pack == b"".join(map(frame, contents))
        assert two.missing(digests) == list(dict.fromkeys(digests))
        assert two.put_pack(pack[at : at + size] for at in range(0, len(pack), size)) == len(contents)
        assert two.missing(digests) == []
        assert [two.read(name) for name in digests] == contents
        assert {path.name for path in two.root.iterdir()} == set(digests)


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=4), st.data())
def test_what_is_cut_or_wrong_is_refused_and_leaves_nothing(contents: list[bytes], data: st.DataObject) -> None:
    pack = b"".join(map(frame, contents))
    cut = data.draw(st.integers(1, len(pack) - 1))
    at = data.draw(st.integers(0, len(pack) - 1))
    wrong = pack[:at] + bytes([pack[at] ^ 1]) + pack[at + 1 :]
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        store = BlobStore(Path(folder))
        ends = {sum(packs.FRAME.size + len(content) for content in contents[:n]) for n in range(len(contents) + 1)}
        if cut not in ends:
            with pytest.raises(UserError, match="the upload was refused"):
                store.put_pack(io.BytesIO(pack[:cut]))
        with pytest.raises(UserError, match="the upload was refused"):
            store.put_pack(io.BytesIO(wrong))
        for path in store.root.iterdir():
            assert digest(path.read_bytes()) == path.name


def test_a_large_blob_needs_little_memory(tmp_path: Path) -> None:
    one, two = BlobStore(tmp_path / "1"), BlobStore(tmp_path / "2")
    piece = os.urandom(1 << 20)
    big = tmp_path / "big"
    with big.open("wb") as file:
        for _ in range(30):
            file.write(piece)
    with big.open("rb") as file:
        name = packs.digest_of(file)
    big.rename(one.root / name)
    tracemalloc.start()
    two.put_pack(one.pack([name]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20
    assert two.size(name) == 30 << 20 and two.verify(name)


def test_a_full_disk_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlobStore(tmp_path)

    def rename(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(receive.os, "rename", rename)
    with pytest.raises(UserError, match="no space left on the disk of"):
        store.put_pack([frame(b"x")])


def test_absent_and_impossible_names(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "blobs")
    for use in (store.open, store.size, store.read):
        with pytest.raises(UserError, match="never uploaded"):
            use(digest(b"nothing"))
    for name in ["", "x", "../../etc/passwd", "A" * 64, "a" * 63, "a" * 65, "a" * 64 + "\n"]:
        with pytest.raises(UserError, match="not a SHA-256 digest"):
            store.missing([name])


def test_damage_is_found_and_removed(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    name = store.put(b"content")
    assert store.verify(name)
    (tmp_path / name).write_bytes(b"c0ntent")
    assert not store.verify(name)
    assert store.missing([name]) == [name]


def test_gc_keeps_what_is_named_and_what_is_young(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    named, old, young, asked = (store.put(data) for data in (b"named", b"old!", b"young", b"asked"))
    (tmp_path / ".1.1").write_bytes(b"an upload that broke off")
    for path in tmp_path.iterdir():
        if path.name != young:
            os.utime(path, (1, 1))
    assert store.missing([asked]) == []  # somebody was told that it is here
    assert store.gc([named]) == (2, 4 + 24)
    assert {path.name for path in tmp_path.iterdir()} == {named, young, asked}
    assert store.gc([], grace_s=-1) == (3, 15)
    assert list(tmp_path.iterdir()) == []
    assert old not in {named, young, asked}


def test_pieces_of_a_blob_in_order_again_and_wrong(tmp_path: Path) -> None:
    data = os.urandom(1000)
    name, folder = digest(data), str(tmp_path)

    def put(offset: int, end: int) -> bool:
        return receive.put_piece(folder, name, offset, len(data), io.BytesIO(data[offset:end]))

    with pytest.raises(packs.FilesError, match="before byte 400 are not here"):
        put(400, 800)
    assert not put(0, 400)
    assert not put(0, 100)  # another sender of the same does not disturb the first
    assert not put(400, 800)
    assert not put(400, 700)  # again, and less of it
    with pytest.raises(packs.FilesError, match="before byte 900 are not here"):
        put(900, 1000)
    assert put(700, 1000)
    assert (tmp_path / name).read_bytes() == data
    with pytest.raises(packs.FilesError, match="not what its digest"):
        receive.put_piece(folder, digest(b"other"), 0, 4, io.BytesIO(b"data"))
    assert put(0, 1000)
    assert {path.name for path in tmp_path.iterdir()} == {name}
