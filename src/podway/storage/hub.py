"""Models, datasets and spaces of the Hugging Face hub to copy from, by its own client. All of it blocks: call it from a thread.

    hf://ORG/MODEL[@REVISION][/PATH]   hf://datasets/ORG/NAME[@REVISION][/PATH]   hf://spaces/ORG/NAME[@REVISION][/PATH]

The token is the one the task gives (HF_TOKEN, as a secret or a variable), else the server's own login; it stays in this process.
`HF_ENDPOINT` of the server is the client's own way to another hub.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile

from podway.errors import ProviderError, UserError
from podway.storage.address import Address
from podway.storage.downloads import RemoteObject

_KINDS = {"datasets": "dataset", "spaces": "space"}
_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


class HubStore:
    """See the module docstring."""

    def __init__(self, credentials: Mapping[str, str]) -> None:
        self._token = next((credentials[name] for name in _TOKENS if credentials.get(name)), None)
        self._api = HfApi(token=self._token)

    def objects(self, address: Address) -> list[RemoteObject]:
        """The files of a repository, at the commit that its revision is now."""
        kind, name, revision = repository(address)
        with _plainly(address):
            commit = self._api.repo_info(name, repo_type=kind, revision=revision).sha or revision
            listed = list(self._api.list_repo_tree(name, recursive=True, revision=commit, repo_type=kind))
        return [
            RemoteObject(
                one.path,
                one.lfs.sha256 if one.lfs else one.blob_id,
                partial(self._fetch, address, kind, name, commit, one.path),
            )
            for one in listed
            if isinstance(one, RepoFile)
        ]

    def _fetch(self, address: Address, kind: str, name: str, commit: str | None, path: str, to: Path) -> None:
        with _plainly(address), tempfile.TemporaryDirectory(prefix=".hub-", dir=to.parent) as folder:
            got = hf_hub_download(
                name, path, repo_type=kind, revision=commit, token=self._token, local_dir=folder, tqdm_class=None
            )
            shutil.move(got, to)


def repository(address: Address) -> tuple[str, str, str | None]:
    """(kind, ORG/NAME, revision) of an address of the hub."""
    name, _, revision = address.bucket.partition("@")
    kind, _, rest = name.partition("/")
    return (_KINDS[kind], rest, revision or None) if kind in _KINDS else ("model", name, revision or None)


@contextlib.contextmanager
def _plainly(address: Address) -> Iterator[None]:
    """What the client raises, as a person can act on it."""
    try:
        yield
    except GatedRepoError:
        raise UserError(
            f"{address} is gated, and the token has no access to it",
            "ask for access on its page, and give a token of that account: --secret HF_TOKEN",
        ) from None
    except RepositoryNotFoundError:
        raise UserError(
            f"{address} does not exist (or it is private)", "correct the name, or give a token: --secret HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise UserError(f"{address}: there is no such revision", "name a branch, a tag or a commit") from None
    except EntryNotFoundError:
        raise UserError(f"{address}: nothing is there", "correct the address", status=404) from None
    except HFValidationError:
        raise UserError(f"{address} is not an address of the hub", "write hf://ORG/NAME") from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "an error"
        raise ProviderError(f"{address}: the hub answered {status}") from None
    except OSError as error:
        raise ProviderError(f"{address}: {str(error).splitlines()[0][:200]}") from None
