"""Files of this machine to the server: the workdir and the local file mounts, each content once.

1. each tree is scanned into a manifest (`podway.hosts.tree`; unchanged files are not read again);
2. the server says which contents it lacks, and those go up in packs of bounded size: of a large file that was changed since the
   last scan, only the blocks that changed. The manifests themselves are contents too. Where the connection breaks, the server is
   asked again, and what has not arrived is sent;
3. what comes back is the `FileTree` of each: where it appears on every host, and the digest of its manifest.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from podway.errors import UserError
from podway.home import home
from podway.hosts.agent.blocks import LARGEST, BlockList
from podway.hosts.agent.packs import FRAME
from podway.hosts.manifest import FileTree
from podway.hosts.tree import Scan, scan
from podway.launch import WORKDIR
from podway.quantities import format_bytes, format_count
from podway.server import api
from podway.server.connection import BROKE_OFF
from podway.task.task import Bucket, LocalDir, Task

PACK_BYTES = 64 << 20
TRIES = 5


class ContentStore(Protocol):
    """Where contents go: the server, as a client sees it."""

    def missing(self, digests: Iterable[str]) -> api.DigestsReply: ...
    def content_blocks(self, digest: str) -> api.BlocksReply: ...
    def upload(self, pack: Iterable[bytes]) -> None: ...


class UploadProgress(Protocol):
    """Who is told: `wait` what is under way, `line` a note, `done` a tree that is there."""

    def wait(self, text: str) -> None: ...
    def line(self, text: str) -> None: ...
    def done(self, text: str) -> None: ...


class NoProgress:
    """For programs."""

    def wait(self, text: str) -> None:
        """Nothing."""

    line = done = wait


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A tree of this machine and its place on the hosts."""

    path: str
    target: str
    kind: Literal["workdir", "mount", "bucket"]


def sources(task: Task, *, mounts: bool) -> list[Source]:
    """What of the task is on this machine."""
    found = []
    if isinstance(task.workdir, LocalDir):
        found.append(Source(path=task.workdir.path, target=WORKDIR, kind="workdir"))
    for mount in task.file_mounts if mounts else ():
        if isinstance(mount.source, LocalDir):
            placed = mount.target.startswith(("/", "~"))
            target = mount.target if placed else f"{WORKDIR}/{mount.target}"
            found.append(Source(path=mount.source.path, target=target, kind="mount"))
        elif isinstance(mount.source, Bucket):
            found += _into_bucket(mount.source)
    return found


def _into_bucket(bucket: Bucket) -> list[Source]:
    """What goes into a bucket first: one source is its content, each of several is below its own name."""
    alone = len(bucket.upload) == 1
    return [
        Source(path=path, target=bucket.uri if alone else f"{bucket.uri}/{Path(path).name}", kind="bucket")
        for path in bucket.upload
    ]


def upload(server: ContentStore, progress: UploadProgress, task: Task, *, mounts: bool = True) -> tuple[FileTree, ...]:
    """Bring the task's files to the server; where each of them is to appear."""
    trees = []
    for source in sources(task, mounts=mounts):
        progress.wait(f"Reading {source.path}")
        found = scan(Path(source.path), cache_dir=_cache())
        manifest = found.manifest.encode()
        tree = FileTree(
            target=source.target,
            manifest=found.manifest.id,
            size=sum(entry.size for entry in found.manifest.entries),
            count=sum(1 for entry in found.manifest.entries if entry.kind == "file"),
            kind=source.kind,
        )
        sent = _send(server, progress, found, tree.manifest, manifest)
        for note in found.notes:
            progress.line(f"  Note: {source.path}: {note}")
        what = f"{format_count(tree.count, 'file')}, {format_bytes(tree.size)}; {format_bytes(sent) if sent else 'nothing'} new"
        progress.done(f"Synced {source.kind}: {source.path} -> {tree.target} ({what})")
        trees.append(tree)
    return tuple(trees)


def _cache() -> Path:
    place = home() / "cache"
    place.mkdir(mode=0o700, exist_ok=True)
    return place


def _send(server: ContentStore, progress: UploadProgress, found: Scan, digest: str, manifest: bytes) -> int:
    """Upload what the server lacks of one tree; how many bytes of content that was."""
    sizes = found.manifest.sizes
    reply = server.missing([*sizes, digest])
    total = sum(sizes[name] for name in reply.missing if name in sizes)
    for left in reversed(range(TRIES)):
        try:
            _send_contents(server, progress, found, reply)
            if digest in reply.missing:
                server.upload(iter([FRAME.pack(bytes.fromhex(digest), len(manifest)), manifest]))
            break
        except UserError as error:
            if error.code != BROKE_OFF or not left:
                raise
            progress.wait("The upload broke off; it goes on")
            reply = server.missing([*sizes, digest])
    return total


def _send_contents(server: ContentStore, progress: UploadProgress, found: Scan, reply: api.DigestsReply) -> None:
    """All files that are missing: large ones by what is new of them, where the server has something to go by."""
    sizes = found.manifest.sizes
    wanted = [name for name in reply.missing if name in sizes]
    total, sent = sum(sizes[name] for name in wanted), 0
    whole = []
    for name in wanted:
        pack = _shorter(server, found, reply, name, sizes[name])
        if pack is None:
            whole.append(name)
            continue
        server.upload(_watched(pack, progress, sent, total))
        sent += sizes[name]
    for batch in _batches(whole, sizes):
        server.upload(_watched(found.pack(batch), progress, sent, total))
        sent += sum(sizes[name] for name in batch)


def _shorter(
    server: ContentStore, found: Scan, reply: api.DigestsReply, name: str, size: int
) -> Iterator[bytes] | None:
    """A pack of less than the whole content, if there can be one."""
    if name in reply.arrived:
        return found.rest(name, size, min(size, reply.arrived[name]))
    if name not in found.bases or size > LARGEST:
        return None
    try:
        known = server.content_blocks(found.bases[name])
    except UserError as error:
        if error.status == 404:  # a server of an earlier release
            return None
        raise
    return found.patch(name, size, BlockList(known.mean, known.rows)) if known.rows else None


def _batches(digests: Sequence[str], sizes: dict[str, int]) -> Iterator[list[str]]:
    """Packs of about PACK_BYTES; a larger content is a pack of its own."""
    batch: list[str] = []
    weight = 0
    for digest in digests:
        cost = sizes[digest] + FRAME.size
        if batch and weight + cost > PACK_BYTES:
            yield batch
            batch, weight = [], 0
        batch.append(digest)
        weight += cost
    if batch:
        yield batch


def _watched(pack: Iterator[bytes], progress: UploadProgress, sent: int, total: int) -> Iterator[bytes]:
    for piece in pack:
        yield piece
        sent += len(piece)
        progress.wait(f"Uploading {format_bytes(min(sent, total))} of {format_bytes(total)}")
