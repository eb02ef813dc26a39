"""Read a `TrainConfig` from a YAML file and `key=value` words, and print it back (no jax).

1. The file becomes nodes that know their place (`task/yamlfile.py`); each word `a.b=value` becomes one more node, and
   goes over what the file says.
2. Every key is held against the records of `config.py`: an unknown one names the nearest.
3. Values are converted by type, so that `1e-4` is a number wherever a number is asked for (YAML 1.1 takes it for text).
"""

import re
import types
from collections.abc import Sequence as Words
from pathlib import Path
from typing import Literal, TypeAlias, Union, get_args, get_origin

import msgspec

from podway.decoding import from_plain
from podway.errors import UserError
from podway.task.fields import did_you_mean
from podway.task.yamlfile import Mapping, Node, Scalar, Sequence, parse
from podway.train.config import TrainConfig

Plain: TypeAlias = dict[str, "Value"]
Value: TypeAlias = str | list["Value"] | Plain | None  # what YAML holds before types are known


def read_config(file: str | None, words: Words[str] = ()) -> TrainConfig:
    """The run that a file (or none) and `key=value` words describe."""
    tree = _read_file(file) if file is not None else {}
    for word in words:
        _override(tree, word)
    return _convert(tree, file or "the command line")


def print_config(config: TrainConfig) -> str:
    """One line for each setting, as it would be given on the command line."""
    return "\n".join(_lines(config))


def changed_settings(config: TrainConfig) -> list[str]:
    """The lines of `print_config` that differ from the defaults."""
    defaults = set(_lines(TrainConfig()))
    return [line for line in _lines(config) if line not in defaults]


def config_yaml(config: TrainConfig) -> bytes:
    """Every setting as a file that `podway train` reads."""
    return msgspec.yaml.encode(msgspec.to_builtins(config))


def _lines(config: TrainConfig) -> list[str]:
    lines: list[str] = []
    _flatten(msgspec.to_builtins(config), "", lines)
    return lines


def _flatten(value: object, path: str, lines: list[str]) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _flatten(inner, f"{path}.{key}" if path else key, lines)
    else:
        text = msgspec.json.encode(value).decode() if not isinstance(value, str) else value
        lines.append(f"{path}={text}")


def _read_file(file: str) -> Plain:
    try:
        data = Path(file).read_bytes()
    except OSError as error:
        hint = f"a setting has a value: {file}=..." if _is_setting(file) else "give the path of a training config"
        raise UserError(f"cannot read {file}: {error.strerror or error}", hint) from None
    documents = parse(data, file)
    if not documents:
        return {}
    if len(documents) > 1 or not isinstance(documents[0], Mapping):
        raise UserError(f"{file} is not one mapping of settings", "write model:, data:, batch:, ... at the left margin")
    checked = _plain(documents[0], TrainConfig, "", file)
    assert isinstance(checked, dict)
    return checked


def _is_setting(word: str) -> bool:
    """Whether a word names a setting, with its value forgotten."""
    return any(line.partition("=")[0] == word for line in print_config(TrainConfig()).splitlines())


def _override(tree: Plain, word: str) -> None:
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise UserError(f"{word!r} is not a setting", "write key=value, such as schedule.steps=100")
    documents = parse(text, key)
    node: Node = documents[0] if documents else Scalar(line=1, column=1, text="null", kind="null")
    *sections, last = key.removeprefix("--").split(".")
    kind: object = TrainConfig
    here = tree
    for depth, section in enumerate(sections):
        kind = _inside(kind, section, ".".join(sections[:depth]), "the command line")
        inside = here.setdefault(section, {})
        if not isinstance(inside, dict):
            raise UserError(
                f"{key!r} goes into {section}, which is a single value", "see docs/training.md for the keys"
            )
        here = inside
    kind = _inside(kind, last, ".".join(sections), "the command line")
    value = _plain(node, kind, key, "the command line")
    before = here.get(last)
    if isinstance(value, dict) and isinstance(before, dict):
        here[last] = before | value
    else:
        here[last] = value


def _plain(node: Node, kind: object, path: str, where: str) -> Value:
    """Nodes to plain values, with every key checked against `kind`."""
    if isinstance(node, Scalar):
        return None if node.kind == "null" else node.text
    if isinstance(node, Sequence):
        return [_plain(item, None, path, where) for item in node.items]
    assert isinstance(node, Mapping)
    plain: Plain = {}
    for key, entry in node.entries.items():
        place = f"{where}:{entry.key.line}:{entry.key.column}" if where != "the command line" else where
        inner = _inside(kind, key, path, place)
        plain[key] = _plain(entry.value, inner, f"{path}.{key}" if path else key, where)
    return plain


def _inside(kind: object, key: str, path: str, where: str) -> object:
    """The type of a key of a record; an unknown key is refused here."""
    record = _record(kind)
    if record is None:
        raise UserError(f"{where}: {path or 'this'} has no keys of its own", "see docs/training.md for the keys")
    fields = {field.name: field.type for field in msgspec.structs.fields(record)}
    if key not in fields:
        section = f"{path} has no" if path else "there is no"
        raise UserError(f"{where}: {section} setting {key!r}", did_you_mean(key, fields))
    return fields[key]


def _record(kind: object) -> type[msgspec.Struct] | None:
    """The Struct in a type, `X | None` included."""
    options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return next((o for o in options if isinstance(o, type) and issubclass(o, msgspec.Struct)), None)


def _convert(tree: Plain, where: str) -> TrainConfig:
    try:
        return from_plain(tree, TrainConfig, strict=False)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at ")
        key = path.strip("`").removeprefix("$").lstrip(".")
        choices = _choices(key)
        hint = "one of: " + ", ".join(choices) if choices else "see docs/training.md for what it may be"
        raise UserError(f"{where}: {key}: {message.replace('`', '')}", hint) from None


def _choices(key: str) -> list[str]:
    """The words that a setting may be, where it may be only a few."""
    kind: object = TrainConfig
    for part in re.findall(r"[a-z0-9_]+", key):
        record = _record(kind)
        kind = None if record is None else {f.name: f.type for f in msgspec.structs.fields(record)}.get(part)
    options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return [str(word) for option in options if get_origin(option) is Literal for word in get_args(option)]
