"""TensorBoard files, read back byte by byte."""

import struct
from pathlib import Path

import pytest

from podway.train.events import EventFile, masked_crc, record


def read_events(file: Path) -> list[tuple[int, dict[str, float]]]:
    """(step, values by tag) of each event; a wrong length or checksum fails."""
    data, at, events = file.read_bytes(), 0, []
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        body = data[at + 12 : at + 12 + length]
        assert struct.unpack_from("<I", data, at + 8) == (masked_crc(data[at : at + 8]),)
        assert struct.unpack_from("<I", data, at + 12 + length) == (masked_crc(body),)
        at += 16 + length
        fields = _fields(body)
        values = {}
        for summary in fields.get(5, []):
            for one in _fields(summary)[1]:
                inner = _fields(one)
                values[inner[1][0].decode()] = struct.unpack("<f", inner[2][0])[0]
        events.append((fields.get(2, [0])[0], values))
    return events


def _fields(data: bytes) -> dict[int, list]:  # type: ignore[type-arg]
    """A protocol buffer as lists of raw values by field number."""
    found: dict[int, list] = {}  # type: ignore[type-arg]
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        field, wire = divmod(varint(), 8)
        if wire == 0:
            value: object = varint()
        else:
            size = {1: 8, 5: 4}[wire] if wire != 2 else varint()
            value = data[at : at + size]
            at += size
        found.setdefault(field, []).append(value)
    return found


def test_the_checksum_is_castagnoli() -> None:
    crc = 0xE3069283  # CRC-32C of "123456789", RFC 3720 and every table of checksums
    assert masked_crc(b"123456789") == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    file.add(3, {"learning/loss": 1.5})
    file.add(300_000, {"a": -2.25, "b": float("inf")})
    file.close()
    first, second, third = read_events(next(tmp_path.iterdir()))
    assert first == (0, {})
    assert second == (3, {"learning/loss": 1.5})
    assert third[0] == 300_000 and third[1] == {"a": -2.25, "b": float("inf")}


def test_a_flipped_bit_is_seen(tmp_path: Path) -> None:
    broken = bytearray(record(b"hello"))
    broken[13] ^= 1
    (tmp_path / "x").write_bytes(broken)
    with pytest.raises(AssertionError):
        read_events(tmp_path / "x")
