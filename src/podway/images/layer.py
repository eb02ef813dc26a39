"""A directory as a layer: a gzipped tar that has the same bytes whenever the files are the same, whoever makes it and wherever.

Paths are in order, owners are root, times are the epoch, and of a file's mode only whether it can be executed is kept: two checkouts
with other umasks are one layer. What is left out is what a sync leaves out (`.git`, ignore files).
"""

import gzip
import hashlib
import io
import tarfile
from typing import IO, BinaryIO, cast

import msgspec

from podway.errors import UserError
from podway.hosts.agent.manifests import unquote
from podway.hosts.tree import Scan, TreeEntry

LEVEL = 6


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """What a manifest and an image's configuration say of a layer."""

    digest: str
    size: int
    diff_id: str  # the digest of the tar itself


class _Hashing(io.RawIOBase):
    """Counts and hashes what passes to `into`."""

    def __init__(self, into: IO[bytes]) -> None:
        super().__init__()
        self._into = into
        self.hash = hashlib.sha256()
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = memoryview(cast(bytes, data))
        self.hash.update(view)
        self.size += len(view)
        self._into.write(view)
        return len(view)

    @property
    def digest(self) -> str:
        return f"sha256:{self.hash.hexdigest()}"


def write_layer(scan: Scan, path: str, into: IO[bytes]) -> Layer:
    """Write the layer that has the tree at `path` of the image."""
    if scan.manifest.root != "dir":
        raise UserError("an image is made of a directory", "name one")
    packed = _Hashing(into)
    with gzip.GzipFile(filename="", mode="wb", compresslevel=LEVEL, fileobj=cast(BinaryIO, packed), mtime=0) as zipped:
        plain = _Hashing(cast(IO[bytes], zipped))
        with tarfile.open(mode="w|", fileobj=cast(BinaryIO, plain), format=tarfile.PAX_FORMAT) as tar:
            root = path.strip("/").split("/")
            for depth in range(1, len(root) + 1):
                tar.addfile(_directory("/".join(root[:depth])))
            for entry in scan.manifest.entries:
                _add(tar, scan, entry, f"{'/'.join(root)}/{unquote(entry.path).decode(errors='surrogateescape')}")
    return Layer(digest=packed.digest, size=packed.size, diff_id=plain.digest)


def _add(tar: tarfile.TarFile, scan: Scan, entry: TreeEntry, name: str) -> None:
    if entry.kind == "dir":
        tar.addfile(_directory(name))
        return
    info = tarfile.TarInfo(name)
    if entry.kind == "link":
        info.type, info.mode = tarfile.SYMTYPE, 0o777
        info.linkname = unquote(entry.target).decode(errors="surrogateescape")
        tar.addfile(info)
        return
    info.size, info.mode = entry.size, 0o755 if entry.mode & 0o100 else 0o644
    with scan.open(entry.sha256, entry.size) as file:
        tar.addfile(info, file)
        file.read(1)  # its end is where its digest is checked


def _directory(name: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode = tarfile.DIRTYPE, 0o755
    return info
