"""Which tree appears where on each host. The tree itself is a `TreeManifest` (`tree.py`); it and its contents travel as blobs."""

from typing import Literal

import msgspec


class FileTree(msgspec.Struct, frozen=True, kw_only=True):
    """A manifest (by the digest of its JSON, which is itself a blob) and its place on each host."""

    target: str
    manifest: str
    size: int = 0
    count: int = 0
    kind: Literal["workdir", "mount", "bucket"] = "mount"  # bucket: `target` is gs://..., and no host gets it
