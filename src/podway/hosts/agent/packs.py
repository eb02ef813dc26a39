"""Blobs, and the packs they travel in: from the client to the server, to the first host, and from host to host.

A *blob* is a content named by its SHA-256 (64 hex digits), one file in a folder. A *pack* is a run of frames and nothing
else; a frame is

    32 bytes   SHA-256 of the content
     8 bytes   length of the content, unsigned, big-endian
     n bytes   the content

`PackStream` reads blobs from wherever the sender has them, as one stream of known size; `receive.py` takes such a stream. A frame
whose length has the bit `PATCHED` gives the content by blocks of another that the receiver has (blocks.py).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import re
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import BinaryIO

    OpenBlob = Callable[[str], BinaryIO]

FRAME = struct.Struct(">32sQ")
PATCHED = 1 << 63
CHUNK = 1 << 20
HOLE = 64 << 10
_ZEROS = bytes(HOLE)
DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_serial = itertools.count()


class FilesError(Exception):
    """What went wrong with files on a host, in one line a person can read."""


class NoSpaceError(FilesError):
    """The disk is full."""


def is_digest(text: object) -> bool:
    """Whether this is the name of a blob, and so also safe as the name of a file."""
    return isinstance(text, str) and DIGEST.match(text) is not None


def temporary(folder: str) -> str:
    """A path in `folder` that nobody else uses; the dot tells `sweep`s that it is not a blob."""
    return os.path.join(folder, ".%d.%d" % (os.getpid(), next(_serial)))


def discard(path: str) -> None:
    """Remove a file that may be gone already."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


@contextlib.contextmanager
def space_on(folder: str) -> Iterator[None]:
    """Turn a full disk into one clear line."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise NoSpaceError("no space left on the disk of %s" % folder) from None


def write_sparse(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write, leaving a hole for each block of zeros; `truncate` the file where it ends, for a hole may be the last of it."""
    view = memoryview(data)
    for at in range(0, len(view), HOLE):
        block = view[at : at + HOLE]
        if not block[0] and len(block) == HOLE and block.tobytes() == _ZEROS:
            file.seek(HOLE, os.SEEK_CUR)
            continue
        while block:
            block = block[file.write(block) :]


def digest_of(stream: BinaryIO) -> str:
    """The SHA-256 of what is left of a stream."""
    seen = hashlib.sha256()
    while True:
        data = stream.read(CHUNK)
        if not data:
            return seen.hexdigest()
        seen.update(data)


class PackStream:
    """The pack of `(digest, length)` pairs as a readable stream of `size` bytes; contents come from `open_blob`."""

    def __init__(self, blobs: Iterable[tuple[str, int]], open_blob: OpenBlob) -> None:
        self._blobs = list(blobs)
        self._chunks = self._frames(open_blob)
        self._rest = memoryview(b"")
        self.size = sum(FRAME.size + length for _, length in self._blobs)

    def read(self, n: int) -> bytes:
        """Up to `n` bytes, b"" at the end."""
        if not self._rest:
            self._rest = memoryview(next(self._chunks, b""))
        data = self._rest[:n]
        self._rest = self._rest[len(data) :]
        return bytes(data)

    def __iter__(self) -> Iterator[bytes]:
        return self._chunks

    def _frames(self, open_blob: OpenBlob) -> Iterator[bytes]:
        for digest, length in self._blobs:
            head = FRAME.pack(bytes.fromhex(digest), length)
            with open_blob(digest) as file:
                data = file.read(min(length, CHUNK))
                yield head + data  # small files are most files: one write each
                left = length - len(data)
                while left:
                    data = file.read(min(left, CHUNK))
                    if not data:
                        raise FilesError("blob %s is shorter than it was" % digest[:12])
                    left -= len(data)
                    yield data
