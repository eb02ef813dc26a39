"""Models that are not on this disk: ids of the Hugging Face hub and `gs://` addresses become folders (no jax).

    fetch("Qwen/Qwen3-8B@main")        ->  the snapshot in the Hugging Face cache (HF_HOME), which other programs share
    fetch("gs://bucket/out/model")     ->  ~/.cache/podway/models/<digest of what lies there>

Only what Podway reads is downloaded: the files of the tokenizer and the configuration (`weights=False`), or the safetensors as
well. A connection that breaks is resumed where it broke; the next start downloads what is missing (of the hub whole files, of a
bucket the rest of one). A hub that cannot be reached is no error while everything is in the cache.
"""

import errno
import fnmatch
import hashlib
import importlib
import json
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from podway.errors import UserError
from podway.extras import load
from podway.model.families import find_model
from podway.model.shape import ModelShape
from podway.quantities import format_bytes

_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)
_SMALL = ("*.json", "*.jinja", "tokenizer.model")
_WEIGHTS = ("*.safetensors",)
_AT_ONCE = 8
_PART = ".part"


def _patterns(weights: bool) -> tuple[str, ...]:
    return (*_SMALL, *_WEIGHTS) if weights else _SMALL


def is_address(name: str) -> bool:
    """Whether a name is to be downloaded: an id of the hub or a `gs://` address. A folder of that name goes first."""
    if name.startswith("gs://"):
        return True
    return not os.path.isdir(name) and not name.startswith(".") and _ID.fullmatch(name) is not None  # noqa: PTH112


def fetch(name: str, *, weights: bool = True, log: Callable[[str], None] = print) -> Path:
    """The folder of a model: of what an address names, downloaded now as far as it is not here yet, or of the path itself."""
    if not is_address(name):
        return Path(name).expanduser()
    return _from_bucket(name, weights, log) if name.startswith("gs://") else _from_hub(name, weights, log)


def fetch_shape(name: str, log: Callable[[str], None] = print) -> ModelShape:
    """`find_model`, which looks for names that it does not know at the hub."""
    try:
        return find_model(name)
    except UserError:
        if not is_address(name):
            raise
    return find_model(str(fetch(name, weights=False, log=log)))


# --- the Hugging Face hub


def _from_hub(name: str, weights: bool, log: Callable[[str], None]) -> Path:
    found = _ID.fullmatch(name)
    assert found is not None
    hub: Any = load("huggingface_hub", "serve", f"downloading {name}")
    for part in ("constants", "errors", "utils"):  # which the package itself imports only when they are used
        importlib.import_module(f"huggingface_hub.{part}")
    hub.utils.disable_progress_bars()
    which = {"repo_id": found["id"], "revision": found["revision"]}
    wanted = {**which, "allow_patterns": list(_patterns(weights)), "ignore_patterns": ["*/*"]}
    try:
        files = hub.snapshot_download(**wanted, dry_run=True)
    except hub.errors.DryRunError as error:  # no answer, or no access: what is in the cache may be all that is needed
        cause = error.__cause__ or error
        try:
            folder = Path(hub.snapshot_download(**which, local_files_only=True))
        except Exception:
            raise _hub_error(hub, name, cause, "it is not in the cache") from None
        if not _complete(folder, weights):
            raise _hub_error(hub, name, cause, "only a part of it is in the cache") from None
        return folder
    except Exception as error:
        raise _hub_error(hub, name, error) from None
    if not any(one.filename == "config.json" for one in files):
        raise UserError(f"{name} holds no config.json", "give the id of a model with safetensors")

    def one(file: Any) -> Path:
        try:
            return Path(hub.hf_hub_download(found["id"], file.filename, revision=file.commit_hash))
        except Exception as error:
            raise _hub_error(hub, name, error) from None

    missing = [file for file in files if file.will_download]
    _in_threads(one, missing, lambda file: (str(file.filename), int(file.file_size or 0)), name, log)
    folder = one(files[0]).parent  # of a file that is here now: nothing is asked
    assert folder.is_dir()
    return folder


def _complete(folder: Path, weights: bool) -> bool:
    """Whether a folder of the cache has all that is read of a model: one that another program began may lack files."""
    if not (folder / "config.json").exists():
        return False
    index = folder / "model.safetensors.index.json"
    if not weights or not index.exists():
        return not weights or (folder / "model.safetensors").exists()
    try:
        return all((folder / name).exists() for name in json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _hub_error(hub: Any, name: str, error: BaseException, cached: str = "") -> UserError:
    """What went wrong, in words; `cached` says what the cache has, where that was looked at."""
    errors, where = hub.errors, str(hub.constants.ENDPOINT)
    if isinstance(error, UserError):
        return error
    if isinstance(error, errors.GatedRepoError):
        model = name.partition("@")[0]
        return UserError(
            f"{name} is gated, and this token has no access to it" if hub.get_token() else f"{name} is gated",
            f"ask for access at {where}/{model}, and set HF_TOKEN to a token of that account",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return UserError(
            f"{name}: no such directory, and no such model at {where}",
            "check the id; a private model needs HF_TOKEN",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(f"{name}: the model has no such revision", "name a branch, a tag or a commit after the @")
    if isinstance(error, errors.HFValidationError):
        return UserError(f"{name} is not an id of the hub", "an id is ORGANIZATION/MODEL")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return UserError(
            f"no space is left in {hub.constants.HF_HUB_CACHE} for {name}", "free some, or set HF_HOME to another disk"
        )
    if isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
        return UserError(f"{where} answered {status} for {name}", "start again in a while: complete files are kept")
    if not cached:
        return UserError(
            f"{name} could not be downloaded from {where}: {_first_line(error)}",
            "start again: complete files are kept",
        )
    why = "HF_HUB_OFFLINE is set" if isinstance(error, errors.OfflineModeIsEnabled) else f"{where} cannot be reached"
    return UserError(f"{name} could not be downloaded: {why}, and {cached}", "check the network, or give a folder")


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


# --- Google Cloud Storage


def bucket_client() -> Any:
    """A client of Google Cloud Storage."""
    storage: Any = load("google.cloud.storage", "gcp", "a gs:// path")
    try:
        return storage.Client()
    except Exception as error:  # google.auth has many ways to say that nobody is logged in
        raise UserError(
            f"cannot sign in to Google Cloud Storage: {error}", "run `gcloud auth application-default login`"
        ) from None


def _from_bucket(name: str, weights: bool, log: Callable[[str], None]) -> Path:
    """A folder for each state of the objects there: what is in it never changes."""
    bucket, _, inside = name.removeprefix("gs://").rstrip("/").partition("/")
    prefix = f"{inside}/" if inside else ""
    try:
        blobs = [
            blob
            for blob in bucket_client().list_blobs(bucket, prefix=prefix or None)
            if any(fnmatch.fnmatch(blob.name, prefix + pattern) for pattern in (*_SMALL, *_WEIGHTS))
            and "/" not in blob.name[len(prefix) :]
        ]
    except UserError:
        raise
    except Exception as error:  # the client's errors share no class with those of its transport
        raise UserError(
            f"cannot list {name}: {_first_line(error)}", "check the bucket's name and your access"
        ) from None
    if not any(blob.name == f"{prefix}config.json" for blob in blobs):
        raise UserError(f"there is no config.json in {name}", "give the address of a model's folder")
    state = sorted((blob.name, str(blob.generation)) for blob in blobs)
    digest = hashlib.sha256(repr((bucket, state)).encode()).hexdigest()[:32]
    folder = Path.home() / ".cache" / "podway" / "models" / digest
    folder.mkdir(parents=True, exist_ok=True)

    def one(blob: Any) -> Path:
        target = folder / str(blob.name)[len(prefix) :]
        part = target.with_name(target.name + _PART)
        try:
            with part.open("ab") as file:
                if file.tell() < blob.size:
                    blob.download_to_file(file, start=file.tell(), checksum=None, raw_download=True)
            if part.stat().st_size != blob.size:
                part.unlink()
                raise UserError(f"{name}/{target.name} came with a wrong size", "start again")
            part.replace(target)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise _bucket_error(name, target.name, error) from None
            raise UserError(f"no space is left in {folder} for {name}", "free some") from None
        except UserError:
            raise
        except Exception as error:
            raise _bucket_error(name, target.name, error) from None
        return target

    now = [
        blob for blob in blobs if any(fnmatch.fnmatch(blob.name, prefix + pattern) for pattern in _patterns(weights))
    ]
    missing = [blob for blob in now if not (folder / blob.name[len(prefix) :]).exists()]
    _in_threads(one, missing, lambda blob: (str(blob.name), int(blob.size)), name, log)
    return folder


def _bucket_error(name: str, file: str, error: BaseException) -> UserError:
    return UserError(f"cannot download {name}/{file}: {_first_line(error)}", "start again: what was downloaded is kept")


def _in_threads(
    one: Callable[[Any], Path],
    missing: Sequence[Any],
    facts: Callable[[Any], tuple[str, int]],
    name: str,
    log: Callable[[str], None],
) -> None:
    """Each of the missing files, a few at once; a line of the log when each is there."""
    if not missing:
        return
    total, done = sum(facts(file)[1] for file in missing), 0
    log(f"downloading {name}: {len(missing)} files, {format_bytes(total)}")
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="download") as pool:
        ends = [(pool.submit(one, file), facts(file)[1]) for file in missing]
        try:
            for number, (end, size) in enumerate(ends, 1):
                end.result()
                done += size
                if size >= 1 << 20 or number == len(ends):
                    log(
                        f"downloaded {number} of {len(ends)} files of {name}, {format_bytes(done)} of {format_bytes(total)}"
                    )
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
