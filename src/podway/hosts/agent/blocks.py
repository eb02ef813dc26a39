"""Contents by their blocks: of a large file that was changed in a few places, only the changed blocks travel.

Flow: 1. `cut` divides a content where its own bytes say so, so that an insertion moves the blocks behind it and changes none of
them. 2. `BlockList` is what the receiver has: the blocks of some *base*, a content that is already there. 3. `patch` writes a new
content as blocks of that base and the bytes that are in none of them. 4. `receive.py` puts it together again, and believes it only
if the whole has the digest it should have.

A patch travels as a frame of a pack (packs.py) whose length has the bit `PATCHED` set. After the frame's head come

    32 bytes   SHA-256 of the base; the content's own digest means what has arrived of it before, when an upload broke off
    then, until the content is complete:
     8 bytes   offset in the base; or LITERAL
     4 bytes   how many bytes, at least one
     n bytes   these, after LITERAL only
"""

from __future__ import annotations

import hashlib
import re
import struct
import zlib

from .packs import CHUNK, FRAME, PATCHED, FilesError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from .wire import Readable

STEP = struct.Struct(">QI")
LITERAL = (1 << 64) - 1
_ROW = struct.Struct(">16sI")
# A block ends after one of these bytes (a line of text, an object of JSON; of other data each byte is as likely), if the checksum of
# the bytes before it says so too. Python looks for them at the speed of C.
_CANDIDATE = re.compile(rb"[\n}]")
_ONE_IN = 128  # bytes between two candidates, about
_WINDOW = 32
_PAUSE = 16  # after a candidate that was none, so that bytes made to be candidates cost little
SMALLEST_MEAN, LARGEST_MEAN = 1 << 10, 1 << 20
_ABOUT = 2048  # blocks a list has at most, about
LARGEST = 256 << 20  # to cut a larger content takes longer than is worth it: about 100 MB are cut in a second


def mean_for(size: int) -> int:
    """The length of a block, on average, for a content of this size: a power of two."""
    return min(LARGEST_MEAN, max(SMALLEST_MEAN, 1 << max(0, size // _ABOUT - 1).bit_length()))


def cut(stream: Readable, mean: int) -> Iterator[bytes]:
    """The blocks of a stream, in order; together they are the stream."""
    buffer, at, ended = b"", 0, False
    while True:
        while len(buffer) - at < mean * 4 and not ended:
            more = stream.read(CHUNK)
            ended = not more
            buffer, at = buffer[at:] + more, 0
        if at == len(buffer):
            return
        end = _boundary(buffer, at, mean)
        yield buffer[at:end]
        at = end


def _boundary(buffer: bytes, at: int, mean: int) -> int:
    here, stop, mask = at + mean // 4, min(at + mean * 4, len(buffer)), mean // _ONE_IN - 1
    while True:
        found = _CANDIDATE.search(buffer, here, stop)
        if found is None:
            return stop
        end = found.end()
        if zlib.crc32(buffer[end - _WINDOW : end]) & mask == mask:
            return end
        here = end + _PAUSE


def _name(block: bytes) -> bytes:
    # Half a digest: what two blocks that share one would make of a content is seen at its end.
    return hashlib.sha256(block).digest()[:16]


class BlockList:
    """The blocks of a base: where in it each is found."""

    def __init__(self, mean: int, rows: bytes) -> None:
        if not SMALLEST_MEAN <= mean <= LARGEST_MEAN or mean & (mean - 1) or len(rows) % _ROW.size:
            raise FilesError("not a list of blocks")
        self.mean = mean
        self.rows = rows
        self._found: dict[bytes, tuple[int, int]] = {}
        offset = 0
        for name, length in _ROW.iter_unpack(rows):
            self._found.setdefault(name, (offset, length))
            offset += length

    @staticmethod
    def of(stream: Readable, size: int) -> BlockList:
        """The list of a content of this size."""
        mean = mean_for(size)
        return BlockList(mean, b"".join(_ROW.pack(_name(block), len(block)) for block in cut(stream, mean)))

    def offset(self, block: bytes) -> int:
        """Where in the base this block is; LITERAL if it is not there."""
        offset, length = self._found.get(_name(block), (LITERAL, 0))
        return offset if length == len(block) else LITERAL


def patch(stream: Readable, digest: str, size: int, base: str, blocks: BlockList) -> Iterator[bytes]:
    """A content as a frame of a pack: blocks of the base, and what is in none of them. In pieces of about `CHUNK` at most."""
    yield head(digest, size, base)
    start, end, fresh = 0, 0, bytearray()  # the run of blocks that is being collected: of the base, or of fresh bytes
    for block in cut(stream, blocks.mean):
        offset = blocks.offset(block)
        if offset == LITERAL:
            yield from copied(start, end)
            start = end = 0
            fresh += block
            if len(fresh) >= CHUNK:
                yield literal(fresh)
                fresh = bytearray()
            continue
        if fresh:
            yield literal(fresh)
            fresh = bytearray()
        if offset != end or start == end:
            yield from copied(start, end)
            start = offset
        end = offset + len(block)
    yield from copied(start, end)
    if fresh:
        yield literal(fresh)


def rest(stream: Readable, digest: str, size: int, arrived: int) -> Iterator[bytes]:
    """A content of which the first `arrived` bytes are there, as a frame of a pack."""
    yield head(digest, size, digest)
    yield from copied(0, arrived)
    at = 0
    while at < size:
        data = stream.read(min(CHUNK, size - at))
        if not data:
            raise FilesError("blob %s is shorter than it was" % digest[:12])
        at += len(data)
        if at > arrived:
            yield literal(data[max(0, arrived - at + len(data)) :])


def head(digest: str, size: int, base: str) -> bytes:
    """How the frame of a patch begins."""
    return FRAME.pack(bytes.fromhex(digest), size | PATCHED) + bytes.fromhex(base)


def literal(data: bytes | bytearray) -> bytes:
    """Bytes that are in no block of the base."""
    return STEP.pack(LITERAL, len(data)) + bytes(data)


def copied(start: int, end: int) -> Iterator[bytes]:
    """Bytes of the base; a step has four bytes for their number."""
    while start < end:
        length = min(end - start, 1 << 30)
        yield STEP.pack(start, length)
        start += length
