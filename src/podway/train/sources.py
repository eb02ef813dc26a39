"""From what a person wrote under `data.paths` to files of a known kind (no jax).

A path is a file, a glob, a folder, a Hugging Face dataset saved on disk, or any of the first three under `gs://`. What
kind a file is follows from its name, or is given by `data.kind`. Files of a path come sorted by name, and small ones are
put together into groups, each of which becomes one token shard.
"""

import glob
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from podway.errors import UserError
from podway.model.download import bucket_client

Kind = Literal["text", "jsonl", "parquet", "arrow", "array_record", "hf", "synthetic"]

KINDS: dict[str, Kind] = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".rst": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".array_record": "array_record",
    ".arrayrecord": "array_record",
}
COMPRESSED = (".gz", ".zst")
_GROUP_BYTES = 64 << 20  # large enough that shards are few, small enough that hosts can share the work


class SourceFile(NamedTuple):
    """One file to read."""

    path: str
    kind: Kind
    size: int
    version: str  # changes whenever the content may have


def expand(path: str, kind: Kind | None) -> list[SourceFile]:
    """All files of one path, sorted; at least one."""
    if path.startswith("gs://"):
        files = _expand_bucket(path, kind)
    else:
        files = _expand_local(path, kind)
    if not files:
        raise UserError(f"no file matches {path}", _nearest_folder(path))
    return files


def group(files: Sequence[SourceFile]) -> list[list[SourceFile]]:
    """Neighbours put together until they are large enough to be a shard."""
    groups: list[list[SourceFile]] = []
    space = 0
    for file in files:
        if not groups or space < file.size or groups[-1][0].kind != file.kind:
            groups.append([])
            space = _GROUP_BYTES
        groups[-1].append(file)
        space -= file.size
    return groups


def stamp(files: Sequence[SourceFile]) -> str:
    """A name for these files as they are now."""
    return hashlib.sha256("\0".join(f"{f.path}\0{f.size}\0{f.version}" for f in files).encode()).hexdigest()[:32]


def kind_of(name: str) -> Kind | None:
    """What a file's name says it is."""
    path = Path(name.lower())
    return KINDS.get(Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix)


def _expand_local(path: str, kind: Kind | None) -> list[SourceFile]:
    place = Path(path).expanduser()
    if place.is_dir():
        if kind in (None, "hf") and ((place / "state.json").exists() or (place / "dataset_dict.json").exists()):
            return _saved_dataset(place)
        if kind == "hf":
            raise UserError(
                f"{place} is not a saved dataset: it has no state.json",
                "give the folder that Dataset.save_to_disk wrote",
            )
        names = sorted(str(file) for file in place.rglob("*") if file.is_file() and not _hidden(file, place))
        known = [name for name in names if kind_of(name)]
        if not known and names and kind is None:
            raise UserError(f"no file in {place} has a known file type", "set data.kind")
        return [_local(name, kind) for name in known or names]
    if place.exists():
        return [_local(str(place), kind)]
    names = sorted(glob.glob(str(place), recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
    return [_local(name, kind) for name in names if Path(name).is_file()]


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def _local(name: str, kind: Kind | None) -> SourceFile:
    try:
        facts = Path(name).stat()
    except OSError as error:
        raise UserError(f"cannot read {name}: {error.strerror}", "check its permissions") from None
    return SourceFile(str(Path(name).absolute()), _decided(name, kind), facts.st_size, str(facts.st_mtime_ns))


def _decided(name: str, kind: Kind | None) -> Kind:
    found = kind if kind not in (None, "hf") else kind_of(name)
    if found is None:
        raise UserError(
            f"cannot tell the file type of {name} from its name",
            "set data.kind to one of text, jsonl, parquet, arrow, array_record",
        )
    return found


def _saved_dataset(place: Path) -> list[SourceFile]:
    """The arrow files that a Hugging Face dataset's state.json lists; of several splits, the one called train."""
    if (place / "dataset_dict.json").exists():
        splits = _json(place / "dataset_dict.json").get("splits", [])
        if "train" not in splits:
            raise UserError(
                f"{place} has no split called train, but {', '.join(map(str, splits)) or 'none'}",
                "give the folder of one split",
            )
        return _saved_dataset(place / "train")
    state = _json(place / "state.json")
    if state.get("_indices_files"):
        raise UserError(
            f"{place} was saved with an index over its rows", "call flatten_indices() before save_to_disk()"
        )
    try:
        names = [str(place / entry["filename"]) for entry in state["_data_files"]]
    except (KeyError, TypeError):
        raise UserError(f"{place / 'state.json'} lists no data files", "save the dataset again") from None
    return [_local(name, "arrow") for name in names]


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {file}: {error}", "save the dataset again") from None
    return found if isinstance(found, dict) else {}


def _nearest_folder(path: str) -> str:
    """A hint that says how far a path leads."""
    if path.startswith("gs://"):
        return "list the bucket with `gcloud storage ls`, and check the path"
    place = Path(path).expanduser()
    for folder in place.parents:
        if folder.is_dir():
            return f"{folder.absolute()} is there; check the rest of the path"
    return "check the path"


def _expand_bucket(path: str, kind: Kind | None) -> list[SourceFile]:
    bucket, _, pattern = path.removeprefix("gs://").partition("/")
    magic = glob.has_magic(pattern)
    try:
        blobs = list(
            bucket_client().list_blobs(
                bucket, match_glob=pattern if magic else None, prefix=None if magic else pattern or None
            )
        )
    except UserError:
        raise
    except Exception as error:  # the client's errors share no class with those of its transport
        raise UserError(f"cannot list {path}: {error}", "check the bucket's name and your access to it") from None
    if not magic:
        inside = pattern.rstrip("/") + "/" if pattern else ""
        blobs = [blob for blob in blobs if blob.name == pattern or blob.name.startswith(inside)]
    names = sorted((blob for blob in blobs if not blob.name.endswith("/")), key=lambda blob: str(blob.name))
    known = [blob for blob in names if kind_of(blob.name)] if not magic and len(names) > 1 else names
    return [
        SourceFile(f"gs://{bucket}/{blob.name}", _decided(blob.name, kind), int(blob.size or 0), f"{blob.generation}")
        for blob in known or names
    ]
