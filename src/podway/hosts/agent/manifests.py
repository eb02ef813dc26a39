"""What a host believes of a manifest: nothing, until every path of it is proven to stay inside its tree.

A manifest is the JSON that `podway.hosts.tree` writes: {"root": "dir"|"file", "entries": [{"path", "kind", "mode", "size",
"sha256", "target"}, ...]}. Its id is the SHA-256 of those bytes, so it travels and is checked like any other blob.

Names on disk are bytes; JSON has only text. `quote` writes bytes as text: UTF-8 stays as it is, a byte that is not UTF-8
becomes \\xNN, a backslash is doubled. Each name has exactly one such text, and `unquote` gives the bytes back.

Paths here are bytes, relative, '/' between names. `parse` refuses absolute paths, '.', '..', empty names, names twice, and
any path whose parent is not a directory *of the same manifest*: so no link of a manifest can lead another entry astray.
"""

from __future__ import annotations

import json
import re

from .packs import FilesError, is_digest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_ESCAPE = re.compile(rb"\\(\\|x([0-9a-f]{2}))?")
MODES = 0o777


def quote(name: bytes) -> str:
    """A name on disk as text that JSON can carry."""
    return name.replace(b"\\", b"\\\\").decode("utf-8", "backslashreplace")


def unquote(text: str) -> bytes:
    """The name on disk that `quote` wrote as `text`."""
    try:
        name = text.encode("utf-8")
    except UnicodeEncodeError:
        raise FilesError("%a is not the text of a file name" % text) from None
    return _ESCAPE.sub(_unescape, name) if b"\\" in name else name


def _unescape(match: re.Match[bytes]) -> bytes:
    if match[2]:
        return bytes([int(match[2], 16)])
    if match[1]:
        return b"\\"
    raise FilesError("%a has a lone backslash" % match.string.decode("utf-8"))


class ManifestEntry:
    """One path of a tree: a file (mode, size, sha256), a dir (mode), or a link (target)."""

    __slots__ = ("kind", "mode", "path", "sha256", "size", "target")

    def __init__(
        self, path: bytes, kind: str, mode: int = 0, size: int = 0, sha256: str = "", target: bytes = b""
    ) -> None:
        self.path = path
        self.kind = kind
        self.mode = mode
        self.size = size
        self.sha256 = sha256
        self.target = target


class Manifest:
    """A proven manifest: `root` says whether it is a directory's or one file's; parents come before children."""

    def __init__(self, root: str, entries: list[ManifestEntry]) -> None:
        self.root = root
        self.entries = entries


def parse(data: bytes) -> Manifest:
    """Read and prove a manifest, or say what is wrong with it."""
    try:
        fields = json.loads(data.decode("utf-8"))
        root = fields.get("root", "dir")
        entries = [_entry(item) for item in fields["entries"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FilesError("not a manifest: %s" % str(error)[:200]) from None
    if root not in ("dir", "file"):
        raise FilesError("not a manifest: its root is neither dir nor file")
    if root == "file" and [(entry.kind, b"/" in entry.path) for entry in entries] != [("file", False)]:
        raise FilesError("not a manifest: the manifest of one file must have one file")
    # By names and not by text: so a directory is followed by what is in it ('a', 'a/b', then 'a-b').
    entries.sort(key=lambda entry: entry.path.split(b"/"))
    _prove(entries)
    return Manifest(root, entries)


def _entry(item: dict[str, Any]) -> ManifestEntry:
    path, kind = unquote(item["path"]), item["kind"]
    mode, size, sha256 = item.get("mode", 0), item.get("size", 0), item.get("sha256", "")
    target = unquote(item.get("target", ""))
    if kind not in ("file", "dir", "link"):
        raise FilesError("%s is neither file, dir nor link" % quote(path))
    if type(mode) is not int or mode & ~MODES:
        raise FilesError("%s has an impossible mode" % quote(path))
    if kind == "file" and not (is_digest(sha256) and type(size) is int and size >= 0):
        raise FilesError("%s has no proper size and digest" % quote(path))
    if kind == "link" and (not target or b"\0" in target):
        raise FilesError("%s links to no possible path" % quote(path))
    return ManifestEntry(path, kind, mode, size, sha256, target)


def _prove(entries: list[ManifestEntry]) -> None:
    folders = {b""}
    last = None
    for entry in entries:
        parent, _, name = entry.path.rpartition(b"/")
        if entry.path.startswith(b"/") or b"\0" in entry.path or name in (b"", b".", b".."):
            raise FilesError("%s is not a path inside a tree" % quote(entry.path))
        if parent not in folders:
            raise FilesError("%s lies in no directory of its manifest" % quote(entry.path))
        if entry.path == last:
            raise FilesError("%s is there twice" % quote(entry.path))
        if entry.kind == "dir":
            folders.add(entry.path)
        last = entry.path
