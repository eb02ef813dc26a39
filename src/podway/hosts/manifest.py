"""Which tree appears where on each host. The tree itself is a `TreeManifest` (`tree.py`); it and its contents travel as blobs."""

from collections.abc import Sequence
from typing import Literal

import msgspec


class FileTree(msgspec.Struct, frozen=True, kw_only=True):
    """A manifest (by the digest of its JSON, which is itself a blob) and its place on each host."""

    target: str
    manifest: str
    size: int = 0
    count: int = 0
    kind: Literal["workdir", "mount", "bucket"] = "mount"  # bucket: `target` is gs://..., and no host gets it


def tree_names(trees: Sequence[FileTree]) -> str:
    """Where trees go, the first few by name."""
    kinds = [tree.target for tree in trees]
    return ", ".join(kinds[:3]) + (f" and {len(kinds) - 3} more" if len(kinds) > 3 else "")
