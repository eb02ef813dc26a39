"""Events of an answer, and the pieces that parsers of it are made of (no jax, no HTTP).

A parser is a generator over an `Input`: it yields events, and None where it needs more text. So each reads like a parser of a whole
text, and works on any pieces of it.
"""

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple


class Content(NamedTuple):
    """Text of the answer."""

    text: str


class Reasoning(NamedTuple):
    """Text that led to it."""

    text: str


class CallStart(NamedTuple):
    """A function is called."""

    name: str


class CallArguments(NamedTuple):
    """More of the arguments of the last call, as JSON."""

    text: str


Event = Content | Reasoning | CallStart | CallArguments
Parts = Generator[Event | None, None, None]
Emit = Callable[[str], Event]
Schemas = dict[str, dict[str, object]]  # of the parameters of the functions that may be called, by name


class Input:
    """The text that came and is not used yet."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False

    def take(self, count: int) -> str:
        taken, self.text = self.text[:count], self.text[count:]
        return taken

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Take what matches at the beginning."""
        if (found := pattern.match(self.text)) is not None:
            self.text = self.text[found.end() :]
        return found


def joined(events: Sequence[Event]) -> list[Event]:
    """Neighbours of one kind as one event."""
    out: list[Event] = []
    for event in events:
        if out and type(out[-1]) is type(event) and not isinstance(event, CallStart):
            out[-1] = type(event)(out[-1][0] + event[0])
        else:
            out.append(event)
    return out


def until(source: Input, markers: Sequence[str], emit: Emit) -> Generator[Event | None, None, str]:
    """Emit text up to the first of the markers and take that; '' at the end of the answer."""
    while True:
        places = [(at, -len(marker), marker) for marker in markers if (at := source.text.find(marker)) >= 0]
        if places:
            at, _, marker = min(places)
            # A longer marker that begins here too may still be on its way.
            if source.ended or not any(m != marker and m.startswith(source.text[at:]) for m in markers):
                yield emit(source.take(at))
                source.take(len(marker))
                return marker
            yield emit(source.take(at))
        else:
            keep = 0 if source.ended else max(_overlap(source.text, marker) for marker in markers)
            yield emit(source.take(len(source.text) - keep))
            if source.ended:
                return ""
        yield None


def _overlap(text: str, marker: str) -> int:
    """How many characters at the end might begin the marker."""
    most = min(len(marker) - 1, len(text))
    return next((n for n in range(most, 0, -1) if text.endswith(marker[:n])), 0)


def skip_space(source: Input) -> Generator[None, None, None]:
    """Skip white space; afterwards there is something else, or the end."""
    source.text = source.text.lstrip()
    while not source.text and not source.ended:
        yield None
        source.text = source.text.lstrip()


def begins(source: Input, word: str) -> Generator[None, None, bool]:
    """Whether the text goes on with this word, white space before it left out."""
    while not source.ended and word != (start := source.text.lstrip()) and word.startswith(start):
        yield None
    return source.text.lstrip().startswith(word)


def drop(_: str) -> Event:
    return Content("")


class _JsonScan:
    """Where a JSON object or array ends, over text that comes in pieces."""

    def __init__(self) -> None:
        self.depth, self.in_string, self.escaped = 0, False, False

    def end(self, text: str) -> int:
        """How many characters of this text belong to it up to its end; -1: all, and it goes on."""
        for at, c in enumerate(text):
            if self.in_string:
                self.escaped, self.in_string = c == "\\" and not self.escaped, c != '"' or self.escaped
            elif c == '"':
                self.in_string = True
            elif c in "{[":
                self.depth += 1
            elif c in "}]":
                self.depth -= 1
                if self.depth <= 0:
                    return at + 1
        return -1


def json_object(source: Input, emit: Emit) -> Generator[Event | None, None, bool]:
    """Emit one object or array as it comes; False where the answer ends in it."""
    scan = _JsonScan()
    while True:
        end = scan.end(source.text)
        yield emit(source.take(len(source.text) if end < 0 else end))
        if end >= 0:
            return True
        if source.ended:
            return False
        yield None


_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.S)


def json_call(source: Input, schemas: Schemas) -> Parts:
    """One {"name": …, "arguments": {…}}: its arguments stream where the name comes first; else it is read whole."""
    scan, held, scanned = _JsonScan(), "", 0
    while True:
        if not held and (found := _HEAD.match(source.text)) is not None:
            name = json.loads(found[1], strict=False)
            if name in schemas:
                source.text = source.text[found.end() :]
                yield CallStart(name)
                if (yield from json_object(source, CallArguments)):
                    yield from until(source, ("}",), drop)
                return
            held = " "  # not offered: read whole, and given out as text
        end = scan.end(source.text[scanned:])
        if end >= 0 or source.ended:
            whole = source.take(scanned + end if end >= 0 else len(source.text))
            yield from _whole_call(whole, schemas)
            return
        scanned = len(source.text)
        yield None


def _whole_call(text: str, schemas: Schemas) -> Parts:
    """A finished object as a call, or as text where it is none."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        value = None
    calls = value if isinstance(value, list) else [value]
    inner = [one.get("function", one) for one in calls if isinstance(one, dict)]
    offered = [one for one in inner if isinstance(one, dict) and _is_offered(one.get("name"), schemas)]
    if not offered or len(offered) != len(calls):
        yield Content(text)
        return
    for one in offered:
        arguments = one.get("arguments", one.get("parameters"))
        yield CallStart(one["name"])
        written = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
        yield CallArguments(written or "{}")


def _is_offered(name: object, schemas: Schemas) -> bool:
    return isinstance(name, str) and name in schemas


def text_then(source: Input, marker: str) -> Generator[Event | None, None, bool]:
    """Emit text up to a marker, but white space just before it only if the marker does not follow; False: the end."""
    held = ""

    def emit(text: str) -> Event:
        nonlocal held
        text = held + text
        kept = text.rstrip()
        held = text[len(kept) :]
        return Content(kept)

    found = yield from until(source, (marker,), emit)
    if not found:
        yield Content(held)
    return bool(found)
