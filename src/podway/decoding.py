"""Bytes to typed values, from any thread: the one way in which this program decodes into a type.

msgspec learns a Struct the first time that it decodes one, and lets other threads see what it has half learnt: two threads that
meet a type first at the same moment end the process by SIGSEGV (0.22; so ends the program of `tests/test_decoding.py` when it
calls msgspec itself). Here a type is learnt whole, under a lock, before anybody decodes into it.
"""

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_learnt: dict[Any, msgspec.json.Decoder[Any]] = {}
_packed: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
_learning = threading.Lock()


def json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """The decoder of a type, made once."""
    found = _learnt.get(kind)
    if found is None:
        with _learning:
            found = _learnt[kind] = msgspec.json.Decoder(kind)
    return found


def from_json(data: bytes | str, kind: type[T]) -> T:
    """A value of this type, out of JSON."""
    return json_decoder(kind).decode(data)


def from_msgpack(data: bytes, kind: type[T]) -> T:
    """A value of this type, out of MessagePack; several hosts of an engine tell each other every token so."""
    found = _packed.get(kind)
    if found is None:
        with _learning:
            found = _packed[kind] = msgspec.msgpack.Decoder(kind)
    value: T = found.decode(data)
    return value


def from_plain(value: object, kind: type[T], *, strict: bool = True) -> T:
    """A value of this type, out of dictionaries and lists."""
    json_decoder(kind)
    return msgspec.convert(value, kind, strict=strict)
