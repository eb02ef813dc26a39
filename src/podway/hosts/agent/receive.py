"""Take packs (packs.py), and pieces of contents too large for one message, and leave their blobs in a folder.

Flow: 1. `Receiver.feed` takes a pack in pieces of any size and writes each content under a temporary name: as it comes, or put
together from blocks of a base that is here (blocks.py). 2. A content that hashes to its digest is renamed to it; any other is
dropped and refused. So a blob that exists is whole, and no content is ever held in memory. 3. What has arrived of a large content
when its sender breaks off stays as `.part.DIGEST.*`; `arrived` says how much that is, and the next sender sends the rest.
"""

from __future__ import annotations

import hashlib
import os

from .blocks import LITERAL, STEP
from .packs import CHUNK, FRAME, HOLE, PATCHED, FilesError, digest_of, discard, space_on, temporary, write_sparse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import BinaryIO

    from .packs import OpenBlob

PART_LEAST = 1 << 20  # of smaller contents nothing is kept: to send them again costs no more than to ask
_MOST = 1 << 50
_PIECE = 256 << 10  # what is hashed and written at once: it stays in the processor's cache
_PART = ".part."


def parts(folder: str, digests: Iterable[str]) -> dict[str, list[tuple[int, str]]]:
    """What has arrived of contents that are not whole: size and path, the largest first."""
    wanted = set(digests)
    found: dict[str, list[tuple[int, str]]] = {}
    with os.scandir(folder) as items:
        for item in items:
            digest = item.name[len(_PART) : len(_PART) + 64]
            if item.name.startswith(_PART) and digest in wanted:
                try:
                    found.setdefault(digest, []).append((item.stat().st_size, item.path))
                except FileNotFoundError:
                    continue
    return {digest: sorted(sizes, reverse=True) for digest, sizes in found.items()}


def arrived(folder: str, digests: Iterable[str]) -> dict[str, int]:
    """How many bytes of these have arrived, where some have and not all."""
    return {digest: sizes[0][0] for digest, sizes in parts(folder, digests).items() if sizes[0][0] >= PART_LEAST}


class Receiver:
    """Takes a pack in pieces of any size and leaves its blobs in `folder`. Use with `with`: what is half done is removed, or kept
    as a part if it is large. `open_base` opens a content that patches may be made from."""

    def __init__(self, folder: str, open_base: OpenBlob | None = None) -> None:
        self.folder = folder
        self.count = 0
        self.size = 0
        self._open_base = open_base
        self._head = bytearray()
        self._expect(self._on_frame, FRAME.size)
        self._left = self._literal = 0
        self._patched = False
        self._digest = ""
        self._hash = hashlib.sha256()
        self._path = ""
        self._file: BinaryIO | None = None
        self._base: BinaryIO | None = None
        self._base_size = 0

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_base()
        if self._file is not None:
            size = self._file.tell()
            self._file.close()
            self._file = None
            if size < PART_LEAST or not os.path.basename(self._path).startswith(_PART):
                discard(self._path)

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the pack."""
        view = memoryview(data)
        with space_on(self.folder):
            while view:
                if self._literal:
                    part = view[: self._literal]
                    self._literal -= len(part)
                    self._add(part)
                    self._advance()
                    view = view[len(part) :]
                else:
                    want = self._want - len(self._head)
                    self._head += view[:want]
                    view = view[want:]
                    if len(self._head) == self._want:
                        raw = bytes(self._head)
                        self._head.clear()
                        self._parse(raw)

    def close(self) -> None:
        """The pack is over: anything half received is an error."""
        if self._head or self._file is not None:
            raise FilesError("the pack ended in the middle of a blob")

    def _expect(self, parse: Callable[[bytes], None], size: int) -> None:
        self._parse, self._want = parse, size

    def _on_frame(self, raw: bytes) -> None:
        name, length = FRAME.unpack(raw)
        self._digest, self._patched, self._left = name.hex(), bool(length & PATCHED), length & ~PATCHED
        if self._left > _MOST:
            raise FilesError("a blob of %d bytes is larger than any" % self._left)
        self._hash = hashlib.sha256()
        self._path = temporary(self.folder)
        if self._left >= PART_LEAST:
            self._path = os.path.join(self.folder, _PART + self._digest + os.path.basename(self._path))
        self._file = open(self._path, "xb")
        if self._patched:
            self._expect(self._on_base, 32)
        else:
            self._literal = self._left
            self._advance()

    def _on_base(self, raw: bytes) -> None:
        name = raw.hex()
        try:
            if name == self._digest:
                others = [path for _, path in parts(self.folder, [name]).get(name, ()) if path != self._path]
                self._base = open(others[0], "rb", buffering=0) if others else None
            if self._base is None and self._open_base is not None:
                self._base = self._open_base(name)
        except FileNotFoundError:
            pass
        if self._base is None:
            raise FilesError("blob %s is not here: no blocks of it can be used" % name[:12])
        self._base_size = os.fstat(self._base.fileno()).st_size
        self._advance()

    def _on_step(self, raw: bytes) -> None:
        offset, length = STEP.unpack(raw)
        if not 0 < length <= self._left:
            raise FilesError("a block of %d bytes does not fit into the %d that are left" % (length, self._left))
        if offset == LITERAL:
            self._literal = length
            return
        if offset + length > self._base_size:
            raise FilesError(
                "a block from byte %d to %d is not in a base of %d" % (offset, offset + length, self._base_size)
            )
        self._copy(offset, length)
        self._advance()

    def _copy(self, offset: int, length: int) -> None:
        assert self._base is not None
        piece = memoryview(
            bytearray(min(length, _PIECE))
        )  # one for all: a new one for each read costs more than the read
        while length:
            count = os.preadv(self._base.fileno(), [piece[:length]], offset)
            if not count:
                raise FilesError("the base of blob %s is shorter than it was" % self._digest[:12])
            offset, length = offset + count, length - count
            self._add(piece[:count])

    def _add(self, part: memoryview) -> None:
        assert self._file is not None
        write_sparse(self._file, part)
        self._hash.update(part)
        self._left -= len(part)

    def _advance(self) -> None:
        """After some bytes of a content: it is whole, or a patch goes on with its next step."""
        if self._left == 0:
            self._finish()
        elif self._patched:
            self._expect(self._on_step, STEP.size)

    def _finish(self) -> None:
        assert self._file is not None
        size = self._file.tell()
        if size >= HOLE:
            self._file.truncate()
        self._file.close()
        self._file = None
        self._close_base()
        self._expect(self._on_frame, FRAME.size)
        right = self._hash.hexdigest() == self._digest
        if right:
            self._publish(os.path.join(self.folder, self._digest))
        else:
            discard(self._path)
        if size >= PART_LEAST:
            for _, path in parts(self.folder, [self._digest]).get(self._digest, ()):
                discard(path)
        if not right:
            raise FilesError("a blob of %d bytes is not what its digest %s says" % (size, self._digest[:12]))
        self.count += 1
        self.size += size

    def _publish(self, path: str) -> None:
        try:
            os.rename(self._path, path)
        except (
            FileNotFoundError
        ):  # another sender of the same blob was faster, and removed what it did not need any more
            if not os.path.exists(path):
                raise FilesError("what had arrived of blob %s was removed meanwhile" % self._digest[:12]) from None

    def _close_base(self) -> None:
        if self._base is not None:
            self._base.close()
            self._base = None


def put_piece(folder: str, digest: str, offset: int, total: int, body: BinaryIO) -> bool:
    """Write one piece of a blob too large for one message; True when the blob is whole. Repeating a piece is harmless, and two may
    send the same blob at once: what they write is the same."""
    path = os.path.join(folder, digest)
    part = os.path.join(folder, _PART + digest)
    if offset and not os.path.exists(part) and os.path.exists(path):
        return True  # another sender was faster
    if offset and (not os.path.exists(part) or os.stat(part).st_size < offset):
        size, largest = parts(folder, [digest]).get(digest, [(0, "")])[0]
        if size < offset:
            raise FilesError("the pieces of blob %s before byte %d are not here" % (digest[:12], offset))
        os.rename(largest, part)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with space_on(folder), open(descriptor, "wb", buffering=0) as file:
        file.seek(offset)
        while True:
            data = body.read(CHUNK)
            if not data:
                break
            write_sparse(file, data)
        end = file.tell()
        if os.fstat(descriptor).st_size < end:  # it ends with a hole
            file.truncate()
    if end < total:
        return False
    with open(part, "rb") as file:
        right = digest_of(file) == digest
    if not right:
        discard(part)
        raise FilesError("a blob of %d bytes is not what its digest %s says" % (total, digest[:12]))
    os.rename(part, path)
    return True
