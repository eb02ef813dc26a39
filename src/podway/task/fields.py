"""A value of a task file together with where it is: the one way readers look at a file.

`Field` joins a node with its file and its path (`resources.any_of[0].accelerators`), so that every complaint made through
`Field.error` says `file:line:column: path: what is wrong` and what to do. Two rules hold everywhere:

- a key whose value is null is as good as absent (the readers that give null a meaning, envs and secrets, look for it);
- text is the text as written, whatever kind YAML would make of it.
"""

import difflib
import math
import re
from collections.abc import Collection, Iterable
from typing import Any

from podway.errors import UserError
from podway.task.yamlfile import Mapping, Node, Scalar, Sequence, one_line, parse

_DECIMAL = re.compile(r"[-+]?[0-9][0-9_]*")
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_./~-]+")
_BIG = 1 << 62  # fits the JSON integers of every reader after us


class Field:
    """A node, the file it is in and the path that leads to it."""

    __slots__ = ("file", "node", "path")

    def __init__(self, file: str, node: Node, path: str = "") -> None:
        self.file = file
        self.node = node
        self.path = path

    def error(self, what: str, hint: str, *, at: Node | None = None) -> UserError:
        node = at or self.node
        path = f"{self.path}: " if self.path else ""
        return UserError(f"{self.file}:{node.line}:{node.column}: {path}{one_line(what)}", hint)

    @property
    def found(self) -> str:
        """What stands here, for "expected X, found Y"."""
        if isinstance(self.node, Mapping):
            return "a mapping"
        if isinstance(self.node, Sequence):
            return "a list"
        assert isinstance(self.node, Scalar)
        return "nothing" if self.node.kind == "null" else f"`{shorten(self.node.text)}`"

    @property
    def is_null(self) -> bool:
        return isinstance(self.node, Scalar) and self.node.kind == "null"

    @property
    def is_flag(self) -> bool:
        return isinstance(self.node, Scalar) and self.node.kind == "bool"

    @property
    def is_list(self) -> bool:
        return isinstance(self.node, Sequence)

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.node, Mapping)

    def text(self) -> str:
        """A single value as it was written."""
        if not isinstance(self.node, Scalar) or self.node.kind == "null":
            raise self.error(f"expected text, found {self.found}", "write a single value")
        if "\0" in self.node.text:
            raise self.error("the text holds a NUL character", "remove it: no shell can pass it on")
        return self.node.text

    def words(self) -> str:
        """Text that must not be empty, on one line."""
        text = self.text().strip()
        if not text or "\n" in text:
            raise self.error("expected one line of text" + ("" if text else ", found an empty one"), "write a value")
        return text

    def integer(self) -> int:
        text = self.text()
        value = _integer(text)
        if value is None:
            raise self.error(f"expected a whole number, found {self.found}", "write digits only")
        if abs(value) > _BIG:
            raise self.error(f"{shorten(text)} is too large", "write a number that fits in 62 bits")
        return value

    def number(self) -> float:
        text = self.text()
        try:
            # YAML writes the numbers that are none as .nan and .inf.
            value = float(text.replace("_", "").lower().replace(".nan", "nan").replace(".inf", "inf"))
        except ValueError:
            raise self.error(f"expected a number, found {self.found}", "write a number such as 2 or 0.5") from None
        if not math.isfinite(value):
            raise self.error(f"{shorten(text)} is not a finite number", "write a number such as 2 or 0.5")
        return value

    def flag(self) -> bool:
        text = self.text().lower()
        if text in ("true", "yes", "on"):
            return True
        if text in ("false", "no", "off"):
            return False
        raise self.error(f"expected true or false, found {self.found}", "write true or false")

    def items(self) -> list["Field"]:
        if not isinstance(self.node, Sequence):
            raise self.error(f"expected a list, found {self.found}", "begin each item with a dash")
        return [Field(self.file, item, f"{self.path}[{i}]") for i, item in enumerate(self.node.items)]

    def entries(self) -> dict[str, "Field"]:
        if not isinstance(self.node, Mapping):
            raise self.error(f"expected a mapping, found {self.found}", "write `key: value` lines below it")
        return {key: Field(self.file, e.value, self._below(key)) for key, e in self.node.entries.items()}

    def get(self, key: str) -> "Field | None":
        """The value under a key of a mapping, or None when the key is absent or null."""
        if not isinstance(self.node, Mapping) or key not in self.node.entries:
            return None
        field = Field(self.file, self.node.entries[key].value, self._below(key))
        return None if field.is_null else field

    def plain(self) -> Any:
        """The value as Python data, for what is passed on as JSON."""
        node = self.node
        if isinstance(node, Mapping):
            return {key: field.plain() for key, field in self.entries().items()}
        if isinstance(node, Sequence):
            return [field.plain() for field in self.items()]
        assert isinstance(node, Scalar)
        if node.kind == "null":
            return None
        if node.kind == "bool":
            return self.flag()
        if node.kind == "int":
            return self.integer()
        return self.number() if node.kind == "float" else self.text()

    def part(self, text: str) -> "Field":
        """A piece of this value as a field of its own: its complaints point at the same place."""
        made = object.__new__(type(self))
        made.file, made.path = self.file, self.path
        made.node = Scalar(line=self.node.line, column=self.node.column, text=text)
        return made

    def _below(self, key: str) -> str:
        shown = key if _PLAIN_KEY.fullmatch(key) else repr(shorten(key))
        return f"{self.path}.{shown}" if self.path else shown


class Layers:
    """A mapping over another: what the first does not say, the next one says."""

    __slots__ = ("fields",)

    def __init__(self, *fields: Field) -> None:
        self.fields = fields

    @property
    def inner(self) -> Field:
        return self.fields[0]

    def get(self, key: str) -> Field | None:
        return next((found for field in self.fields if (found := field.get(key)) is not None), None)


class FlagField(Field):
    """A value typed on the command line: its complaints name the flag instead of a place in a file."""

    __slots__ = ()

    def __init__(self, flag: str, text: str) -> None:
        super().__init__("", Scalar(line=0, column=0, text=text), flag)

    def error(self, what: str, hint: str, *, at: Node | None = None) -> UserError:
        return UserError(f"{self.path}: {one_line(what)}", hint)


# What to do with a file that was written for GPUs.
RUN_ON_TPU = "--tpus v6e-8 runs it on a TPU; or name a slice in the file (`podway tpus` lists them)"


class NotHere(UserError):
    """Right for another tool, but not available here: fatal alone, a note where the file has another choice."""

    def __init__(self, field: Field, what: str, hint: str) -> None:
        error = field.error(what, hint)
        super().__init__(error.what, error.hint)
        self.note = f"{field.path}: {what}"


class GpuFile(NotHere):
    """The file was written for GPUs: said first, since nothing in it is a mistake."""

    def __init__(self, field: Field, what: str) -> None:
        super().__init__(field, f"this is a GPU file: {what}", RUN_ON_TPU)
        self.note = f"{field.path}: {what}"


def _integer(text: str) -> int | None:
    digits = text.replace("_", "")
    if len(digits) > 40:
        return None if not _DECIMAL.fullmatch(text) else _BIG * 2
    try:
        return int(digits, 10) if _DECIMAL.fullmatch(text) else int(digits, 0)
    except ValueError:
        return None


def looks_whole(node: Node) -> bool:
    """Whether a node can be read as a whole number."""
    return isinstance(node, Scalar) and node.kind != "null" and _integer(node.text) is not None


def shorten(text: str, limit: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like this one, or None when none is like it."""
    folded = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower()[:80], folded, n=1, cutoff=0.6)
    return folded[close[0]] if close else None


def read_mapping(data: bytes, path: str, known: Collection[str]) -> Field | None:
    """The one mapping of a file of settings, with none but these keys; None for an empty file."""
    documents = parse(data, path)
    if not documents:
        return None
    if len(documents) > 1:
        raise UserError(f"{path}:1:1: the file holds several documents", "write one mapping")
    root = Field(path, documents[0])
    for key, field in root.entries().items():
        if key not in known:
            raise field.error("unknown key", did_you_mean(key, known))
    return root


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint for a word that is not among the known ones."""
    names = [name for name in known if not name.startswith("_")]  # a leading underscore: of the other tool's own use
    close = nearest(word, names)
    return f"did you mean `{close}`?" if close else f"one of: {', '.join(names)}"
