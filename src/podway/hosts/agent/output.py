"""What a phase printed, and when: a file of raw bytes and an index of times beside it.

`output` holds the bytes as they came (stdout and stderr together). `output.idx` holds one record of 16 bytes for each
piece that was appended: the time in ns since 1970, and the offset in `output` where the piece ends; both little-endian
64-bit. The bytes are written first, so every record's range is there; a reader of a running phase goes as far as the
index goes, and of an ended one as far as the bytes go.
"""

from __future__ import annotations

import os
import struct
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    Times = list[list[int]]

RECORD = struct.Struct("<QQ")
MAX_READ = 1 << 20
# Pieces of one byte each would make a reply's list of times much longer than its bytes; a reply is cut there instead.
MAX_TIMES = 4096
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC


class OutputWriter:
    """The runner's side. A disk that is full costs bytes, which are counted, and never the job."""

    def __init__(self, directory: str) -> None:
        self._output = os.open(os.path.join(directory, "output"), _CREATE, 0o600)
        self._index = os.open(os.path.join(directory, "output.idx"), _CREATE, 0o600)
        self._records = 0
        self._indexed = 0
        self._time = 0
        self.size = 0
        self.lost = 0

    def append(self, data: bytes) -> None:
        """Add a piece that came just now."""
        view = memoryview(data)
        while view:
            try:
                written = os.pwrite(self._output, view, self.size)
            except OSError:
                self.lost += len(view)
                break
            self.size += written
            view = view[written:]
        self.note_time()

    def note_time(self) -> None:
        """Write the record of what has none yet."""
        if self._indexed == self.size:
            return
        # A clock that is set back must not put a rank's own lines out of order.
        self._time = max(self._time, time.time_ns())
        record = RECORD.pack(self._time, self.size)
        try:
            # At a fixed place: a record that a full disk cut short is overwritten by the next.
            if os.pwrite(self._index, record, self._records * RECORD.size) < RECORD.size:
                return
        except OSError:
            return
        self._records += 1
        self._indexed = self.size


class Piece:
    """Bytes from `start`, the times of their parts, and how many bytes there are in all."""

    __slots__ = ("data", "size", "times")

    def __init__(self, data: bytes, times: Times, size: int) -> None:
        self.data = data
        self.times = times
        self.size = size


def read(directory: str, offset: int, limit: int, ended: bool) -> Piece:
    """Up to `limit` bytes from `offset` on. `ended`: nothing will be added any more."""
    try:
        output = os.open(os.path.join(directory, "output"), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return Piece(b"", [], 0)
    try:
        index = os.open(os.path.join(directory, "output.idx"), os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _read(output, index, offset, limit, ended)
        finally:
            os.close(index)
    except FileNotFoundError:
        return Piece(b"", [], 0)
    finally:
        os.close(output)


def size(directory: str, ended: bool) -> int:
    """How many bytes a reader can have now."""
    return read(directory, 0, 0, ended).size


def _read(output: int, index: int, offset: int, limit: int, ended: bool) -> Piece:
    count = os.fstat(index).st_size // RECORD.size
    indexed = _record(index, count - 1)[1] if count else 0
    status = os.fstat(output)
    size = status.st_size if ended else indexed
    end = min(size, offset + min(limit, MAX_READ))
    if end <= offset:
        return Piece(b"", [], size)
    times: Times = []
    for when, record_end in _records(index, _first_beyond(index, count, offset), count):
        times.append([min(record_end, end), when])
        if record_end >= end:
            break
    if len(times) == MAX_TIMES:
        end = times[-1][0]
    elif not times or times[-1][0] < end:
        # The runner died between the bytes and their record. A file's time is coarser than the clock and may be behind.
        times.append([end, max(status.st_mtime_ns, _record(index, count - 1)[0] if count else 0)])
    data = os.pread(output, end - offset, offset)
    if len(data) < end - offset:
        raise OSError("the output file was cut short")
    return Piece(data, times, size)


def _record(index: int, number: int) -> tuple[int, int]:
    when, end = RECORD.unpack(os.pread(index, RECORD.size, number * RECORD.size))
    return when, end


def _records(index: int, first: int, count: int) -> list[tuple[int, int]]:
    number = min(MAX_TIMES, count - first)
    data = os.pread(index, number * RECORD.size, first * RECORD.size)
    return [(when, end) for when, end in RECORD.iter_unpack(data)]


def _first_beyond(index: int, count: int, offset: int) -> int:
    """The first record whose range ends after `offset`."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if _record(index, middle)[1] > offset:
            high = middle
        else:
            low = middle + 1
    return low
