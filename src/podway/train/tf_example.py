"""Read a serialized tf.train.Example without TensorFlow: the form of records that TFDS writes (no jax).

The message (tensorflow/core/example/example.proto and feature.proto): Example{1: Features}, Features{1: map entries},
entry{1: name, 2: Feature}, Feature{1: BytesList | 2: FloatList | 3: Int64List}, each list{1: values}. Only byte values
are kept as text; numbers are kept as lists.
"""

import struct
from collections.abc import Iterator


class _Malformed(Exception):
    pass


def parse_example(data: bytes) -> dict[str, object] | None:
    """Features by name; a feature of one byte string is that string. None when this is not an Example."""
    try:
        features: dict[str, object] = {}
        for number, value in _fields(data):
            if number != 1 or not isinstance(value, bytes):
                return None
            for inner, entry in _fields(value):
                if inner != 1 or not isinstance(entry, bytes):
                    return None
                name, feature = _entry(entry)
                features[name] = feature
        return features or None
    except (_Malformed, UnicodeDecodeError):
        return None


def _entry(data: bytes) -> tuple[str, object]:
    parts = dict(_fields(data))
    name, feature = parts.get(1), parts.get(2, b"")
    if not isinstance(name, bytes) or not isinstance(feature, bytes):
        raise _Malformed
    return name.decode(), _feature(feature)


def _feature(data: bytes) -> object:
    for kind, body in _fields(data):
        if not isinstance(body, bytes):
            raise _Malformed
        values = [value for number, value in _fields(body) if number == 1]
        if kind == 1:
            return values[0] if len(values) == 1 else values
        if kind == 2:
            return [number for packed in values if isinstance(packed, bytes) for number in _floats(packed)]
        if kind == 3:
            return [number for value in values for number in (_varints(value) if isinstance(value, bytes) else [value])]
    return None


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """(field number, value) of a protobuf message; a value is a number, or bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == 2:
            length, at = _varint(data, at)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise _Malformed
        if at + length > len(data) or not number:
            raise _Malformed
        yield number, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        shift += 7
        if not byte & 0x80:
            return value, at
    raise _Malformed


def _varints(data: bytes) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        yield value - (1 << 64) if value >> 63 else value


def _floats(data: bytes) -> list[float]:
    if len(data) % 4:
        raise _Malformed
    return list(struct.unpack(f"<{len(data) // 4}f", data))
