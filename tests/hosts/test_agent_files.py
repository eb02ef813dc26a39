"""Trees on one host: whatever stood there, an apply leaves exactly the manifest, and what jobs made."""

import ast
import contextlib
import errno
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from file_trees import CONTENTS, MEMORY, NAMES, Host, Tree, build, scanned, snapshot, trees
from hypothesis import given, settings
from hypothesis import strategies as st

from podway.hosts.agent import apply as apply_module
from podway.hosts.agent import packs, peers, place, records
from podway.hosts.agent.phase import Refused
from podway.hosts.tree import Entry, Manifest, Scan, scan


def parents(path: bytes) -> list[bytes]:
    names = path.split(b"/")
    return [b"/".join(names[:n]) for n in range(1, len(names))]


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


def expected(old: Tree, made: Tree, new: Tree) -> Tree:
    """The new tree and what of the jobs' files is not in its way."""
    kept = {
        path: item
        for path, item in made.items()
        if path not in new and all(new.get(above, ("dir",))[0] == "dir" for above in parents(path))
    }
    # A directory of the old tree stays as long as a job's file is in it.
    for path in list(kept):
        for above in parents(path):
            if above not in new and above not in kept:
                kept[above] = old[above]
    return {**kept, **new}


@settings(max_examples=120, deadline=None)
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


@settings(max_examples=60, deadline=None)
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
            before = full.lstat()
            shutil.rmtree(full) if full.is_dir() and not full.is_symlink() else full.unlink()
            if what == "rewrite":  # the same size and modification time, as far as one can
                full.write_bytes(b"z" * before.st_size)
                os.utime(full, ns=(before.st_atime_ns, before.st_mtime_ns))
            elif what == "link":
                full.symlink_to(root)
            elif what == "folder":
                full.mkdir()
                (full / "inside").write_text("x")
        touched = snapshot(dest) != tree
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


# Crashes -----------------------------------------------------------------------------------------------------------------

OLD: Tree = {
    b"keep": ("file", 0o644, b"keep"),
    b"edit": ("file", 0o644, b"before"),
    b"gone": ("file", 0o644, b"gone"),
    b"move": ("file", 0o644, b"moved content"),
    b"dir": ("dir", 0o755),
    b"dir/f": ("file", 0o644, b"in dir"),
    b"swap": ("dir", 0o755),
    b"swap/f": ("file", 0o644, b"in swap"),
    b"link": ("link", b"keep"),
}
NEW: Tree = {
    b"keep": ("file", 0o755, b"keep"),
    b"edit": ("file", 0o644, b"after!"),
    b"moved": ("file", 0o644, b"moved content"),
    b"swap": ("file", 0o600, b"now a file"),
    b"link": ("link", b"edit"),
    b"fresh": ("dir", 0o700),
    b"fresh/1": ("file", 0o644, b"twin"),
    b"fresh/2": ("file", 0o644, b"twin"),
    b"fresh/l": ("link", b"../keep"),
}
THIRD: Tree = {b"keep": ("file", 0o644, b"keep"), b"other": ("file", 0o644, b"moved content")}
JOB: Tree = {b"out": ("file", 0o640, b"a job's"), b"dir/log": ("file", 0o640, b"a job's log")}
STEPS = ("rename", "unlink", "mkdir", "rmdir", "symlink", "link", "chmod", "fchmod", "utime", "fdopen")


class Faulty:
    """`os`, in which the n-th change of the disk is where something happens."""

    def __init__(self, at: int, happen: Callable[[], None]) -> None:
        self.left = at
        self._happen = happen

    def __getattr__(self, name: str) -> Any:
        true = getattr(os, name)
        if name not in STEPS:
            return true

        def step(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == -1:
                self._happen()
            return true(*args, **kwargs)

        return step


def _crash(host: Host, scan: Scan, dest: str, at: int) -> bool:
    """Apply in another process that is gone at its n-th step; whether it came that far."""
    child = os.fork()
    if child == 0:
        faulty = Faulty(at, lambda: os._exit(9))
        for module in (apply_module, place, records, packs):
            module.os = faulty  # type: ignore[attr-defined]
        try:
            host.call("files.apply", dest=dest, manifest_id=scan.manifest.id)
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


@pytest.mark.parametrize("disk", ["same", "other"])
@pytest.mark.parametrize("then", ["again", "another"])
def test_killed_at_every_step_and_brought_on(tmp_path: Path, disk: str, then: str) -> None:
    elsewhere = MEMORY if disk == "same" else str(tmp_path)
    if disk == "other" and (MEMORY is None or Path(MEMORY).stat().st_dev == tmp_path.stat().st_dev):
        pytest.skip("there is no second disk here")
    old, new, third = (scanned(tmp_path / n, tree) for n, tree in (("1", OLD), ("2", NEW), ("3", THIRD)))
    whole = {item[2] for tree in (OLD, NEW, JOB) for item in tree.values() if item[0] == "file"}
    for at in range(1000):
        with tempfile.TemporaryDirectory(dir=MEMORY) as home, tempfile.TemporaryDirectory(dir=elsewhere) as folder:
            host, dest = Host(Path(home)), Path(folder, "w")
            host.bring(old, str(dest))
            build(dest, JOB)
            host.call("files.put", b"".join(new.pack(host.missing(new, str(dest)))))
            crashed = _crash(host, new, str(dest), at)
            seen = {item[2] for path, item in snapshot(dest).items() if item[0] == "file" and b".podway." not in path}
            assert seen <= whole
            host.bring(new if then == "again" or not crashed else third, str(dest))
            target = NEW if then == "again" or not crashed else THIRD
            assert snapshot(dest) == expected(OLD, JOB, target), f"after a crash at step {at}"
            if then == "again":
                assert [p.name for p in (host.state / "incoming").iterdir() if not p.name.startswith(".")] == []
        if not crashed:
            break
    assert at > 30


def test_a_crash_before_a_change_of_kind_costs_nobody_a_file(tmp_path: Path) -> None:
    """Of a directory's crashed apply, nothing may be cleaned up beside the one file that takes its place."""
    folder = scanned(tmp_path / "t", {b"a": ("file", 0o644, b"lookalike"), b"b": ("file", 0o644, b"b")})
    for at in range(100):
        host = Host(tmp_path / f"home{at}")
        (host.home / "a").write_bytes(b"lookalike")
        host.call("files.put", b"".join(folder.pack(host.missing(folder, "~/x"))))
        crashed = _crash(host, folder, "~/x", at)
        with contextlib.suppress(Refused):  # what the crash left is in the way: nothing is removed unasked
            host.bring(_one_file(tmp_path, b"one"), "~/x")
        assert (host.home / "a").read_bytes() == b"lookalike"
        if not crashed:
            break
    assert at > 5


def test_a_full_disk_at_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = tempfile.mkdtemp(dir=MEMORY)
    request.addfinalizer(lambda: shutil.rmtree(folder))
    old, new = scanned(tmp_path / "1", OLD), scanned(tmp_path / "2", NEW)
    for at in range(1000):
        home = Path(folder, str(at))
        host, dest = Host(home), home / "w"
        host.bring(old)
        host.call("files.put", b"".join(new.pack(host.missing(new, "~/w"))))
        try:
            faulty = Faulty(at, full)
            with monkeypatch.context() as patch:
                for module in (apply_module, place, records, packs):
                    patch.setattr(module, "os", faulty)
                host.call("files.apply", dest="~/w", manifest_id=new.manifest.id)
        except Refused as error:
            assert "no space left" in str(error).lower() and "\n" not in str(error)
            assert list((host.state / "incoming").iterdir()) == []
        assert all(b".podway." not in path for path in snapshot(dest))
        host.bring(new)
        assert snapshot(dest) == NEW
        if faulty.left >= 0:
            break
    assert at > 30


SMALL_DISK = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from file_trees import Host, scanned, snapshot
from podway.hosts.agent.phase import Refused
root, small = Path(sys.argv[2]), Path(sys.argv[3])
old = {b"f": ("file", 0o644, b"o" * 1000), b"g": ("file", 0o644, b"g")}
new = {b"f": ("file", 0o644, b"n" * 1000), b"big": ("file", 0o644, b"b" * 3_000_000)}
host = Host(root / "home")
host.bring(scanned(root / "old", old), str(small / "w"))
try:
    host.bring(scanned(root / "new", new), str(small / "w"))
except Refused as error:
    print(error)
assert {name: item for name, item in snapshot(small / "w").items() if name == b"f"}[b"f"][2][:1] in b"on"
assert b"big" not in snapshot(small / "w") and set(snapshot(small / "w")) <= {b"f", b"g"}
ok = {b"f": ("file", 0o644, b"n" * 1000)}
host.bring(scanned(root / "ok", ok), str(small / "w"))
assert snapshot(small / "w") == ok
"""


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m none "$0" && shift 0 && exec "$@"', str(small)]
    if shutil.which("unshare") is None or subprocess.run([*mount, "true"], capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here")
    script = [sys.executable, "-c", SMALL_DISK, str(Path(__file__).parent), str(tmp_path), str(small)]
    done = subprocess.run([*mount, *script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"no space left on the disk of {small}/w\n"


# Attacks -----------------------------------------------------------------------------------------------------------------


def _forced(host: Host, manifest: Manifest, contents: list[bytes] = ()) -> tuple[dict, bytes]:  # type: ignore[assignment]
    data = manifest.encode()
    for blob in [data, *contents]:
        name = packs.digest_of(io.BytesIO(blob))
        host.call("files.put", packs.FRAME.pack(bytes.fromhex(name), len(blob)) + blob)
    return host.call("files.apply", dest="~/w", manifest_id=manifest.id)


ENTRY_F = {"kind": "file", "mode": 0o644, "size": 1, "sha256": packs.digest_of(io.BytesIO(b"x"))}


@pytest.mark.parametrize(
    "path", ["/etc/evil", "../evil", "d/../../evil", "l/evil", "\\x2e\\x2e/evil", "", "d//evil", "n\0ul"]
)
def test_no_manifest_writes_outside(tmp_path: Path, path: str) -> None:
    host = Host(tmp_path / "home")
    outside = tmp_path / "outside"
    outside.mkdir()
    entries = (
        Entry(path="d", kind="dir", mode=0o755),
        Entry(path="l", kind="link", target=str(outside)),
        Entry(path=path, **ENTRY_F),
    )
    with pytest.raises(Refused):
        _forced(host, Manifest(entries=entries), [b"x"])
    assert list(outside.iterdir()) == [] and not (tmp_path / "evil").exists() and not (tmp_path / "home/w").exists()


def test_links_that_jobs_plant_are_not_followed(tmp_path: Path) -> None:
    host, outside = Host(tmp_path / "home"), tmp_path / "outside"
    tree: Tree = {b"d": ("dir", 0o755), b"d/f": ("file", 0o644, b"mine"), b"d/g": ("file", 0o644, b"g")}
    scan = scanned(tmp_path / "1", tree)
    build(outside, {b"f": ("file", 0o644, b"theirs"), b"g": ("file", 0o644, b"g"), b"sub": ("dir", 0o755)})
    before = snapshot(outside)
    host.bring(scan)
    shutil.rmtree(tmp_path / "home/w/d")
    (tmp_path / "home/w/d").symlink_to(outside)
    host.bring(scan)  # the link stands where a directory must go
    assert snapshot(tmp_path / "home/w") == tree and snapshot(outside) == before
    shutil.rmtree(tmp_path / "home/w/d")
    (tmp_path / "home/w/d").symlink_to(outside)
    host.bring(
        scanned(tmp_path / "2", {b"x": ("file", 0o644, b"x")})
    )  # d/f and d/g are deleted, but not through the link
    assert snapshot(outside) == before


def test_from_a_link_to_a_directory_and_back(tmp_path: Path) -> None:
    host, outside = Host(tmp_path / "home"), tmp_path / "outside"
    outside.mkdir()
    link: Tree = {b"d": ("link", os.fsencode(outside))}
    folder: Tree = {b"d": ("dir", 0o755), b"d/f": ("file", 0o644, b"f")}
    for n, tree in enumerate([link, folder, link, folder]):
        host.bring(scanned(tmp_path / f"t{n}", tree))
        assert snapshot(tmp_path / "home/w") == tree
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("dest", ["~/.podway", "~/.podway/incoming", "~/x/../.podway/jobs", "~/link/jobs"])
def test_the_agents_own_state_is_no_destination(tmp_path: Path, dest: str) -> None:
    host = Host(tmp_path / "home")
    (tmp_path / "home/link").symlink_to(".podway")
    with pytest.raises(Refused, match=r"podway's own state"):
        host.bring(scanned(tmp_path / "t", {b"f": ("file", 0o644, b"f")}), dest)


@pytest.mark.parametrize(
    "tree", [{b".podway": ("link", b"/x")}, {b".podway": ("dir", 0o755), b".podway/agent.sock": ("file", 0o644, b"")}]
)
def test_the_agents_own_state_is_not_overwritten(tmp_path: Path, tree: Tree) -> None:
    host = Host(tmp_path / "home")
    with pytest.raises(Refused, match="would overwrite podway's own state"):
        host.bring(scanned(tmp_path / "t", tree), "~")
    host.bring(scanned(tmp_path / "u", {b".bashrc": ("file", 0o644, b"x")}), "~")
    assert (tmp_path / "home/.bashrc").read_bytes() == b"x"


@pytest.mark.parametrize("dest", [None, 3, "", "w", "./w", "~root/w", "a\0b", "~x"])
def test_impossible_destinations(tmp_path: Path, dest: object) -> None:
    host = Host(tmp_path / "home")
    scan = scanned(tmp_path / "t", {})
    with pytest.raises(Refused, match=r"(must begin with / or ~/|only ~/ is known)"):
        host.bring(scan, dest)  # type: ignore[arg-type]


TEXT = st.text(
    st.sampled_from("ab~.\0\\é\udcff"), max_size=8
)  # no '/' and no ':': no reading of all of this machine, no calls
JSON = st.recursive(st.none() | st.booleans() | st.integers() | TEXT, lambda inner: st.lists(inner, max_size=3))
FIELDS = ["dest", "manifest_id", "digest", "offset", "total", "from", "token", "address", "port", "path", "limit"]


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["missing", "put", "pull", "apply", "fetch", "list"]),
    st.dictionaries(st.sampled_from(FIELDS), JSON),
    st.binary(max_size=60),
)
def test_no_request_is_a_traceback(op: str, fields: dict[str, Any], body: bytes) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        host = Host(Path(folder))
        fields.pop("op", None)
        try:
            host.call("files." + op, body, **fields)
        except Refused as error:
            assert "\n" not in str(error)


# One file, and the way back ----------------------------------------------------------------------------------------------


def _one_file(tmp_path: Path, content: bytes) -> Scan:
    path = tmp_path / "source.txt"
    path.write_bytes(content)
    return scan(path)


def test_one_file_goes_to_its_destination(tmp_path: Path) -> None:
    host = Host(tmp_path / "home")
    (tmp_path / "home/etc").mkdir()
    (tmp_path / "home/etc/other").write_text("other")
    host.bring(_one_file(tmp_path, b"1"), "~/etc/conf")
    host.bring(_one_file(tmp_path, b"2"), "~/etc/conf")
    host.bring(scanned(tmp_path / "t", {b"tree": ("file", 0o644, b"tree")}), "~/etc")
    one = _one_file(tmp_path, b"3")
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
        host.bring(_one_file(tmp_path, b"one"), "~/x")
        assert dest.read_bytes() == b"one"
    host.bring(folder, "~/x")
    (dest / "mine").write_text("a job's")
    with pytest.raises(Refused, match="is a directory on the host: a file cannot take its place"):
        host.bring(_one_file(tmp_path, b"one"), "~/x")
    assert (dest / "mine").read_text() == "a job's"
    (tmp_path / "home/y").write_text("mine")
    with pytest.raises(Refused, match="is a file on the host: a directory cannot take its place"):
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
    with pytest.raises(Refused, match="is not a file"):
        host.call("files.fetch", path="~/out")
    with pytest.raises(Refused, match="No such file"):
        host.call("files.fetch", path="~/nothing")
    with pytest.raises(Refused, match="No such file"):
        host.call("files.list", path="~/nothing")


def test_an_error_names_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(tmp_path / "home")
    host.bring(scanned(tmp_path / "1", {b"d": ("dir", 0o755), b"d/f": ("file", 0o644, b"1")}))

    def unlink(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", args[0])

    monkeypatch.setattr(place.os, "unlink", unlink)
    with pytest.raises(Refused, match=r"^d/f: Permission denied$"):
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


# Peers -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path: Path):
    """A host that has one tree in place and serves it: (host, scan, "address:port")."""
    host = Host(tmp_path / "peer")
    scan = scanned(tmp_path / "t", {b"f": ("file", 0o644, b"content"), b"g": ("file", 0o644, b"")})
    host.bring(scan)
    reply, _ = host.call("files.listen", address="127.9.1.1", token="secret")
    assert host.call("files.listen", address="127.9.1.1", token="second")[0] == reply
    yield host, scan, f"127.9.1.1:{reply['port']}"
    peers.close(str(host.state))


@pytest.mark.parametrize("token", ["secret", "second"])
def test_a_host_pulls_from_a_peer(tmp_path: Path, served, token: str) -> None:
    _, scan, peer = served
    host = Host(tmp_path / "home")
    where = {"dest": "~/w", "manifest_id": scan.manifest.id}
    reply, _ = host.call("files.pull", token=token, **{"from": peer}, **where)
    assert reply["left"] == 0 and reply["bytes"] == len(scan.manifest.encode()) + 7 + 3 * packs.FRAME.size
    assert host.call("files.apply", **where)[0]["applied"]
    assert snapshot(tmp_path / "home/w") == snapshot(tmp_path / "peer/w")
    assert host.call("files.pull", token=token, **{"from": peer}, **where)[0] == {"bytes": 0, "left": 0}


def test_a_pull_in_parts(tmp_path: Path) -> None:
    peer = Host(tmp_path / "peer")
    tree: Tree = {b"%d" % n: ("file", 0o644, os.urandom(1000)) for n in range(20)}
    scan = scanned(tmp_path / "t", tree)
    peer.bring(scan)
    port = peer.call("files.listen", address="127.9.1.2", token="t")[0]["port"]
    host, lefts = Host(tmp_path / "home"), []
    fields = {"from": f"127.9.1.2:{port}", "token": "t", "dest": "~/w", "manifest_id": scan.manifest.id, "limit": 5000}
    while not lefts or lefts[-1]:
        lefts.append(host.call("files.pull", **fields)[0]["left"])
    peers.close(str(peer.state))
    assert len(lefts) >= 4 and lefts == sorted(lefts, reverse=True)
    host.bring(scan)
    assert snapshot(tmp_path / "home/w") == tree


def test_a_wrong_token_gets_nothing(tmp_path: Path, served) -> None:
    _, scan, peer = served
    host = Host(tmp_path / "home")
    fields = {"from": peer, "token": "guess", "dest": "~/w", "manifest_id": scan.manifest.id}
    reply, _ = host.call("files.pull", **fields)
    assert reply["left"] == -1 and "the token is not valid here" in reply["failed"]
    assert list((host.state / "incoming").iterdir()) == []


def test_a_token_dies(tmp_path: Path, served, monkeypatch: pytest.MonkeyPatch) -> None:
    peer_host, scan, peer = served
    listener = peers._listeners[(str(peer_host.state), "127.9.1.1")]
    listener.tokens["secret"] = 0.0
    host = Host(tmp_path / "home")
    fields = {"from": peer, "token": "secret", "dest": "~/w", "manifest_id": scan.manifest.id}
    assert "the token is not valid here" in host.call("files.pull", **fields)[0]["failed"]


def _talk(peer: str, line: bytes) -> bytes:
    address, _, port = peer.rpartition(":")
    with socket.create_connection((address, int(port)), 5) as connection:
        connection.settimeout(5)
        with connection.makefile("rwb") as stream:
            stream.readline()
            stream.write(line)
            stream.flush()
            connection.shutdown(socket.SHUT_WR)
            return stream.read()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"{}\n",
        b"garbage\n",
        b'{"op":"files.fetch","path":"/etc/passwd"}\n',
        b'{"op":"files.blobs","digests":["../x"],"mac":""}\n',
    ],
)
def test_peers_answer_one_thing_only(served, line: bytes) -> None:
    _, scan, peer = served
    assert b"root:" not in _talk(peer, line)
    digest = scan.manifest.entries[0].sha256
    answer = _talk(peer, b'{"op":"files.blobs","digests":["%s"],"mac":"00"}\n' % digest.encode())
    assert b"the token is not valid here" in answer and b"content" not in answer


def test_a_peer_whose_file_was_written_to_does_not_pass_it_on(
    tmp_path: Path, served, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer_host, scan, peer = served
    (peer_host.home / "w/f").write_bytes(b"CONTENT")
    host = Host(tmp_path / "home")
    fields = {"from": peer, "token": "secret", "dest": "~/w", "manifest_id": scan.manifest.id}
    assert "has not all of the tree" in host.call("files.pull", **fields)[0]["failed"]
    # Even if the peer does not notice, the one who pulls does.
    monkeypatch.setattr(records, "mark_of", lambda found: None)
    true = records.Record.decode
    monkeypatch.setattr(records.Record, "decode", staticmethod(lambda data: _unmarked(true(data))))
    assert "is not what its digest" in host.call("files.pull", **fields)[0]["failed"]
    assert len(list((host.state / "incoming").iterdir())) <= 2


def _unmarked(record: records.Record) -> records.Record:
    record.files = {path: (digest, None) for path, (digest, _) in record.files.items()}
    return record


def test_an_address_of_somebody_else_is_refused(tmp_path: Path) -> None:
    host = Host(tmp_path / "home")
    with pytest.raises(Refused, match=r"cannot listen on 192\.0\.2\.1"):
        host.call("files.listen", address="192.0.2.1", token="t")


def test_the_host_side_is_python_3_8() -> None:
    for module in (apply_module, packs, peers, place, records):
        ast.parse(Path(module.__file__).read_text(), feature_version=(3, 8))
