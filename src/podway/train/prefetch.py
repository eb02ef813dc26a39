"""Batches made ahead of time by a thread, so that the step never waits for the disk (no jax)."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T], Iterator[T]):
    """`make(first)`, `make(first + 1)`, ... in order, at most `depth` ahead. What goes wrong is raised by `next`.

    The thread ends with `close` (or the `with` block, or when this object is forgotten), and never holds up an exit.
    """

    def __init__(self, make: Callable[[int], T], first: int, depth: int = 2) -> None:
        self._ready: queue.Queue[T | BaseException] = queue.Queue(depth)
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        arguments = (make, first, self._ready, self._stop)
        self._thread = threading.Thread(target=_work, args=arguments, name="podway-prefetch", daemon=True)
        self._thread.start()

    def __next__(self) -> T:
        if self._failure is not None:
            raise self._failure
        if self._stop.is_set():
            raise StopIteration
        found = self._ready.get()
        if isinstance(found, BaseException):
            self._failure = found
            raise found
        return found

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._ready.get_nowait()  # it may be waiting for room
            except queue.Empty:
                self._thread.join(0.01)

    def __enter__(self) -> "Prefetch[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._stop.set()


def _work(make: Callable[[int], T], step: int, ready: "queue.Queue[T | BaseException]", stop: threading.Event) -> None:
    """Not a method: a thread that held the object would keep it from being forgotten."""
    while not stop.is_set():
        try:
            made: T | BaseException = make(step)
        except BaseException as error:  # whatever it is, it belongs to who asks for the batch
            made = error
        while not stop.is_set():
            try:
                ready.put(made, timeout=0.2)
                break
            except queue.Full:
                continue
        if isinstance(made, BaseException):
            return
        step += 1
