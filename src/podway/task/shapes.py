"""The shapes a task file's values may have: declared once, used twice.

A dialect is a `Table` of keys (`skypilot_keys.py`, `dstack_keys.py`). From it follow

1. `check(field, shape)`: unknown keys with the nearest known one, wrong types, missing keys, keys Podway must refuse, and
   the notes for keys that have no effect here. After it a reader may take values without asking what they are.
2. `schema(shape)`: the JSON schema editors complete and check with.

What a *combination* of values means is the reader's work, not a shape's.
"""

import re
from typing import NamedTuple

import msgspec

from podway.task.fields import Field, did_you_mean, looks_whole
from podway.task.problems import Problems
from podway.task.yamlfile import Mapping, Node, Scalar, Sequence


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the shapes below."""


class Text(Shape, frozen=True, kw_only=True):
    """A single value, taken as written; perhaps one of a few words, in any case."""

    choices: tuple[str, ...] = ()
    pattern: str | None = None
    form: str = "text"  # what a person should write, for the message


class Whole(Shape, frozen=True, kw_only=True):
    """A whole number within bounds."""

    minimum: int | None = None
    maximum: int | None = None


class Number(Shape, frozen=True, kw_only=True):
    """A number within bounds."""

    minimum: float | None = None
    above: float | None = None


class Flag(Shape, frozen=True, kw_only=True):
    """true or false."""


class Anything(Shape, frozen=True, kw_only=True):
    """A value nobody looks into."""


class ListOf(Shape, frozen=True, kw_only=True):
    """A list."""

    item: Shape


class MapOf(Shape, frozen=True, kw_only=True):
    """Names of the user's own, and their values."""

    value: Shape
    key: str | None = None  # pattern of the names
    nullable: bool = False


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """A known key: its shape, what it is, and, where that is so, why it has no effect or is refused."""

    shape: Shape
    about: str
    note: str | None = None
    refuse: tuple[str, str] | None = None  # why, and what to use instead


class Table(Shape, frozen=True, kw_only=True):
    """A mapping with known keys and no others."""

    keys: dict[str, Key]
    required: tuple[str, ...] = ()


class Either(Shape, frozen=True, kw_only=True):
    """The first of several shapes that a value can have by its look."""

    options: tuple[Shape, ...]


class Findings(NamedTuple):
    """What a check gathers."""

    notes: list[str]
    unused: Problems  # keys that are unknown or refused
    malformed: Problems  # values that are missing or of another shape


def check(field: Field, shape: Shape, notes: list[str], problems: Problems) -> None:
    """Gather every place that does not have its shape, and a note for each key without effect.

    Readers never look at a key that is unknown or refused, so reading can go on and find more; where a value is malformed or
    missing it cannot, and what was gathered is raised.
    """
    found = Findings(notes, problems, Problems())
    _check(field, shape, found)
    if found.malformed.found:
        problems.found += found.malformed.found
        problems.raise_any()


def _check(field: Field, shape: Shape, found: Findings) -> None:
    """One bad value does not hide the next."""
    found.malformed.read(lambda: _check_one(field, shape, found), None)


def _check_one(field: Field, shape: Shape, found: Findings) -> None:
    while isinstance(shape, Either):
        shape = _choose(field, shape)
    if not _looks_like(field.node, shape):
        raise field.error(f"expected {_name(shape)}, found {field.found}", _how(shape))
    match shape:
        case Table():
            _check_table(field, shape, found)
        case MapOf():
            _check_map(field, shape, found)
        case ListOf():
            for item in field.items():
                _check(item, shape.item, found)
        case Text():
            _check_text(field, shape)
        case Whole():
            _check_bounds(field, field.integer(), shape.minimum, shape.maximum, None)
        case Number():
            _check_bounds(field, field.number(), shape.minimum, None, shape.above)
        case Flag():
            field.flag()


def _check_table(field: Field, table: Table, found: Findings) -> None:
    assert isinstance(field.node, Mapping)
    for name, below in field.entries().items():
        key = table.keys.get(name)
        if key is None:
            at = field.node.entries[name].key
            found.unused.found.append(below.error("unknown key", did_you_mean(name, table.keys), at=at))
            continue
        if below.is_null:
            continue
        if key.refuse:
            found.unused.found.append(below.error(key.refuse[0], key.refuse[1], at=field.node.entries[name].key))
            continue
        _check(below, key.shape, found)
        if key.note:
            found.notes.append(f"{below.path}: {key.note}")
    for name in table.required:
        if field.get(name) is None:
            what = f"`{name}` is required"
            found.malformed.found.append(field.error(what, f"add a `{name}:` line: {table.keys[name].about}"))


def _check_map(field: Field, shape: MapOf, found: Findings) -> None:
    assert isinstance(field.node, Mapping)
    for name, below in field.entries().items():
        if shape.key and not re.fullmatch(shape.key, name):
            at = field.node.entries[name].key
            what = f"`{name}` is not a valid name here"
            found.malformed.found.append(field.error(what, f"names match {shape.key}", at=at))
        elif not (below.is_null and shape.nullable):
            _check(below, shape.value, found)


def _check_text(field: Field, shape: Text) -> None:
    text = field.text()
    if shape.choices and text.lower() not in (choice.lower() for choice in shape.choices):
        raise field.error(f"{field.found} is not a known value", did_you_mean(text, shape.choices))
    if shape.pattern and not re.fullmatch(shape.pattern, text):
        raise field.error(f"expected {shape.form}, found {field.found}", f"write {shape.form}")


def _check_bounds(
    field: Field, value: float, minimum: float | None, maximum: float | None, above: float | None
) -> None:
    if minimum is not None and value < minimum:
        raise field.error(f"{value:g} is too small", f"write {minimum:g} or more")
    if above is not None and value <= above:
        raise field.error(f"{value:g} is too small", f"write a number above {above:g}")
    if maximum is not None and value > maximum:
        raise field.error(f"{value:g} is too large", f"write {maximum:g} or less")


def _choose(field: Field, either: Either) -> Shape:
    for option in either.options:
        if _looks_like(field.node, option):
            return option
    names = [_name(option) for option in either.options]
    expected = f"{', '.join(names[:-1])} or {names[-1]}"
    raise field.error(f"expected {expected}, found {field.found}", f"write {expected}")


def _looks_like(node: Node, shape: Shape) -> bool:
    match shape:
        case Either():
            return any(_looks_like(node, option) for option in shape.options)
        case Table() | MapOf():
            return isinstance(node, Mapping)
        case ListOf():
            return isinstance(node, Sequence)
        case Flag():
            return isinstance(node, Scalar) and (node.kind == "bool" or node.text.lower() in ("true", "false"))
        case Whole():
            return looks_whole(node)
        case Number() | Text():
            return isinstance(node, Scalar) and node.kind != "null"
        case _:
            return True


def _name(shape: Shape) -> str:
    match shape:
        case Table() | MapOf():
            return "a mapping"
        case ListOf():
            return "a list"
        case Flag():
            return "true or false"
        case Whole():
            return "a whole number"
        case Number():
            return "a number"
        case Text(choices=choices) if choices:
            return f"one of {', '.join(choices)}"
        case Text(form=form):
            return form
        case _:
            return "a value"


def _how(shape: Shape) -> str:
    match shape:
        case Table(keys=keys):
            return f"write keys below it, such as `{next(iter(keys))}:`"
        case MapOf():
            return "write `name: value` lines below it"
        case ListOf():
            return "write a list: each item on a line of its own, after a dash"
        case _:
            return f"write {_name(shape)}"


def schema(shape: Shape) -> dict[str, object]:
    """The shape as JSON schema (draft 2020-12)."""
    match shape:
        case Table(keys=keys, required=required):
            properties = {name: _key_schema(key, name in required) for name, key in keys.items()}
            out: dict[str, object] = {"type": "object", "properties": properties, "additionalProperties": False}
            return {**out, "required": list(required)} if required else out
        case MapOf(value=value, key=key, nullable=nullable):
            below = {"anyOf": [schema(value), {"type": "null"}]} if nullable else schema(value)
            names = {"propertyNames": {"pattern": f"^(?:{key})$"}} if key else {}
            return {"type": "object", "additionalProperties": below, **names}
        case ListOf(item=item):
            return {"type": "array", "items": schema(item)}
        case Either(options=options):
            return {"anyOf": [schema(option) for option in options]}
        case _:
            return _scalar_schema(shape)


def _key_schema(key: Key, required: bool) -> dict[str, object]:
    if key.refuse:
        return {"description": f"{key.about} Refused: {key.refuse[0]}; {key.refuse[1]}.", "type": "null"}
    about = f"{key.about} No effect here: {key.note}." if key.note else key.about
    below = schema(key.shape)
    if not required and below:
        below = {"anyOf": [below, {"type": "null"}]}
    return {"description": about, **below}


def _scalar_schema(shape: Shape) -> dict[str, object]:
    match shape:
        case Flag():
            return {"type": "boolean"}
        case Whole(minimum=minimum, maximum=maximum):
            bounds = {"minimum": minimum, "maximum": maximum}
            return {"type": "integer", **{k: v for k, v in bounds.items() if v is not None}}
        case Number(minimum=low, above=above):
            limits = {"minimum": low, "exclusiveMinimum": above}
            return {"type": "number", **{k: v for k, v in limits.items() if v is not None}}
        case Text(choices=choices, pattern=pattern):
            out: dict[str, object] = {"type": ["string", "number", "boolean"]}
            if choices:
                # A version such as 3.11 is a number to whoever reads the YAML.
                numbers = [float(choice) for choice in choices if choice.replace(".", "", 1).isdigit()]
                return {"enum": sorted({case for c in choices for case in (c, c.lower(), c.upper())}) + numbers}
            return {**out, "pattern": f"^(?:{pattern})$"} if pattern else out
        case _:
            return {}
