"""TensorBoard event files, written directly: scalars need four kinds of field and one checksum.

A file is a run of records: length (8 bytes), checksum of the length, data, checksum of the data. The data is an `Event`
protocol buffer (wall_time 1, step 2, file_version 3, summary 5), whose summary is a list of values (tag 1, number 2).
Formats: TensorFlow `core/lib/io/record_writer.cc`, `core/util/event.proto`, `core/framework/summary.proto`.
"""

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO


def _table() -> tuple[int, ...]:
    rows = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)  # CRC-32C (Castagnoli), reflected
        rows.append(byte)
    return tuple(rows)


_CRC = _table()


def masked_crc(data: bytes) -> int:
    """CRC-32C, rotated and shifted as the record format asks, so that a checksum of checksums still tells errors."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def record(data: bytes) -> bytes:
    """One record of the file."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data))


def scalars_event(step: int, values: Mapping[str, float], now: float) -> bytes:
    """An Event with one value for each tag."""
    summary = b""
    for tag, value in values.items():
        one = _bytes(1, tag.encode()) + _key(2, 5) + struct.pack("<f", value)
        summary += _bytes(1, one)
    return _key(1, 1) + struct.pack("<d", now) + _key(2, 0) + _varint(step) + _bytes(5, summary)


class EventFile:
    """An event file that is being written."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file: BinaryIO = (folder / name).open("ab")
        self._file.write(record(_key(1, 1) + struct.pack("<d", time.time()) + _bytes(3, b"brain.Event:2")))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._file.write(record(scalars_event(step, values, time.time())))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _key(field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _bytes(field: int, data: bytes) -> bytes:
    return _key(field, 2) + _varint(len(data)) + data
