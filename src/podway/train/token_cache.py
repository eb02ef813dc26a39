"""Tokenized documents on disk: tokenize once, map into memory ever after (no jax).

    <cache>/<key>/tokens.bin     uint16 or uint32, document after document
                  ends.bin       int64, where each document ends
                  answers.bin    uint8, 1 for each token the loss is on (chat only)
                  about.json     counts and sizes of the above
    <cache>/seen/<stamp>         the content hash of files of these names, sizes and times

A shard is written under another name and renamed when it is whole, so what has the name is whole. Its key is a hash of
the files' content, of how they are read and of the tokenizer. Hosts on a shared disk help each other, for each begins
elsewhere in the list and finds what the others made; hosts on disks of their own make all of it.
"""

import errno
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from podway.decoding import from_json
from podway.errors import UserError
from podway.files import write_atomically

N = TypeVar("N", bound=np.generic)
_FORMAT = 1  # part of every key: raise it when the layout or the meaning of these files changes


class Document(NamedTuple):
    """A stretch of tokens; `ends` says whether the document ends with it."""

    tokens: NDArray[np.uint32]
    answers: NDArray[np.uint8] | None = None
    ends: bool = True


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What a shard holds."""

    tokens: int
    documents: int
    width: int  # bytes of a token
    largest: int  # of all token ids
    answers: bool


class TokenShard:
    """A whole shard, mapped into memory."""

    def __init__(self, place: Path) -> None:
        self.about = from_json((place / "about.json").read_bytes(), About)
        self.tokens: NDArray[np.uint16] | NDArray[np.uint32]
        if self.about.width == 2:
            self.tokens = _map(place / "tokens.bin", np.uint16, self.about.tokens)
        else:
            self.tokens = _map(place / "tokens.bin", np.uint32, self.about.tokens)
        self.ends: NDArray[np.int64] = _map(place / "ends.bin", np.int64, self.about.documents)
        self.answers: NDArray[np.uint8] | None = None
        if self.about.answers:
            self.answers = _map(place / "answers.bin", np.uint8, self.about.tokens)
        if self.about.documents and self.ends[-1] != self.about.tokens:
            raise ValueError(f"{place}: documents do not end where tokens do")


class TokenCache:
    """The folder of shards."""

    def __init__(self, place: Path) -> None:
        self.place = place
        with _user_errors(place):
            (place / "seen").mkdir(parents=True, exist_ok=True)
            for left in place.glob("partial-*"):
                if _untouched(left):
                    shutil.rmtree(left, ignore_errors=True)

    def find(self, key: str) -> TokenShard | None:
        """The shard of this key; one that is damaged is removed, so that it is recreated."""
        place = self.place / key
        try:
            # Asked first: a shard appears whole, so one that is there and lacks a file is damaged, and not just being made.
            return TokenShard(place) if place.exists() else None
        except FileNotFoundError:
            pass
        except (ValueError, msgspec.MsgspecError):
            pass
        except OSError as error:
            raise UserError(
                f"cannot read {place}: {error.strerror}", "check its permissions, or set data.cache to another folder"
            ) from None
        with _user_errors(self.place):
            to_delete = tempfile.mkdtemp(dir=self.place, prefix="damaged-")
            with suppress(FileNotFoundError):  # another host removed it first
                place.rename(Path(to_delete) / "shard")
            shutil.rmtree(to_delete, ignore_errors=True)
        return None

    def write(self, key: str, documents: Iterable[Document], *, width: int, answers: bool) -> TokenShard:
        """Make the shard of this key from its documents."""
        with _user_errors(self.place):
            partial = Path(tempfile.mkdtemp(dir=self.place, prefix="partial-"))
        try:
            with _user_errors(self.place):
                _write_files(partial, documents, width, answers)
                partial.chmod(0o755)  # mkdtemp makes it private; other users of a shared cache may read
            try:
                partial.rename(self.place / key)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return TokenShard(self.place / key)  # ours, or that of another host that was first

    def content_of(self, stamp: str, files: Iterable[Path]) -> str:
        """The hash of what files hold, remembered under `stamp` (which must change whenever a file does)."""
        note = self.place / "seen" / stamp
        try:
            known = note.read_text()
            if len(known) == 64:
                return known
        except OSError:
            pass
        digest = hashlib.sha256()
        for file in files:
            try:
                with open(file, "rb") as stream:
                    digest.update(hashlib.file_digest(stream, "sha256").digest())
            except OSError as error:
                raise UserError(f"cannot read {file}: {error.strerror}", "check its permissions") from None
        self.remember(stamp, digest.hexdigest())
        return digest.hexdigest()

    def remember(self, stamp: str, content: str) -> None:
        """Write a note, whole or not at all."""
        with _user_errors(self.place):
            write_atomically(self.place / "seen" / stamp, content.encode())


def key_of(*facts: str) -> str:
    """A name for a shard from all that its content follows from."""
    return hashlib.sha256("\0".join([str(_FORMAT), *facts]).encode()).hexdigest()[:32]


def _write_files(place: Path, documents: Iterable[Document], width: int, answers: bool) -> None:
    kind = np.uint16 if width == 2 else np.uint32
    total, largest, count, ended = 0, -1, 0, 0
    with (
        open(place / "tokens.bin", "wb") as tokens,
        open(place / "ends.bin", "wb") as ends,
        open(place / "answers.bin", "wb") as marks,
    ):
        for document in documents:
            total += len(document.tokens)
            largest = max(largest, int(document.tokens.max(initial=0)))
            tokens.write(document.tokens.astype(kind).tobytes())
            if document.answers is not None:
                marks.write(document.answers.tobytes())
            if document.ends and total > ended:
                ends.write(np.int64(total).tobytes())
                count, ended = count + 1, total
        for stream in (tokens, ends, marks):
            _sync(stream)
    about = About(tokens=total, documents=count, width=width, largest=largest, answers=answers)
    with open(place / "about.json", "wb") as stream:
        stream.write(msgspec.json.encode(about))
        _sync(stream)


def _untouched(place: Path) -> bool:
    """Whether nothing was written here for a day: it was left by someone who was killed."""
    with suppress(OSError):
        return all(time.time() - at.stat().st_mtime > 86400 for at in [place, *place.iterdir()])
    return False


def _sync(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _map(file: Path, kind: type[N], count: int) -> NDArray[N]:
    if file.stat().st_size != count * np.dtype(kind).itemsize:
        raise ValueError(f"{file} has not the size that about.json says")
    if not count:  # an empty file cannot be mapped
        return np.empty(0, kind)
    return np.asarray(np.memmap(file, kind, mode="r", shape=(count,)))  # a plain array: memmap is slow to index


@contextmanager
def _user_errors(place: Path) -> Iterator[None]:
    """What the disk refuses, in words."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"no space is left for tokens in {place}", "free some, or set data.cache to a folder on a larger disk"
            ) from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise UserError(
                f"cannot write tokens to {place}: {error.strerror}", "set data.cache to a folder you may write to"
            ) from None
        raise
