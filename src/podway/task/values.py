"""The small grammars inside task files: durations, sizes, ranges, ports, names.

Each reader takes a `Field` and answers a plain value, or raises an error that points at the field. Units follow the two
peers: `GB` means 2**30 bytes in both.
"""

import re
from collections.abc import Callable

import msgspec

from podway.task.fields import Field

ENV_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
DURATION = r"(?i:[0-9]+ *[smhdw]?)"
SKY_TIME = r"(?i:[0-9]+(\.[0-9]+)? *[smhdw]?)"
SKY_SIZE = r"(?i:[0-9]+(\.[0-9]+)? *([kmgtp](i?b?)?|b)?)"
MEMORY = r"(?i:[0-9]+(\.[0-9]+)? *([mgt]b)?)"

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_MAX_SECONDS = 10 * 366 * 86_400  # ten years: longer is a typing error
_GB = {"k": 2**-20, "m": 2**-10, "g": 1.0, "t": 2.0**10, "p": 2.0**20, "b": 2**-30}
_SKY_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_DSTACK_NAME = re.compile(r"[a-z][a-z0-9-]{1,40}")


class Range(msgspec.Struct, frozen=True):
    """From `low` to `high`; an end that is None is open."""

    low: float | None
    high: float | None

    def holds(self, value: float) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        ends = ["" if end is None else f"{end:g}" for end in (self.low, self.high)]
        return ends[0] if self.low == self.high else "..".join(ends)


def duration(field: Field) -> int:
    """dstack's: whole seconds, or a number and s, m, h, d or w."""
    text = field.text().strip().lower()
    if not re.fullmatch(DURATION, text):
        raise field.error(
            f"expected a duration, found {field.found}", "write seconds, or a number with s, m, h, d or w: 90m"
        )
    unit = text[-1] if text[-1].isalpha() else "s"
    return int(_bounded_seconds(field, float(text.rstrip("smhdw ")[:18]) * _SECONDS[unit]))


def duration_or_off(field: Field, default: int | None) -> int | None:
    """As `duration`; `off` and false mean None, `on` and true mean the default."""
    if field.is_flag:
        return default if field.flag() else None
    if field.text().strip().lower() == "off":
        return None
    return duration(field)


def idle_minutes(field: Field) -> float:
    """SkyPilot's time: minutes, or a number and m, h, d or w."""
    text = field.text().strip().lower()
    if not re.fullmatch(SKY_TIME, text):
        raise field.error(f"expected a time, found {field.found}", "write minutes, or a number with m, h, d or w: 10h")
    unit = text[-1] if text[-1].isalpha() else "m"
    return _bounded_seconds(field, float(text.rstrip("smhdw ")[:18]) * _SECONDS[unit]) / 60


def _bounded_seconds(field: Field, seconds: float) -> float:
    if seconds > _MAX_SECONDS:
        raise field.error(f"{field.found} is longer than ten years", "check the unit")
    return seconds


def gigabytes(field: Field) -> int:
    """SkyPilot's disk and memory size: GB, or a number and a unit; rounded down."""
    text = field.text().strip().lower()
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([kmgtpb]?)[ib]*", text)
    if not match or not re.fullmatch(SKY_SIZE, text):
        raise field.error(f"expected a size, found {field.found}", "write GB, or a number with a unit: 256 or 1Ti")
    size = float(match[1][:18]) * _GB[match[2] or "g"]
    if not 1 <= size <= 2**24:
        raise field.error(f"{field.found} is not a disk size", "write between 1 GB and 16 PB")
    return int(size)


def memory(field: Field, text: str | None = None) -> float:
    """dstack's memory in GB: a number (GB), or a number and MB, GB or TB."""
    shown = (field.text() if text is None else text).replace(" ", "").lower()
    if not re.fullmatch(MEMORY, shown):
        raise field.error(f"`{shown}` is not a memory size", "write a number with MB, GB or TB: 16GB")
    return float(shown.rstrip("mgtb")[:18]) * _GB[shown[-2] if shown[-1] == "b" else "g"]


def memory_range(field: Field) -> Range:
    """`16GB`, `16GB..`, `..64GB`, `16GB..64GB`, or {min, max}."""
    if field.is_mapping:
        ends = [field.get("min"), field.get("max")]
        return _ordered(field, *(None if end is None else memory(end) for end in ends))
    return _ordered(field, *_ends(field, lambda text: memory(field, text)))


def count_range(field: Field) -> Range:
    """`4`, `4..`, `..8`, `4..8`, or {min, max}."""
    if field.is_mapping:
        ends = [field.get("min"), field.get("max")]
        return _ordered(field, *(None if end is None else float(end.integer()) for end in ends))

    def whole(text: str) -> float:
        if not re.fullmatch(r"[0-9]{1,9}", text):
            raise field.error(f"`{text}` is not a count", "write a number, or a range: 1..4")
        return float(text)

    return _ordered(field, *_ends(field, whole))


def _ends(field: Field, read: Callable[[str], float]) -> tuple[float | None, float | None]:
    text = field.text().replace(" ", "")
    if ".." not in text:
        value = read(text)
        return value, value
    low, _, high = text.partition("..")
    return (read(low) if low else None), (read(high) if high else None)


def _ordered(field: Field, low: float | None, high: float | None) -> Range:
    if low is None and high is None:
        raise field.error("the range is empty", "give at least one end: 4.. or ..8")
    if low is not None and high is not None and low > high:
        raise field.error(f"the range runs backwards: {low:g}..{high:g}", "write the smaller end first")
    return Range(low, high)


def ports(field: Field) -> tuple[str, ...]:
    """SkyPilot's: 8080, "8000-8010", or a list of them."""
    found: list[str] = []
    for one in field.items() if field.is_list else [field]:
        match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", one.text().strip())
        if not match:
            raise one.error(f"expected a port, found {one.found}", "write a port (8080) or a range (8000-8010)")
        first, last = int(match[1]), int(match[2] or match[1])
        if not 1 <= first <= last <= 65535:
            raise one.error(f"{one.found} is not a port or range", "ports run from 1 to 65535, the smaller first")
        text = str(first) if first == last else f"{first}-{last}"
        if text not in found:
            found.append(text)
    return tuple(found)


def port(field: Field) -> int:
    """One port; `80:8000` gives the one inside, 8000."""
    return int(port_mapping(field).rpartition(":")[2])


def port_mapping(field: Field) -> str:
    """dstack's: `8080`, `80:8080` (local:remote) or `*:8080` (any local port), or {local_port, container_port}."""
    if field.is_mapping:
        local, inside = field.get("local_port"), field.get("container_port")
        if inside is None:
            raise field.error("`container_port` is required", "say which port the program listens on")
        text = f"{local.text() if local else '*'}:{inside.text()}"
    else:
        text = field.text().strip()
    match = re.fullmatch(r"(?:([0-9]{1,6}|\*):)?([0-9]{1,6})", text)
    numbers = [int(part) for part in (match[1], match[2]) if part and part != "*"] if match else []
    if not match or not all(1 <= number <= 65535 for number in numbers):
        raise field.error(f"`{text}` is not a port", "write 8080, 80:8080 or *:8080, from 1 to 65535")
    return text if match[1] else f"{match[2]}:{match[2]}"


def at_least(field: Field, unit: str = "") -> str:
    """SkyPilot's cpus (`4`, `4+`) and, with a default unit, memory (`32+`, `64GB`), which is answered in that unit."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?) *([kmgtp]?)i?b?(\+?)", field.text().strip().lower())
    if not match or float(match[1]) <= 0 or (match[2] and not unit):
        raise field.error(f"expected a number or `N+`, found {field.found}", "write 4 for exactly 4, 4+ for 4 or more")
    amount = float(match[1]) * (_GB[match[2] or unit] / _GB[unit] if unit else 1)
    return f"{amount:g}{match[3]}"


def sky_name(field: Field) -> str:
    text = field.text().strip()
    if not _SKY_NAME.fullmatch(text) or "---" in text or "___" in text or len(text) > 100:
        raise field.error(
            f"{field.found} is not a task name",
            "use letters, digits, `.`, `_`, `-`; begin and end with a letter or digit; at most 100 characters",
        )
    return text


def dstack_name(field: Field) -> str:
    text = field.text().strip()
    if not _DSTACK_NAME.fullmatch(text):
        raise field.error(
            f"{field.found} is not a run name",
            "use lower-case letters, digits and `-`; begin with a letter; 2 to 41 characters",
        )
    return text
