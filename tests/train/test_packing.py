"""Every token is an input exactly once, in order, with the right neighbours, whatever the documents and the packing."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from podway.train.corpus import Packing, Source
from podway.train.packing import Stream, best_fit, cut


class MemoryShard(NamedTuple):
    tokens: NDArray[np.uint32]
    ends: NDArray[np.int64]
    answers: NDArray[np.uint8] | None = None


documents = st.lists(st.integers(1, 12), min_size=1, max_size=12)
shards_of_documents = st.lists(documents, min_size=1, max_size=4)
sequences = st.integers(1, 9)


def make_stream(lengths: list[list[int]], answers: NDArray[np.uint8] | None = None) -> tuple[Stream, NDArray[np.int64]]:
    """Token n of the stream is n itself, so that a token tells where it is from; and the document of each token."""
    parts, first = [], 0
    for shard in lengths:
        total = sum(shard)
        marks = None if answers is None else answers[first : first + total]
        tokens = np.arange(first, first + total, dtype=np.uint32)
        parts.append((MemoryShard(tokens, np.cumsum(shard), marks), 0, total))
        first += total
    flat = [length for shard in lengths for length in shard]
    return Stream(parts), np.repeat(np.arange(len(flat)), flat)


@given(shards_of_documents, sequences, st.sampled_from(["concat", "best_fit", "none"]))
def test_every_token_once_with_its_neighbour(lengths: list[list[int]], seq: int, packing: Packing) -> None:
    stream, document = make_stream(lengths)
    source = Source(stream, seq, packing)
    rows = [source.row(number) for number in range(len(source))]
    seen = np.concatenate([row.inputs[row.segment_ids > 0] for row in rows])
    assert sorted(seen) == list(range(len(stream)))
    if packing == "concat":
        assert list(seen) == list(range(len(stream)))
    for row in rows:
        assert all(len(array) == seq for array in row)
        for segment in range(1, row.segment_ids.max() + 1):
            mine = row.segment_ids == segment
            tokens, targets, mask = row.inputs[mine], row.targets[mine], row.loss_mask[mine]
            assert list(tokens) == list(range(tokens[0], tokens[0] + len(tokens))), "a segment is one run"
            assert len(set(document[tokens])) == 1, "of one document"
            assert list(row.positions[mine]) == list(range(len(tokens)))
            for token, target, weight in zip(tokens, targets, mask, strict=True):
                last = token + 1 == len(stream) or document[token + 1] != document[token]
                assert weight == (0 if last else 1)
                assert last or target == token + 1
        padding = row.segment_ids == 0
        assert not row.loss_mask[padding].any()
        assert not padding.any() or list(padding) == sorted(padding), "padding is at the end"


@given(shards_of_documents, sequences, st.sampled_from(["concat", "best_fit", "none"]), st.integers(0, 2**32 - 1))
def test_loss_is_on_answers_only(lengths: list[list[int]], seq: int, packing: Packing, seed: int) -> None:
    total = sum(map(sum, lengths))
    answers = np.random.default_rng(seed).integers(0, 2, total).astype(np.uint8)
    stream, document = make_stream(lengths, answers)
    source = Source(stream, seq, packing)
    learned = []
    for number in range(len(source)):
        row = source.row(number)
        on = row.loss_mask > 0
        assert answers[row.targets[on]].all()
        assert (document[row.targets[on]] == document[row.inputs[on]]).all()
        learned += list(row.targets[on])
        if packing != "concat":
            assert on.any(), "a row with nothing to learn is left out"
    assert len(learned) == len(set(learned))
    starts = np.concatenate([[0], np.flatnonzero(np.diff(document)) + 1])
    place = np.arange(total) - starts[document]
    reachable = (place > 0) & (place <= seq if packing != "concat" else True)  # long conversations are truncated
    assert sorted(learned) == list(np.flatnonzero(reachable & (answers > 0)))


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 30))
def test_best_fit_is_best_fit_decreasing(lengths: list[int], capacity: int) -> None:
    row_of = best_fit(np.array(lengths, np.int64), capacity)
    room: list[int] = []
    for length in sorted(lengths, reverse=True):  # the plain algorithm, one piece at a time
        fits = [i for i, left in enumerate(room) if left >= length]
        if not fits:
            room.append(capacity)
            fits = [len(room) - 1]
        best = min(fits, key=lambda i: room[i])
        room[best] -= length
    filled = [capacity - sum(np.array(lengths)[row_of == row]) for row in range(len(room))]
    assert sorted(filled) == sorted(room)
    if lengths:
        firsts = [int(np.argmax(row_of == row)) for row in range(len(room))]
        assert firsts == sorted(firsts)


def test_a_part_that_ends_inside_a_document_ends_it() -> None:
    shard = MemoryShard(np.arange(10, dtype=np.uint32), np.array([4, 10]))
    kept, held = Stream([(shard, 0, 7)]), Stream([(shard, 7, 10)])
    assert list(kept.ends(0, 7)) == [4, 7]
    assert list(held.ends(0, 3)) == [3]
    assert Source(held, 3, "concat").row(0).inputs.tolist() == [7, 8, 9]


def test_long_text_goes_on_and_long_conversations_are_truncated() -> None:
    stream, _ = make_stream([[7, 2]])
    pieces, truncated = cut(stream, 3, truncate=False)
    assert pieces.lengths.tolist() == [3, 3, 1, 2]
    assert pieces.closed.tolist() == [False, False, True, True]
    assert truncated == 0
    pieces, truncated = cut(stream, 3, truncate=True)
    assert pieces.lengths.tolist() == [3, 2]
    assert truncated == 1


def test_best_fit_of_many_pieces_wastes_little() -> None:
    lengths = np.random.default_rng(0).geometric(1 / 300, 200_000).clip(1, 2048)
    row_of = best_fit(lengths, 2048)
    filled = np.bincount(row_of, weights=lengths)
    assert filled.max() <= 2048
    assert filled.mean() > 0.99 * 2048


@pytest.mark.parametrize("packing", ["concat", "best_fit", "none"])
def test_an_empty_stream_has_no_rows(packing: Packing) -> None:
    assert len(Source(Stream([]), 8, packing)) == 0
