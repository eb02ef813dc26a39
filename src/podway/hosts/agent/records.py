"""What a host remembers about synced files, all of it below its state directory:

    incoming/<sha256>     blobs that arrived and wait to be moved into place
    manifests/<sha256>    the manifests that are applied somewhere, or were about to be
    applied/<dest>.json   one *record* per destination: what was put there, and how each file looked right after
    applied/<dest>.begun  the ids of manifests whose apply began there and has not ended

A record is written last, so a crash half-way leaves the old one; what has begun is noted before the first change, so that
the next apply also knows what a crashed one may have left behind.
There is no permanent second copy of any content: besides `incoming`, the files in place are where contents are found again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import time

from .manifests import Manifest, ManifestEntry, parse, quote, unquote
from .packs import FilesError, discard, is_digest, temporary
from .place import Place

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any, BinaryIO

    Fingerprint = tuple[int, int, int, int]

# Set for the agent of a simulated host, whose home is all it has: the rest of the file system is its user's machine.
CONFINED = "PODWAY_CONFINED"
# What an interrupted sync left is kept this long, so that it can be resumed.
LEFTOVERS_S = 24 * 3600
_APPLIED = re.compile(rb'\{"manifest":"([0-9a-f]{64})"')


def fingerprint_of(found: os.stat_result) -> Fingerprint:
    """What changes when somebody writes a file: looked at instead of its content."""
    return (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class AppliedRecord:
    """What stands at a destination: digest and fingerprint of each file; kind, mode and target of each directory and link."""

    def __init__(self, base: bytes, root: str, manifest: str = "") -> None:
        self.base = base
        self.root = root
        self.manifest = manifest
        self.files: dict[bytes, tuple[str, Fingerprint | None]] = {}
        self.others: dict[bytes, tuple[str, int, bytes]] = {}

    def encode(self) -> bytes:
        """As JSON, for the file."""
        fields = {
            "manifest": self.manifest,  # first, so that `SyncState.applied_id` need not read the rest
            "base": quote(self.base),
            "root": self.root,
            "files": {quote(path): [digest, fingerprint] for path, (digest, fingerprint) in self.files.items()},
            "others": {quote(path): [kind, mode, quote(to)] for path, (kind, mode, to) in self.others.items()},
        }
        return json.dumps(fields, separators=(",", ":")).encode("ascii")

    @staticmethod
    def decode(data: bytes) -> AppliedRecord:
        """From the file's JSON."""
        fields: dict[str, Any] = json.loads(data.decode("ascii"))
        record = AppliedRecord(unquote(fields["base"]), fields["root"], fields["manifest"])
        for path, (digest, fingerprint) in fields["files"].items():
            record.files[unquote(path)] = (
                digest,
                (fingerprint[0], fingerprint[1], fingerprint[2], fingerprint[3]) if fingerprint else None,
            )
        for path, (kind, mode, target) in fields["others"].items():
            record.others[unquote(path)] = (kind, mode, unquote(target))
        return record


class SyncState:
    """The folders of one host's state directory, and what is in them. Created for each request."""

    def __init__(self, state_dir: str) -> None:
        self.state_dir = os.path.abspath(state_dir)
        self.home = os.path.dirname(self.state_dir)
        self.incoming = os.path.join(self.state_dir, "incoming")
        self.manifests = os.path.join(self.state_dir, "manifests")
        self.applied = os.path.join(self.state_dir, "applied")
        self._records: dict[str, AppliedRecord | None] = {}
        for folder in (self.incoming, self.manifests, self.applied):
            os.makedirs(folder, 0o700, exist_ok=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """One change of this host's trees at a time."""
        with open(os.path.join(self.applied, ".lock"), "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def resolve(self, path: object) -> bytes:
        """A path as people write it, `~` being this host's home, as an absolute path. A final '/' stays."""
        if not isinstance(path, str) or "\0" in path or not path.startswith(("/", "~/", "~")):
            raise FilesError("%a is not a path on the host: it must begin with / or ~/" % (path,))
        if path.startswith("~") and path[1:2] not in ("", "/"):
            raise FilesError("%a is somebody else's home: only ~/ is known here" % path)
        full = (self.home + path[1:] if path.startswith("~") else path).encode("utf-8", "surrogateescape")
        if os.environ.get(CONFINED):
            home = os.path.realpath(os.fsencode(self.home))
            if not (os.path.realpath(full) + b"/").startswith(home + b"/"):
                raise FilesError(
                    "%a leads out of the home of this simulated host: begin it with ~/ and leave out .." % path
                )
        return os.path.normpath(full) + (b"/" if full.endswith(b"/") else b"")

    def blob(self, digest: str) -> str:
        """Where a blob arrives."""
        return os.path.join(self.incoming, digest)

    def has(self, digest: str) -> bool:
        """Whether the blob has arrived whole. One with a second name is not trusted: it is some file in place, linked
        here by an apply that crashed, and may have been written to since."""
        try:
            return os.stat(self.blob(digest)).st_nlink == 1
        except FileNotFoundError:
            return False

    def manifest(self, digest: object) -> Manifest | None:
        """The manifest of this id, if the host has it."""
        if not is_digest(digest):
            raise FilesError("%a is not the id of a manifest" % (digest,))
        for folder in (self.manifests, self.incoming):
            with contextlib.suppress(FileNotFoundError), open(os.path.join(folder, str(digest)), "rb") as file:
                data = file.read()
                if hashlib.sha256(data).hexdigest() == digest:
                    return parse(data)
        return None

    def keep_manifest(self, digest: str) -> None:
        """Out of `incoming`, so that it is there as long as a record names it."""
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.blob(digest), os.path.join(self.manifests, digest))

    def key(self, dest: bytes, root: str) -> str:
        """The name of a destination's record. A final '/' matters for one file only: it then goes *into* `dest`."""
        return hashlib.sha256(dest if root == "file" else dest.rstrip(b"/")).hexdigest()[:32]

    def record(self, key: str) -> AppliedRecord | None:
        """What was applied there last; None if nothing was, or if it cannot be read. Read once."""
        if key not in self._records:
            try:
                with open(os.path.join(self.applied, key + ".json"), "rb") as file:
                    self._records[key] = AppliedRecord.decode(file.read())
            except (FileNotFoundError, ValueError, KeyError, TypeError, IndexError):
                self._records[key] = None
        return self._records[key]

    def applied_id(self, key: str) -> str:
        """The id of the manifest that was applied there last, or ""."""
        try:
            with open(os.path.join(self.applied, key + ".json"), "rb") as file:
                found = _APPLIED.match(file.read(128))
        except FileNotFoundError:
            return ""
        return found[1].decode("ascii") if found else ""

    def begun(self, key: str) -> list[str]:
        """The ids of the manifests whose apply there began and did not end."""
        try:
            with open(os.path.join(self.applied, key + ".begun")) as file:
                return [line for line in file.read().split("\n") if is_digest(line)]
        except FileNotFoundError:
            return []

    def begin(self, key: str, digest: str) -> None:
        """Note that this manifest's apply begins: from here on it may leave things behind."""
        self._write(key + ".begun", "\n".join(dict.fromkeys([*self.begun(key), digest])).encode("ascii"))

    def end(self, key: str, record: AppliedRecord | None) -> None:
        """Note what stands there now; this is what makes an apply done."""
        if record is None:
            discard(os.path.join(self.applied, key + ".json"))
        else:
            self._write(key + ".json", record.encode())
        discard(os.path.join(self.applied, key + ".begun"))
        self._records[key] = record

    def _write(self, name: str, data: bytes) -> None:
        temp_name = temporary(self.applied)
        with open(temp_name, "xb") as file:
            file.write(data)
        os.rename(temp_name, os.path.join(self.applied, name))

    def _keys(self, kind: str) -> list[str]:
        return [name[: -len(kind)] for name in os.listdir(self.applied) if name.endswith(kind)]

    def records(self) -> list[AppliedRecord]:
        """All of them."""
        return [record for record in map(self.record, self._keys(".json")) if record is not None]

    def make_room(self) -> None:
        """The disk is full: give back what arrived and is not in place. It can be sent again."""
        for name in os.listdir(self.incoming):
            discard(os.path.join(self.incoming, name))

    def sweep(self, entries: Iterable[ManifestEntry]) -> None:
        """After an apply: drop what it did not need to move, manifests nobody names, and leftovers of long ago."""
        arrived = set(os.listdir(self.incoming))
        for entry in entries:
            if entry.kind == "file" and entry.sha256 in arrived:
                discard(self.blob(entry.sha256))
        named = {self.applied_id(key) for key in self._keys(".json")}
        named.update(digest for key in self._keys(".begun") for digest in self.begun(key))
        for folder in (self.incoming, self.manifests, self.applied):
            for name in os.listdir(folder):
                if name in named or name.endswith((".json", ".begun", ".lock")):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    path = os.path.join(folder, name)
                    if time.time() - os.lstat(path).st_mtime > LEFTOVERS_S:
                        os.unlink(path)


class Contents:
    """Where on this host a content can be found: among what arrived, or in a file that some record says holds it."""

    def __init__(self, store: SyncState) -> None:
        self._store = store
        self._index: dict[str, list[tuple[bytes, bytes, Fingerprint | None]]] | None = None

    def in_place(self, digest: str) -> Iterator[tuple[bytes, bytes]]:
        """(base, path) of the files in place that should hold it and that nobody seems to have touched."""
        if self._index is None:
            self._index = {}
            for record in self._store.records():
                for path, (found, fingerprint) in record.files.items():
                    self._index.setdefault(found, []).append((record.base, path, fingerprint))
        for base, path, fingerprint in self._index.get(digest, ()):
            with contextlib.suppress(OSError), Place(base) as place:
                found_now = place.stat(path)
                if found_now is not None and fingerprint == fingerprint_of(found_now):
                    yield base, path

    def size(self, digest: str) -> int | None:
        """How long it is; None if it is not here."""
        if self._store.has(digest):
            return os.stat(self._store.blob(digest)).st_size
        with contextlib.suppress(FileNotFoundError):
            return os.stat(os.path.join(self._store.manifests, digest)).st_size
        for base, path in self.in_place(digest):
            with Place(base) as place:
                found = place.stat(path)
                if found is not None:
                    return found.st_size
        return None

    def open(self, digest: str) -> BinaryIO:
        """Open it to read; FilesError if it is gone. The reader must check it: a file in place may be written to."""
        if self._store.has(digest):
            return open(self._store.blob(digest), "rb", buffering=0)
        with contextlib.suppress(FileNotFoundError):
            return open(os.path.join(self._store.manifests, digest), "rb", buffering=0)
        for base, path in self.in_place(digest):
            with contextlib.suppress(OSError), Place(base) as place:
                return place.open(path)
        raise FilesError("blob %s is not on this host" % digest[:12])
