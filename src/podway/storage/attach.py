"""Buckets to all hosts of a cluster, before a job's setup; and back into the buckets, at its end.

1. a bucket that the task names and that is not there is made; local files go into it, by the server, from its own contents;
2. COPY: where hosts have an identity of their own, each fetches for itself; else the server downloads once and the files fan out
   from host to host like any others, so that no credentials are needed on hosts;
3. MOUNT and MOUNT_CACHED: a script (render.py) runs on every host as an agent's job of its own, until the cluster ends. One that
   runs already is left alone; one that has died is started again. Hosts that are made with their mounts need neither (`make_missing`
   makes the buckets before them);
4. at the end of a job `flush` waits until what it wrote to cached mounts is in the bucket.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from podway.errors import ProviderError, UserError
from podway.extras import explain
from podway.hosts.blobs import BlobStore
from podway.hosts.manifest import FileTree
from podway.hosts.sync import HostLink, sync
from podway.hosts.tree import TreeManifest
from podway.order import OrderBucket
from podway.storage import permissions
from podway.storage.address import Address, parse, split_login
from podway.storage.downloads import Downloads, ObjectStore
from podway.storage.render import MOUNTED, WORKDIR, HostMount, flushed, script
from podway.task.task import Bucket, FileMount

if TYPE_CHECKING:
    from podway.storage.gcs import Buckets

MOUNT_S = 180.0  # a tool may have to be installed first
COPY_S = 24 * 3600.0
FLUSH_S = 900
SHORT_FLUSH_S = 60  # for what is left of a job that was cancelled or failed
POLL_S = 5.0

Note = Callable[[str], Awaitable[None]]


def bucket_mounts(mounts: Sequence[FileMount], endpoint: str | None = None) -> list[HostMount]:
    """The buckets among a task's mounts."""
    return [
        HostMount(source=mount.source, target=mount.target, endpoint=endpoint)
        for mount in mounts
        if isinstance(mount.source, Bucket)
    ]


class Attachment:
    """The buckets of one task on the hosts of one cluster."""

    def __init__(
        self,
        mounts: Sequence[FileMount],
        links: Sequence[HostLink],
        *,
        capabilities: frozenset[str],
        credentials: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        # The storage client's own variable: hosts are to use the server that the control side uses.
        endpoint = os.environ.get("STORAGE_EMULATOR_HOST") or None
        on_hosts = "own-identity" in capabilities
        # Its login is the server's; hosts with an identity of their own need none.
        endpoint = split_login(endpoint)[0] if endpoint and on_hosts else endpoint
        self._mounts = bucket_mounts(mounts, endpoint)
        self._links = links
        self._on_hosts = on_hosts  # hosts have an identity of their own
        self._from_start = "attached-buckets" in capabilities  # hosts were made with their mounts
        self._credentials = credentials  # the task's variables and secrets, among which those of other stores may be

    async def bring(self, trees: Sequence[FileTree], blobs: BlobStore, *, location: str | None, note: Note) -> None:
        """All of them, one after the other; every step may be repeated. `location` is where a new bucket would be near."""
        new = [mount for mount in self._mounts if mount.source.create]
        uploads = [tree for tree in trees if tree.kind == "bucket"]
        copies = [mount for mount in self._mounts if mount.source.mode == "COPY" and not self._by_hosts(mount)]
        if new or uploads:
            buckets = await asyncio.to_thread(_open_gcs, blobs.root.parent)
            for mount in new:
                place = location if self._on_hosts else None  # elsewhere a region is not one of Google's
                if await asyncio.to_thread(buckets.ensure, mount.address, location=place):
                    await note(f"Made the bucket gs://{mount.address.bucket}")
            for tree in uploads:
                await note(f"Uploading to {tree.target}")
                manifest = TreeManifest.decode(await asyncio.to_thread(blobs.read, tree.manifest))
                await asyncio.to_thread(buckets.upload, parse(tree.target), manifest, blobs)
        for mount in copies:
            await self._pass_on(mount, blobs, note)
        for mount in self._mounts:
            if mount not in copies and not (self._from_start and mount.source.mode != "COPY"):
                await self._on_each(mount, note)

    async def flush(self, note: Note, *, succeeded: bool) -> None:
        """What was written to cached mounts is in the bucket; what is not, after long, is said."""
        seconds = FLUSH_S if succeeded else SHORT_FLUSH_S
        for mount in self._mounts if not self._from_start else ():
            if mount.source.mode == "MOUNT_CACHED" and not mount.source.read_only:
                answers = await self._everywhere(lambda link, mount=mount: self._flush(link, mount, seconds))  # type: ignore[misc]
                late = [str(answer) for answer in answers if isinstance(answer, Exception)]
                if late:
                    await note(f"Not all that was written to {mount.target} is in {mount.address} yet: {late[0]}")

    def _by_hosts(self, mount: HostMount) -> bool:
        """Whether each host copies for itself: their identity is Google's."""
        return self._on_hosts and mount.address.scheme == "gs"

    async def _pass_on(self, mount: HostMount, blobs: BlobStore, note: Note) -> None:
        """From the bucket to the server, and from there to the hosts."""
        await note(f"Copying {mount.address} to {mount.target} on {len(self._links)} host(s), by way of the server")
        manifest = await asyncio.to_thread(self._download, mount.address, blobs)
        target = mount.target if mount.target.startswith(("/", "~")) else f"{WORKDIR}/{mount.target}"
        await sync(self._links, manifest, target, blobs)

    def _download(self, address: Address, blobs: BlobStore) -> TreeManifest:
        store = _open(address, blobs.root.parent, self._credentials)
        return Downloads(blobs.root.parent / "cache" / "buckets").tree(store, address, blobs)

    async def _on_each(self, mount: HostMount, note: Note) -> None:
        """By each host itself."""
        copied = mount.source.mode == "COPY"
        doing = f"Copying {mount.address} to" if copied else f"Mounting {mount.address} at"
        await note(f"{doing} {mount.target} on {len(self._links)} host(s)")
        work = self._copy if copied else self._mount
        self._raise(mount, await self._everywhere(lambda link: work(link, mount)))

    async def _everywhere(self, work: Callable[[HostLink], Awaitable[None]]) -> list[BaseException | None]:
        return await asyncio.gather(*map(work, self._links), return_exceptions=True)

    def _raise(self, mount: HostMount, answers: Sequence[BaseException | None]) -> None:
        """The first host's trouble, with what it takes to end it."""
        for link, answer in zip(self._links, answers, strict=True):
            if isinstance(answer, _Failed):
                action = "list" if mount.source.mode != "COPY" else "read"
                if permissions.is_refusal(answer.output):
                    raise permissions.refused(answer.output, action, mount.address)
                why = told(answer.output)
                raise UserError(
                    f"{mount.address} could not be brought to {mount.target} on {link.address}: {why}",
                    "put that right on the host, or choose another mode",
                )
            if answer is not None:
                raise answer

    async def _mount(self, link: HostLink, mount: HostMount) -> None:
        """Have the mount there, from before or from now on."""
        state = (await link.call("status", job=mount.key, phase="run")).fields["state"]
        if state in ("exited", "lost"):
            await link.call("forget", job=mount.key)
        await _start(link, mount.key, script(mount))
        output = b""
        async with _limit(MOUNT_S, f"{mount.address} was not mounted on {link.address}"):
            while MOUNTED.encode() not in output:
                reply = await link.call("follow", job=mount.key, phase="run", offset=len(output), wait=POLL_S)
                output += reply.body
                if reply.fields.get("end"):
                    raise _Failed(output)

    async def _copy(self, link: HostLink, mount: HostMount) -> None:
        await self._to_the_end(link, f"copy-{mount.id}", script(mount), COPY_S)

    async def _flush(self, link: HostLink, mount: HostMount, seconds: int) -> None:
        await self._to_the_end(link, f"flush-{mount.id}", flushed(mount, seconds), seconds + 2 * POLL_S)

    async def _to_the_end(self, link: HostLink, key: str, text: str, seconds: float) -> None:
        """Run a script, or go on with one that an earlier server began."""
        await _start(link, key, text)
        async with _limit(seconds, f"{key} did not end on {link.address}"):
            while (done := (await link.call("status", job=key, phase="run", wait=POLL_S)).fields)["state"] == "running":
                pass
        output = (await link.call("follow", job=key, phase="run", offset=0)).body
        await link.call("forget", job=key)
        if done.get("code") != 0:
            raise _Failed(output)


async def make_missing(buckets: Sequence[OrderBucket], root: Path, note: Note) -> None:
    """Those that a task would have made, before hosts are made that mount them."""
    for wanted in [one for one in buckets if one.create]:
        address = parse(wanted.uri)
        if await asyncio.to_thread(lambda address=address: _open_gcs(root).ensure(address)):  # type: ignore[misc]
            await note(f"Made the bucket gs://{address.bucket}")


def told(output: str) -> str:
    """What a script that failed said last, with the last word of the tool it ran."""
    lines = [line.strip() for line in output.splitlines() if line.strip() and line.strip() != MOUNTED]
    own = [line.removeprefix("podway: ") for line in lines if line.startswith("podway: ")]
    tools = [line for line in lines if not line.startswith("podway: ")]
    return " - ".join([*own[-1:], *tools[-1:]]) or "it ended without a word"


class _Failed(Exception):
    """A script ended badly; this is what it printed."""

    def __init__(self, output: bytes) -> None:
        self.output = output.decode(errors="replace")
        super().__init__(self.output.strip().splitlines()[-1] if self.output.strip() else "it failed")


async def _start(link: HostLink, key: str, text: str) -> None:
    await link.call("start", job=key, phase="run", script=text, cwd="~", interpreter=["bash"])


@contextlib.asynccontextmanager
async def _limit(seconds: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise ProviderError(f"{what} within {seconds:g} s") from None


def _open(address: Address, root: Path, credentials: Mapping[str, str]) -> ObjectStore:
    """The store of an address. The clients take most of a second to import, and few tasks have buckets."""
    try:
        if address.scheme == "s3":
            from podway.storage.s3 import S3Store

            return S3Store(credentials)
        if address.scheme == "hf":
            from podway.storage.hub import HubStore

            return HubStore(credentials)
    except ModuleNotFoundError as error:
        extra = {"s3": "s3", "hf": "hub"}[address.scheme]
        raise explain(error, f"{address.scheme}:// storage", extra, "on the server") or error from None
    return _open_gcs(root)


def _open_gcs(root: Path) -> "Buckets":
    try:
        from podway.storage import gcs
    except ModuleNotFoundError as error:
        raise explain(error, "a bucket", "gcp", "on the server") or error from None
    return gcs.open_buckets(root)
