"""An SFTP server on stdin and stdout, for hosts without one: protocol version 3 (draft-ietf-secsh-filexfer-02), as OpenSSH speaks it.

scp, sftp and editors copy files by it. Every request is answered in the order it came. A handle is a number; what it stands for (a
file, or the names of a directory that are left to list) is closed with the connection.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import sys
import time
from collections.abc import Callable
from typing import BinaryIO

MOST_PACKET = 256 << 10
MOST_READ = 256 << 10
NAMES_AT_ONCE = 100
INIT, VERSION, STATUS, HANDLE, DATA, NAME, ATTRS, EXTENDED = 1, 2, 101, 102, 103, 104, 105, 200
OK, EOF, NO_SUCH_FILE, DENIED, FAILURE, BAD_MESSAGE, UNSUPPORTED = 0, 1, 2, 3, 4, 5, 8
HAS_SIZE, HAS_OWNER, HAS_MODE, HAS_TIMES = 1, 2, 4, 8
READ, WRITE, APPEND, CREATE, TRUNCATE, EXCLUSIVE = 1, 2, 4, 8, 16, 32
EXTENSIONS = {b"posix-rename@openssh.com": b"1", b"fsync@openssh.com": b"1", b"expand-path@openssh.com": b"1"}


class BadPacket(Exception):
    """It does not hold what its kind says."""


class Packet:
    """The fields of a request, read one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def _take(self, size: int) -> bytes:
        found = self._data[self._at : self._at + size]
        if len(found) != size:
            raise BadPacket
        self._at += size
        return found

    def byte(self) -> int:
        return self._take(1)[0]

    def number(self) -> int:
        return int.from_bytes(self._take(4), "big")

    def long(self) -> int:
        return int.from_bytes(self._take(8), "big")

    def text(self) -> bytes:
        return self._take(self.number())

    def attributes(self) -> dict[str, int]:
        flags, found = self.number(), {}
        if flags & HAS_SIZE:
            found["size"] = self.long()
        if flags & HAS_OWNER:
            found["uid"], found["gid"] = self.number(), self.number()
        if flags & HAS_MODE:
            found["mode"] = self.number()
        if flags & HAS_TIMES:
            found["atime"], found["mtime"] = self.number(), self.number()
        return found


def string(value: bytes) -> bytes:
    """As a field."""
    return struct.pack("!I", len(value)) + value


def attributes_of(found: os.stat_result) -> bytes:
    """Those of a file."""
    flags = HAS_SIZE | HAS_OWNER | HAS_MODE | HAS_TIMES
    times = (int(found.st_atime) & 0xFFFFFFFF, int(found.st_mtime) & 0xFFFFFFFF)
    return struct.pack("!IQIIIII", flags, found.st_size, found.st_uid, found.st_gid, found.st_mode, *times)


def change(target: int | bytes, wanted: dict[str, int]) -> None:
    """Give a file, by its descriptor or its name, these attributes."""
    if "size" in wanted:
        os.truncate(target, wanted["size"])
    if "uid" in wanted:
        os.chown(target, wanted["uid"], wanted["gid"])
    if "mode" in wanted:
        os.chmod(target, wanted["mode"] & 0o7777)
    if "mtime" in wanted:
        os.utime(target, (wanted["atime"], wanted["mtime"]))


class SftpServer:
    """One connection."""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self._source, self._sink = source, sink
        self._files: dict[bytes, int] = {}
        self._listings: dict[bytes, list[tuple[bytes, bytes]]] = {}
        self._count = 0
        self._requests: dict[int, Callable[[Packet], bytes | None]] = {
            3: self._open, 4: self._close, 5: self._read, 6: self._write,
            7: lambda packet: self._attributes(os.lstat(packet.text())),
            8: lambda packet: self._attributes(os.fstat(self._file(packet))),
            9: lambda packet: change(packet.text(), packet.attributes()),
            10: lambda packet: change(self._file(packet), packet.attributes()),
            11: self._list, 12: self._next_names,
            13: lambda packet: os.remove(packet.text()),
            14: self._make_directory,
            15: lambda packet: os.rmdir(packet.text()),
            16: lambda packet: self._name(os.path.realpath(packet.text() or b".")),
            17: lambda packet: self._attributes(os.stat(packet.text())),
            18: self._rename,
            19: lambda packet: self._name(os.readlink(packet.text())),
            20: lambda packet: os.symlink(packet.text(), packet.text()),  # OpenSSH sends what it leads to first
            EXTENDED: self._extended,
        }  # fmt: skip

    def run(self) -> None:
        """Until the client is gone."""
        while True:
            head = self._source.read(4)
            size = int.from_bytes(head, "big")
            if len(head) < 4 or not 1 <= size <= MOST_PACKET + 1024:
                return
            data = self._source.read(size)
            if len(data) < size:
                return
            self._send(self._answer(data[0], Packet(data[1:])))

    def _send(self, answer: bytes) -> None:
        self._sink.write(struct.pack("!I", len(answer)) + answer)
        self._sink.flush()

    def _answer(self, kind: int, packet: Packet) -> bytes:
        if kind == INIT:
            return struct.pack("!BI", VERSION, 3) + b"".join(string(k) + string(v) for k, v in EXTENSIONS.items())
        number = b"\0\0\0\0"
        try:
            number = struct.pack("!I", packet.number())
            known = self._requests.get(kind)
            answer = self._status(UNSUPPORTED, "not supported") if known is None else known(packet) or self._done()
        except BadPacket:
            answer = self._status(BAD_MESSAGE, "a request that cannot be read")
        except FileNotFoundError:
            answer = self._status(NO_SUCH_FILE, "no such file")
        except PermissionError:
            answer = self._status(DENIED, "permission denied")
        except (OSError, ValueError, OverflowError) as error:
            answer = self._status(FAILURE, getattr(error, "strerror", None) or str(error))
        return answer[:1] + number + answer[1:]

    # answers, without the number of their request

    def _status(self, code: int, said: str) -> bytes:
        return struct.pack("!BI", STATUS, code) + string(said.encode()) + string(b"")

    def _done(self) -> bytes:
        return self._status(OK, "")

    def _attributes(self, found: os.stat_result) -> bytes:
        return bytes([ATTRS]) + attributes_of(found)

    def _name(self, path: bytes) -> bytes:
        return struct.pack("!BI", NAME, 1) + string(path) + string(path) + struct.pack("!I", 0)

    def _new_handle(self) -> bytes:
        self._count += 1
        return b"%d" % self._count

    def _file(self, packet: Packet) -> int:
        handle = packet.text()
        if handle not in self._files:
            raise OSError(errno.EBADF, "no such handle")
        return self._files[handle]

    # requests

    def _open(self, packet: Packet) -> bytes:
        path, flags, wanted = packet.text(), packet.number(), packet.attributes()
        how = {READ: os.O_RDONLY, WRITE: os.O_WRONLY, READ | WRITE: os.O_RDWR}.get(flags & (READ | WRITE), os.O_RDONLY)
        for flag, word in ((APPEND, os.O_APPEND), (CREATE, os.O_CREAT), (TRUNCATE, os.O_TRUNC), (EXCLUSIVE, os.O_EXCL)):
            how |= word if flags & flag else 0
        handle = self._new_handle()
        self._files[handle] = os.open(path, how, wanted.get("mode", 0o666) & 0o7777)
        return bytes([HANDLE]) + string(handle)

    def _close(self, packet: Packet) -> bytes:
        handle = packet.text()
        if handle in self._files:
            os.close(self._files.pop(handle))
        elif self._listings.pop(handle, None) is None:
            raise OSError(errno.EBADF, "no such handle")
        return self._done()

    def _read(self, packet: Packet) -> bytes:
        file, offset, size = self._file(packet), packet.long(), packet.number()
        data = os.pread(file, min(size, MOST_READ), offset)
        return bytes([DATA]) + string(data) if data else self._status(EOF, "end of file")

    def _write(self, packet: Packet) -> bytes:
        file, offset, data = self._file(packet), packet.long(), packet.text()
        while data:
            written = os.pwrite(file, data, offset)
            data, offset = data[written:], offset + written
        return self._done()

    def _list(self, packet: Packet) -> bytes:
        names = []
        with os.scandir(packet.text()) as found:
            for one in found:
                about = one.stat(follow_symlinks=False)
                long_name = b"%s %d %d %d %d %s %s" % (
                    stat.filemode(about.st_mode).encode(), about.st_nlink, about.st_uid, about.st_gid, about.st_size,
                    time.strftime("%b %d %H:%M", time.localtime(about.st_mtime)).encode(), one.name,
                )  # fmt: skip
                names.append((one.name, string(one.name) + string(long_name) + attributes_of(about)))
        handle = self._new_handle()
        self._listings[handle] = sorted(names, reverse=True)
        return bytes([HANDLE]) + string(handle)

    def _next_names(self, packet: Packet) -> bytes:
        left = self._listings.get(packet.text())
        if left is None:
            raise OSError(errno.EBADF, "no such handle")
        if not left:
            return self._status(EOF, "no more names")
        taken = [left.pop()[1] for _ in range(min(NAMES_AT_ONCE, len(left)))]
        return struct.pack("!BI", NAME, len(taken)) + b"".join(taken)

    def _make_directory(self, packet: Packet) -> bytes:
        path, wanted = packet.text(), packet.attributes()
        os.mkdir(path, wanted.get("mode", 0o777) & 0o7777)
        return self._done()

    def _rename(self, packet: Packet) -> bytes:
        """Of the protocol, which never replaces a file."""
        old, new = packet.text(), packet.text()
        if os.path.lexists(new):
            raise OSError(errno.EEXIST, "the file exists")
        os.rename(old, new)
        return self._done()

    def _extended(self, packet: Packet) -> bytes:
        name = packet.text()
        if name == b"posix-rename@openssh.com":
            os.replace(packet.text(), packet.text())
            return self._done()
        if name == b"fsync@openssh.com":
            os.fsync(self._file(packet))
            return self._done()
        if name == b"expand-path@openssh.com":
            return self._name(os.path.realpath(os.path.expanduser(packet.text() or b".")))
        return self._status(UNSUPPORTED, "not supported")


def main() -> int:
    """Serve this process' user from its home."""
    os.chdir(os.path.expanduser("~"))
    try:
        SftpServer(sys.stdin.buffer, sys.stdout.buffer).run()
    except BrokenPipeError:
        return 1
    return 0
