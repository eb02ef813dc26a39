"""Tokens of an answer into text as they come (no jax).

`TextStream` holds back the bytes of an unfinished character, and the beginning of what might become a stop string; both are
given out when the next tokens decide.
"""

import codecs
from collections.abc import Sequence

from podway.model.tokenizer import ModelTokenizer

_UNFINISHED = "\ufffd"  # what a decoder makes of half a character


class _Bytes:
    """Text of tokens that are bytes in a row: those of an unfinished character wait."""

    def __init__(self, pieces: list[bytes], skipped: frozenset[int]) -> None:
        self._pieces, self._skipped = pieces, skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int], last: bool) -> str:
        pieces, count = self._pieces, len(self._pieces)
        raw = b"".join([pieces[id] for id in ids if id < count and id not in self._skipped])
        return self._decoder.decode(raw, last)


class _Decoded:
    """Text of tokens whose text depends on their neighbours: decoded together with those just before."""

    def __init__(self, tokenizer: ModelTokenizer, skip_special: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        self._ids: list[int] = []
        self._base = 0  # ids before this are done with; some are kept, since spaces depend on what is before
        self._read = 0  # ids before this have been given out as text

    def push(self, ids: Sequence[int], last: bool) -> str:
        self._ids += ids
        before = self._tokenizer.decode(self._ids[self._base : self._read], self._skip)
        after = self._tokenizer.decode(self._ids[self._base :], self._skip)
        if not last and (len(after) <= len(before) or after.endswith(_UNFINISHED)):
            return ""
        self._base, self._read = self._read, len(self._ids)
        return after[len(before) :]


class TextStream:
    """Tokens of one answer in, text out."""

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        stops: Sequence[str] = (),
        *,
        skip_special: bool = True,
        keep_stop: bool = False,
    ) -> None:
        skipped = tokenizer.special_ids if skip_special else frozenset[int]()
        pieces = tokenizer.pieces
        self._decoder = _Decoded(tokenizer, skip_special) if pieces is None else _Bytes(pieces, skipped)
        self._stops = [stop for stop in stops if stop]
        self._keep = keep_stop
        self._held = ""
        self.stopped = False
        self._given: list[str] = []

    @property
    def text(self) -> str:
        """All that was given out."""
        if len(self._given) > 1:
            self._given = ["".join(self._given)]
        return "".join(self._given)

    def push(self, ids: Sequence[int], last: bool = False) -> tuple[str, int]:
        """The text that is certain now, with `last` all of it; and how many of these ids came before or in a stop string."""
        if not self._stops:
            return self._push(ids, last), len(ids)
        out, used = "", 0
        for used, id in enumerate(ids, 1):
            out += self._push([id], False)
            if self.stopped:
                return out, used
        return out + (self._push([], True) if last else ""), used

    def _push(self, ids: Sequence[int], last: bool) -> str:
        if self.stopped:
            return ""
        self._held += self._decoder.push(ids, last)
        out = self._release(last)
        if out:
            self._given.append(out)
        return out

    def _release(self, last: bool) -> str:
        if not self._stops:
            out, self._held = self._held, ""
            return out
        found = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if found:
            at, stop = min(found)
            out, self._held, self.stopped = self._held[: at + (len(stop) if self._keep else 0)], "", True
            return out
        keep = 0 if last else max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def _overlap(self, stop: str) -> int:
        """How many characters at the end of what is held might begin this stop string."""
        most = min(len(stop) - 1, len(self._held))
        return next((n for n in range(most, 0, -1) if self._held.endswith(stop[:n])), 0)
