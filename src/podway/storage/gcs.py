"""Buckets of Google Cloud Storage as the control side uses them, by Google's own client. All of it blocks: call it from a thread.

    ensure     the bucket is there, or is made now where the task says so
    upload     local files into a bucket, once: an object remembers the digest of what it was made from
    objects    what lies below an address, for `downloads.py`

Credentials and project are the gcp provider's (gcp_settings.py); without any, what is public can still be read.
`STORAGE_EMULATOR_HOST` is the client's own way to another endpoint.
What a person has to put right is a `UserError` that names the missing permission; what may pass is a `ProviderError`.
"""

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

import requests
from google.api_core import exceptions as api
from google.auth import exceptions as auth
from google.auth.credentials import AnonymousCredentials, Credentials
from google.cloud import storage  # type: ignore[attr-defined]
from google.oauth2.credentials import Credentials as UserCredentials

from podway.errors import ProviderError, UserError
from podway.hosts.blobs import BlobStore
from podway.hosts.tree import TreeEntry, TreeManifest
from podway.providers.gcp.account import Account
from podway.storage.address import Address, split_login
from podway.storage.downloads import RemoteObject, in_threads
from podway.storage.permissions import refused

MARK = "podway-sha256"
_WHERE_US = "US"  # the API's own default location


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
    return Buckets(client, account)


class StoredObject(Protocol):
    """What is used of an object of Google's client, which has no types."""

    name: str
    generation: int
    metadata: dict[str, str] | None

    def download_to_filename(self, filename: str, *, checksum: str) -> None:
        """Write the contents to a file, compared with the checksum."""


class Buckets:
    """See the module docstring."""

    def __init__(self, client: storage.Client, account: Account) -> None:
        self._client = client
        self._account = account

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

        in_threads(send, wanted)
        return len(wanted)

    def objects(self, address: Address) -> list[RemoteObject]:
        """What lies at or below the address; a generation of an object never changes."""
        with _plainly(address, "list"):
            return [
                RemoteObject(one.name, one.generation, partial(_fetch, address, one)) for one in self._listed(address)
            ]

    def _listed(self, address: Address) -> list[StoredObject]:
        return list(self._client.list_blobs(address.bucket, prefix=address.prefix or None))


def _fetch(address: Address, one: StoredObject, path: Path) -> None:
    with _plainly(address, "read"):
        one.download_to_filename(str(path), checksum="crc32c")


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
