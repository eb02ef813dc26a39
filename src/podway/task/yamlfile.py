"""YAML text to a tree of nodes that know where they stand in the file.

1. `parse` checks the text itself: size, UTF-8, byte-order mark, tabs.
2. The parser's *events* are composed here, in one loop with an explicit stack: no recursion, so that depth is a number we
   check and not a crash. Anchors and merge keys work; recursive aliases, alias bombs, duplicate keys, foreign tags and
   over-deep nesting end as a `UserError` with `file:line:column`.
3. A scalar keeps the text as it was written beside the kind YAML gives it. Readers that want a string take the text, so
   `python: 3.10`, `DATE: 2024-01-01` and `FLAG: true` arrive as a shell user typed them.
"""

import re
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, NoReturn

import msgspec
import yaml

from podway.errors import UserError

MAX_BYTES = 1 << 20  # a task file is pages, not megabytes
MAX_DEPTH = 40
MAX_NODES = 50_000  # after aliases are expanded
MAX_EXPANDED = 2 * MAX_BYTES  # bytes of text after aliases are expanded

Kind = Literal["str", "int", "float", "bool", "null", "timestamp"]

# libyaml is five times faster; the pure-Python loader gives the same events where the wheel was built without it.
_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_resolve: Callable[..., str] = yaml.resolver.Resolver().resolve
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_TAG = "tag:yaml.org,2002:"
_SCALAR_KINDS: dict[str, Kind] = {
    _TAG + "str": "str",
    _TAG + "int": "int",
    _TAG + "float": "float",
    _TAG + "bool": "bool",
    _TAG + "null": "null",
    _TAG + "timestamp": "timestamp",
    _TAG + "value": "str",
    _TAG + "merge": "str",
}


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A value in a file, with the line and column (from 1) where it begins."""

    line: int
    column: int


class Scalar(Node, frozen=True, kw_only=True):
    """A single value: the text as written, and what YAML 1.1 takes it for."""

    text: str
    kind: Kind = "str"
    merge: bool = False  # a plain `<<`


class Sequence(Node, frozen=True, kw_only=True):
    """A list of values."""

    items: tuple[Node, ...]


class KeyValue(msgspec.Struct, frozen=True):
    """A key of a mapping and its value."""

    key: Scalar
    value: Node


class Mapping(Node, frozen=True, kw_only=True):
    """Values by key, in the order of the file; keys are the text as written."""

    entries: dict[str, KeyValue]


def parse(data: bytes | str, name: str) -> list[Node]:
    """All documents of the text that hold something, in order."""
    text = _decode(data, name)
    composer = _Composer(name)
    try:
        for event in yaml.parse(text, Loader=_Loader):
            composer.take(event)
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, text, name) from None
    except yaml.reader.ReaderError as error:
        line, column = _place(text.encode(), error.position)
        what = f"the character U+{ord(error.character) if isinstance(error.character, str) else error.character:04X}"
        raise UserError(
            f"{name}:{line}:{column}: {what} is not allowed in YAML", "remove the stray character"
        ) from None
    return composer.documents


def too_large(name: str, size: int) -> UserError:
    """The error for a file too large to be a task file."""
    return UserError(
        f"{name}: the file has {size:,} bytes; a task file may have at most {MAX_BYTES:,}",
        "give the path of a task file; large data belongs in workdir or file_mounts",
    )


def _decode(data: bytes | str, name: str) -> str:
    raw = data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass")
    if len(raw) > MAX_BYTES:
        raise too_large(name, len(raw))
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(f"{name}:1:1: the file is UTF-16", "save it as UTF-8")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, column = _place(raw, error.start)
        raise UserError(f"{name}:{line}:{column}: the file is not UTF-8", "save it as UTF-8") from None


def _place(raw: bytes, offset: int) -> tuple[int, int]:
    return raw.count(b"\n", 0, offset) + 1, offset - raw.rfind(b"\n", 0, offset)


def _syntax_error(error: yaml.MarkedYAMLError, text: str, name: str) -> UserError:
    mark = error.problem_mark or error.context_mark
    where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
    problem = one_line(error.problem or error.context or "not valid YAML")
    lines = text.splitlines()
    near = lines[mark.line] if mark and mark.line < len(lines) else ""
    if "\t" in near[: len(near) - len(near.lstrip())] or "'\\t'" in problem:
        return UserError(f"{where}: a tab indents this line", "indent with spaces: YAML does not allow tabs")
    return UserError(f"{where}: not valid YAML: {problem}", "check indentation, quotes and colons near this place")


def one_line(what: object) -> str:
    """Text for a message: what a file says may hold line ends and control characters, a message must not."""
    return _UNPRINTABLE.sub(" ", str(what))[:300]


def _begin(event: yaml.Event) -> tuple[int, int]:
    """The line and column of an event, from 1."""
    assert event.start_mark is not None
    return event.start_mark.line + 1, event.start_mark.column + 1


class Extent(NamedTuple):
    """How large a node is when every alias in it is written out."""

    nodes: int
    text: int  # characters
    height: int

    def holding(self, child: "Extent") -> "Extent":
        """The extent of a collection, with one more child."""
        return Extent(self.nodes + child.nodes, self.text + child.text, max(self.height, child.height + 1))


class _Open:
    """A collection whose end has not been read yet."""

    __slots__ = ("anchor", "children", "column", "extent", "is_mapping", "line")

    def __init__(self, event: yaml.CollectionStartEvent, is_mapping: bool) -> None:
        self.is_mapping = is_mapping
        self.anchor: str | None = event.anchor
        self.line, self.column = _begin(event)
        self.children: list[Node] = []
        self.extent = Extent(nodes=1, text=0, height=1)


class _Composer:
    """Events in, documents out. Extents count what aliases expand to, so that memory and output stay bounded."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.documents: list[Node] = []
        self.stack: list[_Open] = []
        self.anchors: dict[str, tuple[Node, Extent]] = {}
        self.has_aliases = False

    def take(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.ScalarEvent):
            self._add(self._scalar(event), Extent(nodes=1, text=len(event.value), height=1), event.anchor)
        elif isinstance(event, yaml.AliasEvent):
            self._add(*self._alias(event), None)
        elif isinstance(event, yaml.CollectionStartEvent):
            is_mapping = isinstance(event, yaml.MappingStartEvent)
            self._check_tag(event, ("map", "set") if is_mapping else ("seq",))
            self.stack.append(_Open(event, is_mapping))
            if len(self.stack) > MAX_DEPTH:
                self._fail(event, f"nested more than {MAX_DEPTH} deep", "a task file needs five or six levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            opened = self.stack.pop()
            node = self._mapping(opened) if opened.is_mapping else self._sequence(opened)
            self._add(node, opened.extent, opened.anchor)
        elif isinstance(event, yaml.DocumentStartEvent):
            self.anchors = {}

    def _add(self, node: Node, extent: Extent, anchor: str | None) -> None:
        if anchor is not None:
            self.anchors[anchor] = (node, extent)
        if not self.stack:
            if not (isinstance(node, Scalar) and node.kind == "null"):
                self.documents.append(node)
            return
        parent = self.stack[-1]
        parent.children.append(node)
        parent.extent = parent.extent.holding(extent)
        self._check_extent(parent)

    def _check_extent(self, opened: _Open) -> None:
        extent = opened.extent
        if extent.nodes <= MAX_NODES and extent.text <= MAX_EXPANDED and extent.height <= MAX_DEPTH:
            return
        what, hint = "too large when its aliases are expanded", "write it without so many aliases"
        if not self.has_aliases:
            what = f"more than {MAX_NODES:,} values in one file"
            hint = "large data belongs in workdir or file_mounts"
        raise self._error(opened.line, opened.column, what, hint)

    def _scalar(self, event: yaml.ScalarEvent) -> Scalar:
        tag = event.tag
        if tag is None or tag == "!":
            tag = _resolve(yaml.ScalarNode, event.value, event.implicit)
        kind = _SCALAR_KINDS.get(tag)
        if kind is None:
            self._check_tag(event, ())
            kind = "str"
        line, column = _begin(event)
        return Scalar(line=line, column=column, text=event.value, kind=kind, merge=tag == _TAG + "merge")

    def _check_tag(self, event: yaml.ScalarEvent | yaml.CollectionStartEvent, allowed: tuple[str, ...]) -> None:
        if event.tag not in (None, "!", *(_TAG + name for name in allowed)):
            tag = str(event.tag).replace(_TAG, "!!")
            self._fail(event, f"the tag {tag} has no meaning in a task file", "remove the tag")

    def _alias(self, event: yaml.AliasEvent) -> tuple[Node, Extent]:
        self.has_aliases = True
        if any(opened.anchor == event.anchor for opened in self.stack):
            self._fail(event, f"the alias *{event.anchor} stands inside its own anchor", "write the value out")
        if event.anchor not in self.anchors:
            self._fail(event, f"the alias *{event.anchor} has no anchor", f"define it before with &{event.anchor}")
        return self.anchors[event.anchor]

    def _sequence(self, opened: _Open) -> Sequence:
        return Sequence(line=opened.line, column=opened.column, items=tuple(opened.children))

    def _mapping(self, opened: _Open) -> Mapping:
        entries: dict[str, KeyValue] = {}
        merged: dict[str, KeyValue] = {}
        for key, value in _pairs(opened.children):
            if not isinstance(key, Scalar):
                raise self._error(key.line, key.column, "a key must be a word", "a list or mapping cannot be a key")
            if key.kind == "null":
                raise self._error(key.line, key.column, "a key is empty", "write a name before the colon")
            if key.text in entries:
                first = entries[key.text].key
                raise self._error(
                    key.line,
                    key.column,
                    f"`{key.text}` is given twice: here and at line {first.line}, column {first.column}",
                    "keep one of them",
                )
            if key.merge:
                for source in self._merge_sources(value):
                    for text, entry in source.entries.items():
                        merged.setdefault(text, entry)
                continue
            entries[key.text] = KeyValue(key, value)
        if merged:
            entries = {**{k: e for k, e in merged.items() if k not in entries}, **entries}
        return Mapping(line=opened.line, column=opened.column, entries=entries)

    def _merge_sources(self, value: Node) -> tuple[Mapping, ...]:
        sources = value.items if isinstance(value, Sequence) else (value,)
        maps = tuple(source for source in sources if isinstance(source, Mapping))
        if len(maps) != len(sources):
            raise self._error(value.line, value.column, "`<<` merges mappings only", "give it an alias of a mapping")
        return maps

    def _fail(self, event: yaml.Event, what: str, hint: str) -> NoReturn:
        raise self._error(*_begin(event), what, hint)

    def _error(self, line: int, column: int, what: str, hint: str) -> UserError:
        return UserError(f"{self.name}:{line}:{column}: {one_line(what)}", hint)


def _pairs(children: list[Node]) -> Iterator[tuple[Node, Node]]:
    return zip(children[::2], children[1::2], strict=True)
