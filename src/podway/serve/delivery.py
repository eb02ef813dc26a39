"""Updates on their way from the engines' threads to the event loop (no jax).

A step of the engine has an update for each of its rows, hundreds at once. To wake the event loop for each would be a system call, and a
struggle for the interpreter, for each; so the first of them wakes it, and it takes all that are there by its turn.
"""

import asyncio
import threading
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

T = TypeVar("T", contravariant=True)


class Receiver(Protocol[T]):
    """Who gets updates, on the event loop."""

    def receive(self, update: T) -> None: ...


class Delivery(Generic[T]):
    """Of one event loop, the one that runs where it is made."""

    def __init__(self) -> None:
        self._events = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: list[tuple[Receiver[T], T]] = []

    @property
    def alive(self) -> bool:
        """Whether its event loop still runs something."""
        return not self._events.is_closed()

    def put(self, receiver: Receiver[T], update: T) -> None:
        """From any thread."""
        with self._lock:
            self._waiting.append((receiver, update))
            first = len(self._waiting) == 1
        if first:
            with suppress(RuntimeError):  # the event loop is closed: nobody reads any more
                self._events.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            taken, self._waiting = self._waiting, []
        for receiver, update in taken:
            receiver.receive(update)
