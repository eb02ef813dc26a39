"""Objects of a store into the server's contents: each version of each object once, so that hosts get them as any other files.

A store (`gcs.py`, `s3.py`, `hub.py`) lists what lies below an address as `RemoteObject`s; `Downloads.tree` fetches those whose version was
not fetched before, and makes a tree of files of them. What was fetched is remembered in a file for each bucket.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import quote

import msgspec

from podway.decoding import from_json
from podway.errors import UserError
from podway.files import write_atomically
from podway.hosts.blobs import BlobStore
from podway.hosts.tree import TreeEntry, TreeManifest
from podway.storage.address import Address

AT_ONCE = 8

T = TypeVar("T")
Item = TypeVar("Item")


class RemoteObject(msgspec.Struct, frozen=True):
    """An object by its full name; the same version has the same content. `fetch` writes it to a path."""

    name: str
    version: int | str
    fetch: Callable[[Path], None]


class ObjectStore(Protocol):
    """Where objects are copied from."""

    def objects(self, address: Address) -> list[RemoteObject]:
        """What lies at or below the address."""


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """What was downloaded before."""

    version: int | str
    sha256: str
    size: int


class Downloads:
    """What was downloaded, remembered in files of the directory `cache`."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache

    def tree(self, store: ObjectStore, address: Address, blobs: BlobStore) -> TreeManifest:
        """What lies below the address, as a tree whose contents are in `blobs`; one object by its full name is one file."""
        objects = _below(address, store.objects(address))
        known = self._known(address)
        lacking = [one for one in objects if not _has(blobs, known.get(one.name), one.version)]

        def fetch(one: RemoteObject) -> tuple[str, Kept]:
            return one.name, Kept(one.version, *_fetched(one, blobs))

        try:
            for name, kept in in_threads(fetch, lacking):
                known[name] = kept
        finally:
            self._remember(address, known)
        if [one.name for one in objects] == [address.prefix]:
            only = known[address.prefix]
            entry = TreeEntry(
                path=Path(address.prefix).name, kind="file", mode=0o644, size=only.size, sha256=only.sha256
            )
            return TreeManifest(root="file", entries=(entry,))
        return tree_of(address, {one.name: known[one.name] for one in objects})

    def _file(self, address: Address) -> Path:
        scheme = "" if address.scheme == "gs" else f"{address.scheme}-"
        return self._cache / f"{scheme}{quote(address.bucket, safe='@')}.json"

    def _known(self, address: Address) -> dict[str, Kept]:
        try:
            return from_json(self._file(address).read_bytes(), dict[str, Kept])
        except (OSError, msgspec.DecodeError):
            return {}

    def _remember(self, address: Address, known: dict[str, Kept]) -> None:
        self._cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(self._file(address), msgspec.json.encode(known))


def _below(address: Address, objects: Sequence[RemoteObject]) -> list[RemoteObject]:
    found = [one for one in objects if not one.name.endswith("/")]
    exact = [one for one in found if one.name == address.prefix]
    below = [one for one in found if not address.prefix or one.name.startswith(f"{address.prefix}/")]
    if not exact and not below:
        raise UserError(f"{address}: nothing is there", "correct the address, or upload it first", status=404)
    return below or exact


def tree_of(address: Address, objects: dict[str, Kept]) -> TreeManifest:
    """The objects as a tree of files; a name that no file can have is refused."""
    entries: dict[str, TreeEntry] = {}
    for name, kept in sorted(objects.items()):
        path = name[len(address.prefix) + 1 :] if address.prefix else name
        parts = path.split("/")
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise UserError(
                f"{address.scheme}://{address.bucket}/{name} cannot be a file: its path has an empty, '.' or '..' part",
                "copy it to another name, or mount the bucket instead (mode: MOUNT)",
            )
        for depth in range(1, len(parts)):
            folder = "/".join(parts[:depth])
            entries.setdefault(folder, TreeEntry(path=folder, kind="dir", mode=0o755))
            _one_kind(entries[folder], "dir", address)
        made = TreeEntry(path=path, kind="file", mode=0o644, size=kept.size, sha256=kept.sha256)
        _one_kind(entries.setdefault(path, made), "file", address)
    return TreeManifest(root="dir", entries=tuple(entries.values()))


def _one_kind(entry: TreeEntry, kind: str, address: Address) -> None:
    if entry.kind != kind:
        raise UserError(
            f"{address}: {entry.path} is an object and a folder of others, which no directory can have",
            "rename one of them, or mount the bucket instead (mode: MOUNT)",
        )


def _has(blobs: BlobStore, kept: Kept | None, version: int | str) -> bool:
    return kept is not None and kept.version == version and not blobs.missing([kept.sha256])


def _fetched(one: RemoteObject, blobs: BlobStore) -> tuple[str, int]:
    """The object among the contents: its digest and size."""
    handle, path = tempfile.mkstemp(prefix=".download-", dir=blobs.root)
    os.close(handle)
    try:
        one.fetch(Path(path))
        return blobs.adopt(Path(path))
    finally:
        Path(path).unlink(missing_ok=True)


def in_threads(work: Callable[[Item], T], items: Sequence[Item]) -> list[T]:
    """A few at a time; the first failure is raised, and what had not begun is left."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
