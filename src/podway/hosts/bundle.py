"""Packs podway/hosts/agent into the one file that is copied to hosts and run there: a zip that Python can execute.

Each module is in it twice: as source, for any Python >= 3.8, and compiled by the Python that packs, because most of an
agent's start would else be compiling, and hosts of a simulated slice run this same Python. A Python of another version
passes the compiled ones over. The same sources and the same Python give the same bytes (names in order, one fixed time
stamp, no compression, whose output differs between zlib versions); the same sources alone give the same `sha256`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import marshal
import zipfile
from functools import cache
from pathlib import Path

import msgspec

from podway.files import write_atomically

PACKAGE = "podway_agent"
_SOURCES = Path(__file__).parent / "agent"
_EARLIEST = (1980, 1, 1, 0, 0, 0)  # the first time a zip can hold
_START = "import sys\nfrom {package}.__main__ import main\nsys.exit(main(sys.argv[1:], {sha256!r}))\n"
# A pyc that is not checked against its source (PEP 552): they travel together and never change.
_UNCHECKED_HASH = (1).to_bytes(4, "little")
# The last marshal format without back references, whose presence depends on what else the process has loaded.
_MARSHAL_FORMAT = 2


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """The agent as one file, and the hash of its sources, which `hello` answers as `version`."""

    data: bytes
    sha256: str

    def write(self, path: Path) -> None:
        """Put it at `path`, whole or not at all; nothing is done if it is there."""
        if path.is_file() and path.read_bytes() == self.data:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, self.data, mode=0o755)


@cache
def bundle() -> Bundle:
    """The agent of this installation."""
    sources = {f"{PACKAGE}/{path.name}": path.read_bytes() for path in sorted(_SOURCES.glob("*.py"))}
    digest = hashlib.sha256()
    for name, source in sources.items():
        digest.update(b"%s %d\n" % (name.encode(), len(source)) + source)
    packed = io.BytesIO()
    packed.write(b"#!/usr/bin/env python3\n")
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        _add(archive, "__main__.py", _START.format(package=PACKAGE, sha256=digest.hexdigest()).encode())
        for name, source in sources.items():
            _add(archive, f"{name}c", _compiled(name, source))
            _add(archive, name, source)
    return Bundle(data=packed.getvalue(), sha256=digest.hexdigest())


def _compiled(name: str, source: bytes) -> bytes:
    code = marshal.dumps(compile(source, name, "exec", dont_inherit=True), _MARSHAL_FORMAT)
    return importlib.util.MAGIC_NUMBER + _UNCHECKED_HASH + importlib.util.source_hash(source) + code


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    entry = zipfile.ZipInfo(name, _EARLIEST)
    entry.create_system = 3  # Unix, wherever it is packed
    entry.external_attr = 0o644 << 16
    archive.writestr(entry, data)
