"""Trees of files for tests: as plain values, on disk, and back. A tree is {path: ("file", mode, content) | ("dir", mode) |
("link", target)}, paths relative, in bytes; the snapshot of a directory is the same value."""

import io
import os
import stat
from pathlib import Path

from hypothesis import strategies as st

from podway.hosts.agent import files, packs
from podway.hosts.tree import Scan, scan

Tree = dict[bytes, tuple]


def _memory() -> str | None:
    """Where trees are made and thrown away by the hundred: a disk in memory, where there is one of a decent size."""
    if not os.access("/dev/shm", os.W_OK):
        return None
    free = os.statvfs("/dev/shm")
    return "/dev/shm" if free.f_bavail * free.f_frsize > 2 << 30 else None


MEMORY = _memory()

NAMES = [b"a", b"b", b"c d", b"new\nline", b"\xff\xfe", "é".encode(), b"back\\slash", b".hidden", b"-dash"]
CONTENTS = [b"", b"x", b"y", b"same size A", b"same size B", b"\0" * 5000, b"#!/bin/sh\n"]


@st.composite
def trees(draw: st.DrawFn, max_entries: int = 14) -> Tree:
    """Random trees, over few names, so that two of them often disagree about what a path is."""
    tree: Tree = {}
    folders = [b""]
    for _ in range(draw(st.integers(0, max_entries))):
        parent = draw(st.sampled_from(folders))
        path = parent + draw(st.sampled_from(NAMES))
        if path in tree:
            continue
        kind = draw(st.sampled_from(["file", "file", "dir", "dir", "link"]))
        if kind == "file":
            tree[path] = ("file", draw(st.sampled_from([0o644, 0o755, 0o600, 0o444])), draw(st.sampled_from(CONTENTS)))
        elif kind == "dir":
            tree[path] = ("dir", draw(st.sampled_from([0o755, 0o700])))
            folders.append(path + b"/")
        else:
            tree[path] = ("link", draw(st.sampled_from([b"a", b"../..", b"/etc/passwd", b"no such", b"\xff"])))
    return tree


def build(root: Path, tree: Tree) -> None:
    """Make the tree on disk, below `root`, which is made too."""
    root.mkdir(parents=True, exist_ok=True)
    for path in sorted(tree):
        full = root / os.fsdecode(path)
        item = tree[path]
        if item[0] == "dir":
            full.mkdir()
            full.chmod(item[1])
        elif item[0] == "link":
            full.symlink_to(os.fsdecode(item[1]))
        else:
            full.write_bytes(item[2])
            full.chmod(item[1])


def snapshot(root: Path) -> Tree:
    """The tree that is on disk."""
    tree: Tree = {}
    for folder, folders, names in os.walk(root):
        for name in folders + names:
            full = Path(folder, name)
            path = os.fsencode(full.relative_to(root))
            found = full.lstat()
            mode = stat.S_IMODE(found.st_mode)
            if stat.S_ISLNK(found.st_mode):
                tree[path] = ("link", os.fsencode(full.readlink()))
            elif stat.S_ISDIR(found.st_mode):
                tree[path] = ("dir", mode)
            else:
                tree[path] = ("file", mode, full.read_bytes())
    return tree


def scanned(root: Path, tree: Tree) -> Scan:
    """The manifest of a tree, by way of the disk."""
    build(root, tree)
    return scan(root)


class Host:
    """A host's agent without its processes: its file operations, called as the agent calls them."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.state = home / ".podway"
        self.state.mkdir(parents=True, exist_ok=True)

    def call(self, op: str, body: bytes = b"", **fields) -> tuple[dict, bytes]:
        reply, answer = files.OPS[op](str(self.state), fields, io.BytesIO(body))
        return reply, answer or b""

    def missing(self, scan: Scan, dest: str) -> list[str]:
        reply, raw = self.call("files.missing", dest=dest, manifest_id=scan.manifest.id)
        if not reply["known"]:
            data = scan.manifest.encode()
            self.call("files.put", packs.FRAME.pack(bytes.fromhex(scan.manifest.id), len(data)) + data)
            reply, raw = self.call("files.missing", dest=dest, manifest_id=scan.manifest.id)
        return [raw[at : at + 32].hex() for at in range(0, len(raw), 32)]

    def bring(self, scan: Scan, dest: str = "~/w") -> dict:
        """What a sync does with one host."""
        self.call("files.put", b"".join(scan.pack(self.missing(scan, dest))))
        reply, missing = self.call("files.apply", dest=dest, manifest_id=scan.manifest.id)
        assert reply["applied"] and not missing
        return reply


def _parents(path: bytes) -> list[bytes]:
    names = path.split(b"/")
    return [b"/".join(names[:n]) for n in range(1, len(names))]


def expected(old: Tree, made: Tree, new: Tree) -> Tree:
    """The new tree and what of the jobs' files is not in its way."""
    kept = {
        path: item
        for path, item in made.items()
        if path not in new and all(new.get(above, ("dir",))[0] == "dir" for above in _parents(path))
    }
    # A directory of the old tree stays as long as a job's file is in it.
    for path in list(kept):
        for above in _parents(path):
            if above not in new and above not in kept:
                kept[above] = old[above]
    return {**kept, **new}


def one_file(folder: Path, content: bytes) -> Scan:
    """The manifest of a single file."""
    path = folder / "source.txt"
    path.write_bytes(content)
    return scan(path)
