"""The server's store of file contents: each kept once, named by its SHA-256, until nobody needs it.

Flow: 1. a client asks what is `missing` and uploads one pack with just that (`receiver`, or `put_pack`; the format is in
agent/packs.py): of a large content that it changed, the blocks that none of the old content's `blocks` are, and of one whose
upload broke off, what has not `arrived`. 2. `sync.py` sends contents on to hosts (`open`, `size`). 3. `gc` drops what no manifest
in use names.
A blob appears under its name only when it is whole and hashes to it. No content is held in memory.
"""

import contextlib
import functools
import hashlib
import io
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from podway.errors import UserError
from podway.hosts.agent import packs, receive
from podway.hosts.agent.blocks import LARGEST, BlockList

# A blob is safe from `gc` this long after somebody uploaded it or was told that it is here.
GRACE_S = 3600.0
BLOCK_LISTS = 32


class BlobStore:
    """Blobs in the directory `root`, creating it if needed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A changed file is asked for twice: by whoever sends it here, and to send it on to hosts. A list has some 100 KB.
        self._cut = functools.lru_cache(maxsize=BLOCK_LISTS)(self._cut_now)

    def missing(self, digests: Iterable[str]) -> list[str]:
        """Which of these are not here, each once. Those that are here stay for at least `GRACE_S`."""
        absent = []
        for digest in dict.fromkeys(digests):
            try:
                os.utime(self._path(digest))
            except FileNotFoundError:
                absent.append(digest)
        return absent

    def arrived(self, digests: Iterable[str]) -> dict[str, int]:
        """How many bytes came of those whose upload broke off."""
        return receive.arrived(str(self.root), digests)

    def blocks(self, digest: str) -> BlockList:
        """The blocks of a content, for the sender of a changed one: none if it is not here, or too large."""
        if self.missing([digest]) or (size := self.size(digest)) > LARGEST:
            return BlockList.of(io.BytesIO(), 0)
        return self._cut(digest, size)

    def _cut_now(self, digest: str, size: int) -> BlockList:
        with self.open(digest) as file:
            return BlockList.of(file, size)

    def receiver(self) -> receive.Receiver:
        """Takes an upload piece by piece: `with store.receiver() as r: r.feed(data) ...; r.close()`."""
        return receive.Receiver(str(self.root), self.open)

    def put_pack(self, stream: BinaryIO | Iterable[bytes]) -> int:
        """Take a whole pack; how many blobs it had. UserError if it is cut short or a blob is not what it claims."""
        pieces = stream if not hasattr(stream, "read") else iter(lambda: stream.read(packs.CHUNK), b"")
        try:
            with self.receiver() as receiver:
                for data in pieces:
                    receiver.feed(data)
                receiver.close()
        except packs.FilesError as error:
            raise UserError(f"the upload was refused: {error}", "run the command again") from None
        return receiver.count

    def put(self, data: bytes) -> str:
        """Keep these bytes; their digest."""
        digest = hashlib.sha256(data).hexdigest()
        if self.missing([digest]):
            self.put_pack([packs.FRAME.pack(bytes.fromhex(digest), len(data)), data])
        return digest

    def adopt(self, path: Path) -> tuple[str, int]:
        """Take a whole file that lies in `root` for one of ours: its digest and size. It moves."""
        with path.open("rb") as file:
            digest = packs.digest_of(file)
        size = path.stat().st_size
        path.replace(self._path(digest))
        return digest, size

    def size(self, digest: str) -> int:
        """The length of a blob."""
        try:
            return self._path(digest).stat().st_size
        except FileNotFoundError:
            raise self._absent(digest) from None

    def open(self, digest: str) -> BinaryIO:
        """Open a blob to read."""
        try:
            return self._path(digest).open("rb", buffering=0)
        except FileNotFoundError:
            raise self._absent(digest) from None

    def read(self, digest: str) -> bytes:
        """A small blob whole: a manifest."""
        with self.open(digest) as file:
            return file.read()

    def pack(self, digests: Iterable[str]) -> Iterator[bytes]:
        """The pack of these blobs, in pieces."""
        return iter(packs.PackStream([(digest, self.size(digest)) for digest in digests], self.open))

    def verify(self, digest: str) -> bool:
        """Whether a blob still is what its name says; a damaged one (a disk that lost power) is removed."""
        with self.open(digest) as file:
            if packs.digest_of(file) == digest:
                return True
        packs.discard(str(self._path(digest)))
        return False

    def gc(self, keep: Iterable[str], *, grace_s: float = GRACE_S) -> tuple[int, int]:
        """Remove blobs not in `keep`, and parts of uploads that broke off, that are older than the grace; count and bytes."""
        kept, before = set(keep), time.time() - grace_s
        count = size = 0
        with os.scandir(self.root) as items:
            for item in items:
                with contextlib.suppress(FileNotFoundError):
                    found = item.stat()
                    if item.name not in kept and found.st_mtime <= before:
                        packs.discard(item.path)
                        count, size = count + 1, size + found.st_size
        return count, size

    def _path(self, digest: str) -> Path:
        if not packs.is_digest(digest):
            raise UserError(f"{digest!r} is not a SHA-256 digest", "send 64 hex digits, lower case")
        return self.root / digest

    def _absent(self, digest: str) -> UserError:
        return UserError(
            f"the contents with digest {digest[:12]} were never uploaded", "run the command again", status=409
        )
