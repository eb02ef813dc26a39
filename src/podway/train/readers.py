"""What is in a file: texts or records, one after the other, each with the place it came from (no jax).

`read` looks the reader up by kind. A reader never holds a whole file: text comes in stretches of about a megabyte cut
at line ends, records one by one. Whatever is wrong with a file becomes a `UserError` that names it, and the line.
"""

import gzip
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from podway.errors import UserError
from podway.model.download import bucket_client
from podway.train.optional import require_module
from podway.train.sources import SourceFile
from podway.train.tf_example import parse_example

_STRETCH = 1 << 20  # characters of text tokenized at once


class Item(NamedTuple):
    """A text or a record, and where it stands; `ends` is False when its document goes on in the next item."""

    where: str
    value: str | dict[str, Any]
    ends: bool = True


def read(file: SourceFile, local: Path) -> Iterator[Item]:
    """The items of a file, of which `local` is a copy on this machine or the file itself."""
    try:
        yield from _READERS[file.kind](local, file.path)
    except Exception as error:  # gzip says EOFError for a file that was cut short; zstandard has a class of its own
        if not isinstance(error, OSError | EOFError) and type(error).__name__ != "ZstdError":
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(
            f"cannot read {file.path}: {reason}", "check its permissions, copy it again, or leave it out"
        ) from None


def fetch(file: SourceFile, folder: Path) -> Path:
    """The file on this machine; one in a bucket is copied into `folder`."""
    if not file.path.startswith("gs://"):
        return Path(file.path)
    bucket, _, name = file.path.removeprefix("gs://").partition("/")
    copy = folder / ("copy" + "".join(Path(name).suffixes[-2:]))
    try:
        source = bucket_client().bucket(bucket).blob(name, generation=int(file.version))
        source.download_to_filename(str(copy))  # checked against the checksum that the bucket keeps
    except (UserError, OSError):
        raise
    except Exception as error:  # the client's errors share no class with those of its transport
        raise UserError(f"cannot fetch {file.path}: {error}", "check your access to the bucket") from None
    return copy


def text_of(item: Item, field: str) -> str:
    """The text of an item: itself, or one field of a record."""
    if isinstance(item.value, str):
        return item.value
    value = item.value.get(field)
    if value is None and field not in item.value:
        names = ", ".join(sorted(item.value)[:12]) or "those that it has: it is empty"
        raise UserError(f"{item.where}: there is no field {field!r}", f"set data.field to one of {names}")
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if value is not None and not isinstance(value, str):
        raise UserError(
            f"{item.where}: field {field!r} is not text but {type(value).__name__}",
            "name a field of text with data.field, or set data.form=chat for conversations",
        )
    return value or ""


def _open(path: Path, name: str) -> IO[bytes]:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.suffix == ".zst":
        zstandard = require_module("zstandard", "zstandard", name)
        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(open(path, "rb")))
    return open(path, "rb")


def _text(path: Path, name: str) -> Iterator[Item]:
    with _open(path, name) as raw, io.TextIOWrapper(raw, encoding="utf-8", newline="") as stream:
        held = ""
        try:
            while more := stream.read(_STRETCH):
                held += more
                at = _last_line_end(held)
                if at and len(held) >= _STRETCH:
                    yield Item(name, held[:at], ends=False)
                    held = held[at:]
        except UnicodeDecodeError as error:
            raise UserError(
                f"{name} is not UTF-8: {error.reason} (byte 0x{error.object[error.start]:02x})",
                f"convert it (`iconv -t utf-8 {Path(name).name}`), or leave it out",
            ) from None
        yield Item(name, held)


def _last_line_end(text: str) -> int:
    """Just after the last newline that a visible character follows: no tokenizer joins tokens across it."""
    tail = text[-65536:]
    ends = [match.end() for match in re.finditer(r"\n(?=\S)", tail)]
    return len(text) - len(tail) + ends[-1] if ends else 0


def _jsonl(path: Path, name: str) -> Iterator[Item]:
    with _open(path, name) as stream:
        start = stream.read(64).lstrip()[:1]
    if start == b"[":
        yield from _json_list(path, name)
        return
    with _open(path, name) as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield _record(line, f"{name}:{number}")


def _record(line: bytes, where: str) -> Item:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {error}", "each line must hold one JSON object") from None
    if not isinstance(value, dict | str):
        raise UserError(f"{where}: not a JSON object but {type(value).__name__}", "each line must hold one JSON object")
    return Item(where, value)


def _json_list(path: Path, name: str) -> Iterator[Item]:
    """A file that is one list of objects, as many instruction sets are."""
    with _open(path, name) as stream:
        try:
            values = json.load(stream)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{name} is not JSON: {error}", "write one JSON object a line, or one list of them"
            ) from None
    for number, value in enumerate(values):
        if not isinstance(value, dict | str):
            raise UserError(f"{name}[{number}]: not a JSON object", "write one JSON object a line, or one list of them")
        yield Item(f"{name}[{number}]", value)


def _parquet(path: Path, name: str) -> Iterator[Item]:
    arrow = require_module("pyarrow", "pyarrow", name)
    parquet = require_module("pyarrow.parquet", "pyarrow", name)

    try:
        with parquet.ParquetFile(path) as file:
            yield from _rows(name, file.iter_batches(batch_size=1024))
    except (arrow.ArrowException, OSError) as error:
        raise UserError(
            f"{name} is not a whole parquet file: {error}", "copy the file again, or leave it out"
        ) from None


def _arrow(path: Path, name: str) -> Iterator[Item]:
    """Both forms of Arrow IPC: files begin with ARROW1, streams (which Hugging Face writes) do not."""
    arrow = require_module("pyarrow", "pyarrow", name)
    try:
        with arrow.memory_map(str(path)) as source:
            if source.read(6) == b"ARROW1":
                file = arrow.ipc.open_file(source)
                yield from _rows(name, (file.get_batch(i) for i in range(file.num_record_batches)))
            else:
                source.seek(0)
                yield from _rows(name, arrow.ipc.open_stream(source))
    except (arrow.ArrowException, OSError) as error:
        raise UserError(f"{name} is not a whole arrow file: {error}", "copy the file again, or leave it out") from None


def _rows(name: str, batches: Iterator[Any]) -> Iterator[Item]:
    number = 0
    for batch in batches:
        for record in batch.to_pylist():
            yield Item(f"{name} row {number}", record)
            number += 1


def _array_record(path: Path, name: str) -> Iterator[Item]:
    module = require_module("array_record.python.array_record_module", "array_record", name)
    try:
        reader = module.ArrayRecordReader(str(path))
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{name} is not an ArrayRecord file: {error}", "copy the file again, or leave it out") from None
    try:
        for first in range(0, reader.num_records(), 1024):
            last = min(first + 1024, reader.num_records())
            for number, record in enumerate(reader.read(first, last), first):
                yield _array_item(record, f"{name} record {number}")
        reader.close()  # only here does it tell of a file too short to be one
    except (RuntimeError, ValueError, IndexError) as error:
        raise UserError(f"{name} is damaged: {error}", "copy the file again, or leave it out") from None


def _array_item(record: bytes, where: str) -> Item:
    """A record holds a JSON object, a tf.train.Example (as TFDS writes), or plain text."""
    if record[:1] == b"{":
        return _record(record, where)
    example = parse_example(record)
    if example is not None:
        return Item(where, example)
    try:
        return Item(where, record.decode())
    except UnicodeDecodeError:
        raise UserError(
            f"{where}: neither a JSON object, nor a tf.train.Example, nor UTF-8 text", "write it as one of these"
        ) from None


_READERS = {
    "text": _text,
    "jsonl": _jsonl,
    "parquet": _parquet,
    "arrow": _arrow,
    "array_record": _array_record,
}
