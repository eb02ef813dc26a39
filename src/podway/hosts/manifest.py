"""What a synced tree is made of, as the client, the server and the hosts all see it.

A `Manifest` lists every path of a tree with its content digest. A `FileTree` says where on each host a manifest appears.
Both travel as JSON; the contents travel beside them as packs of blobs (see `blobs.py`).
"""

from typing import Literal

import msgspec


class FileTree(msgspec.Struct, frozen=True, kw_only=True):
    """A manifest (by the digest of its JSON, which is itself a blob) and its place on each host."""

    target: str
    manifest: str
    size: int = 0
    count: int = 0
    kind: Literal["workdir", "mount"] = "mount"
