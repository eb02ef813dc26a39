"""From a directory to its manifest."""

import hashlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import pytest
from file_trees import MEMORY, Tree, build, trees
from hypothesis import given, settings
from hypothesis import strategies as st

from podway.errors import UserError
from podway.hosts import hashes
from podway.hosts.agent import manifests, packs
from podway.hosts.blobs import BlobStore
from podway.hosts.tree import TreeEntry, TreeManifest, scan

LATER = 10_000_000_000


def later() -> int:
    """A clock by which all files here are old enough to be remembered."""
    return time.time_ns() + LATER


def described(manifest: TreeManifest, contents: dict[str, bytes]) -> Tree:
    """A manifest as a tree."""
    tree: Tree = {}
    for entry in manifest.entries:
        path = manifests.unquote(entry.path)
        if entry.kind == "file":
            tree[path] = ("file", entry.mode, contents[entry.sha256])
        else:
            tree[path] = ("dir", entry.mode) if entry.kind == "dir" else ("link", manifests.unquote(entry.target))
    return tree


@settings(max_examples=60)
@given(trees())
def test_a_manifest_is_the_whole_tree(tree: Tree) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        build(Path(folder, "t"), tree)
        found = scan(Path(folder, "t"))
        store = BlobStore(Path(folder, "blobs"))
        store.put_pack(found.pack(found.manifest.sizes))
        contents = {digest: store.read(digest) for digest in found.manifest.sizes}
        assert described(found.manifest, contents) == tree
        data = found.manifest.encode()
        assert TreeManifest.decode(data) == found.manifest
        assert found.manifest.id == hashlib.sha256(data).hexdigest()
        assert manifests.parse(data).root == "dir"
        assert [entry.path for entry in found.manifest.entries] == sorted(
            entry.path for entry in found.manifest.entries
        )


@given(st.binary(max_size=40))
def test_every_name_has_one_text(name: bytes) -> None:
    text = manifests.quote(name)
    assert manifests.unquote(text) == name
    assert msgspec.json.decode(msgspec.json.encode(text)) == text


@given(st.text(st.sampled_from("a\\x09f\udcff/"), max_size=8))
def test_no_text_is_a_traceback(text: str) -> None:
    try:
        name = manifests.unquote(text)
    except packs.FilesError:
        return
    assert manifests.unquote(manifests.quote(name)) == name


def test_a_plain_name_is_its_own_text() -> None:
    assert manifests.quote("src/modèle.py".encode()) == "src/modèle.py"
    assert manifests.quote(b"a\\b\xff") == "a\\\\b\\xff"


def test_a_linked_root_is_followed_and_other_links_are_kept(tmp_path: Path) -> None:
    (tmp_path / "real/sub").mkdir(parents=True)
    (tmp_path / "real/sub/f").write_text("f")
    (tmp_path / "real/out").symlink_to("/etc")
    (tmp_path / "real/loop").symlink_to(".")
    (tmp_path / "work").symlink_to("real")
    got = {entry.path: entry.target for entry in scan(tmp_path / "work").manifest.entries}
    assert got == {"sub": "", "sub/f": "", "out": "/etc", "loop": "."}


def test_one_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret")
    (tmp_path / "key").chmod(0o600)
    (tmp_path / "link").symlink_to("key")
    manifest = scan(tmp_path / "link").manifest
    digest = hashlib.sha256(b"secret").hexdigest()
    assert manifest == TreeManifest(
        root="file", entries=(TreeEntry(path="link", kind="file", mode=0o600, size=6, sha256=digest),)
    )
    manifests.parse(manifest.encode())


def test_what_is_no_file_is_left_out_with_a_note(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "sock"))
    (tmp_path / "f").write_text("f")
    found = scan(tmp_path)
    assert [entry.path for entry in found.manifest.entries] == ["f"]
    assert [note.split(":")[0] for note in found.notes] == ["left out pipe", "left out sock"]


def test_errors_name_the_path(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist"):
        scan(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match="loop does not exist"):
        scan(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is neither"):
        scan(tmp_path / "pipe")


# Root may read everything: be somebody else.
SCAN_AS_NOBODY = """
import os, sys
from pathlib import Path
from podway.errors import UserError
from podway.hosts.tree import scan
if os.getuid() == 0:
    os.setuid(65534)
try:
    scan(Path(sys.argv[1]))
except UserError as error:
    print(error, end="")
"""


@pytest.mark.parametrize("what", ["file", "folder", "ignore file"])
def test_the_unreadable_is_named(what: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        target = Path(folder, {"file": "locked", "folder": "locked", "ignore file": ".gitignore"}[what])
        if what == "folder":
            target.mkdir()
        else:
            target.write_text("x")
        target.chmod(0)
        said = subprocess.run([sys.executable, "-c", SCAN_AS_NOBODY, folder], capture_output=True, text=True).stdout
        target.chmod(0o700)
    assert said.startswith(f"cannot read {target}") and "Permission denied" in said and "\n  " in said


def test_a_file_that_changes_once_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _change_while_read(monkeypatch, tmp_path / "f", times=1)
    found = scan(tmp_path)
    assert found.manifest.entries[0].sha256 == hashlib.sha256((tmp_path / "f").read_bytes()).hexdigest()


def test_a_file_that_never_rests_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _change_while_read(monkeypatch, tmp_path / "f", times=100)
    with pytest.raises(UserError, match="keeps changing"):
        scan(tmp_path)


def _change_while_read(monkeypatch: pytest.MonkeyPatch, path: Path, times: int) -> None:
    """Write to the file whenever a part of it has been hashed."""
    path.write_bytes(b"0")
    left = [times]

    class Hash:
        def __init__(self) -> None:
            self._hash = hashlib.sha256()
            self.digest = self._hash.digest

        def update(self, data: bytes) -> None:
            self._hash.update(data)
            if left[0]:
                left[0] -= 1
                path.write_bytes(b"%d" % left[0] * (1 + left[0] % 3))

    monkeypatch.setattr(
        hashes,
        "hashlib",
        type("hashlib", (), {"sha256": lambda data=None: Hash() if data is None else hashlib.sha256(data)}),
    )


@pytest.mark.parametrize("change", ["rewritten", "shorter", "longer", "gone"])
def test_a_file_that_changed_since_the_scan_is_not_sent(tmp_path: Path, change: str) -> None:
    path = tmp_path / "t/f"
    path.parent.mkdir()
    path.write_bytes(b"before" * 100)
    found = scan(tmp_path / "t")
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes({"rewritten": b"AFTER!" * 100, "shorter": b"b", "longer": b"before" * 101}[change])
    store = BlobStore(tmp_path / "blobs")
    if change == "longer":  # what was scanned is still its beginning
        store.put_pack(found.pack(found.manifest.sizes))
        return
    with pytest.raises(UserError, match="changed while it was being sent"):
        store.put_pack(found.pack(found.manifest.sizes))
    assert store.missing(found.manifest.sizes) == list(found.manifest.sizes)


class _Reads:
    """Counts the files that are really read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: list[str] = []
        true = hashes._hash
        monkeypatch.setattr(hashes, "_hash", lambda path: (self.paths.append(os.fsdecode(path)), true(path))[1])

    def take(self) -> list[str]:
        taken, self.paths = [Path(path).name for path in self.paths], []
        return sorted(taken)


def test_only_what_changed_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, root, cache = _Reads(monkeypatch), tmp_path / "t", tmp_path / "cache"
    build(root, {b"a": ("file", 0o644, b"aaa"), b"b": ("file", 0o644, b"bbb"), b"c": ("file", 0o644, b"ccc")})
    first = scan(root, cache_dir=cache, now_ns=later)
    assert reads.take() == ["a", "b", "c"]
    assert scan(root, cache_dir=cache, now_ns=later).manifest == first.manifest
    assert reads.take() == []
    # The same size and, on purpose, the same modification time: the change time still tells.
    before = (root / "b").stat()
    (root / "b").write_bytes(b"BBB")
    os.utime(root / "b", ns=(before.st_atime_ns, before.st_mtime_ns))
    second = scan(root, cache_dir=cache, now_ns=later)
    assert reads.take() == ["b"]
    assert second.manifest.id != first.manifest.id
    (root / "c").rename(root / "d")
    scan(root, cache_dir=cache, now_ns=later)
    assert reads.take() in ([], ["d"])  # a rename changes the change time on some file systems


def test_fresh_files_are_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, root, cache = _Reads(monkeypatch), tmp_path / "t", tmp_path / "cache"
    build(root, {b"a": ("file", 0o644, b"aaa")})
    scan(root, cache_dir=cache)
    scan(root, cache_dir=cache)
    assert reads.take() == ["a", "a"]


def test_a_damaged_cache_is_no_cache(tmp_path: Path) -> None:
    root, cache = tmp_path / "t", tmp_path / "cache"
    build(root, {b"a": ("file", 0o644, b"aaa")})
    first = scan(root, cache_dir=cache, now_ns=later)
    (kept,) = cache.iterdir()
    kept.write_bytes(kept.read_bytes()[:-5] + b"\xff")
    assert scan(root, cache_dir=cache, now_ns=later).manifest == first.manifest


def test_ten_thousand_files_again_in_less_than_the_blink_of_an_eye() -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        root, cache = Path(folder, "t"), Path(folder, "cache")
        for package in range(100):
            (root / f"package{package}").mkdir(parents=True)
            for number in range(100):
                (root / f"package{package}/module{number}.py").write_text(f"{package}.{number}")
        (root / ".gitignore").write_text(
            "*.pyc\n__pycache__/\n/build/\n*.egg-info\n.venv\n!keep.pyc\nlogs/**/*.log\n" * 3
        )
        scan(root, cache_dir=cache, now_ns=later)
        spent = []
        for _ in range(3):
            start = time.process_time()
            assert len(scan(root, cache_dir=cache, now_ns=later).manifest.entries) == 10_101
            spent.append(time.process_time() - start)
    assert min(spent) < 0.3


BAD = [
    b"", b"{", b"[]", b"null", b'{"entries": 3}', b'{"entries": [3]}', b'{"entries": [{"path": "a"}]}',
    b'{"entries": [{"path": "a", "kind": "socket"}]}', b'{"root": "x", "entries": []}', b'{"root": "file", "entries": []}',
    b'{"entries": [{"path": "a", "kind": "file"}]}', b'{"entries": [{"path": "a", "kind": "link"}]}', b'\xff{"entries": []}',
    b'{"entries": [{"path": "a", "kind": "dir", "mode": 4095}]}', b'{"entries": [{"path": "a", "kind": "dir", "mode": "7"}]}',
    b'{"root": "file", "entries": [{"path": "a", "kind": "dir"}]}', b'{"entries": [{"path": 1, "kind": "dir"}]}',
]  # fmt: skip


@pytest.mark.parametrize("data", BAD)
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(packs.FilesError):
        manifests.parse(data)
    with pytest.raises(UserError):
        TreeManifest.decode(data)


PATHS = [
    "/etc/x",
    "../x",
    "a/../../x",
    "./a",
    "a/./b",
    "a//b",
    "a/",
    "",
    ".",
    "..",
    "a\0b",
    "\\x2e\\x2e",
    "d/\\x2f",
    "\\x00",
    "l/x",
]


@pytest.mark.parametrize("path", PATHS)
def test_no_path_leaves_its_tree(path: str) -> None:
    entries = (
        TreeEntry(path="a", kind="dir", mode=0o755),
        TreeEntry(path="d", kind="dir", mode=0o755),
        TreeEntry(path="l", kind="link", target="/etc"),
        TreeEntry(path=path, kind="link", target="x"),
    )
    with pytest.raises(UserError):
        TreeManifest.decode(TreeManifest(entries=entries).encode())


def test_reading_a_tree_needs_nothing_heavy() -> None:
    code = "import sys, podway.hosts.tree; print(sorted({'asyncio', 'pathspec', 'sqlite3', 'jax'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
