"""Trees on one host: whatever stood there, an apply leaves exactly the manifest, and what jobs made."""

import errno
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from file_trees import CONTENTS, MEMORY, NAMES, Host, Tree, build, expected, one_file, scanned, snapshot, trees
from hypothesis import given, settings
from hypothesis import strategies as st

from podway.hosts.agent import place, records
from podway.hosts.agent.phase import RequestRefused
from podway.hosts.tree import scan


@st.composite
def job_files(draw: st.DrawFn, tree: Tree) -> Tree:
    """Files that a job might make in a tree: none of the tree's own, only below its directories or new ones."""
    made: Tree = {}
    folders = [b"", *(path + b"/" for path, item in tree.items() if item[0] == "dir")]
    for _ in range(draw(st.integers(0, 5))):
        path = draw(st.sampled_from(folders)) + draw(st.sampled_from([*NAMES, b"ckpt", b"out"]))
        if path in tree or path in made:
            continue
        if draw(st.booleans()):
            made[path] = ("dir", 0o755)
            folders.append(path + b"/")
        made[path] = made.get(path) or ("file", 0o640, draw(st.sampled_from(CONTENTS)))
    return made


@settings(max_examples=120)
@given(st.data())
def test_apply_leaves_the_new_tree_and_the_jobs_files(data: st.DataObject) -> None:
    old, new = data.draw(trees()), data.draw(trees())
    made = data.draw(job_files(old))
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        root = Path(folder)
        host, dest = Host(root / "home"), root / "home/w"
        host.bring(scanned(root / "old", old))
        assert snapshot(dest) == old
        build(dest, made)
        host.bring(scanned(root / "new", new))
        assert snapshot(dest) == expected(old, made, new)
        again = host.bring(scanned(root / "again", new))
        assert (again["written"], again["deleted"]) == (0, 0)
        assert list((host.state / "incoming").iterdir()) == []


@settings(max_examples=60)
@given(st.data())
def test_whatever_is_done_to_the_tree_is_undone(data: st.DataObject) -> None:
    tree = data.draw(trees().filter(bool))
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        root = Path(folder)
        host, dest = Host(root / "home"), root / "home/w"
        scan = scanned(root / "t", tree)
        host.bring(scan)
        for path in data.draw(st.lists(st.sampled_from(sorted(tree)), min_size=1, max_size=4, unique=True)):
            full = dest / os.fsdecode(path)
            if not os.path.lexists(full):
                continue
            what = data.draw(st.sampled_from(["delete", "chmod", "rewrite", "link", "folder"]))
            if what == "chmod" and not full.is_symlink():
                full.chmod(0o711)
                continue
            was = full.lstat()
            shutil.rmtree(full) if full.is_dir() and not full.is_symlink() else full.unlink()
            if what == "rewrite":  # the same size and modification time, as far as one can
                full.write_bytes(b"z" * was.st_size)
                os.utime(full, ns=(was.st_atime_ns, was.st_mtime_ns))
            elif what == "link":
                full.symlink_to(root)
            elif what == "folder":
                full.mkdir()
                (full / "inside").write_text("x")
        before = snapshot(dest)
        touched = any(before.get(path) != item for path, item in tree.items())
        reply, _ = host.call("files.missing", dest="~/w", manifest_id=scan.manifest.id)
        assert not (reply["in_place"] and touched)
        host.bring(scan)
        assert host.call("files.missing", dest="~/w", manifest_id=scan.manifest.id)[0]["in_place"]
        got = snapshot(dest)
        assert {path: got.get(path) for path in tree} == tree
        assert all(path.endswith(b"/inside") for path in got.keys() - tree.keys())


def test_an_edit_in_place_right_after_an_apply_is_seen(tmp_path: Path) -> None:
    host = Host(tmp_path / "home")
    scan = scanned(tmp_path / "t", {b"f": ("file", 0o644, b"right")})
    for _ in range(20):
        host.bring(scan)
        with open(tmp_path / "home/w/f", "r+b") as file:
            file.write(b"WRONG")
        host.bring(scan)
        assert (tmp_path / "home/w/f").read_bytes() == b"right"


def test_unchanged_files_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(tmp_path / "home")
    tree: Tree = {b"%d" % n: ("file", 0o644, b"%d" % n) for n in range(50)}
    scan = scanned(tmp_path / "t", tree)
    host.bring(scan)
    read: list[bytes] = []
    true = place.Place.digest
    monkeypatch.setattr(place.Place, "digest", lambda self, path: (read.append(path), true(self, path))[1])
    (tmp_path / "home/w/7").write_bytes(b"!")
    assert host.bring(scan)["written"] == 1
    assert set(read) == {b"7"}


def test_a_rename_sends_nothing_and_keeps_the_very_file(tmp_path: Path) -> None:
    host = Host(tmp_path / "home")
    big = os.urandom(3 << 20)
    host.bring(scanned(tmp_path / "1", {b"model": ("file", 0o644, big), b"x": ("file", 0o644, b"x")}))
    inode = (tmp_path / "home/w/model").stat().st_ino
    renamed = scanned(
        tmp_path / "2", {b"d": ("dir", 0o755), b"d/moved": ("file", 0o600, big), b"x": ("file", 0o644, b"x")}
    )
    assert host.missing(renamed, "~/w") == []
    host.bring(renamed)
    moved = (tmp_path / "home/w/d/moved").stat()
    assert (moved.st_ino, moved.st_nlink, moved.st_mode & 0o777) == (inode, 1, 0o600)
    # A copy beside it gets a file of its own: what a job does to one must not happen to the other.
    doubled = scanned(
        tmp_path / "3", {b"d": ("dir", 0o755), b"d/moved": ("file", 0o600, big), b"y": ("file", 0o644, big)}
    )
    assert host.missing(doubled, "~/w") == []
    host.bring(doubled)
    assert (tmp_path / "home/w/y").stat().st_ino != (tmp_path / "home/w/d/moved").stat().st_ino
    # And another destination finds it as well.
    assert host.missing(doubled, "~/elsewhere") == []
    host.bring(doubled, "~/elsewhere")
    assert snapshot(tmp_path / "home/elsewhere") == snapshot(tmp_path / "home/w")


def test_content_that_only_seemed_to_be_there_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(tmp_path / "home")
    host.bring(scanned(tmp_path / "1", {b"a": ("file", 0o644, b"content")}))
    (tmp_path / "home/w/a").write_bytes(b"CONTENT")
    found = records.Contents.in_place
    base = os.fsencode(tmp_path / "home/w")
    monkeypatch.setattr(
        records.Contents, "in_place", lambda self, digest: iter([(base, b"a")])
    )  # as if its mark were right
    other = scanned(tmp_path / "2", {b"b": ("file", 0o644, b"content")})
    assert host.missing(other, "~/w") == []
    reply, raw = host.call("files.apply", dest="~/w", manifest_id=other.manifest.id)
    assert reply["applied"] is False and raw.hex() == other.manifest.entries[0].sha256
    assert snapshot(tmp_path / "home/w") == {b"a": ("file", 0o644, b"CONTENT")}
    monkeypatch.setattr(records.Contents, "in_place", found)
    host.bring(other)
    assert snapshot(tmp_path / "home/w") == {b"b": ("file", 0o644, b"content")}


def test_a_large_file_in_pieces(tmp_path: Path) -> None:
    host = Host(tmp_path / "home")
    big = os.urandom(30 << 20)
    scan = scanned(tmp_path / "t", {b"big": ("file", 0o755, big), b"none": ("file", 0o644, b"")})
    none, large = sorted(host.missing(scan, "~/w"), key=lambda digest: scan.manifest.sizes[digest])
    host.call("files.put", b"".join(scan.pack([none])))
    step = 4 << 20
    for offset in range(0, len(big), step):
        piece = big[offset : offset + step]
        reply, _ = host.call("files.put", piece, digest=large, writer="me", offset=offset, total=len(big))
        assert reply["whole"] is (offset + len(piece) == len(big))
    host.bring(scan)
    assert snapshot(tmp_path / "home/w") == {b"big": ("file", 0o755, big), b"none": ("file", 0o644, b"")}
    held = sum(path.stat().st_size for path in host.state.rglob("*") if path.is_file())
    assert held < 10_000  # no second copy of the data


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    host = Host(tmp_path / "home")
    host.bring(scanned(tmp_path / "1", {b"f": ("file", 0o644, b"a" * 100_000)}))
    with open(tmp_path / "home/w/f", "rb") as file:
        first = file.read(1000)
        host.bring(scanned(tmp_path / "2", {b"f": ("file", 0o644, b"b" * 100_000)}))
        assert first + file.read() == b"a" * 100_000
    assert (tmp_path / "home/w/f").read_bytes() == b"b" * 100_000


def test_one_file_goes_to_its_destination(tmp_path: Path) -> None:
    host = Host(tmp_path / "home")
    (tmp_path / "home/etc").mkdir()
    (tmp_path / "home/etc/other").write_text("other")
    host.bring(one_file(tmp_path, b"1"), "~/etc/conf")
    host.bring(one_file(tmp_path, b"2"), "~/etc/conf")
    host.bring(scanned(tmp_path / "t", {b"tree": ("file", 0o644, b"tree")}), "~/etc")
    one = one_file(tmp_path, b"3")
    host.bring(one, "~/etc/")
    assert host.call("files.missing", dest="~/etc/", manifest_id=one.manifest.id)[0]["in_place"]
    contents = {path.name: path.read_text() for path in (tmp_path / "home/etc").iterdir()}
    assert contents == {"other": "other", "conf": "2", "tree": "tree", "source.txt": "3"}


def test_a_file_and_a_directory_take_each_others_place_only_if_it_is_podways(tmp_path: Path) -> None:
    host, dest = Host(tmp_path / "home"), tmp_path / "home/x"
    folder = scanned(tmp_path / "t", {b"f": ("file", 0o644, b"f")})
    for _ in range(2):
        host.bring(folder, "~/x")
        assert snapshot(dest) == {b"f": ("file", 0o644, b"f")}
        host.bring(one_file(tmp_path, b"one"), "~/x")
        assert dest.read_bytes() == b"one"
    host.bring(folder, "~/x")
    (dest / "mine").write_text("a job's")
    with pytest.raises(RequestRefused, match="is a directory on the host: a file cannot take its place"):
        host.bring(one_file(tmp_path, b"one"), "~/x")
    assert (dest / "mine").read_text() == "a job's"
    (tmp_path / "home/y").write_text("mine")
    with pytest.raises(RequestRefused, match="is a file on the host: a directory cannot take its place"):
        host.bring(folder, "~/y")
    assert (tmp_path / "home/y").read_text() == "mine"


def test_fetch_and_list(tmp_path: Path) -> None:
    host = Host(tmp_path / "home")
    tree: Tree = {b"d": ("dir", 0o755), b"d/\xff": ("file", 0o600, b"0123456789"), b"l": ("link", b"d")}
    build(tmp_path / "home/out", tree)
    assert host.call("files.fetch", path="~/out/l/../d/\udcff", offset=3, limit=4) == (
        {"size": 10, "end": False},
        b"3456",
    )
    assert host.call("files.fetch", path="~/out/d/\udcff", offset=8) == ({"size": 10, "end": True}, b"89")
    assert host.call("files.fetch", path="~/out/d/\udcff", offset=80) == ({"size": 10, "end": True}, b"")
    reply, raw = host.call("files.list", path="~/out")
    rows = json.loads(raw)
    assert reply == {"count": 3, "truncated": False}
    assert [(row[0], row[1], row[5]) for row in rows] == [("d", "dir", ""), ("l", "link", "d"), ("d/\\xff", "file", "")]
    assert rows[2][2:4] == [0o600, 10]
    with pytest.raises(RequestRefused, match="is not a file"):
        host.call("files.fetch", path="~/out")
    with pytest.raises(RequestRefused, match="No such file"):
        host.call("files.fetch", path="~/nothing")
    with pytest.raises(RequestRefused, match="No such file"):
        host.call("files.list", path="~/nothing")


def test_an_error_names_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(tmp_path / "home")
    host.bring(scanned(tmp_path / "1", {b"d": ("dir", 0o755), b"d/f": ("file", 0o644, b"1")}))

    def unlink(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", args[0])

    monkeypatch.setattr(place.os, "unlink", unlink)
    with pytest.raises(RequestRefused, match=r"^d/f: Permission denied$"):
        host.bring(scanned(tmp_path / "2", {}))


def test_leftovers_go_after_a_day(tmp_path: Path) -> None:
    host = Host(tmp_path / "home")
    host.bring(scanned(tmp_path / "1", {b"f": ("file", 0o644, b"1")}))
    old, young = host.state / "incoming" / ("a" * 64), host.state / "incoming" / ("b" * 64)
    for path in (old, young):
        path.write_bytes(b"left")
    os.utime(old, (1, 1))
    first = next((host.state / "manifests").iterdir())
    os.utime(first, (1, 1))
    host.bring(scanned(tmp_path / "2", {b"f": ("file", 0o644, b"2")}))
    assert not old.exists() and young.exists() and not first.exists()
    assert len(list((host.state / "manifests").iterdir())) == 1


@pytest.mark.parametrize("size", [3 << 20, (3 << 20) + 17, 9 << 20])
def test_holes_stay_holes(tmp_path: Path, size: int) -> None:
    """By a pack, in pieces, and as a copy of a file in place: the same bytes, and the disk space of those that are not zero."""
    tree = tmp_path / "tree"
    tree.mkdir()
    with (tree / "sparse").open("wb") as file:
        file.write(b"begin")
        file.seek(size // 2)
        file.write(b"middle" * 100)
        file.truncate(size)
    content = (tree / "sparse").read_bytes()
    host = Host(tmp_path / "home")
    made = scan(tree)
    host.bring(made)
    digest = made.manifest.entries[0].sha256
    for offset in range(0, size, 1 << 20):
        piece = content[offset : offset + (1 << 20)]
        reply, _ = host.call("files.put", piece, digest=digest, writer="ab", offset=offset, total=size)
    assert reply["whole"]
    shutil.copytree(tree, tree / "again")
    host.bring(scan(tree))
    for path in (host.home / "w/sparse", host.home / "w/again/sparse"):
        assert path.read_bytes() == content
        assert path.stat().st_blocks * 512 <= 512 << 10, path
