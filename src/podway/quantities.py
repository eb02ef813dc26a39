"""Numbers as people write them (`15T` tokens, `500ms`, `$20k`, a tile `4,2,2`) and read them (`1.5 MiB`, `2h 5m`, `3 mins ago`).

The fields of a task file have their own readers (`podway.task.values`): each dialect allows other units, and an error there names
a line.
"""

import re
from itertools import pairwise

from podway.errors import UserError

_SCALE = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_AMOUNT = re.compile(r"\$?([0-9]{1,15}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})\s*([kmbgt]?)", re.IGNORECASE)
_DURATION = re.compile(r"([0-9]{1,12}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})\s*(us|ms|s|m|h|d)?", re.IGNORECASE)
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SPANS = ((86400, "d", "day"), (3600, "h", "hr"), (60, "m", "min"), (1, "s", "sec"))
_NOW_S = 5


def parse_amount(text: str, what: str) -> float:
    """`15T` -> 15e12; `$20k` -> 20000."""
    match = _AMOUNT.fullmatch(text.strip().replace(",", "").replace("_", ""))
    if match is None or float(match[1]) == 0:
        raise UserError(
            f"{what} {_shown(text)} is not a number above 0", "write a number, with k, M, B or T if it is large"
        )
    return float(match[1]) * _SCALE[match[2].lower()]


def parse_duration(text: str, what: str) -> float:
    """`500ms` -> 0.5 seconds; a bare number is seconds."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise UserError(
            f"{what} {_shown(text)} is not a duration above 0", "write a number with a unit: 500ms, 90s, 30m, 6h or 2d"
        )
    return float(match[1]) * _SECONDS[(match[2] or "s").lower()]


def parse_batch(text: str, seq: int) -> int:
    """Sequences of a step: `512`, or tokens with a suffix, `4M`."""
    word = text.strip()
    if re.fullmatch("[0-9]{1,15}", word):
        if int(word) == 0:
            raise UserError("the batch is 0", "a step has at least 1 sequence")
        return int(word)
    tokens = parse_amount(word, "batch")
    # Suffixes are loose in common use: 4M is 4 x 2**20 or 4e6. The nearest whole number of sequences is taken.
    sequences = round(tokens / seq)
    if sequences < 1:
        raise UserError(f"a batch of {word} tokens is less than one sequence of {seq}", "ask for more tokens")
    return sequences


def parse_tile(text: str) -> tuple[int, ...]:
    """`4,2,2` or `4x2x2x1` -> (4, 2, 2[, 1])."""
    word = text.strip().strip("()").replace(" ", "").replace("x", ",")
    if not re.fullmatch(r"[0-9]{1,4}(,[0-9]{1,4}){0,3}", word) or "0" in word.split(","):
        raise UserError(
            f"tile {_shown(text)} is not of the form x,y or x,y,z or x,y,z,core", "write sizes, such as 4,2,2"
        )
    return tuple(int(side) for side in word.split(","))


def _shown(text: str) -> str:
    quoted = repr(text.strip())
    return quoted if len(quoted) <= 40 else f"{quoted[:37]}…'"


def format_number(number: float) -> str:
    """`2.26M`, `663k`, `87`: three digits."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number:.3g}"


def format_seconds(seconds: float) -> str:
    """`12.5 s`, `310 ms`, `85 us`."""
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def format_hours(hours: float) -> str:
    """`3.2 h`, `12 days`, `4.1 years`."""
    if hours < 72:
        return f"{hours:,.1f} h"
    return f"{hours / 24:,.0f} days" if hours < 24 * 730 else f"{hours / 24 / 365:,.1f} years"


def format_dollars(amount: float | None, digits: int = 2) -> str | None:
    """`12.30`; None stays None, which a table shows as `-`."""
    if amount is None:
        return None
    return f"{amount:,.{digits}f}" if amount < 1e5 else f"{amount:,.0f}"


def format_duration(seconds: float | None) -> str | None:
    """The two largest units that matter: `45s`, `2m 5s`, `1h`, `3d 4h`; None stays None, which a table shows as `-`."""
    if seconds is None:
        return None
    left = max(0, int(seconds))
    for (span, unit, _), (smaller, small_unit, _) in pairwise(_SPANS):
        if left >= span:
            rest = left % span // smaller
            return f"{left // span}{unit}" + (f" {rest}{small_unit}" if rest else "")
    return f"{left}s"


def format_ago(then: float | None, now: float) -> str | None:
    """How long since: `just now`, `12 secs ago`, `1 hr ago`, `3 days ago`."""
    if then is None:
        return None
    passed = int(now - then)
    if passed < _NOW_S:
        return "just now"
    span, word = next((span, word) for span, _, word in _SPANS if passed >= span)
    return f"{format_count(passed // span, word)} ago"


def format_bytes(size: int) -> str:
    """`17 B`, `1.5 MiB`."""
    if size < 1024:
        return f"{size} B"
    value = float(size)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"


def format_count(number: int, thing: str) -> str:
    """`1 host`, `4 hosts`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
