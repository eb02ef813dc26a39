"""Tokens of an answer into text as they come (no jax).

`TextStream` holds back the bytes of an unfinished character, and the beginning of what might become a stop string; both are
given out when the next tokens decide.
"""

from collections.abc import Sequence

from podway.model.tokenizer import ModelTokenizer

_UNFINISHED = "\ufffd"  # what a decoder makes of half a character


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
        self._tokenizer = tokenizer
        self._stops = [stop for stop in stops if stop]
        self._skip, self._keep = skip_special, keep_stop
        self._ids: list[int] = []
        self._base = (
            0  # ids before this are decoded and done with; some are kept, since spaces depend on what is before
        )
        self._read = 0  # ids before this have been given out as text
        self._held = ""
        self.stopped = False
        self.text = ""  # all that was given out

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
        self._ids += ids
        before = self._tokenizer.decode(self._ids[self._base : self._read], self._skip)
        after = self._tokenizer.decode(self._ids[self._base :], self._skip)
        fresh = ""
        if last or (len(after) > len(before) and not after.endswith(_UNFINISHED)):
            fresh = after[len(before) :]
            self._base, self._read = self._read, len(self._ids)
        self._held += fresh
        out = self._release(last)
        self.text += out
        return out

    def _release(self, last: bool) -> str:
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
