"""The pages of the key/value cache: who holds them, and which hold a prefix that others may share (no jax).

1. A page holds the keys and values of `size` neighbouring tokens, in every layer. Page 0 is nobody's: what is padding is
   written there.
2. A page that holds the full run of tokens of some prefix is published under a key: a digest of the key of the page before
   it and of its own tokens. The keys of two pages are equal only if all tokens up to their ends are.
3. `reuse` takes the published pages of a new request's prefix instead of computing them again.
4. A page is held as often as it was taken. One that nobody holds is free, but keeps its contents and its key until it is
   taken for something else, the longest unused first.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

PAD_PAGE = 0


def page_keys(tokens: Sequence[int], size: int, salt: bytes = b"", after: bytes = b"", start: int = 0) -> list[bytes]:
    """The keys of the full pages of `tokens[start:]`; `after` is the key of the page before `start`."""
    # A salt is hashed: a client could choose one that is the key of somebody's page.
    key, keys = after or (hashlib.blake2b(salt, digest_size=16, person=b"salt").digest() if salt else b""), []
    for begin in range(start, len(tokens) - size + 1, size):
        key = hashlib.blake2b(key + array("I", tokens[begin : begin + size]).tobytes(), digest_size=16).digest()
        keys.append(key)
    return keys


class PagePool:
    """`count` pages of `size` tokens each, page 0 among them."""

    def __init__(self, count: int, size: int) -> None:
        self.count = count
        self.size = size
        self._holders = [0] * count
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, count))  # the longest unused first
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """How many pages can be taken."""
        return len(self._free)

    @property
    def held(self) -> int:
        return self.count - 1 - len(self._free)

    def pages_for(self, tokens: int) -> int:
        """How many pages so many tokens fill."""
        return -(-tokens // self.size)

    def take(self, wanted: int) -> list[int] | None:
        """So many pages with nothing of use in them, or none at all."""
        if wanted > len(self._free):
            return None
        pages = []
        for _ in range(wanted):
            page, _ = self._free.popitem(last=False)
            self._forget(page)
            self._holders[page] = 1
            pages.append(page)
        return pages

    def matching(self, keys: Iterable[bytes]) -> list[int]:
        """The published pages of the longest known prefix, not yet taken."""
        found = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def reuse(self, pages: Iterable[int]) -> None:
        """Hold these once more; they may be free."""
        for page in pages:
            self._free.pop(page, None)
            self._holders[page] += 1

    def publish(self, page: int, key: bytes) -> None:
        """Others may share this page from now on; the first page under a key stays the one that is shared."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def release(self, pages: Sequence[int]) -> None:
        """Let go. The end of a prefix is forgotten before its beginning, which more requests may share."""
        for page in reversed(pages):
            self._holders[page] -= 1
            assert self._holders[page] >= 0, f"page {page} was let go by someone who does not hold it"
            if self._holders[page] == 0:
                self._free[page] = None
                if page not in self._key_of:  # nothing to remember: the first to be taken
                    self._free.move_to_end(page, last=False)

    def _forget(self, page: int) -> None:
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Every page is held by exactly these, and by nobody else (for tests)."""
        counted = [0] * self.count
        for pages in holders:
            assert len(set(pages)) == len(pages), "a request holds a page twice"
            for page in pages:
                counted[page] += 1
        assert counted == self._holders, "pages are leaked or shared wrongly"
        assert counted[PAD_PAGE] == 0
        assert set(self._free) == {p for p in range(1, self.count) if not counted[p]}
        assert {self._page_of[key] for key in self._page_of} == set(self._key_of)
