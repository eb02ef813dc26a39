"""From a directory (or a file) of the user's machine to the manifest that describes it.

Flow: 1. `scan` walks the tree, leaving out `.git` and what the ignore files say. 2. Each file is hashed, unless the cache
knows a file of the same identity and times (`hashes.py`). 3. The result is a `TreeManifest`, every path with its kind, mode and
content digest, and the paths to read the contents from. 4. `Scan.pack` streams the contents the server asks for, `Scan.patch` the
changed blocks of one and `Scan.rest` what is left to send of one. Each checks
again that a content is still what the manifest says: a tree that changes while it is sent is refused, never sent wrong.

Ignore files: a `.skyignore` at the root means all `.skyignore` files count and nothing else does; otherwise every
`.gitignore`, with those above the root in the same repository and its `.git/info/exclude`, as git itself would have it.
Links are kept as links, wherever they point; only the root itself is followed. Sockets, pipes and devices are left out.
"""

import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Literal, Self, cast

import msgspec

from podway.decoding import from_json
from podway.errors import UserError
from podway.hosts.agent import blocks, manifests, packs
from podway.hosts.agent.blocks import BlockList
from podway.hosts.hashes import HashCache
from podway.hosts.ignore import Rules, ignored

LEAVE_OUT = "fix its permissions, or leave it out with a .skyignore file"


class TreeEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One path of a tree. Names that are not UTF-8 are written as `manifests.quote` says; so are link targets."""

    path: str
    kind: Literal["file", "dir", "link"]
    mode: int = 0
    size: int = 0
    sha256: str = ""
    target: str = ""


class TreeManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A whole tree: of a directory, or of one file that appears under the name of its destination."""

    root: Literal["dir", "file"] = "dir"
    entries: tuple[TreeEntry, ...] = ()

    def encode(self) -> bytes:
        """The JSON that travels. Its SHA-256 is the manifest's id, and it is a blob like any other."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read what `encode` wrote, and prove that no path of it leaves the tree."""
        try:
            manifest = from_json(data, cls)
            manifests.parse(data)
        except (msgspec.DecodeError, packs.FilesError) as error:
            raise UserError(f"not a manifest of files: {error}", "send the one that the scan made") from None
        return manifest

    @property
    def id(self) -> str:
        """The digest of the manifest."""
        return hashlib.sha256(self.encode()).hexdigest()

    @property
    def sizes(self) -> dict[str, int]:
        """The length of each distinct content, by digest."""
        return {entry.sha256: entry.size for entry in self.entries if entry.kind == "file"}


class Scan(msgspec.Struct, frozen=True, kw_only=True):
    """A manifest, where on this machine its contents are, and what was left out that one might miss."""

    manifest: TreeManifest
    sources: dict[str, bytes]
    bases: dict[str, str] = {}  # of a large file that has changed since the last scan: the digest it had then
    notes: tuple[str, ...] = ()

    def pack(self, digests: Iterable[str]) -> Iterator[bytes]:
        """The pack of these contents; UserError if one is not any more what it was."""
        sizes = self.manifest.sizes
        wanted = [(digest, sizes[digest]) for digest in digests]
        return iter(packs.PackStream(wanted, lambda digest: self.open(digest, sizes[digest])))

    def open(self, digest: str, size: int) -> BinaryIO:
        """One content, to be read with `with`; UserError at its end if it is not any more what it was."""
        return cast(BinaryIO, _VerifiedFile(self.sources[digest], digest, size))

    def patch(self, digest: str, size: int, base: BlockList) -> Iterator[bytes]:
        """The pack of one content by its blocks, of which the server has those of `base`."""
        with _VerifiedFile(self.sources[digest], digest, size) as file:
            yield from blocks.patch(file, digest, size, self.bases[digest], base)

    def rest(self, digest: str, size: int, arrived: int) -> Iterator[bytes]:
        """The pack of one content of which so many bytes are there."""
        with _VerifiedFile(self.sources[digest], digest, size) as file:
            yield from blocks.rest(file, digest, size, arrived)


class _VerifiedFile:
    """A file that is read once; its last bytes are given away only if all of it has the digest it had."""

    def __init__(self, path: bytes, digest: str, size: int) -> None:
        self._path = path
        self._digest = digest
        self._left = size
        self._seen = hashlib.sha256()

    def __enter__(self) -> Self:
        try:
            self._file = open(self._path, "rb", buffering=0)
        except OSError:
            raise self._changed() from None
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, n: int = -1) -> bytes:
        if not self._left:
            self._check()
            return b""
        data = self._file.read(min(n, self._left) if n >= 0 else self._left)
        self._seen.update(data)
        self._left -= len(data)
        if not data:
            raise self._changed()
        if not self._left:
            self._check()
        return data

    def _check(self) -> None:
        if self._seen.hexdigest() != self._digest:
            raise self._changed()

    def _changed(self) -> UserError:
        return UserError(f"{_show(self._path)} changed while it was being sent", "run the command again")


def scan(path: Path, *, cache_dir: Path | None = None, now_ns: Callable[[], int] = time.time_ns) -> Scan:
    """Describe the tree at `path`; `cache_dir` is where hashes of unchanged files are remembered."""
    try:
        root = path.resolve(strict=True)
        found = root.stat()
    except (OSError, RuntimeError):
        raise UserError(f"{path} does not exist", "give a directory or a file of this machine") from None
    cache = HashCache(cache_dir, os.fsencode(root), now_ns())
    walk = _Walk(cache)
    if stat.S_ISREG(found.st_mode):
        walk.file(os.fsencode(root), os.fsencode(path.name or root.name), found)
        manifest = TreeManifest(root="file", entries=tuple(walk.entries))
    elif stat.S_ISDIR(found.st_mode):
        walk.tree(root)
        manifest = TreeManifest(entries=tuple(sorted(walk.entries, key=lambda entry: entry.path)))
    else:
        raise UserError(f"{path} is neither a directory nor a file", "give a directory or a file of this machine")
    cache.save()
    return Scan(manifest=manifest, sources=walk.sources, bases=walk.bases, notes=tuple(walk.notes))


class _Walk:
    """Collects the entries of one tree."""

    def __init__(self, cache: HashCache) -> None:
        self.entries: list[TreeEntry] = []
        self.sources: dict[str, bytes] = {}
        self.bases: dict[str, str] = {}
        self.notes: list[str] = []
        self._cache = cache

    def tree(self, root: Path) -> None:
        """All that is below a directory."""
        ignore_file = b".skyignore" if os.path.lexists(root / ".skyignore") else b".gitignore"
        # Ignore files speak of paths from where they stand; all are asked with the path from the repository's top.
        prefix, outer = _outer_rules(root) if ignore_file == b".gitignore" else (b"", ())
        top = os.fsencode(root) + b"/"
        folders = [(prefix, outer)]
        while folders:
            folder, rules = folders.pop()
            full = top + folder[len(prefix) :]
            items = _items(full)
            if any(item.name == ignore_file and item.is_file(follow_symlinks=False) for item in items):
                rules = (_rules(full + ignore_file, len(folder)), *rules)
            for item in items:
                path, is_folder = folder + item.name, item.is_dir(follow_symlinks=False)
                if item.name == b".git" or ignored(rules, path, item.name, is_folder):
                    continue
                self._add(item, path[len(prefix) :])
                if is_folder:
                    folders.append((path + b"/", rules))

    def _add(self, item: os.DirEntry[bytes], path: bytes) -> None:
        try:
            found = item.stat(follow_symlinks=False)
            target = os.readlink(item.path) if stat.S_ISLNK(found.st_mode) else b""  # noqa: PTH115  # bytes
        except FileNotFoundError:
            return  # gone since the directory was read: as if it had been gone before
        if stat.S_ISREG(found.st_mode):
            self.file(item.path, path, found)
        elif stat.S_ISDIR(found.st_mode):
            # The owner's rights, or the host could not fill the directory.
            mode = stat.S_IMODE(found.st_mode) & manifests.MODES | 0o700
            self.entries.append(TreeEntry(path=manifests.quote(path), kind="dir", mode=mode))
        elif stat.S_ISLNK(found.st_mode):
            self.entries.append(TreeEntry(path=manifests.quote(path), kind="link", target=manifests.quote(target)))
        else:
            self.notes.append(f"left out {_show(path)}: neither file, directory nor link")

    def file(self, full: bytes, path: bytes, found: os.stat_result) -> None:
        """One regular file."""
        try:
            digest, size = self._cache.digest(full, found)
        except FileNotFoundError:
            return
        except OSError as error:
            raise UserError(f"cannot read {_show(full)}: {error.strerror}", LEAVE_OUT) from None
        mode = stat.S_IMODE(found.st_mode) & manifests.MODES | 0o400
        self.sources[digest] = full
        former = self._cache.former(full)
        if former and former != digest:
            self.bases[digest] = former
        self.entries.append(TreeEntry(path=manifests.quote(path), kind="file", mode=mode, size=size, sha256=digest))


def _show(path: bytes) -> str:
    return manifests.quote(path)


def _items(folder: bytes) -> list[os.DirEntry[bytes]]:
    try:
        with os.scandir(folder) as items:
            return sorted(items, key=lambda item: item.name)
    except OSError as error:
        raise UserError(f"cannot read {_show(folder)}: {error.strerror}", LEAVE_OUT) from None


def _rules(path: bytes | Path, depth: int) -> Rules:
    try:
        with open(path, "rb") as file:
            return Rules.parse(file.read(), depth)
    except OSError as error:
        raise UserError(f"cannot read {_show(os.fsencode(path))}: {error.strerror}", "fix its permissions") from None


def _outer_rules(root: Path) -> tuple[bytes, tuple[Rules, ...]]:
    """What the repository around a tree ignores: the tree's path in it, and the rules from above the tree.

    A tree that its repository ignores altogether was named on purpose: then nothing from outside counts.
    """
    top = next((folder for folder in (root, *root.parents) if os.path.lexists(folder / ".git")), None)
    if top is None:
        return b"", ()
    exclude = top / ".git" / "info" / "exclude"
    rules: tuple[Rules, ...] = (_rules(exclude, 0),) if exclude.is_file() else ()
    at, folder = b"", top
    for part in root.relative_to(top).parts:
        ignore_file = folder / ".gitignore"
        if ignore_file.is_file() and not ignore_file.is_symlink():
            rules = (_rules(ignore_file, len(at)), *rules)
        name = os.fsencode(part)
        if ignored(rules, at + name, name, True):
            return b"", ()
        at, folder = at + name + b"/", folder / part
    return at, rules
