"""When the gateway of this machine's own server ends without being told: there may be nobody left to tell it.

1. Its directory is gone, or is another one: whoever deleted it wants nothing of it any more, and no server will find it again.
2. Its server has been away for a while, and the last routes have no service: nobody can be using it.

While there is a service in the last routes it goes on, however long the server is away.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec

from podway.gateway.state_dir import lock_is_ours

LOOK_S = 5.0
UNUSED_S = 600.0


class Lifetime(msgspec.Struct, frozen=True, kw_only=True):
    """What says whether a gateway is still needed."""

    folder: Path
    lock: int  # a descriptor of the lock there
    services: Callable[[], int]  # in the last routes
    away_since: Callable[[], float | None]  # when the server was last there, while it is not
    unused_s: float = UNUSED_S

    def end_reason(self, now: float) -> str | None:
        """Why it is to end; None: it goes on."""
        if not lock_is_ours(self.folder, self.lock):
            return f"{self.folder} was deleted"
        away = self.away_since()
        if away is not None and now - away >= self.unused_s and not self.services():
            return "there is no service, and the server is away"
        return None
