"""How long a body would take to decode, told before it is: the decoder holds the interpreter, so a thread would not help (no jax).

A body's weight is a count of its marks: commas stand for values, quotes for strings, colons for fields, brackets for lists and objects.
One is about 20 ns. What stands in strings counts too at first, which is quick; where that is too much, only what stands outside of
them, which needs a thread.
"""

import numpy as np

MAX_WEIGHT = 1_000_000
_WEIGHTS = {b",": 1, b'"': 1, b":": 8, b"[": 4, b"{": 4}
TOO_HEAVY = (
    f"too many values: the limit is about {MAX_WEIGHT:,} numbers, {MAX_WEIGHT // 3:,} strings or {MAX_WEIGHT // 11:,} "
    "fields of objects"
)


def weight(raw: bytes) -> int:
    """At most this, whatever stands in strings."""
    return sum(each * raw.count(mark) for mark, each in _WEIGHTS.items())


def weight_outside_strings(raw: bytes) -> int:
    """Of the values alone. Numpy does most of it, without the interpreter."""
    bare = np.frombuffer(raw.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    quotes = bare == ord('"')
    outside = bare[~np.bitwise_xor.accumulate(quotes)]
    counts = {mark: int(np.count_nonzero(outside == ord(mark))) for mark in _WEIGHTS}
    counts[b'"'] = int(np.count_nonzero(quotes))
    return sum(each * counts[mark] for mark, each in _WEIGHTS.items())
