"""Bring one tree to every host of a slice: the server sends it once, the hosts pass it on among themselves.

Flow: 1. every host is asked which contents of the manifest it lacks. 2. A host that has an older tree gets the changed blocks from
the server, if they are few, and puts the new tree in place at once (`patches.py`). 3. Of the others, if none has all contents, the
first that can be reached gets what it lacks from the server: the only time the tree leaves the server. A large content whose
sending broke off goes on where it stopped. 4. Hosts that have all serve those
that have not (`fanout` at a time), which then serve others: the number of holders multiplies with each round. A host that
cannot reach its peers gets the tree from the server after all. 5. These hosts apply the manifest. 6. If an apply finds that a
content is missing after all (a job wrote to a file that was to be reused), it is sent and the apply repeated.
Repeating a sync sends only what is still missing; where nothing has changed it is one short call per host.
"""

import asyncio
import secrets
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from podway.errors import ProviderError, UserError
from podway.hosts.agent import packs
from podway.hosts.blobs import BlobStore
from podway.hosts.link import AgentRefused, AgentReply
from podway.hosts.patches import patch_pack
from podway.hosts.tree import TreeManifest
from podway.quantities import format_bytes, format_count

CHUNK = 4 << 20
PULL_LIMIT = 256 << 20
# A call that moves or hashes n bytes may take this long, and n at this rate: a slow disk under load. A file counts as so many
# bytes besides its content, since each is opened, written and renamed: 10 ms.
PATIENCE_S = 120.0
SLOWEST = 10 << 20
FILE_BYTES = SLOWEST // 100
APPLY_TRIES = 3
# After so many failures a host is believed to reach nobody, a holder to be reached by nobody.
STRIKES = 2
# A patch of this size goes from the server to every host that can use it: less than it takes to pass it on from host to host. A larger
# one does only if all of them together are no more than the new contents themselves, which would else be sent once.
DIRECT_BYTES = 64 << 10
# What is sent is asked for again, so each round should be the last: the manifest, its contents, and nothing more.
SEND_ROUNDS = 4

T = TypeVar("T")


class HostLink(Protocol):
    """A host's agent, as seen from the server (`podway.hosts.link.AgentLink`); `address` is the one its peers reach."""

    @property
    def address(self) -> str: ...
    def call(
        self, op: str, *, body: bytes = b"", timeout: float | None = None, **fields: Any
    ) -> Coroutine[Any, Any, AgentReply]: ...


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a sync is: bytes sent to the first host, then hosts that have all, then hosts that have it in place."""

    stage: Literal["send", "spread", "apply"]
    done: int
    total: int

    def __str__(self) -> str:
        if self.stage == "send":
            return f"{format_bytes(self.done)} of {format_bytes(self.total)} are on the first host"
        return (
            f"{self.done} of {format_count(self.total, 'host')} {'have it' if self.stage == 'spread' else 'are done'}"
        )


class HostState(msgspec.Struct, frozen=True, kw_only=True):
    """What a host lacks of a tree, the manifest of the tree it has there now, and how much came of contents that are not whole."""

    lacking: list[str]
    applied: str = ""
    arrived: dict[str, int] = {}


class SyncReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a sync did. Bytes are those of contents and manifests: sent by the server, and from host to host."""

    hosts: int
    server_bytes: int
    peer_bytes: int
    changed_hosts: int
    written: int
    deleted: int
    seconds: float
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        sent = format_bytes(self.server_bytes + self.peer_bytes)
        return f"{format_count(self.changed_hosts, 'host')} changed in {self.seconds:.1f} s ({sent} sent)"


async def sync(
    hosts: Sequence[HostLink],
    manifest: TreeManifest,
    dest: str,
    blobs: BlobStore,
    *,
    fanout: int = 2,
    progress: Callable[[Progress], None] | None = None,
) -> SyncReport:
    """Bring `dest` on all hosts to the manifest, whose contents are in `blobs`.

    ProviderError names the hosts that could not be brought there; all others have been, and a repeat does the rest.
    """
    started = time.monotonic()
    work = _Sync(hosts, manifest, dest, blobs, fanout, progress)
    await work.distribute()
    await work.apply_all()
    work.raise_failures()
    return SyncReport(
        hosts=len(hosts),
        server_bytes=work.server_bytes,
        peer_bytes=work.peer_bytes,
        changed_hosts=work.changed_hosts,
        written=work.written,
        deleted=work.deleted,
        seconds=time.monotonic() - started,
        notes=tuple(work.notes),
    )


class _Sync:
    """One sync under way. Hosts are known by their index."""

    def __init__(
        self,
        hosts: Sequence[HostLink],
        manifest: TreeManifest,
        dest: str,
        blobs: BlobStore,
        fanout: int,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._hosts = hosts
        self._manifest = manifest
        self._blobs = blobs
        self._fanout = fanout
        self._progress = progress or (lambda progress: None)
        self._size = sum(manifest.sizes.values())
        self._effort = sum(entry.size + FILE_BYTES for entry in manifest.entries)
        self._id = blobs.put(manifest.encode())
        self._where: dict[str, Any] = {"dest": dest, "manifest_id": self._id}
        self._token = secrets.token_hex(32)
        self._failures: dict[int, Exception] = {}
        self._in_place: set[int] = set()
        self.server_bytes = self.peer_bytes = self.changed_hosts = self.written = self.deleted = 0
        self.notes: list[str] = []

    async def distribute(self) -> None:
        """Every host gets every content it lacks."""
        asked = await self._on_all(range(len(self._hosts)), self._missing)
        await self._patch({host: state.applied for host, state in asked.items() if state.lacking})
        have = {host: not state.lacking or host in self._in_place for host, state in asked.items()}
        complete = [host for host, whole in have.items() if whole]
        waiting = deque(host for host, whole in have.items() if not whole and host not in self._failures)
        while waiting and not complete:
            seed = waiting.popleft()
            await self._on_all([seed], self._send)
            complete = [seed] if seed not in self._failures else []
        if waiting:
            await self._spread(complete, waiting)

    async def _patch(self, hosts: dict[int, str]) -> None:
        """Bring hosts that have an older tree to the new one by the blocks that changed, where these are few."""
        groups: dict[str, list[int]] = {}
        for host, applied in hosts.items():
            groups.setdefault(applied, []).append(host)
        for applied, group in groups.items():
            if applied in ("", self._id):
                continue  # it has no tree, or should have this one, and a job has changed something of it
            most = max(DIRECT_BYTES, self._size // len(group))
            pack = await asyncio.to_thread(patch_pack, self._blobs, applied, self._manifest, self._id, most)
            if pack is not None:
                await self._on_all(group, partial(self._apply_patch, pack, len(group)))

    async def _apply_patch(self, pack: bytes, total: int, host: int) -> None:
        try:
            reply = await self._call(host, "files.apply", size=self._effort, body=pack, **self._where)
        except AgentRefused as error:
            if error.code != "files":
                raise
            return  # what stands there is not what was put there: it gets whole contents
        if reply.fields["applied"]:
            self._count(reply)
            self._in_place.add(host)
            self._progress(Progress(stage="apply", done=len(self._in_place), total=len(self._hosts)))

    async def apply_all(self) -> None:
        """Every host that has all puts it in place."""
        hosts = [host for host in range(len(self._hosts)) if host not in self._failures and host not in self._in_place]
        done = 0

        async def apply(host: int) -> None:
            nonlocal done
            await self._apply(host)
            done += 1
            self._progress(Progress(stage="apply", done=done, total=len(hosts)))

        await self._on_all(hosts, apply)

    def raise_failures(self) -> None:
        """Say which hosts failed, if any did."""
        if not self._failures:
            return
        for error in self._failures.values():
            if not isinstance(error, ProviderError):
                raise error
        host, first = min(self._failures.items())
        others = f" (and {len(self._failures) - 1} more hosts failed)" if len(self._failures) > 1 else ""
        if isinstance(first, AgentRefused) and first.code == "no-space":
            full = f"the disk of host {host} ({self._hosts[host].address}) is full: {first}{others}"
            raise UserError(full, "free some space there, then run it again", status=507)
        what = f"files could not be brought to host {host} ({self._hosts[host].address}): {first}{others}"
        transient = all(isinstance(error, ProviderError) and error.transient for error in self._failures.values())
        raise ProviderError(what, transient=transient)

    async def _on_all(self, hosts: Sequence[int], work: Callable[[int], Awaitable[T]]) -> dict[int, T]:
        """Do something with hosts, all at once; what goes wrong is that host's failure and nobody else's."""
        answers = await asyncio.gather(*map(work, hosts), return_exceptions=True)
        good: dict[int, T] = {}
        for host, answer in zip(hosts, answers, strict=True):
            if isinstance(answer, ProviderError | UserError):
                self._failures[host] = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                good[host] = answer
        return good

    def _call(self, host: int, op: str, *, size: int = 0, body: bytes = b"", **fields: Any) -> Awaitable[AgentReply]:
        """Ask a host; `size` is how many bytes it may have to move or read for it."""
        self.server_bytes += len(body)
        return self._hosts[host].call(op, body=body, timeout=PATIENCE_S + size / SLOWEST, **fields)

    async def _missing(self, host: int) -> HostState:
        """What a host lacks: of an unknown tree the manifest, which is a content too."""
        reply = await self._call(host, "files.missing", size=self._effort, **self._where)
        if reply.fields["in_place"]:
            self._in_place.add(host)
        return HostState(
            lacking=_digests(reply.body) if reply.fields["known"] else [self._id],
            applied=reply.fields.get("applied") or "",
            arrived=reply.fields.get("arrived") or {},
        )

    async def _send(self, host: int) -> None:
        """Give a host from the server all that it lacks."""
        for _ in range(SEND_ROUNDS):
            state = await self._missing(host)
            if not state.lacking:
                return
            await self._put(host, state.lacking, state.arrived)
        raise ProviderError("what is sent to the host does not stay there")

    async def _put(self, host: int, digests: list[str], arrived: dict[str, int]) -> None:
        total = sum(self._blobs.size(digest) for digest in digests)
        done = sum(arrived.values())
        messages = _messages(self._blobs, digests, arrived)
        while (message := await asyncio.to_thread(next, messages, None)) is not None:
            try:
                effort = len(message.body) + FILE_BYTES * len(message.digests)
                await self._call(host, "files.put", size=effort, body=message.body, **message.fields)
            except ProviderError:
                await asyncio.to_thread(self._check, message.digests)
                raise
            done += message.size
            self._progress(Progress(stage="send", done=done, total=total))

    def _check(self, digests: list[str]) -> None:
        """A host refused contents: if it is the server's own copies that are damaged, only a new upload helps."""
        damaged = [digest for digest in digests if not self._blobs.verify(digest)]
        if damaged:
            what = f"{len(damaged)} of the files the server had kept were damaged, and are removed"
            raise UserError(what, "run the command again: it uploads them again", status=409)

    async def _spread(self, complete: list[int], waiting: deque[int]) -> None:
        """Hosts that have all serve those that wait, and these serve others."""
        total = len(complete) + len(waiting)
        holders = complete[: -(-len(waiting) // self._fanout)]
        free = deque(slot for offers in await asyncio.gather(*map(self._offer, holders)) for slot in offers)
        struck: Counter[int | str] = Counter()
        running: dict[asyncio.Task[tuple[str, list[str]]], tuple[int, str]] = {}
        try:
            while waiting or running:
                while waiting and (free or not running or struck[waiting[0]] >= STRIKES):
                    host = waiting.popleft()
                    source = free.popleft() if free and struck[host] < STRIKES else ""
                    running[asyncio.create_task(self._fill(host, source, bool(waiting)))] = (host, source)
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    host, source = running.pop(task)
                    failed, offers = task.result()
                    if failed:
                        struck.update((host, source))
                        self.notes.append(f"host {host} could not get files from {failed}")
                        waiting.append(host)
                    free.extend([*offers, source] if source else offers)
                free = deque(slot for slot in free if struck[slot] < STRIKES)
                have = total - len(waiting) - len(running)
                self._progress(Progress(stage="spread", done=have, total=total))
        finally:
            for task in running:
                task.cancel()

    async def _fill(self, host: int, source: str, wanted: bool) -> tuple[str, list[str]]:
        """Give one host all it lacks, from a peer or (no source) from the server. How the peer failed, or the host's own
        offers to serve others, if they are wanted."""
        failed = ""
        try:
            if source:
                failed = await self._pull(host, source)
            else:
                await self._send(host)
        except (ProviderError, UserError) as error:
            self._failures[host] = error
        if failed or not wanted or host in self._failures:
            return failed, []
        return "", await self._offer(host)

    async def _pull(self, host: int, source: str) -> str:
        """Let a host fetch what it lacks from a peer, in parts. "" if it has all; else how the peer failed."""
        while True:
            fields: dict[str, Any] = {"from": source, "token": self._token, "limit": PULL_LIMIT, **self._where}
            reply = await self._call(host, "files.pull", size=self._effort, **fields)
            self.peer_bytes += int(reply.fields["bytes"])
            if reply.fields.get("failed"):
                return str(reply.fields["failed"])
            if not reply.fields["left"]:
                return ""

    async def _offer(self, host: int) -> list[str]:
        """Let a host serve its peers: where they reach it, once for each it may serve at a time. None, if it cannot."""
        address = self._hosts[host].address
        try:
            reply = await self._call(host, "files.listen", address=address, token=self._token)
        except ProviderError as error:
            self.notes.append(f"host {host} cannot serve others: {error}")
            return []
        return [f"{address}:{reply.fields['port']}"] * self._fanout

    async def _apply(self, host: int) -> None:
        for _ in range(APPLY_TRIES):
            reply = await self._call(host, "files.apply", size=self._effort, **self._where)
            if reply.fields["applied"]:
                self._count(reply)
                return
            await self._put(host, _digests(reply.body), {})
        raise ProviderError("the files of the host change faster than they can be replaced")

    def _count(self, reply: AgentReply) -> None:
        written, deleted = int(reply.fields["written"]), int(reply.fields["deleted"])
        self.written += written
        self.deleted += deleted
        self.changed_hosts += bool(written or deleted)


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    """One `files.put`: a pack of small contents, or a piece of a large one."""

    fields: dict[str, Any]
    body: bytes
    digests: list[str]
    size: int


def _messages(blobs: BlobStore, digests: list[str], arrived: dict[str, int]) -> Iterator[_Message]:
    """The contents as messages of about `CHUNK` bytes, read as they are needed."""
    batch, inside, size = bytearray(), list[str](), 0
    for digest in digests:
        length = blobs.size(digest)
        if length > CHUNK:
            yield from _pieces(blobs, digest, length, min(length, arrived.get(digest, 0)))
            continue
        if batch and len(batch) + length > CHUNK:
            yield _Message(fields={}, body=bytes(batch), digests=inside, size=size)
            batch, inside, size = bytearray(), [], 0
        batch += packs.FRAME.pack(bytes.fromhex(digest), length) + blobs.read(digest)
        inside.append(digest)
        size += length
    if batch:
        yield _Message(fields={}, body=bytes(batch), digests=inside, size=size)


def _pieces(blobs: BlobStore, digest: str, total: int, arrived: int) -> Iterator[_Message]:
    """Of a content of which so much is there, at least the last piece: it is what makes the host look whether all is right."""
    first = min(arrived, total - 1)
    with blobs.open(digest) as file:
        file.seek(first)
        for offset in range(first, total, CHUNK):
            data = file.read(CHUNK)
            # An agent of an earlier release keeps pieces by their writer.
            fields = {"digest": digest, "offset": offset, "total": total, "writer": digest[:32]}
            yield _Message(fields=fields, body=data, digests=[digest], size=len(data))


def _digests(raw: bytes) -> list[str]:
    return [raw[at : at + 32].hex() for at in range(0, len(raw), 32)]
