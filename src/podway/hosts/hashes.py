"""The SHA-256 of files, remembered between scans so that an unchanged tree is not read again.

Flow: 1. a cache file per tree holds (device, inode, size, mtime, ctime) -> digest of the last scan, and the digests of its large files
by path: of one that has changed, only the changed blocks need to be sent (`former`). 2. A file of the same
identity has the same content, with one exception: a write in the same tick of the clock as the last one leaves the times as
they were. So a digest is only remembered if the file had not been touched for `SETTLED_NS` when it was hashed. 3. The cache
is replaced whole, by rename; a damaged one is as good as none.
"""

import contextlib
import hashlib
import os
from pathlib import Path

import msgspec

from podway.decoding import from_msgpack
from podway.errors import UserError
from podway.files import write_atomically

CHUNK = 1 << 20
TRIES = 3
# The coarsest clock of a file system one still meets: FAT writes times in steps of 2 s (Microsoft FAT specification 1.03).
SETTLED_NS = 2_000_000_000

LARGE = 1 << 20  # of a smaller file that has changed, all is sent

Identity = tuple[int, int, int, int, int]


class _SavedHashes(msgspec.Struct, frozen=True, array_like=True):
    """The cache's file: identity and digest of each file, and path and digest of the large ones."""

    rows: list[tuple[int, int, int, int, int, bytes]]
    large: dict[bytes, bytes]


def _identity(found: os.stat_result) -> Identity:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class HashCache:
    """The digests of one tree's files. `now` is when the scan began; without a folder nothing is remembered."""

    def __init__(self, folder: Path | None, tree: bytes, now: int) -> None:
        name = hashlib.sha256(tree).hexdigest()[:32] + ".hashes"
        self._path = folder / name if folder else None
        self._now = now
        self._known: dict[Identity, bytes] = {}
        self._seen: dict[Identity, bytes] = {}
        self._former: dict[bytes, bytes] = {}
        self._large: dict[bytes, bytes] = {}
        if self._path:
            with contextlib.suppress(OSError, msgspec.DecodeError):
                saved = from_msgpack(self._path.read_bytes(), _SavedHashes)
                self._known, self._former = {row[:5]: row[5] for row in saved.rows}, saved.large

    def digest(self, path: bytes, found: os.stat_result) -> tuple[str, int]:
        """Digest and size of the file at `path`, of which `found` was just seen. It is read only if it must be."""
        identity = _identity(found)
        digest = self._known.get(identity)
        if digest is None:
            digest, identity = _hash(path)
        if self._now - max(identity[3:]) > SETTLED_NS:
            self._seen[identity] = digest
        if identity[2] >= LARGE:
            self._large[path] = digest
        return digest.hex(), identity[2]

    def former(self, path: bytes) -> str:
        """The digest that the large file at `path` had at the last scan; "" if there was none."""
        return self._former.get(path, b"").hex()

    def save(self) -> None:
        """Remember this scan's digests, and none of files that are gone. A cache that cannot be written is not an error."""
        if self._path is None or (self._seen, self._large) == (self._known, self._former):
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            rows = [(*key, digest) for key, digest in self._seen.items()]
            write_atomically(self._path, msgspec.msgpack.encode(_SavedHashes(rows, self._large)), mode=0o600)


def _hash(path: bytes) -> tuple[bytes, Identity]:
    """Digest of a file that stayed the same while it was read, and which file that was."""
    for _ in range(TRIES):
        # Nonblocking, in case the file has become a pipe since it was seen.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb", buffering=0) as file:
            before = _identity(os.fstat(file.fileno()))
            seen, size = hashlib.sha256(), 0
            while data := file.read(CHUNK):
                seen.update(data)
                size += len(data)
            if before == _identity(os.fstat(file.fileno())) and size == before[2]:
                return seen.digest(), before
    raise UserError(
        f"{os.fsdecode(path)!r} keeps changing while it is read",
        "stop what writes to it, or leave it out with a .skyignore file",
    )
