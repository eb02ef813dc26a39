"""Blobs, and the packs they travel in: from the client to the server, to the first host, and from host to host.

A *blob* is a content named by its SHA-256 (64 hex digits), one file in a folder. A *pack* is a run of frames and nothing
else; a frame is

    32 bytes   SHA-256 of the content
     8 bytes   length of the content, unsigned, big-endian
     n bytes   the content

Flow: 1. `PackStream` reads blobs from wherever the sender has them, as one stream of known size. 2. `Receiver.feed` takes
the stream in pieces of any size and writes each content under a temporary name. 3. A content that hashes to its digest is
renamed to it; any other is dropped and refused. So a blob that exists is whole, and no content is ever held in memory.
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
CHUNK = 1 << 20
_HOLE = 64 << 10
_ZEROS = bytes(_HOLE)
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
    for at in range(0, len(view), _HOLE):
        block = view[at : at + _HOLE]
        if not block[0] and len(block) == _HOLE and block.tobytes() == _ZEROS:
            file.seek(_HOLE, os.SEEK_CUR)
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


class Receiver:
    """Takes a pack in pieces of any size and leaves its blobs in `folder`. Use with `with`: what is half done is removed."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.count = 0
        self.size = 0
        self._head = bytearray()
        self._left = 0
        self._digest = ""
        self._hash = hashlib.sha256()
        self._path = ""
        self._file: BinaryIO | None = None

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            discard(self._path)

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the pack."""
        view = memoryview(data)
        with space_on(self.folder):
            while view:
                if self._file is None:
                    view = self._begin(view)
                else:
                    view = self._continue(view)

    def close(self) -> None:
        """The pack is over: anything half received is an error."""
        if self._head or self._file is not None:
            raise FilesError("the pack ended in the middle of a blob")

    def _begin(self, view: memoryview) -> memoryview:
        want = FRAME.size - len(self._head)
        self._head += view[:want]
        if len(self._head) == FRAME.size:
            raw, self._left = FRAME.unpack(self._head)
            self._head.clear()
            self._digest = raw.hex()
            self._hash = hashlib.sha256()
            self._path = temporary(self.folder)
            self._file = open(self._path, "xb")
            if self._left == 0:
                self._finish()
        return view[want:]

    def _continue(self, view: memoryview) -> memoryview:
        assert self._file is not None
        part = view[: self._left]
        write_sparse(self._file, part)
        self._hash.update(part)
        self._left -= len(part)
        if self._left == 0:
            self._finish()
        return view[len(part) :]

    def _finish(self) -> None:
        assert self._file is not None
        size = self._file.tell()
        if size >= _HOLE:
            self._file.truncate()
        self._file.close()
        self._file = None
        if self._hash.hexdigest() != self._digest:
            discard(self._path)
            raise FilesError("a blob of %d bytes is not what its digest %s says" % (size, self._digest[:12]))
        os.rename(self._path, os.path.join(self.folder, self._digest))
        self.count += 1
        self.size += size


def put_piece(folder: str, digest: str, writer: str, offset: int, total: int, body: BinaryIO) -> bool:
    """Write one piece of a blob too large for one message; True when the blob is whole. Repeating a piece is harmless.

    `writer` (hex digits) tells apart two who send the same blob at once.
    """
    path = os.path.join(folder, digest)
    part = os.path.join(folder, ".part.%s.%s" % (digest, writer))
    if offset and (not os.path.exists(part) or os.stat(part).st_size < offset):
        raise FilesError("the pieces of blob %s before byte %d are not here" % (digest[:12], offset))
    with space_on(folder), open(part, "r+b" if offset else "wb") as file:
        file.seek(offset)
        file.truncate()
        while True:
            data = body.read(CHUNK)
            if not data:
                break
            write_sparse(file, data)
        file.truncate()
        if file.tell() < total:
            return False
    with open(part, "rb") as file:
        right = digest_of(file) == digest
    if not right:
        discard(part)
        raise FilesError("a blob of %d bytes is not what its digest %s says" % (total, digest[:12]))
    os.rename(part, path)
    return True


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
