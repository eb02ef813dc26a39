"""How far somebody has seen a log, as a short string they can come back with.

A cursor holds, for each phase and rank, the offset behind the last line that was shown. It is written down as a version
letter and URL-safe base64 of compressed MessagePack (zlib's own checksum tells a damaged one).
"""

import base64
import binascii
import zlib
from typing import Annotated

import msgspec

from podway.decoding import from_msgpack
from podway.errors import UserError

_VERSION = "a"
_LONGEST_TOKEN = 64 * 1024
_LONGEST_PAYLOAD = 1 << 20
_Offset = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Phase = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
_Offsets = dict[_Phase, list[_Offset]]


class Cursor:
    """Offsets by rank and phase; 0 where nothing has been shown."""

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts
        self._offsets: dict[str, list[int]] = {}

    def offset(self, rank: int, phase: str) -> int:
        """The offset behind the last line shown."""
        offsets = self._offsets.get(phase)
        return offsets[rank] if offsets else 0

    def phase(self, phase: str) -> list[int]:
        """The offsets of one phase by rank, to be changed in place."""
        offsets = self._offsets.get(phase)
        if offsets is None:
            offsets = self._offsets[phase] = [0] * self.hosts
        return offsets

    def encode(self) -> str:
        """The cursor as a string."""
        packed = zlib.compress(msgspec.msgpack.encode(self._offsets), 6)
        return _VERSION + base64.urlsafe_b64encode(packed).decode().rstrip("=")

    @classmethod
    def decode(cls, token: str, hosts: int) -> "Cursor":
        """The cursor of a string made by `encode` for as many hosts."""
        cursor = cls(hosts)
        cursor._offsets = dict(_read(token))
        if any(len(offsets) != hosts for offsets in cursor._offsets.values()):
            raise UserError(
                f"the log position {_short(token)} does not belong to a job on {hosts} host{'s' * (hosts > 1)}",
                "leave it out to see the log from its beginning",
            )
        return cursor


def _read(token: str) -> dict[str, list[int]]:
    damaged = UserError(
        f"the log position {_short(token)} is damaged", "leave it out to see the log from its beginning"
    )
    if not token.startswith(_VERSION) or len(token) > _LONGEST_TOKEN or not token.isascii():
        raise damaged
    try:
        body = token[len(_VERSION) :]
        packed = base64.b64decode(body + "=" * (-len(body) % 4), altchars="-_", validate=True)
        unpacker = zlib.decompressobj()
        payload = unpacker.decompress(packed, _LONGEST_PAYLOAD)
        if not unpacker.eof or unpacker.unused_data:
            raise damaged
        return from_msgpack(payload, _Offsets)
    except (binascii.Error, zlib.error, msgspec.DecodeError, ValueError) as error:
        raise damaged from error


def _short(token: str) -> str:
    return repr(token if len(token) <= 24 else token[:21] + "...")
