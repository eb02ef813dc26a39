"""What both sides of the gateway have in common: a socket that is written to, paced and closed."""

import asyncio
from typing import cast


class SocketProtocol(asyncio.Protocol):
    """A protocol that knows its transport while there is one; every call after its end does nothing."""

    transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's do not derive from asyncio's classes

    def write(self, data: bytes) -> None:
        """Send bytes, or keep them until the other side takes them."""
        if self.transport is not None:
            self.transport.write(data)

    def pause_reading(self) -> None:
        """Read no more for now."""
        if self.transport is not None:
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        if self.transport is not None:
            self.transport.resume_reading()

    def close(self) -> None:
        """Send what is left, then close."""
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """Close at once, whatever was not sent yet."""
        if self.transport is not None:
            self.transport.abort()
