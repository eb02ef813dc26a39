"""When two lines of different ranks say the same: what is left of a line without the parts that always differ.

`Alike.keys` answers, for each line, bytes that are equal for lines that say the same. Left out are

- times, as absl, glog, XLA, Python's logging, loguru and tqdm write them, and the thread ids beside them; `0x…` addresses;
  process and thread ids after their name (`pid=4211`);
- the rank's own: its index after a word for it (`process_index=3` of rank 3), its own address;
- figures: numbers with a fraction, an exponent or a unit of time, rate or percent. `figures_differ` and `spread` find them again.

Whole numbers stay: step 5 of one rank is never taken for step 6 of another, nor a warning about host 7 for one about host 9.
What is left out depends on where digits stand and not on which they are: so it is found once for each *shape* of a line, the line
with every digit a zero, and most lines of a log share a few shapes.
"""

import os.path
import re
from collections.abc import Callable, Sequence
from operator import itemgetter

_CLOCK = rb"\d\d?:\d\d(?::\d\d)?(?:[.,]\d++)?"
_AHEAD = rb"[ =(,:<>\[|/~+@-] *+"  # what stands before a number that is a word of its own; quick to look for
_TIMES = (
    rb":\d\d(?::\d++)?(?:[.,]\d++)?(?: +\d++(?= [\w./-]++:\d++\]))?"  # 23:43:26.785419 1996 file.cc:185]
    rb"|[-/]\d\d[-/]\d\d(?:[T ]" + _CLOCK + rb"(?: ?Z| ?[+-]\d\d:?\d\d)?)?"
)
_NUMBERS = (
    rb"\.\d++(?:[eE][+-]?\d++)?(?!\.\d)|[eE][+-]?\d++\b"
    rb"|(?= ?(?:%|(?:[mun]?s|secs?|seconds?|it/s|s/it|[A-Za-z]++/s(?:ec)?)\b))"
)
_LEFT_OUT = re.compile(
    _AHEAD + rb"(?:\d++(?:" + _NUMBERS + rb"|" + _TIMES + rb"|x[0-9a-fA-F]++)|(?<=[pPtT][iI][dD][ =:])\d++)"
)
_FIGURES = re.compile(
    _AHEAD + rb"(?:\d++(?:" + _TIMES + rb")|(?<=[ptPT][iI][dD][ =:])\d++|([+-]?\d++(?:" + _NUMBERS + rb")))"
)
_GONE = b"\x00"
# An index counts as the rank's own only behind one of these words.
_WORDS = (b"rank", b"process", b"host", b"worker", b"task", b"node", b"-w-")
_INDEX = re.compile(
    rb"(?i)((?:(?<!\w)(?:rank|process(?:[ _]?(?:index|id))?|host(?:[ _]?(?:index|id))?|worker|task|node)|-w-)[ =:#\[(]*-?)"
    rb"(\d{1,5})(?![\d.])"
)
_REMEMBERED = 8192
_SHAPE = bytes.maketrans(b"123456789", b"000000000")
_Form = tuple[Callable[[bytes], tuple[bytes, ...]] | None, bool]


class Alike:
    """Compares lines of the ranks whose addresses these are."""

    def __init__(self, ips: Sequence[str] = ()) -> None:
        self._ips = [ip.encode() for ip in ips]
        # Without its shape in a line, no rank's address is in it.
        self._network = os.path.commonprefix([ip.translate(_SHAPE) for ip in self._ips])  # noqa: RUF071  # not paths
        self._forms: dict[bytes, _Form] = {}
        self._own: dict[bytes, bytes] = {}  # key with the index of the rank that said it -> without
        self._foreign: set[bytes] = set()  # keys with an index, said by another rank than that

    def keys(self, ranks: Sequence[int], texts: Sequence[bytes]) -> list[bytes]:
        """For each line of a rank, what is equal for lines that say the same."""
        if not texts:
            return []
        distinct = list(dict.fromkeys(texts))  # most are copies
        shapes = b"\n".join(distinct).translate(_SHAPE).split(b"\n")
        forms, found, personal = self._forms, {}, set()
        for text, shape in zip(distinct, shapes, strict=True):
            kept, own = forms.get(shape) or self._form(shape)
            found[text] = _GONE.join(kept(text)) if kept is not None else text
            if own:
                personal.add(text)
        if not personal:
            return [found[text] for text in texts]
        lines = zip(ranks, texts, strict=True)
        return [self._without_own(rank, found[text]) if text in personal else found[text] for rank, text in lines]

    def _form(self, shape: bytes) -> _Form:
        """What is kept of a line of this shape, and whether it may hold a rank's own index or address."""
        kept, end = [], 0
        for found in _LEFT_OUT.finditer(b" " + shape):  # a blank ahead, for the number that a line may begin with
            kept.append(slice(end, max(found.start() - 1, 0)))
            end = found.end() - 1
        kept.append(slice(end, None))
        words = shape.lower()
        own = any(word in words for word in _WORDS) or bool(self._network and self._network in shape)
        _limit(self._forms)
        # A getter of one slice would answer bytes, not a tuple of them.
        form = (itemgetter(*kept) if len(kept) > 1 else None, own)
        self._forms[shape] = form
        return form

    def _without_own(self, rank: int, key: bytes) -> bytes:
        """A key without the rank's own index and address."""
        if found := _INDEX.search(key):
            key = self._without_index(rank, key, int(found[2]))
        own = self._ips[rank] if rank < len(self._ips) else b""
        if own and own in key:
            key = re.sub(rb"(?<![\w.])%s(?::\d++)?(?![\w.])" % re.escape(own), _GONE, key)
        return key

    def _without_index(self, rank: int, key: bytes, index: int) -> bytes:
        """ "rank 0 leads" may be what every rank says, or what rank 0 says of itself as the others do of themselves."""
        if index != rank:
            if key in self._own:
                return self._own[key]
            _limit(self._foreign)
            self._foreign.add(key)
            return key
        if key in self._foreign:
            return key
        _limit(self._own)
        self._own[key] = _INDEX.sub(lambda found: found[1] + _GONE if int(found[2]) == rank else found[0], key)
        return self._own[key]


def _limit(known: dict[bytes, bytes] | dict[bytes, _Form] | set[bytes]) -> None:
    if len(known) > _REMEMBERED:
        known.clear()


def figures_differ(texts: Sequence[bytes]) -> bool:
    """Whether lines that say the same differ in more than times and ids."""
    distinct = set(texts)
    return len(distinct) > 1 and len({_figures(text) for text in distinct}) > 1


def _figures(text: bytes) -> tuple[bytes, ...]:
    return tuple(found[1] for found in _FIGURES.finditer(b" " + text) if found[1])


def spread(texts: Sequence[bytes]) -> list[str]:
    """For each figure that differs between such lines, its least and its largest value: `0.31–0.36`."""
    found = []
    for column in zip(*map(_figures, texts), strict=False):
        ordered = sorted(set(column), key=float)
        if len(ordered) > 1:
            found.append(f"{ordered[0].decode()}–{ordered[-1].decode()}")
    return found
