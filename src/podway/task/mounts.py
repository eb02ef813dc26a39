"""What appears on the hosts: SkyPilot's workdir, file_mounts and volumes.

A mount is a local path (synced), an address (`gs://`, `s3://` and `hf://` copied, `https://` fetched) or a bucket spelled out as a
mapping. Buckets of S3 and of the Hugging Face hub can only be copied, and addresses of other stores are refused by name: a job that
finds an empty directory is worse than one that does not start.
"""

import posixpath
import re
from typing import Literal

import msgspec

from podway.task.fields import Field
from podway.task.paths import LocalMachine
from podway.task.task import Bucket, FileMount, Git, LocalDir, Url, Volume
from podway.task.values import gigabytes

Mode = Literal["COPY", "MOUNT", "MOUNT_CACHED"]

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")  # cloud.google.com/storage/docs/buckets#naming
_REPOSITORY = re.compile(
    r"(?:(?:datasets|spaces)/)?[\w.-]+/[\w.-]+(?:@[\w.-]+)?(?:/|$)"
)  # as huggingface_hub names one
_STORES = {"gcs": "gs", "s3": "s3", "hf": "hf"}  # `store` in a file, and the scheme of its addresses
WORKDIR_NAME = "sky_workdir"  # below the home of every host
_MODES: dict[str, Mode] = {"MOUNT": "MOUNT", "COPY": "COPY", "MOUNT_CACHED": "MOUNT_CACHED"}
_COMMIT = re.compile(r"[0-9a-f]{40}")


def read_workdir(field: Field, local: LocalMachine) -> LocalDir | Git:
    if field.is_mapping:
        url, ref = field.get("url"), field.get("ref")
        assert url is not None  # the shape requires it
        return git(url.words(), ref.words() if ref else None)
    return LocalDir(path=local.existing(field, field.words(), directory=True))


def git(url: str, ref: str | None) -> Git:
    """A ref of 40 hex digits is a commit."""
    return Git(url=url, hash=ref) if ref and _COMMIT.fullmatch(ref) else Git(url=url, ref=ref)


def read_file_mounts(section: Field, local: LocalMachine, notes: list[str]) -> tuple[list[FileMount], list[Volume]]:
    """The mounts, and those of them that are volumes (`store: volume`)."""
    mounts: list[FileMount] = []
    volumes: list[Volume] = []
    for target, field in section.entries().items():
        at = mount_target(field, target)
        if field.is_mapping and _store(field) == "volume":
            volumes.append(_volume_store(field, at))
        elif field.is_mapping:
            mounts.append(FileMount(target=at, source=_bucket(field, local, notes)))
        else:
            mounts.append(FileMount(target=at, source=_source(field, local)))
    return mounts, volumes


def read_volumes(section: Field) -> list[Volume]:
    found = []
    for target, field in section.entries().items():
        at = mount_target(field, target)
        if not field.is_mapping:
            found.append(Volume(path=at, name=field.words()))
            continue
        name, size = field.get("name"), field.get("size")
        if name is None and size is None:
            raise field.error("neither a name nor a size", "name an existing volume, or give the size of a new one")
        part = field.get("sub_path")
        found.append(
            Volume(
                path=at,
                name=name.words() if name else None,
                size_gb=gigabytes(size) if size else None,
                sub_path=_sub_path(part) if part else None,
            )
        )
    return found


def _sub_path(field: Field) -> str:
    inside = posixpath.normpath(field.words().strip("/"))
    if inside == ".." or inside.startswith("../") or "\0" in inside or "\n" in inside:
        raise field.error(f"{field.found} leads out of the volume", "write a directory below it, such as data/train")
    return inside


def mount_target(field: Field, text: str) -> str:
    """Where on a host something appears, without `.` and `..`."""
    target = settled(text.strip())
    if target is None:
        raise field.error(f"`{text}` leads out of the home", "write the path without `..`, or from the root")
    if "\0" in target or "\n" in target or target in ("", "/", "//", "~", "."):
        raise field.error(f"`{text}` cannot be mounted over", "name a directory or file of its own, such as /data")
    return target


def settled(target: str) -> str | None:
    """A target without `.` and `..`; None where it leads above the home. The workdir lies in the home: `../x` is `~/x`."""
    if posixpath.normpath(target).startswith("../") and not target.startswith("~/"):
        target = f"~/{WORKDIR_NAME}/{target}"
    begin = "~/" if target.startswith("~/") else ""
    inside = posixpath.normpath(target.removeprefix(begin)) if target.removeprefix(begin) else "."
    if inside == ".." or inside.startswith("../"):
        return None
    return f"{begin}{inside}" if inside != "." else begin.rstrip("/")


def _source(field: Field, local: LocalMachine) -> LocalDir | Bucket | Url:
    """A mount given as plain text."""
    text = field.words()
    match = _ADDRESS.fullmatch(text)
    if match is None:
        return LocalDir(path=local.existing(field, text))
    scheme = match[1].lower()
    if scheme in ("http", "https"):
        return Url(url=text)
    return Bucket(uri=_uri(field, scheme, match[2]), mode="COPY")


def _uri(field: Field, scheme: str, rest: str) -> str:
    """The address of a bucket, or of a repository of the hub."""
    if scheme not in _STORES.values():
        raise field.error(
            f"{scheme}:// storage cannot be brought to a TPU host",
            "copy the data to a gs:// bucket, or fetch it in `setup`",
        )
    if scheme == "hf":
        if rest.startswith("buckets/"):
            raise field.error(
                "a bucket of the hub cannot be copied here", "put the files into a dataset: hf://datasets/ORG/NAME"
            )
        if not _REPOSITORY.match(rest):
            raise field.error(
                f"`{rest}` is not a repository of the hub", "write hf://ORG/MODEL or hf://datasets/ORG/NAME"
            )
        return f"hf://{rest}".rstrip("/")
    name, _, prefix = rest.partition("/")
    if not _BUCKET.fullmatch(name):
        raise field.error(f"`{name}` is not the name of a bucket", f"write {scheme}://BUCKET or {scheme}://BUCKET/PATH")
    return f"{scheme}://{name}/{prefix}".rstrip("/")


def _store(field: Field) -> str:
    store = field.get("store")
    return store.text().lower() if store else "gcs"


def _bucket(field: Field, local: LocalMachine, notes: list[str]) -> Bucket | Url:
    store = field.get("store")
    if store and _store(field) not in _STORES:
        raise store.error(
            f"a {_store(field)} store cannot be brought to a TPU host",
            "use `store: gcs`, or copy the data to a gs:// bucket",
        )
    name, source = field.get("name"), field.get("source")
    address = None if source is None or source.is_list else _ADDRESS.fullmatch(source.words())
    if source and address and name:
        raise name.error("a bucket is named by source already", "remove `name`, or give local files as source")
    if source and address and address[1].lower() in ("http", "https"):
        return Url(url=source.words())
    mode, read_only = _mode(field, notes)
    persistent = field.get("persistent")
    common = Bucket(
        uri="",
        mode=mode,
        read_only=read_only,
        persistent=persistent.flag() if persistent else True,
        options=_options(field),
    )
    if source and address:
        uri = _uri(source, address[1].lower(), address[2])
    elif name is None:
        raise field.error("neither a bucket name nor a gs:// source", "add `name:` or `source: gs://...`")
    else:
        uri = _uri(name, _STORES[_store(field)], name.words())
    scheme = uri.partition("://")[0]
    if scheme != "gs" and mode != "COPY":
        raise (source or name or field).error(
            f"{uri} can be copied, not mounted", "add `mode: COPY`; what the task writes is not put back"
        )
    if source and address:
        return msgspec.structs.replace(common, uri=uri)
    if scheme != "gs" and source:
        raise source.error(f"local files cannot be put into {uri}", "use `store: gcs`, or upload them yourself")
    upload = _uploads(source, local) if source else ()
    return msgspec.structs.replace(common, uri=uri, create=scheme == "gs", upload=upload)


def _uploads(source: Field, local: LocalMachine) -> tuple[str, ...]:
    paths = []
    for one in source.items() if source.is_list else [source]:
        text = one.words()
        if _ADDRESS.fullmatch(text):
            raise one.error("a list of sources holds local files only", "give one gs:// source, without a list")
        paths.append(local.existing(one, text))
    return tuple(paths)


def _mode(field: Field, notes: list[str]) -> tuple[Mode, bool]:
    """(mode, read-only), from `mode`, `type` and `config`."""
    mode, kind = field.get("mode"), field.get("type")
    word = _MODES[mode.text().upper()] if mode else "MOUNT"
    read_only = False
    if kind:
        purpose = kind.text().upper()
        read_only = purpose.endswith("_RO")
        if not mode and purpose.startswith("MODEL_CHECKPOINT"):
            word = "MOUNT_CACHED"
        notes.append(f"{kind.path}: read as mode {word}{', read-only' if read_only else ''}")
    config = field.get("config")
    for section in ("mount", "mount_cached"):
        below = config.get(section) if config else None
        asked = below.get("read_only") if below else None
        read_only = read_only or (asked is not None and asked.flag())
    return word, read_only


def _options(field: Field) -> dict[str, str]:
    found = {}
    given = field.get("mount_options")
    if given:
        found["mount_options"] = given.text()
    config = field.get("config")
    cached = config.get("mount_cached") if config else None
    for key, value in cached.entries().items() if cached else ():
        if key != "read_only" and not value.is_null:
            found[key] = value.text()
    return found


def _volume_store(field: Field, target: str) -> Volume:
    name, source, config = field.get("name"), field.get("source"), field.get("config")
    if source:
        raise source.error("files cannot be put into a volume", "use a bucket (`store: gcs`), or copy them in `setup`")
    if name is None:
        raise field.error("a volume needs a name", "add `name:`")
    size = config.get("disk_size") if config else None
    mode = config.get("attach_mode") if config else None
    return Volume(
        path=target,
        name=name.words(),
        size_gb=gigabytes(size) if size else None,
        read_only=mode is not None and mode.text().lower() == "read_only",
    )
