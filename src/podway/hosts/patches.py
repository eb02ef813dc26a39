"""What brings a host from the tree that it has to a new one, as one small pack: the new manifest and the changed contents, each by
the blocks that changed (agent/blocks.py).

The server has the contents of both trees, so it can write the pack without asking the host more than which manifest it has. A host on
which a job has written to one of the files refuses the pack, and is given whole contents as if it had no tree at all.
"""

from collections.abc import Iterator

import msgspec

from podway.decoding import from_json
from podway.errors import UserError
from podway.hosts.agent.blocks import LARGEST, patch
from podway.hosts.blobs import BlobStore
from podway.hosts.tree import TreeManifest

# A smaller content is sent whole: its blocks would hardly be less.
PATCH_LEAST = 16 << 10


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
    blocks = blobs.blocks(base) if base and PATCH_LEAST <= size <= LARGEST else None
    if blocks is not None and blocks.rows:
        with blobs.open(digest) as file:
            yield from patch(file, digest, size, base, blocks)
    elif size > most:
        yield bytes(most + 1)  # too long, whatever it is
    else:
        yield from blobs.pack([digest])
