"""What brings a host from the tree that it has to a new one, as one small pack: the new manifest and the changed contents, each by
the blocks that changed (agent/blocks.py).

The server has the contents of both trees, so it can write the pack without asking the host more than which manifest it has. A host on
which a job has written to one of the files refuses the pack, and is given whole contents as if it had no tree at all.
"""

from collections.abc import Callable, Iterator
from typing import BinaryIO

import msgspec

from podway.decoding import from_json
from podway.errors import UserError
from podway.hosts.agent.blocks import LARGEST, copied, head, literal, patch
from podway.hosts.blobs import BlobStore
from podway.hosts.tree import TreeManifest

# A smaller content is sent whole: its blocks would hardly be less.
PATCH_LEAST = 16 << 10
# Most changes are in one place. The server has both contents, and to compare them takes a tenth of the time that cutting them takes.
LOOK, LOOK_NEAR = 256 << 10, 4 << 10
NEAR = 64 << 10  # at most so many bytes between the first and the last change
NEAR_LEAST = 64 * NEAR  # a smaller content is cut: that takes a moment, and its patch is smaller


def patch_pack(blobs: BlobStore, old: str, manifest: TreeManifest, new: str, most: int) -> bytes | None:
    """The pack, or None if it would be longer than `most`, or if the server does not have the old tree any more."""
    try:
        former = from_json(blobs.read(old), TreeManifest)
    except (UserError, msgspec.DecodeError):
        return None
    bases = {entry.path: entry.sha256 for entry in former.entries if entry.kind == "file"}
    there = set(bases.values())
    wanted = {new: (old, blobs.size(new))}
    for entry in manifest.entries:
        if entry.kind == "file" and entry.sha256 not in there:
            wanted.setdefault(entry.sha256, (bases.get(entry.path, ""), entry.size))
    pack = bytearray()
    for digest, (base, size) in wanted.items():
        for piece in _frame(blobs, digest, size, base, most - len(pack)):
            pack += piece
            if len(pack) > most:
                return None
    return bytes(pack)


def _frame(blobs: BlobStore, digest: str, size: int, base: str, most: int) -> Iterator[bytes]:
    if base and PATCH_LEAST <= size <= LARGEST and not blobs.missing([base]):
        with blobs.open(base) as old, blobs.open(digest) as new:
            near = _near(old, base, blobs.size(base), new, digest, size) if size >= NEAR_LEAST else None
            if near is not None:
                yield near
            else:
                new.seek(0)
                yield from patch(new, digest, size, base, blobs.blocks(base))
    elif size > most:
        yield bytes(most + 1)  # too long, whatever it is
    else:
        yield from blobs.pack([digest])


def _near(old: BinaryIO, base: str, old_size: int, new: BinaryIO, digest: str, size: int) -> bytes | None:
    """The frame of a content that differs from its base in one place; None if there are several."""
    most = min(old_size, size)
    before = _same(old, new, lambda at: (at, at), most)
    after = _same(old, new, lambda at: (old_size - at, size - at), most - before, back=True)
    if size - before - after > NEAR:
        return None
    new.seek(before)
    changed = new.read(size - before - after)
    steps = [*copied(0, before), *([literal(changed)] if changed else []), *copied(old_size - after, old_size)]
    return head(digest, size, base) + b"".join(steps)


def _same(old: BinaryIO, new: BinaryIO, places: Callable[[int], tuple[int, int]], most: int, back: bool = False) -> int:
    """How many bytes are the same from the beginning, or back from the end: in whole steps, which is near enough."""
    done = 0
    for step in (LOOK, LOOK_NEAR):
        while done + step <= most:
            for file, place in zip((old, new), places(done + step if back else done), strict=True):
                file.seek(place)
            if old.read(step) != new.read(step):
                break
            done += step
    return done
