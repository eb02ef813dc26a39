"""Bring a directory of this host to a manifest: content, modes and links, with deletions, and nothing else touched.

Flow: 1. `survey` compares each entry with what stands there; a file whose fingerprint is as recorded is not read again.
2. `stage` finds every content that is needed (arrived, or in some file in place) and checks it; if one is missing the
caller is told which, and nothing has changed. 3. It is noted that the apply has begun. 4. What the last manifest had
and this one has not is deleted; files that jobs made are not in any manifest, so they stay, unless they stand in the way.
5. Each wrong entry is replaced in one step. 6. The record is written: only now is the manifest applied.
A crash at any point leaves whole files and a record that makes the next apply finish the work.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time

from .manifests import Manifest, ManifestEntry, quote
from .packs import FilesError, digest_of, discard, space_on, temporary
from .place import FRESH, Place, copy_to
from .records import AppliedRecord, Contents, SyncState, fingerprint_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from .records import Fingerprint

# The longest tick of the kernel's clock for file times: 10 ms at 100 Hz (man 7 time, "The software clock").
TICK_NS = 10_000_000


class Survey:
    """What an apply has to do: `right` files (with fingerprints), `wrong` entries to replace, `remode` files to chmod."""

    def __init__(self) -> None:
        self.right: dict[bytes, Fingerprint] = {}
        self.wrong: list[ManifestEntry] = []
        self.remode: list[ManifestEntry] = []


def survey(place: Place | None, entries: list[ManifestEntry], record: AppliedRecord | None) -> Survey:
    """Compare a tree with what it should be; no tree is a wrong tree."""
    result = Survey()
    files = record.files if record else {}
    for entry in entries:
        found = place.stat(entry.path) if place else None
        if found is None or place is None:
            result.wrong.append(entry)
        elif entry.kind == "dir":
            if not stat.S_ISDIR(found.st_mode) or stat.S_IMODE(found.st_mode) != entry.mode:
                result.wrong.append(entry)
        elif entry.kind == "link":
            if place.link_target(entry.path) != entry.target:
                result.wrong.append(entry)
        elif _holds(place, entry, found, files.get(entry.path)):
            result.right[entry.path] = fingerprint_of(found)
            if stat.S_IMODE(found.st_mode) != entry.mode:
                result.remode.append(entry)
        else:
            result.wrong.append(entry)
    return result


def _holds(
    place: Place, entry: ManifestEntry, found: os.stat_result, known: tuple[str, Fingerprint | None] | None
) -> bool:
    if not stat.S_ISREG(found.st_mode) or found.st_size != entry.size:
        return False
    if known is not None and known[1] == fingerprint_of(found):
        return known[0] == entry.sha256  # it is as the last apply left it
    return place.digest(entry.path) == entry.sha256


def ground(store: SyncState, dest: object, manifest: Manifest) -> tuple[bytes, list[ManifestEntry]]:
    """The directory a manifest goes to, and its entries there: one file becomes an entry of its parent directory."""
    path, entries = store.resolve(dest), manifest.entries
    if manifest.root == "file":
        path += entries[0].path if path.endswith(b"/") else b""
        only, (path, _, name) = entries[0], path.rpartition(b"/")
        entries = [ManifestEntry(name, "file", only.mode, only.size, only.sha256)]
    base = path.rstrip(b"/") or b"/"
    _keep_out_of(os.path.realpath(os.fsencode(store.state_dir)), os.path.realpath(base), entries)
    return base, entries


def _keep_out_of(state: bytes, base: bytes, entries: list[ManifestEntry]) -> None:
    """Podway's own state on the host must not be written over by somebody's files."""
    if (base + b"/").startswith(state + b"/"):
        raise FilesError("%s holds podway's own state: choose another destination" % quote(base))
    inner = base.rstrip(b"/") + b"/"
    if not state.startswith(inner):
        return
    own = state[len(inner) :]
    for entry in entries:
        above = own.startswith(entry.path + b"/") and entry.kind != "dir"
        if above or entry.path == own or entry.path.startswith(own + b"/"):
            raise FilesError("%s would overwrite podway's own state on the host" % quote(entry.path))


def _look(base: bytes, entries: list[ManifestEntry], record: AppliedRecord | None) -> Survey:
    try:
        with Place(base) as place:
            return survey(place, entries, record)
    except (FileNotFoundError, NotADirectoryError):
        return survey(None, entries, None)


def needed(store: SyncState, dest: object, manifest: Manifest) -> list[str]:
    """The digests of the contents that must still arrive before the manifest can be applied."""
    base, entries = ground(store, dest, manifest)
    record = store.record(store.key(store.resolve(dest), manifest.root))
    wrong = _look(base, entries, record if record and record.base == base else None).wrong
    contents = Contents(store)
    digests = dict.fromkeys(entry.sha256 for entry in wrong if entry.kind == "file")
    return [digest for digest in digests if contents.size(digest) is None]


def in_place(store: SyncState, dest: object, digest: object) -> bool:
    """Whether `dest` is exactly as this manifest's apply left it; the manifest itself is not even read."""
    path = store.resolve(dest)
    for key in {store.key(path, "dir"), store.key(path, "file")}:
        record = store.record(key) if store.applied_id(key) == digest and not store.begun(key) else None
        if record is not None:
            try:
                with Place(record.base) as place:
                    return _untouched(place, record)
            except (FileNotFoundError, NotADirectoryError):
                return False
    return False


def _untouched(place: Place, record: AppliedRecord) -> bool:
    for path, (kind, mode, target) in record.others.items():
        found = place.stat(path)
        if kind == "link" and place.link_target(path) != target:
            return False
        if kind == "dir" and (found is None or found.st_mode != stat.S_IFDIR | mode):
            return False
    for path, (_, fingerprint) in record.files.items():
        found = place.stat(path)
        if (
            found is None or fingerprint is None or fingerprint != fingerprint_of(found)
        ):  # the fingerprint has the time of the last chmod, too
            return False
    return True


class _Staged:
    """Files that wait in `incoming`, each ready to be renamed to its path: content checked, mode set."""

    def __init__(self) -> None:
        self.files: dict[bytes, tuple[str, int]] = {}
        self.missing: list[str] = []

    def add(self, entry: ManifestEntry, path: str) -> None:
        os.chmod(path, entry.mode)
        self.files[entry.path] = (path, os.stat(path).st_mtime_ns)


def _stage(store: SyncState, base: bytes, found: Survey) -> _Staged:
    staged, contents = _Staged(), Contents(store)
    wanted: dict[str, list[ManifestEntry]] = {}
    for entry in found.wrong:
        if entry.kind == "file":
            wanted.setdefault(entry.sha256, []).append(entry)
    for digest in wanted:
        if not store.has(digest) and not _bring(store, contents, digest, base, found):
            staged.missing.append(digest)
    if staged.missing:
        return staged
    for digest, entries in wanted.items():
        for entry in entries[1:]:  # more files of one content: each needs its own
            path = temporary(store.incoming)
            _copy(store.blob(digest), path)
            staged.add(entry, path)
        staged.add(entries[0], store.blob(digest))
    return staged


def _bring(store: SyncState, contents: Contents, digest: str, base: bytes, found: Survey) -> bool:
    """Make a blob of a file in place: a renamed source file need not travel again. Whether there was one."""
    for folder, path in contents.in_place(digest):
        temp_name = temporary(store.incoming)
        try:
            with Place(folder) as place:
                # A file that this apply removes gives its content away; any other keeps its own.
                if folder == base and path not in found.right:
                    _link(place, path, temp_name)
                else:
                    with place.open(path) as file:
                        copy_to(file, os.open(temp_name, FRESH, 0o600), 0o600)
            with open(temp_name, "rb", buffering=0) as file:
                if digest_of(file) == digest:
                    os.rename(temp_name, store.blob(digest))
                    return True
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        finally:
            discard(temp_name)
    return False


def _link(place: Place, path: bytes, target: str) -> None:
    folder, name = place.parent(path)
    try:
        os.link(name, target, src_dir_fd=folder, follow_symlinks=False)
    except OSError:  # another disk, or one without hard links
        with place.open(path) as file:
            copy_to(file, os.open(target, FRESH, 0o600), 0o600)


def _copy(source: str, target: str) -> None:
    with open(source, "rb", buffering=0) as file:
        copy_to(file, os.open(target, FRESH, 0o600), 0o600)


def apply(store: SyncState, dest: object, digest: str, manifest: Manifest) -> dict[str, Any]:
    """Bring `dest` to the manifest of id `digest`; answers what was done, or `missing` contents and nothing was done."""
    if in_place(store, dest, digest):
        return {"applied": True, "written": 0, "deleted": 0}
    base, entries = ground(store, dest, manifest)
    key = store.key(store.resolve(dest), manifest.root)
    record = before = store.record(key)
    if record is not None and (record.base, record.root) != (base, manifest.root):
        record = None  # one file stood here and now a directory shall, or the reverse
    found = _look(base, entries, record)
    with space_on(store.incoming):
        staged = _stage(store, base, found)
    if staged.missing:
        return {"applied": False, "missing": staged.missing}
    if before is not None and record is None:
        _withdraw(store, key, before)
    _make_base(base, manifest.root, entries)
    with Place(base) as place:
        begun = store.begun(key)
        to_delete = _to_delete(store, place, entries, record, begun if manifest.root == "dir" else [])
        store.keep_manifest(digest)
        store.begin(key, digest)
        temp_name = b".podway.%s." % key.encode("ascii")
        _clean(store, place, begun, temp_name)
        done = {"applied": True, "written": len(found.wrong) + len(found.remode), "deleted": _delete(place, to_delete)}
        with space_on(quote(base)):
            _write(place, found, staged, temp_name)
        store.end(key, _recorded(place, AppliedRecord(base, manifest.root, digest), entries, found, staged))
    store.sweep(entries)
    return done


def _make_base(base: bytes, root: str, entries: list[ManifestEntry]) -> None:
    try:
        _make_folders(base)
    except (FileExistsError, NotADirectoryError):
        raise FilesError("%s is a file on the host: a directory cannot take its place" % quote(base)) from None
    path = os.path.join(base, entries[0].path) if root == "file" else b""
    if path and os.path.isdir(path) and os.listdir(path):
        raise FilesError("%s is a directory on the host: a file cannot take its place" % quote(path))


def _make_folders(path: bytes) -> None:
    if not os.path.isdir(path):
        _make_folders(os.path.dirname(path))
        os.mkdir(path)
        os.chmod(path, 0o755)  # the agent's own umask keeps its state private; these are the user's


def _to_delete(
    store: SyncState, place: Place, entries: list[ManifestEntry], record: AppliedRecord | None, begun: list[str]
) -> dict[bytes, str]:
    """Path and kind of what earlier manifests put here and this one has not."""
    kept = {entry.path for entry in entries}
    to_delete: dict[bytes, str] = {}
    if record is not None:
        to_delete.update(dict.fromkeys(record.files, "file"))
        to_delete.update({path: other[0] for path, other in record.others.items()})
    for digest in begun:
        manifest = store.manifest(digest)
        # What a crashed apply meant to write may be a job's own file by now: only what is exactly its work goes.
        for entry in manifest.entries if manifest and manifest.root == "dir" else ():
            if entry.path not in kept and _is(place, entry):
                to_delete[entry.path] = entry.kind
    return {path: kind for path, kind in to_delete.items() if path not in kept}


def _is(place: Place, entry: ManifestEntry) -> bool:
    if entry.kind == "link":
        return place.link_target(entry.path) == entry.target
    if entry.kind == "file":
        return place.digest(entry.path) == entry.sha256
    found = place.stat(entry.path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def _clean(store: SyncState, place: Place, begun: list[str], prefix: bytes) -> None:
    """Spare names that a crashed apply left in its directories."""
    for digest in begun:
        manifest = store.manifest(digest)
        if manifest:
            place.remove_named(b"", prefix)
            for entry in manifest.entries:
                if entry.kind == "dir":
                    place.remove_named(entry.path, prefix)


def _delete(place: Place, to_delete: dict[bytes, str]) -> int:
    count = 0
    for path in sorted(to_delete, reverse=True):  # what is in a directory goes before it
        with _naming(path):
            count += place.remove_empty(path) if to_delete[path] == "dir" else place.remove_file(path)
    return count


@contextlib.contextmanager
def _naming(path: bytes) -> Iterator[None]:
    """An error names the path in the tree, not just the last name of it."""
    try:
        yield
    except OSError as error:
        error.filename = path
        raise


def _write(place: Place, found: Survey, staged: _Staged, prefix: bytes) -> None:
    for number, entry in enumerate(found.wrong):
        temp_name = prefix + b"%d" % number
        with _naming(entry.path):
            if entry.kind == "dir":
                place.make_folder(entry.path, entry.mode)
            elif entry.kind == "link":
                place.make_link(entry.path, entry.target, temp_name)
            else:
                place.move_in(staged.files[entry.path][0], entry.path, temp_name)
    for entry in found.remode:
        with _naming(entry.path):
            place.set_mode(entry.path, entry.mode)


def _recorded(
    place: Place, record: AppliedRecord, entries: list[ManifestEntry], found: Survey, staged: _Staged
) -> AppliedRecord:
    """Fill a record with how everything looks now."""
    changed = {entry.path for entry in found.remode}
    newest = 0
    for entry in entries:
        if entry.kind != "file":
            record.others[entry.path] = (entry.kind, entry.mode, entry.target)
            continue
        fingerprint = found.right.get(entry.path)
        if fingerprint is None or entry.path in changed:
            now = place.stat(entry.path)
            time_written = fingerprint[2] if fingerprint else staged.files[entry.path][1]
            # A running job may have written to it already: then it gets no fingerprint and is read again next time.
            fingerprint = fingerprint_of(now) if now is not None and now.st_mtime_ns == time_written else None
        record.files[entry.path] = (entry.sha256, fingerprint)
        newest = max(newest, fingerprint[3] if fingerprint else 0)
    _outlive(newest)
    return record


def _outlive(newest: int) -> None:
    """Wait out the tick of the newest file time, so that no later write can bear the same one and pass unseen."""
    wait = newest + TICK_NS - time.time_ns()
    time.sleep(max(0, min(wait, TICK_NS)) / 1e9)


def _withdraw(store: SyncState, key: str, record: AppliedRecord) -> None:
    """Take back what a record put in place, because the destination changes from one file to a directory or back."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), Place(record.base) as place:
        _delete(place, _to_delete(store, place, [], record, []))
    if record.root == "dir":
        with contextlib.suppress(OSError):
            os.rmdir(record.base)
    store.end(key, None)
