"""Contents by their blocks: what is put together is the content or nothing, whatever was changed and whoever wrote the list."""

import contextlib
import hashlib
import io
import os
import random
import struct
import tempfile
from pathlib import Path

import pytest
from file_trees import Host, Tree, build
from hypothesis import given
from hypothesis import strategies as st

from podway.errors import UserError
from podway.hosts.agent import blocks, receive
from podway.hosts.agent.blocks import LITERAL, STEP, BlockList, head, literal
from podway.hosts.agent.packs import FRAME, FilesError
from podway.hosts.agent.phase import RequestRefused
from podway.hosts.agent.place import Place
from podway.hosts.blobs import BlobStore
from podway.hosts.patches import _frame, patch_pack
from podway.hosts.tree import scan


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def blocks_of(data: bytes) -> BlockList:
    return BlockList.of(io.BytesIO(data), len(data))


def patched(old: bytes, new: bytes) -> bytes:
    return b"".join(blocks.patch(io.BytesIO(new), digest(new), len(new), digest(old), blocks_of(old)))


KINDS = {
    "random": lambda dice, size: dice.randbytes(size),
    "text": lambda dice, size: b"".join(b"line %d of a file\n" % dice.randrange(10**6) for _ in range(size // 22)),
    "zeros": lambda dice, size: bytes(size),
    "json": lambda dice, size: b"[" + b"".join(b'{"a":%d}' % dice.randrange(10**9) for _ in range(size // 16)) + b"]",
}


@st.composite
def edits(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A content and a changed one: bytes replaced, inserted, removed, the end cut off or added to; both may be empty."""
    dice = random.Random(draw(st.integers(0, 1 << 32)))
    old = KINDS[draw(st.sampled_from(sorted(KINDS)))](dice, draw(st.sampled_from([0, 1, 1000, 40_000, 300_000])))
    new = bytearray(old)
    for kind in draw(st.lists(st.sampled_from(["replace", "insert", "remove", "cut", "append"]), max_size=5)):
        at, length = dice.randrange(len(new) + 1), dice.choice([1, 100, 5000])
        if kind == "replace":
            new[at : at + length] = dice.randbytes(min(length, len(new) - at))
        elif kind == "insert":
            new[at:at] = dice.randbytes(length)
        elif kind == "remove":
            del new[at : at + length]
        elif kind == "cut":
            del new[at:]
        else:
            new += dice.randbytes(length)
    return old, bytes(new)


@given(edits(), st.integers(1, 1 << 16))
def test_a_changed_content_is_put_together_from_the_old_one(change: tuple[bytes, bytes], piece: int) -> None:
    old, new = change
    sent = patched(old, new)
    with tempfile.TemporaryDirectory() as folder:
        store = BlobStore(Path(folder))
        store.put(old)
        store.put_pack(sent[at : at + piece] for at in range(0, len(sent), piece))
        assert store.read(digest(new)) == new
        assert {path.name for path in Path(folder).iterdir()} == {digest(old), digest(new)}


@given(edits())
def test_what_the_server_sends_to_hosts_is_the_new_tree(change: tuple[bytes, bytes]) -> None:
    """Both contents are there to be compared: one place that changed, or several, or another length."""
    old, new = change
    with tempfile.TemporaryDirectory() as folder:
        for name, content in (("old", old), ("new", new)):
            build(Path(folder, name), {b"data": ("file", 0o644, content)})
        first, second = scan(Path(folder, "old")), scan(Path(folder, "new"))
        store = BlobStore(Path(folder, "blobs"))
        for content in (old, new, first.manifest.encode(), second.manifest.encode()):
            store.put(content)
        sent = patch_pack(store, first.manifest.id, second.manifest, second.manifest.id, 1 << 30)
        assert sent is not None
        host = BlobStore(Path(folder, "host"))
        for content in (old, first.manifest.encode()):
            host.put(content)
        host.put_pack([sent])
        assert host.read(digest(new)) == new and host.read(second.manifest.id) == second.manifest.encode()


def test_a_change_in_one_place_is_sent_as_that_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "cut", lambda *_: pytest.fail("it was cut"))
    store = BlobStore(tmp_path)
    old = random.Random(1).randbytes(5_000_000)
    for new in (
        old[:70_001] + b"x" * 100 + old[70_101:],
        old[:70_001] + b"new" + old[70_001:],
        old + b"more",
        old[:-5],
    ):
        frame = b"".join(_frame(store, store.put(new), len(new), store.put(old), 1 << 30))
        assert len(frame) < 12_000
        with receive.Receiver(str(tmp_path), store.open) as receiver:
            receiver.feed(frame)
            receiver.close()  # it was the content that its digest says
        assert receiver.count == 1


@given(edits())
def test_blocks_are_the_content_whatever_pieces_it_is_read_in(change: tuple[bytes, bytes]) -> None:
    data = change[1]

    class Slow(io.BytesIO):
        def read(self, n: int | None = -1) -> bytes:
            return super().read(min(n or 0, 777))

    cut = list(blocks.cut(io.BytesIO(data), 1024))
    assert b"".join(cut) == data and all(0 < len(block) <= 4096 for block in cut)
    assert list(blocks.cut(Slow(data), 1024)) == cut


@pytest.mark.parametrize("kind", ["random", "text", "json"])
def test_an_insertion_changes_the_blocks_around_it_and_no_others(kind: str) -> None:
    old = KINDS[kind](random.Random(1), 4_000_000)
    new = old[:1_000_000] + b"a few bytes more" + old[1_000_000:]
    assert len(patched(old, new)) < 60_000
    assert len(patched(old, old)) < 200


def test_bytes_made_to_be_candidates_are_cut_all_the_same() -> None:
    for data in (b"\n" * 300_000, b"}\n" * 150_000):
        cut = list(blocks.cut(io.BytesIO(data), 1024))
        assert b"".join(cut) == data


def test_the_number_of_blocks_does_not_grow_with_the_content() -> None:
    for size in (0, 1, 1 << 20, 1 << 27, 1 << 40):
        mean = blocks.mean_for(size)
        assert mean & (mean - 1) == 0 and blocks.SMALLEST_MEAN <= mean <= blocks.LARGEST_MEAN
        assert size // mean <= 2048 or mean == blocks.LARGEST_MEAN


OLD = random.Random(3).randbytes(100_000)
NEW = OLD[:50_000] + b"!" + OLD[50_000:]
HOSTILE = {
    "beyond the base": head(digest(NEW), len(NEW), digest(OLD)) + STEP.pack(90_000, 20_000),
    "far beyond": head(digest(NEW), len(NEW), digest(OLD)) + STEP.pack(LITERAL - 1, 1),
    "more than the content": head(digest(NEW), len(NEW), digest(OLD)) + STEP.pack(0, 99_999) * 2,
    "a huge block": head(digest(NEW), len(NEW), digest(OLD)) + STEP.pack(0, (1 << 32) - 1),
    "a huge literal": head(digest(NEW), len(NEW), digest(OLD)) + STEP.pack(LITERAL, (1 << 32) - 1) + b"x" * 1000,
    "no bytes": head(digest(NEW), len(NEW), digest(OLD)) + STEP.pack(0, 0) * 1000,
    "no bytes at all": head(digest(NEW), len(NEW), digest(OLD)) + STEP.pack(LITERAL, 0),
    "a huge content": head(digest(NEW), 1 << 60, digest(OLD)) + STEP.pack(0, 1000) * 100,
    "an unknown base": head(digest(NEW), len(NEW), digest(b"?")) + STEP.pack(0, 1000),
    "nothing arrived": head(digest(NEW), len(NEW), digest(NEW)) + STEP.pack(0, 1000),
    "wrong blocks": head(digest(NEW), len(NEW), digest(OLD)) + STEP.pack(0, 50_000) + literal(b"?") + STEP.pack(50_000, 50_000),
    "cut off": patched(OLD, NEW)[:-10],
    "cut off in its head": patched(OLD, NEW)[:50],
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_list_is_refused_and_nothing_is_replaced(name: str, tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    store.put(OLD)
    with pytest.raises(UserError) as caught:
        store.put_pack([HOSTILE[name]])
    assert "\n" not in caught.value.what and len(caught.value.what) < 200
    assert {path.name for path in tmp_path.iterdir()} == {digest(OLD)} and store.read(digest(OLD)) == OLD


@given(st.binary(max_size=300), st.booleans())
def test_random_steps_are_refused_or_right(steps: bytes, counted: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = BlobStore(Path(folder))
        store.put(OLD)
        with contextlib.suppress(UserError):
            store.put_pack([head(digest(NEW), len(NEW) if counted else 10, digest(OLD)) + steps])
        assert {path.name for path in Path(folder).iterdir()} <= {digest(OLD), digest(NEW)}


@pytest.mark.parametrize(
    ("mean", "rows"), [(0, b""), (1000, b""), (1 << 40, b""), (-1024, b""), (1024, b"x"), (1024, b"x" * 21)]
)
def test_what_is_not_a_list_of_blocks(mean: int, rows: bytes) -> None:
    with pytest.raises(FilesError, match="not a list of blocks"):
        BlockList(mean, rows)


def test_a_list_that_lies_makes_a_content_that_is_refused(tmp_path: Path) -> None:
    """The server's list is believed only until the whole is looked at."""
    true = blocks_of(OLD)
    row = struct.Struct(">16sI")
    rows = [row.unpack_from(true.rows, at) for at in range(0, len(true.rows), row.size)]
    lie = BlockList(true.mean, b"".join(row.pack(name, length) for name, length in [rows[1], rows[0], *rows[2:]]))
    sent = b"".join(blocks.patch(io.BytesIO(NEW), digest(NEW), len(NEW), digest(OLD), lie))
    store = BlobStore(tmp_path)
    store.put(OLD)
    with pytest.raises(UserError, match=r"not what its digest|is not in a base"):
        store.put_pack([sent])
    assert store.missing([digest(NEW)]) == [digest(NEW)]


# What arrived before it broke off ----------------------------------------------------------------------------------------

BIG = random.Random(5).randbytes(5 << 20)


def broken(store: BlobStore, data: bytes, sent: int) -> None:
    """An upload of which so many bytes came."""
    pack = FRAME.pack(bytes.fromhex(digest(data)), len(data)) + data
    with pytest.raises(UserError, match="in the middle"):
        store.put_pack([pack[: FRAME.size + sent]])


def test_an_upload_goes_on_where_it_stopped(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    broken(store, BIG, 3 << 20)
    assert store.missing([digest(BIG)]) == [digest(BIG)] and store.arrived([digest(BIG)]) == {digest(BIG): 3 << 20}
    rest = list(blocks.rest(io.BytesIO(BIG), digest(BIG), len(BIG), 3 << 20))
    assert sum(map(len, rest)) < (2 << 20) + 200
    with pytest.raises(UserError):
        store.put_pack(b"".join(rest)[: 1 << 20] for _ in range(1))  # it breaks off again
    assert store.arrived([digest(BIG)])[digest(BIG)] > (3 << 20)
    at = store.arrived([digest(BIG)])[digest(BIG)]
    store.put_pack(blocks.rest(io.BytesIO(BIG), digest(BIG), len(BIG), at))
    assert store.read(digest(BIG)) == BIG and {path.name for path in tmp_path.iterdir()} == {digest(BIG)}


def test_a_part_that_is_not_right_is_given_up(tmp_path: Path) -> None:
    """Somebody sent other bytes under this name, or the disk lost some: the next upload begins anew, and is right."""
    store = BlobStore(tmp_path)
    broken(store, BIG, 2 << 20)
    (part,) = tmp_path.iterdir()
    part.write_bytes(bytes(2 << 20))
    with pytest.raises(UserError, match="not what its digest"):
        store.put_pack(blocks.rest(io.BytesIO(BIG), digest(BIG), len(BIG), 2 << 20))
    assert store.arrived([digest(BIG)]) == {} and list(tmp_path.iterdir()) == []
    store.put_pack([FRAME.pack(bytes.fromhex(digest(BIG)), len(BIG)) + BIG])
    assert store.read(digest(BIG)) == BIG


def test_a_second_sender_of_the_same_is_not_disturbed(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    pack = FRAME.pack(bytes.fromhex(digest(BIG)), len(BIG)) + BIG
    with store.receiver() as slow:
        slow.feed(pack[: 2 << 20])
        store.put_pack([pack])
        slow.feed(pack[2 << 20 :])
        slow.close()
    assert store.read(digest(BIG)) == BIG and {path.name for path in tmp_path.iterdir()} == {digest(BIG)}


def test_little_is_not_kept(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    broken(store, BIG, 1000)
    assert list(tmp_path.iterdir()) == []


def test_pieces_go_on_from_what_a_peer_had_sent(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    broken(store, BIG, 3 << 20)
    assert receive.put_piece(str(tmp_path), digest(BIG), 3 << 20, len(BIG), io.BytesIO(BIG[3 << 20 :]))
    assert store.read(digest(BIG)) == BIG and {path.name for path in tmp_path.iterdir()} == {digest(BIG)}


# On a host ---------------------------------------------------------------------------------------------------------------


def test_a_host_takes_a_patch_of_what_is_in_place_and_refuses_one_of_what_is_not(tmp_path: Path) -> None:
    host = Host(tmp_path / "host")
    old: Tree = {b"weights": ("file", 0o644, OLD)}
    new: Tree = {b"weights": ("file", 0o644, NEW)}
    build(tmp_path / "old", old)
    build(tmp_path / "new", new)
    first, second = scan(tmp_path / "old"), scan(tmp_path / "new")
    host.bring(first)
    data = second.manifest.encode()
    manifest = FRAME.pack(bytes.fromhex(second.manifest.id), len(data)) + data
    for name, frame in HOSTILE.items():
        with pytest.raises(RequestRefused):
            host.call("files.apply", manifest + frame, dest="~/w", manifest_id=second.manifest.id)
        assert (host.home / "w/weights").read_bytes() == OLD, name
    wanted = {"dest": "~/w", "manifest_id": second.manifest.id}
    reply, _ = host.call("files.missing", **wanted)
    assert reply["applied"] == first.manifest.id
    reply, _ = host.call("files.apply", manifest + patched(OLD, NEW), **wanted)
    assert reply == {"applied": True, "written": 1, "deleted": 0}
    assert (host.home / "w/weights").read_bytes() == NEW
    (host.home / "w/weights").write_bytes(os.urandom(10))  # a job's work
    with pytest.raises(RequestRefused, match="is not on this host"):
        host.call("files.apply", patched(NEW, OLD), dest="~/w", manifest_id=first.manifest.id)


def test_a_file_that_nobody_touched_is_not_read_to_see_that_it_is_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(tmp_path / "host")
    later = bytes([OLD[0] ^ 1]) + OLD[1:]  # of the same size
    build(tmp_path / "old", {b"weights": ("file", 0o644, OLD)})
    build(tmp_path / "new", {b"weights": ("file", 0o644, later)})
    first, second = scan(tmp_path / "old"), scan(tmp_path / "new")
    host.bring(first)
    data = second.manifest.encode()
    manifest = FRAME.pack(bytes.fromhex(second.manifest.id), len(data)) + data
    monkeypatch.setattr(Place, "digest", lambda *_: pytest.fail("the file was read"))
    reply, _ = host.call("files.apply", manifest + patched(OLD, later), dest="~/w", manifest_id=second.manifest.id)
    assert reply["written"] == 1 and (host.home / "w/weights").read_bytes() == later


def test_a_content_is_cut_once_for_all_who_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlobStore(tmp_path)
    name = store.put(OLD)
    assert store.blocks(name).rows == blocks_of(OLD).rows
    monkeypatch.setattr(BlockList, "of", lambda *_: pytest.fail("it was cut again"))
    assert store.blocks(name).rows
