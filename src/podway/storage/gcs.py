"""Buckets of Google Cloud Storage as the control side uses them, by Google's own client. All of it blocks: call it from a thread.

    ensure     the bucket is there, or is made now where the task says so
    upload     local files into a bucket, once: an object remembers the digest of what it was made from
    download   objects into the server's contents, each generation of each object once, so that hosts get them as any other files

Credentials and project are the gcp provider's (gcp_settings.py); without any, what is public can still be read.
`STORAGE_EMULATOR_HOST` is the client's own way to another endpoint.
What a person has to put right is a `UserError` that names the missing permission; what may pass is a `ProviderError`.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import requests
from google.api_core import exceptions as api
from google.auth import exceptions as auth
from google.auth.credentials import AnonymousCredentials, Credentials
from google.cloud import storage  # type: ignore[attr-defined]
from google.oauth2.credentials import Credentials as UserCredentials

from podway.decoding import from_json
from podway.errors import ProviderError, UserError
from podway.files import write_atomically
from podway.hosts.blobs import BlobStore
from podway.hosts.tree import TreeEntry, TreeManifest
from podway.providers.gcp.account import Account
from podway.storage.address import Address, split_login
from podway.storage.permissions import refused

AT_ONCE = 8
MARK = "podway-sha256"
_WHERE_US = "US"  # the API's own default location

T = TypeVar("T")
Item = TypeVar("Item")


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """What was downloaded before: a generation of an object never changes."""

    generation: int
    sha256: str
    size: int


def open_buckets(root: Path) -> "Buckets":
    """With the account of the Podway home `root`; without one, for what is public."""
    account = Account(root)
    options = {}
    if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):
        # Given by its URL, the login would be in every error message.
        options["api_endpoint"], token = split_login(emulator)
        credentials: Credentials = UserCredentials(token) if token else AnonymousCredentials()  # type: ignore[no-untyped-call]
    else:
        try:
            credentials = account.credentials()
        except UserError:
            credentials = AnonymousCredentials()  # type: ignore[no-untyped-call]
    # Reading needs no project; where one is needed, in `ensure`, the account's own is given.
    client = storage.Client(project="none", credentials=credentials, client_options=options)
    return Buckets(client, account, root / "cache" / "buckets")


class StoredObject(Protocol):
    """What is used of an object of Google's client, which has no types."""

    name: str
    generation: int
    metadata: dict[str, str] | None

    def download_to_filename(self, filename: str, *, checksum: str) -> None:
        """Write the contents to a file, compared with the checksum."""


class Buckets:
    """See the module docstring. `cache` is a directory to remember downloads in."""

    def __init__(self, client: storage.Client, account: Account, cache: Path) -> None:
        self._client = client
        self._account = account
        self._cache = cache

    def ensure(self, address: Address, *, location: str | None = None) -> bool:
        """Make the bucket unless it is there; whether it was made."""
        with _plainly(address, "look at"):
            if self._client.lookup_bucket(address.bucket) is not None:
                return False
        project = self._account.project
        with _plainly(address, "create"), contextlib.suppress(api.Conflict):
            self._client.create_bucket(address.bucket, project=project, location=location or _WHERE_US)
            return True
        return False

    def check(self, address: Address) -> None:
        """The bucket is there and can be listed."""
        with _plainly(address, "list"):
            next(iter(self._client.list_blobs(address.bucket, prefix=address.prefix or None, max_results=1)), None)

    def upload(self, address: Address, manifest: TreeManifest, blobs: BlobStore) -> int:
        """Every file of a tree as an object below the address, unless that object holds it already; how many were sent.

        Objects that are not in the tree stay: the bucket may be others' too.
        """
        files = {address.name_of(entry.path): entry for entry in manifest.entries if entry.kind == "file"}
        with _plainly(address, "list"):
            there = {one.name: (one.metadata or {}).get(MARK) for one in self._listed(address)}
        wanted = [(name, entry) for name, entry in files.items() if there.get(name) != entry.sha256]
        bucket = self._client.bucket(address.bucket)

        def send(item: tuple[str, TreeEntry]) -> None:
            name, entry = item
            made = bucket.blob(name)
            made.metadata = {MARK: entry.sha256}
            with _plainly(address, "replace" if name in there else "write"), blobs.open(entry.sha256) as file:
                made.upload_from_file(file, size=entry.size, checksum="crc32c")

        _each(send, wanted)
        return len(wanted)

    def download(self, address: Address, blobs: BlobStore) -> TreeManifest:
        """What lies below the address, as a tree whose contents are in `blobs`; one object by its full name is one file."""
        objects = self._objects(address)
        known = self._known(address.bucket)
        lacking = [one for one in objects if not _has(blobs, known.get(one.name), one.generation)]

        def fetch(one: StoredObject) -> tuple[str, Kept]:
            with _plainly(address, "read"):
                digest, size = _fetched(one, blobs)
            return one.name, Kept(one.generation, digest, size)

        try:
            for name, kept in _each(fetch, lacking):
                known[name] = kept
        finally:
            self._remember(address.bucket, known)
        if [one.name for one in objects] == [address.prefix]:
            only = known[address.prefix]
            entry = TreeEntry(
                path=Path(address.prefix).name, kind="file", mode=0o644, size=only.size, sha256=only.sha256
            )
            return TreeManifest(root="file", entries=(entry,))
        return tree_of(address, {one.name: known[one.name] for one in objects})

    def _objects(self, address: Address) -> list[StoredObject]:
        with _plainly(address, "list"):
            found = [one for one in self._listed(address) if not one.name.endswith("/")]
        exact = [one for one in found if one.name == address.prefix]
        below = [one for one in found if not address.prefix or one.name.startswith(f"{address.prefix}/")]
        if not exact and not below:
            raise UserError(f"{address}: nothing is there", "correct the address, or upload it first", status=404)
        return below or exact

    def _listed(self, address: Address) -> list[StoredObject]:
        return list(self._client.list_blobs(address.bucket, prefix=address.prefix or None))

    def _known(self, bucket: str) -> dict[str, Kept]:
        try:
            return from_json((self._cache / f"{bucket}.json").read_bytes(), dict[str, Kept])
        except (OSError, msgspec.DecodeError):
            return {}

    def _remember(self, bucket: str, known: dict[str, Kept]) -> None:
        self._cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(self._cache / f"{bucket}.json", msgspec.json.encode(known))


def tree_of(address: Address, objects: dict[str, Kept]) -> TreeManifest:
    """The objects as a tree of files; a name that no file can have is refused."""
    entries: dict[str, TreeEntry] = {}
    for name, kept in sorted(objects.items()):
        path = name[len(address.prefix) + 1 :] if address.prefix else name
        parts = path.split("/")
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise UserError(
                f"gs://{address.bucket}/{name} cannot be a file: its path has an empty, '.' or '..' part",
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


def _has(blobs: BlobStore, kept: Kept | None, generation: int) -> bool:
    return kept is not None and kept.generation == generation and not blobs.missing([kept.sha256])


def _fetched(one: StoredObject, blobs: BlobStore) -> tuple[str, int]:
    """The object among the contents: its digest and size."""
    handle, path = tempfile.mkstemp(prefix=".download-", dir=blobs.root)
    os.close(handle)
    try:
        one.download_to_filename(path, checksum="crc32c")
        return blobs.adopt(Path(path))
    finally:
        Path(path).unlink(missing_ok=True)


def _each(work: Callable[[Item], T], items: Sequence[Item]) -> list[T]:
    """A few at a time; the first failure is raised, and what had not begun is left."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()


@contextlib.contextmanager
def _plainly(address: Address, action: str) -> Iterator[None]:
    """What the client raises, as a person can act on it."""
    try:
        yield
    except (api.Forbidden, api.Unauthorized) as error:
        raise refused(str(error), action, address) from None
    except api.NotFound:
        raise UserError(
            f"gs://{address.bucket} does not exist (or it is hidden from you)",
            "correct the name, or let Podway make it: give it by `name:` instead of `source:`",
            status=404,
        ) from None
    except auth.RefreshError as error:
        raise UserError(
            f"{address}: the Google login has expired ({str(error).splitlines()[0][:80]})",
            "log in again where the Podway server runs: gcloud auth application-default login",
        ) from None
    except api.BadRequest as error:
        raise UserError(f"{address}: {error.message}", "correct the bucket's name or place") from None
    except (api.GoogleAPIError, auth.TransportError, requests.RequestException) as error:
        raise ProviderError(f"{address}: {str(error).splitlines()[0][:200]}") from None
