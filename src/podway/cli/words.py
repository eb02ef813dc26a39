"""Times and sizes as people read them: `3 mins ago`, `2h 5m`, `1.5 MiB`, `3 files`."""

from itertools import pairwise

from podway.errors import UserError

_SPANS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))
_WORDS = {"d": "day", "h": "hr", "m": "min", "s": "sec"}
_NOW_S = 5


def duration(seconds: float | None) -> str | None:
    """The two largest units that say something: `45s`, `2m 5s`, `1h`, `3d 4h`; None stays None, for a table's `-`."""
    if seconds is None:
        return None
    left = max(0, int(seconds))
    for (span, unit), (smaller, small_unit) in pairwise(_SPANS):
        if left >= span:
            rest = left % span // smaller
            return f"{left // span}{unit}" + (f" {rest}{small_unit}" if rest else "")
    return f"{left}s"


def seconds(text: str, option: str) -> float:
    """`90`, `30m`, `6h`, `2d` in seconds."""
    number, unit = (text[:-1], text[-1:]) if text[-1:].isalpha() else (text, "s")
    span = next((span for span, its in _SPANS if its == unit.lower()), None)
    if span is None or not number.isascii() or not number.replace(".", "", 1).isdigit() or float(number) * span <= 0:
        raise UserError(f"{option} {text!r} is no duration", "write it as 30m, 6h or 2d")
    return float(number) * span


def ago(then: float | None, now: float) -> str | None:
    """How long since: `just now`, `12 secs ago`, `1 hr ago`, `3 days ago`."""
    if then is None:
        return None
    passed = int(now - then)
    if passed < _NOW_S:
        return "just now"
    span, unit = next((span, unit) for span, unit in _SPANS if passed >= span)
    return f"{count(passed // span, _WORDS[unit])} ago"


def size(bytes_: int) -> str:
    """`17 B`, `1.5 MiB`."""
    if bytes_ < 1024:
        return f"{bytes_} B"
    value = float(bytes_)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"


def count(number: int, thing: str) -> str:
    """`1 host`, `4 hosts`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
