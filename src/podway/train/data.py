"""The trainer's data: what is in the batch of a step, as a pure function of the step (no jax).

1. `sources.expand` finds the files of each path, `tokenizing.tokenize` makes (or finds) their tokens on disk.
2. The last part of every shard is held out when `eval_fraction` asks for it; the rest is a stream, cut into rows
   (`packing.py`).
3. Rows of a run are numbered: step s has rows s * batch ... A mixture says which source gives row n, a permutation of
   the epoch says which of its rows (`shuffle.py`). Nothing of this is state: resuming is the number of the next row
   (`resume`), and the global batch does not depend on how many hosts share it.
4. Each host makes its own rows of the batch; `prefetch` does it ahead of time.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from podway.errors import UserError
from podway.model.chat import CHATML, ChatTemplate
from podway.model.download import fetch
from podway.model.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from podway.train.corpus import Corpus, Feed, Packing, Source, Synthetic
from podway.train.packing import Row, Stream, padding
from podway.train.prefetch import Prefetch
from podway.train.sources import Kind, expand
from podway.train.token_cache import TokenCache, TokenShard
from podway.train.tokenizing import Form, tokenize

Batch = dict[str, NDArray[np.generic]]

_BYTE_MODELS = 512  # a vocabulary up to this may well be one of bytes; for a larger one a tokenizer must be named


class DataConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where tokens come from, and how they become rows."""

    kind: Kind | None = None  # none: by the names of the files; no paths: synthetic
    paths: tuple[str, ...] = ()  # files, globs, folders, gs:// addresses; with weights, each is a source of its own
    weights: tuple[float, ...] = ()  # one for each path: the share of rows it gives; none: every row once an epoch
    field: str | None = None  # of a record: the text ("text"), or the messages of a chat ("messages")
    form: Literal["text", "chat"] = "text"
    loss_on: Literal["answers", "all"] = "answers"  # of a chat
    template: str | None = None  # of a chat: a jinja2 file, or chatml; none: the tokenizer's own
    tokenizer: str | None = None  # bytes, a tokenizer.json, a folder that holds one, or an id of the hub
    packing: Packing | None = None  # none: concat for text, best_fit for chats
    seed: int | None = 0  # of the order of rows; null: as they stand in the files
    eval_fraction: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0  # held out: the last part of every shard
    cache: str | None = None  # folder of tokenized files; none: ~/.cache/podway/tokens
    reuse_batch: bool = False  # the batch of step 0 at every step, for measurements

    def __post_init__(self) -> None:
        if self.weights and len(self.weights) != len(self.paths):
            raise UserError(
                f"data.weights has {len(self.weights)} numbers for {len(self.paths)} paths", "give one for each path"
            )
        if any(not weight > 0 or weight == float("inf") for weight in self.weights):
            raise UserError("data.weights must all be above 0", "leave out a path that is to give nothing")
        if self.kind == "synthetic" and self.paths:
            raise UserError("data.kind is synthetic, but data.paths names files", "leave out one of them")
        if self.kind not in (None, "synthetic") and not self.paths:
            raise UserError(f"data.kind is {self.kind}, but data.paths is empty", "name the files in data.paths")

    @property
    def synthetic(self) -> bool:
        """Whether tokens are made up."""
        return not self.paths


class Data:
    """What `open_data` gives: batches by step, and the held-out ones."""

    def __init__(
        self, feed: Feed | None, held_out: Feed | None, *, batch: int, seq: int, process: int, processes: int,
        reuse: bool, about: str, order: dict[str, object],
    ) -> None:  # fmt: skip
        self._feed, self._held_out = feed, held_out
        self.order = order  # settings and sizes that decide which row is the n-th
        self._origin_step = self._origin_row = 0
        self._batch, self._seq = batch, seq
        self._reuse, self._about = reuse, about
        share = batch // processes
        self._mine = range(process * share, (process + 1) * share)

    def batch(self, step: int) -> Batch:
        """This host's rows of the batch of a step: inputs, targets, segment_ids, positions, loss_mask."""
        return self.rows(step, self._mine)

    def rows(self, step: int, which: range) -> Batch:
        """Any rows of the global batch of a step, for meshes that split it otherwise than evenly over hosts."""
        if self._feed is None:
            raise UserError("all data is held out for evaluation", "set data.eval_fraction below 1")
        first = 0 if self._reuse else self.first_row(step)
        return _stack([self._feed.row(first + row) for row in which])

    def first_row(self, step: int) -> int:
        """The number of the first row of a step: how many rows the steps before it have seen."""
        return self._origin_row + (step - self._origin_step) * self._batch

    def resume(self, step: int, row: int) -> None:
        """Step `step` begins with this row, whatever batches the steps before it had."""
        self._origin_step, self._origin_row = step, row

    def eval_batches(self, limit: int | None = None) -> Iterator[Batch]:
        """This host's part of each held-out batch, every held-out row once; the last batch is filled up with padding."""
        if self._held_out is None:
            return
        rows = self._held_out.rows or (limit or 8) * self._batch
        batches = -(-rows // self._batch)
        for number in range(batches if limit is None else min(limit, batches)):
            places = [number * self._batch + row for row in self._mine]
            yield _stack([self._held_out.row(at) if at < rows else padding(self._seq) for at in places])

    def prefetch(self, from_step: int, depth: int = 2) -> Prefetch[Batch]:
        """The batches of `from_step` and after, made ahead by a thread. Close it, or use it in a `with`."""
        return Prefetch(self.batch, from_step, depth)

    def epoch(self, step: int) -> float:
        """How often the data was seen when `step` begins; of a mixture, the source seen most often; 0 for synthetic."""
        return self._feed.epoch(self.first_row(step)) if self._feed else 0.0

    def describe(self) -> str:
        """What there is to train on, in a few lines."""
        return self._about


def open_data(
    config: DataConfig, *, batch: int, seq: int, process: int, processes: int, vocab: int | None = None
) -> Data:
    """Tokenize what is not tokenized yet, check all that can be checked, and be ready for any step.

    `batch` is the global one. `vocab` is the model's, so that a tokenizer that does not fit it is refused here.
    """
    if batch % processes:
        raise UserError(f"a batch of {batch} rows does not split over {processes} hosts", "make it a multiple of them")
    feed: Feed | None
    held_out: Feed | None
    if config.synthetic:
        seed = config.seed or 0
        feed, held_out = Synthetic(seed, seq, vocab or 256), Synthetic(~seed, seq, vocab or 256)
        about = feed.describe()
        order: dict[str, object] = {"the vocabulary": vocab or 256}
    else:
        feed, held_out, about, order = _open_files(config, seq, process, processes, vocab)
        _check_enough(feed, config, batch, seq)
    return Data(
        feed, held_out, batch=batch, seq=seq, process=process, processes=processes,
        reuse=config.reuse_batch, about=about,
        order=order | {"data.seed": config.seed, "data.weights": list(config.weights), "batch.length": seq},
    )  # fmt: skip


def _open_files(
    config: DataConfig, seq: int, process: int, processes: int, vocab: int | None
) -> tuple[Feed | None, Feed | None, str, dict[str, object]]:
    tokenizer = _tokenizer(config, vocab)
    chat = config.form == "chat"
    form = Form(
        tokenizer, config.field, chat, _template(config, tokenizer) if chat else None, config.loss_on == "answers"
    )
    paths = [[path] for path in config.paths] if config.weights else [list(config.paths)]
    files = [[file for path in mixed for file in expand(path, config.kind)] for mixed in paths]
    cache = TokenCache(_cache_folder(config))
    shards = [tokenize(mixed, form, cache, process, processes) for mixed in files]
    _check_tokens(shards, paths, tokenizer, vocab)
    packing: Packing = config.packing or ("best_fit" if chat else "concat")
    kept, held = zip(*(_split(mixed, config.eval_fraction, chat) for mixed in shards), strict=True)
    weights = config.weights or (1.0,)
    feed = _corpus(kept, seq, packing, weights, config.seed)
    held_out = _corpus(held, seq, packing, weights, None)
    documents = sum(shard.about.documents for mixed in shards for shard in mixed)
    count = sum(len(mixed) for mixed in files)
    about = [f"{count} files, {documents:,} documents, tokenizer {tokenizer.name}, {packing}, cache {cache.place}"]
    about += [feed.describe()] if feed else []
    about += [f"held out: {held_out.describe()}"] if held_out else []
    order: dict[str, object] = {
        "data.packing": packing,
        "data.eval_fraction": config.eval_fraction,
        "data.loss_on": config.loss_on if chat else "all",
        "the tokenizer": tokenizer.fingerprint[:12],
        "the number of tokens": [sum(shard.about.tokens for shard in mixed) for mixed in shards],
    }
    return feed, held_out, "\n".join(about), order


def _corpus(
    streams: Sequence[Stream], seq: int, packing: Packing, weights: Sequence[float], seed: int | None
) -> Corpus | None:
    sources = [Source(stream, seq, packing) for stream in streams]
    used = [(source, weight) for source, weight in zip(sources, weights, strict=True) if len(source)]
    return Corpus([s for s, _ in used], [w for _, w in used], seed) if used else None


def _split(shards: Sequence[TokenShard], fraction: float, whole: bool) -> tuple[Stream, Stream]:
    """What is trained on and what is held out: the last part of every shard."""
    kept: list[tuple[TokenShard, int, int]] = []
    held: list[tuple[TokenShard, int, int]] = []
    for shard in shards:
        total = shard.about.tokens
        at = _cut_at(shard, fraction, whole)
        kept.append((shard, 0, at))
        held.append((shard, at, total))
    return Stream(kept), Stream(held)


def _cut_at(shard: TokenShard, fraction: float, whole: bool) -> int:
    """Where documents end, if such a place is near enough; within one otherwise (a book is one document)."""
    total = shard.about.tokens
    wanted = total - round(total * fraction)
    if wanted in (0, total):
        return wanted
    after = int(np.searchsorted(shard.ends, wanted))
    candidates = [int(shard.ends[i]) for i in (after - 1, after) if 0 <= i < len(shard.ends)]
    nearest = min(candidates, key=lambda place: abs(place - wanted))
    near = abs(nearest - wanted) <= total * min(fraction, 1 - fraction) / 4
    return nearest if near or whole else wanted


def _tokenizer(config: DataConfig, vocab: int | None) -> Tokenizer:
    if config.tokenizer is None and vocab is not None and vocab > _BYTE_MODELS:
        raise UserError(
            f"no tokenizer is given for a model of {vocab} tokens",
            "set data.tokenizer to the folder of the model's tokenizer.json, or to bytes",
        )
    tokenizer = load_tokenizer(config.tokenizer or "bytes")
    if vocab is not None:
        check_vocabulary(tokenizer, vocab)
    return tokenizer


def _template(config: DataConfig, tokenizer: Tokenizer) -> ChatTemplate | None:
    source = own_template(config)
    if source is not None:
        return ChatTemplate(source, tokenizer.words, str(config.template))
    return ChatTemplate(tokenizer.template, tokenizer.words, tokenizer.name) if tokenizer.template else None


def own_template(config: DataConfig) -> str | None:
    """The text of the chat template that the settings name; None where the tokenizer's own is used."""
    if config.template is None or config.template == "chatml":
        return CHATML if config.template else None
    try:
        return Path(config.template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {config.template}: {error}", "give a jinja2 file, or chatml") from None


def tokenizer_folder(config: DataConfig) -> Path | None:
    """Where the files of the tokenizer are; None for bytes."""
    if config.tokenizer in (None, "bytes"):
        return None
    place = fetch(str(config.tokenizer), weights=False)
    return place.parent if place.is_file() else place


def _cache_folder(config: DataConfig) -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(config.cache or f"{home}/podway/tokens").expanduser()


def _check_tokens(
    shards: Sequence[Sequence[TokenShard]], paths: Sequence[Sequence[str]], tokenizer: Tokenizer, vocab: int | None
) -> None:
    for mixed, names in zip(shards, paths, strict=True):
        if not sum(shard.about.tokens for shard in mixed):
            raise UserError(f"there is no text in {', '.join(names)}", "give files that are not empty")
        if vocab is not None:
            check_vocabulary(tokenizer, vocab, max(shard.about.largest for shard in mixed))


def _check_enough(feed: Feed | None, config: DataConfig, batch: int, seq: int) -> None:
    if feed is None and config.eval_fraction < 1:
        raise UserError(
            f"nothing is left to train on in {', '.join(config.paths)}",
            "set data.eval_fraction lower, or a longer batch.length if every prompt fills a whole row",
        )
    if feed is not None and feed.rows < batch:
        raise UserError(
            f"the data makes {feed.rows} rows of {seq} tokens, too few for a batch of {batch}",
            "give more data, or a smaller batch or length",
        )


def _stack(rows: Sequence[Row]) -> Batch:
    return {name: np.stack([getattr(row, name) for row in rows]) for name in Row._fields}
