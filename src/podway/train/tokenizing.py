"""Files into token shards: find in the cache what is there, make the rest (no jax)."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from podway.model.chat import ChatTemplate
from podway.model.tokenizer import Tokenizer
from podway.train.readers import Item, fetch, read, text_of
from podway.train.sft import chat_documents
from podway.train.sources import SourceFile, group, stamp
from podway.train.token_cache import Document, TokenCache, TokenShard, key_of

_BATCH_TEXTS = 1024  # texts handed to the tokenizer at once: enough for all cores
_BATCH_CHARACTERS = 4 << 20


class Form(NamedTuple):
    """How an item becomes tokens: as plain text, or (`chat`) as a conversation."""

    tokenizer: Tokenizer
    field: str | None
    chat: bool = False
    template: ChatTemplate | None = None
    answers_only: bool = True

    @property
    def identity(self) -> str:
        """Changes whenever the tokens of an item might."""
        template = self.template.source + repr(sorted(self.tokenizer.words.items())) if self.template else ""
        return "\0".join(
            [self.tokenizer.fingerprint, repr(self.field), str(self.chat), str(self.answers_only), template]
        )


def tokenize(files: Sequence[SourceFile], form: Form, cache: TokenCache, host: int, hosts: int) -> list[TokenShard]:
    """The shards of these files, in order. Host i of n begins i/n into the list, so that a shared disk is shared work."""
    groups = group(files)
    shards: dict[int, TokenShard] = {}
    first = host * len(groups) // hosts
    for number in [*range(first, len(groups)), *range(first)]:
        shards[number] = _shard(groups[number], form, cache)
    return [shards[number] for number in range(len(groups))]


def _shard(files: list[SourceFile], form: Form, cache: TokenCache) -> TokenShard:
    mark = stamp(files)
    if files[0].path.startswith("gs://"):
        content = mark  # an object's generation names its content
    else:
        content = cache.content_of(mark, [Path(file.path) for file in files])
    key = key_of(content, files[0].kind, form.identity)
    found = cache.find(key)
    if found is not None:
        return found
    width = 2 if form.tokenizer.size <= 1 << 16 else 4
    return cache.write(key, _documents(files, form, cache.place), width=width, answers=form.chat)


def _documents(files: list[SourceFile], form: Form, scratch: Path) -> Iterator[Document]:
    folder = Path(tempfile.mkdtemp(dir=scratch, prefix="partial-"))
    try:
        for file in files:
            local = fetch(file, folder)
            items = read(file, local)
            if form.chat:
                for item in items:
                    yield from chat_documents(item, form.tokenizer, form.template, form.field, form.answers_only)
            else:
                yield from _texts(items, form.tokenizer, form.field or "text")
            if local.parent == folder:
                local.unlink()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _texts(items: Iterator[Item], tokenizer: Tokenizer, field: str) -> Iterator[Document]:
    before, after = np.array(tokenizer.prefix, np.uint32), np.array(tokenizer.suffix, np.uint32)
    begins = True
    for batch in _batches(items, field):
        for (_, ends), ids in zip(batch, tokenizer.encode([text for text, _ in batch]), strict=True):
            if begins and ends and not len(ids):
                continue  # an empty text is not a document
            yield Document(np.concatenate([*([before] if begins else []), ids, *([after] if ends else [])]), ends=ends)
            begins = ends


def _batches(items: Iterator[Item], field: str) -> Iterator[list[tuple[str, bool]]]:
    batch: list[tuple[str, bool]] = []
    characters = 0
    for item in items:
        text = text_of(item, field)
        batch.append((text, item.ends))
        characters += len(text)
        if len(batch) >= _BATCH_TEXTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
