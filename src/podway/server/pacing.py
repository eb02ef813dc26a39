"""Turns: of all that is rendered for followers, one small piece in a few rounds of the loop, so that requests are answered in between."""

import asyncio

ROUNDS = 4  # of the loop between two pieces: a request takes several until it is answered


class Turns:
    """First come, first served."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def take(self) -> None:
        """Until it is the caller's turn and the loop has gone round since the last one."""
        async with self._lock:
            for _ in range(ROUNDS):
                await asyncio.sleep(0)
