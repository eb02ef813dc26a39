"""A directory tree touched only from the inside: no path can leave it, whatever links stand in it or appear meanwhile.

Every name is reached from the descriptor of its parent, and each parent is opened without following links. A path below
something that is not a real directory is simply absent. Descriptors of the current directory's chain are kept, so walking
paths in order opens each directory once. Paths are bytes, as on disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from .packs import CHUNK, digest_of, write_sparse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Nonblocking, because what was a file a moment ago may be a pipe now, and opening a pipe waits for its writer.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
FRESH = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class Place:
    """The tree below `root`, which must be a directory. Use with `with`."""

    def __init__(self, root: bytes) -> None:
        # The root itself may be reached through links: where a tree goes is its owner's choice.
        self._chain = [os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
        self._names: list[bytes] = []
        self._at: bytes | None = b""

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        while self._chain:
            os.close(self._chain.pop())

    def folder(self, path: bytes) -> int:
        """The descriptor of the directory `path` ("" is the root), open until the next call; OSError if there is none."""
        if path == self._at:
            return self._chain[-1]
        names = path.split(b"/") if path else []
        same = 0
        while same < min(len(names), len(self._names)) and names[same] == self._names[same]:
            same += 1
        self._at = None
        while len(self._names) > same:
            self._names.pop()
            os.close(self._chain.pop())
        for name in names[same:]:
            self._chain.append(os.open(name, _FOLDER, dir_fd=self._chain[-1]))
            self._names.append(name)
        self._at = path
        return self._chain[-1]

    def parent(self, path: bytes) -> tuple[int, bytes]:
        """Where `path` is kept: its directory's descriptor, and its name there."""
        folder, _, name = path.rpartition(b"/")
        return self.folder(folder), name

    def stat(self, path: bytes) -> os.stat_result | None:
        """What stands at `path` (a link is itself, not its target); None if nothing does."""
        try:
            folder, name = self.parent(path)
            return os.stat(name, dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            if error.errno in _NOT_THERE:
                return None
            raise

    def link_target(self, path: bytes) -> bytes | None:
        """Where the link at `path` points; None if there is no link."""
        try:
            folder, name = self.parent(path)
            return os.readlink(name, dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.EINVAL, *_NOT_THERE):
                return None
            raise

    def open(self, path: bytes) -> BinaryIO:
        """Open the regular file at `path` to read; OSError if it is anything else."""
        folder, name = self.parent(path)
        file = os.fdopen(os.open(name, _FILE, dir_fd=folder), "rb", buffering=0)
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise OSError(errno.EINVAL, "not a regular file", os.fsdecode(path))
        return file

    def digest(self, path: bytes) -> str:
        """The SHA-256 of the file at `path`; "" if it cannot be read as a file."""
        try:
            with self.open(path) as file:
                return digest_of(file)
        except OSError:
            return ""

    def set_mode(self, path: bytes, mode: int, flags: int = _FILE) -> None:
        """Give the file (or directory) at `path` this mode."""
        folder, name = self.parent(path)
        target = os.open(name, flags, dir_fd=folder)
        try:
            os.fchmod(target, mode)
        finally:
            os.close(target)

    def remove(self, path: bytes) -> None:
        """Remove whatever stands at `path`, and all below it; nothing there is fine."""
        found = self.stat(path)
        if found is None:
            return
        folder, name = self.parent(path)
        if not stat.S_ISDIR(found.st_mode):
            os.unlink(name, dir_fd=folder)
            return
        for _, folders, files, fd in os.fwalk(name, topdown=False, follow_symlinks=False, dir_fd=folder):
            for inner in files:
                os.unlink(inner, dir_fd=fd)
            for inner in folders:
                _remove_folder(inner, fd)
        os.rmdir(name, dir_fd=folder)

    def remove_file(self, path: bytes) -> bool:
        """Remove the file or link at `path`; a directory stays. Whether something was removed."""
        found = self.stat(path)
        if found is None or stat.S_ISDIR(found.st_mode):
            return False
        folder, name = self.parent(path)
        os.unlink(name, dir_fd=folder)
        return True

    def remove_empty(self, path: bytes) -> bool:
        """Remove the directory at `path` if it is one and is empty; whether it was."""
        try:
            folder, name = self.parent(path)
            os.rmdir(name, dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY, *_NOT_THERE):
                return False
            raise
        return True

    def make_folder(self, path: bytes, mode: int) -> None:
        """A directory of this mode at `path`, in the place of anything that is none."""
        found = self.stat(path)
        if found is not None and not stat.S_ISDIR(found.st_mode):
            self.remove(path)
            found = None
        if found is None:
            folder, name = self.parent(path)
            os.mkdir(name, 0o700, dir_fd=folder)
        self.set_mode(path, mode, _FOLDER)

    def make_link(self, path: bytes, target: bytes, temp_name: bytes) -> None:
        """A link at `path`, in the place of what stands there; `temp_name` is a free name for a moment."""
        self._clear_folder(path)
        folder, name = self.parent(path)
        with _unless_done(temp_name, folder):
            os.symlink(target, temp_name, dir_fd=folder)
            os.rename(temp_name, name, src_dir_fd=folder, dst_dir_fd=folder)

    def move_in(self, source: str, path: bytes, temp_name: bytes) -> None:
        """Put the file `source` at `path` in one step: who opens `path` sees the old content or the new, whole."""
        self._clear_folder(path)
        folder, name = self.parent(path)
        try:
            os.rename(source, name, dst_dir_fd=folder)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        else:
            return
        # Another disk than the one blobs arrive on: copy it beside its place first.
        with open(source, "rb", buffering=0) as file, _unless_done(temp_name, folder):
            was = os.fstat(file.fileno())
            copy_to(file, os.open(temp_name, FRESH, 0o600, dir_fd=folder), stat.S_IMODE(was.st_mode))
            os.utime(temp_name, ns=(was.st_atime_ns, was.st_mtime_ns), dir_fd=folder)
            os.rename(temp_name, name, src_dir_fd=folder, dst_dir_fd=folder)
        os.unlink(source)

    def _clear_folder(self, path: bytes) -> None:
        found = self.stat(path)
        if found is not None and stat.S_ISDIR(found.st_mode):
            self.remove(path)

    def remove_named(self, path: bytes, prefix: bytes) -> None:
        """Remove the files directly in the directory `path` whose names begin so; no such directory is fine."""
        with contextlib.suppress(OSError):
            folder = self.folder(path)
            for name in os.listdir(folder):
                if os.fsencode(name).startswith(prefix):
                    os.unlink(name, dir_fd=folder)


@contextlib.contextmanager
def _unless_done(temp_name: bytes, folder: int) -> Iterator[None]:
    """If the block fails, what it made under the temp_name name goes."""
    try:
        yield
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temp_name, dir_fd=folder)
        raise


def _remove_folder(name: bytes, folder: int) -> None:
    # `fwalk` counts a link to a directory among the directories.
    try:
        os.rmdir(name, dir_fd=folder)
    except NotADirectoryError:
        os.unlink(name, dir_fd=folder)


def copy_to(source: BinaryIO, descriptor: int, mode: int) -> None:
    """Copy a file into a fresh descriptor, which is closed."""
    with os.fdopen(descriptor, "wb", buffering=0) as target:
        os.fchmod(descriptor, mode)
        while True:
            data = source.read(CHUNK)
            if not data:
                target.truncate()
                return
            write_sparse(target, data)
