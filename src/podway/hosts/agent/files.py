"""The agent's file operations: what the server asks a host to do with synced trees.

Flow of a sync, seen from one host: 1. `files.missing` says whether a manifest is in place already, and which contents are lacking.
2. They arrive by `files.put` (from the server) or `files.pull` (from another host, which was told to `files.listen`).
3. `files.apply` brings the destination to the manifest. `files.list` and `files.fetch` are the way back: logs, results.

Each operation is `op(state_dir, request, body) -> (fields, reply body)`; all may be repeated. Trees may have a million files,
so lists of digests travel in bodies (32 raw bytes each), never in the one JSON line that a message begins with.
The formats are in packs.py and manifests.py, the folders in records.py.
"""

from __future__ import annotations

import json
import os
import stat

from . import peers
from .apply import apply, in_place, needed
from .manifests import Manifest, quote
from .packs import CHUNK, FilesError, NoSpaceError, is_digest, space_on
from .phase import RequestRefused
from .place import Place
from .receive import Receiver, arrived, put_piece
from .records import Contents, SyncState

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, BinaryIO

    Request = dict[str, Any]
    Answer = tuple[dict[str, Any], bytes | BinaryIO | None]
    Op = Callable[[str, Request, BinaryIO], Answer]

FETCH_LIMIT = 4 << 20
PULL_LIMIT = 256 << 20
BATCH = 4096
LIST_LIMIT = 100_000


def _number(request: Request, name: str, default: int, most: int) -> int:
    value = request.get(name, default)
    if type(value) is not int or not 0 <= value <= most:
        raise FilesError("%s must be a number from 0 to %d, not %a" % (name, most, value))
    return value


def _text(request: Request, name: str) -> str:
    value = request.get(name)
    if not isinstance(value, str) or not value:
        raise FilesError("%s is missing" % name)
    return value


def _known(store: SyncState, request: Request) -> Manifest:
    manifest = store.manifest(request.get("manifest_id"))
    if manifest is None:
        raise FilesError("this host has no manifest %s" % str(request.get("manifest_id"))[:12])
    return manifest


def _raw(digests: list[str]) -> bytes:
    return b"".join(map(bytes.fromhex, digests))


def missing(state_dir: str, request: Request, body: BinaryIO) -> Answer:
    """{dest, manifest_id} -> {known, in_place, count}, and in the body the digests of the contents that are missing.

    `in_place`: the destination is as it should be, and nothing needs to be done. Not `known`: send the manifest first.
    `applied` is the id of the manifest that stands there now: what is new can be sent as a patch of it. `arrived`: how many bytes
    of large contents came before a sender broke off.
    """
    store = SyncState(state_dir)
    dest, digest = request.get("dest"), request.get("manifest_id")
    if in_place(store, dest, digest):
        return {"known": True, "in_place": True, "count": 0}, None
    manifest = store.manifest(digest)
    applied = store.applied_id(store.key(store.resolve(dest), "dir"))
    if manifest is None:
        return {"known": False, "in_place": False, "count": 0, "applied": applied}, None
    digests = needed(store, dest, manifest)
    begun = arrived(store.incoming, digests)
    return {"known": True, "in_place": False, "count": len(digests), "applied": applied, "arrived": begun}, _raw(
        digests
    )


def put(state_dir: str, request: Request, body: BinaryIO) -> Answer:
    """A pack in the body; or {digest, offset, total} and a piece of one large blob in the body."""
    store = SyncState(state_dir)
    if "digest" in request:
        digest = _text(request, "digest")
        if not is_digest(digest):
            raise FilesError("%a is not a digest" % digest)
        total = _number(request, "total", 0, 1 << 50)
        offset = _number(request, "offset", 0, total)
        return {"whole": put_piece(store.incoming, digest, offset, total, body)}, None
    return {"count": _receive(store, body)}, None


def _receive(store: SyncState, body: BinaryIO) -> int:
    """Take a pack; how many blobs it had. Patches are made of what is in place."""
    with Receiver(store.incoming, Contents(store).open) as receiver:
        while True:
            data = body.read(CHUNK)
            if not data:
                break
            receiver.feed(data)
        receiver.close()
    return receiver.count


def pull(state_dir: str, request: Request, body: BinaryIO) -> Answer:
    """{from, token, dest, manifest_id, limit} -> {bytes, left}: fetch from a peer what is missing, about `limit` bytes of it.

    `left` counts what is still missing. If it is the peer that failed, `failed` says how, and asking another may help.
    """
    store = SyncState(state_dir)
    peer, token, digest = _text(request, "from"), _text(request, "token"), request.get("manifest_id")
    limit = _number(request, "limit", PULL_LIMIT, 1 << 50)
    came = 0
    try:
        manifest = store.manifest(digest)
        if manifest is None:
            came, _ = peers.pull(peer, token, [str(digest)], store.incoming)
            manifest = _known(store, request)
        lacking = needed(store, request.get("dest"), manifest)
        sizes = {entry.sha256: entry.size for entry in manifest.entries}
        at = 0
        while at < len(lacking) and came < limit:
            batch, size = 0, 0
            while at + batch < len(lacking) and batch < BATCH and (not batch or came + size < limit):
                size += sizes[lacking[at + batch]]
                batch += 1
            more, absent = peers.pull(peer, token, lacking[at : at + batch], store.incoming)
            if absent:
                raise peers.PeerUnreachable("peer %s has not all of the tree" % peer)
            came, at = came + more, at + batch
    except NoSpaceError:
        raise
    except (peers.PeerUnreachable, FilesError) as error:
        return {"bytes": came, "left": -1, "failed": str(error)}, None
    return {"bytes": came, "left": len(lacking) - at}, None


def listen(state_dir: str, request: Request, body: BinaryIO) -> Answer:
    """{address, port?, token} -> {port}: serve this host's blobs to other hosts that know the token."""
    address, port = _text(request, "address"), _number(request, "port", 0, 65535)
    try:
        return {"port": peers.listen(state_dir, address, port, _text(request, "token"))}, None
    except OSError as error:
        raise FilesError("cannot listen on %s: %s" % (address, error.strerror)) from None


def put_in_place(state_dir: str, request: Request, body: BinaryIO) -> Answer:
    """{dest, manifest_id} -> {applied: true, written, deleted}; or {applied: false} and the missing digests in the body.

    The request's body may be a pack, which is taken first.
    """
    store = SyncState(state_dir)
    _receive(store, body)
    manifest = _known(store, request)
    with store.lock():
        done = apply(store, request.get("dest"), str(request["manifest_id"]), manifest)
    return done, _raw(done.pop("missing", []))


def fetch(state_dir: str, request: Request, body: BinaryIO) -> Answer:
    """{path, offset, limit} -> {size, end} and the bytes of a file from there."""
    path = SyncState(state_dir).resolve(request.get("path"))
    offset = _number(request, "offset", 0, 1 << 60)
    limit = _number(request, "limit", FETCH_LIMIT, FETCH_LIMIT)
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise FilesError("%s is not a file" % quote(path))
        data = os.pread(file, limit, offset)
    finally:
        os.close(file)
    return {"size": found.st_size, "end": offset + len(data) >= found.st_size}, data


def listing(state_dir: str, request: Request, body: BinaryIO) -> Answer:
    """{path} -> {count, truncated}, in the body a JSON list of [path, kind, mode, size, mtime_ns, target] of all below it.

    Paths are quoted as in manifests; of a single file the path is ".". Links are listed, never followed.
    """
    path = SyncState(state_dir).resolve(request.get("path"))
    found = os.stat(path)
    if not stat.S_ISDIR(found.st_mode):
        rows = [_row(b".", found, None)]
        return {"count": 1, "truncated": False}, json.dumps(rows).encode("ascii")
    rows = []
    folders = [b""]
    with Place(path) as place:
        while folders and len(rows) < LIST_LIMIT:
            folder = folders.pop()
            for name in sorted(map(os.fsencode, os.listdir(place.folder(folder)))):
                inner = folder + b"/" + name if folder else name
                entry = place.stat(inner)
                if entry is None:
                    continue
                rows.append(_row(inner, entry, place.link_target(inner)))
                if stat.S_ISDIR(entry.st_mode):
                    folders.append(inner)
    return {"count": len(rows), "truncated": bool(folders)}, json.dumps(rows).encode("ascii")


def _row(path: bytes, found: os.stat_result, target: bytes | None) -> list[object]:
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "link"}
    kind = kinds.get(stat.S_IFMT(found.st_mode), "other")
    mode = stat.S_IMODE(found.st_mode)
    return [quote(path), kind, mode, found.st_size, found.st_mtime_ns, quote(target) if target is not None else ""]


def _plainly(op: Op) -> Op:
    """What goes wrong is refused, in one line a person can read."""

    def call(state_dir: str, request: Request, body: BinaryIO) -> Answer:
        try:
            with space_on(state_dir):
                return op(state_dir, request, body)
        except NoSpaceError as error:
            SyncState(state_dir).make_room()
            raise RequestRefused(str(error), "no-space") from None
        except FilesError as error:
            raise RequestRefused(str(error), "files") from None
        except OSError as error:
            name = error.filename
            where = quote(name) if isinstance(name, bytes) else name
            raise RequestRefused("%s%s" % ("%s: " % where if where else "", error.strerror or error), "io") from None

    return call


OPS: dict[str, Op] = {
    "files.missing": _plainly(missing),
    "files.put": _plainly(put),
    "files.pull": _plainly(pull),
    "files.listen": _plainly(listen),
    "files.apply": _plainly(put_in_place),
    "files.fetch": _plainly(fetch),
    "files.list": _plainly(listing),
}
