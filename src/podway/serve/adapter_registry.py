"""The adapters that clients can ask for by name: loaded from folders into every replica, and taken out again (no jax arrays).

A request belongs to the adapter that had its name when it came. An adapter that is unloaded refuses new requests at once; its
place is given to another only when nobody uses it any more. Each loading has a salt of its own, so that pages of the cache are
shared by requests of one adapter as it was loaded, and by no others.
"""

import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec

from podway.errors import UserError
from podway.model.adapter_files import Adapter, read_adapter
from podway.model.shape import ModelShape
from podway.serve.adapters import AdapterSizes
from podway.serve.loop import Loop


class LoadedAdapter(msgspec.Struct, frozen=True):
    """An adapter that can be asked for."""

    name: str
    path: str
    number: int  # its place in every replica, from 1
    salt: bytes
    created: int


class AdapterRegistry:
    """By name. Loading takes seconds: call it from a thread."""

    def __init__(self, sizes: AdapterSizes, shape: ModelShape, base: str, updatable: bool = False) -> None:
        self.sizes, self.shape, self.base = sizes, shape, base
        self.updatable = updatable  # every client may then have the server read folders of its machine
        self._loaded: dict[str, LoadedAdapter] = {}
        self._loading = threading.Lock()

    def find(self, name: str) -> LoadedAdapter | None:
        return self._loaded.get(name)

    def all(self) -> list[LoadedAdapter]:
        return list(self._loaded.values())

    def read(self, name: str, path: str) -> Adapter:
        """The files of an adapter, if it can be loaded here."""
        if not name or len(name) > 256 or name == self.base or name in self._loaded:
            used = name == self.base or name in self._loaded
            raise UserError(
                f"there is a model {name!r} already" if used else f"{name[:40]!r} cannot be the name of an adapter",
                "unload it first, or choose another name" if used else "use 1 to 256 characters",
                status=400,
            )
        try:
            adapter = read_adapter(Path(path).expanduser(), self.shape)
        except UserError as error:
            raise UserError(error.what, error.hint, status=400) from None
        if adapter.rank > self.sizes.rank:
            raise UserError(
                f"the adapter {name} has rank {adapter.rank}, and the server takes {self.sizes.rank}",
                "start it with a larger --max-lora-rank",
                status=400,
            )
        return adapter

    def load(self, name: str, path: str, loops: Sequence[Loop], busy: Callable[[], Collection[int]]) -> None:
        """Put an adapter into a place that nobody uses; `busy` tells those of requests under way."""
        with self._loading:
            adapter = self.read(name, path)
            taken = {one.number for one in self.all()}
            taken |= set(busy())  # after the names: whoever begins now has one of those
            free = [number for number in range(1, self.sizes.count + 1) if number not in taken]
            if not free:
                raise UserError(
                    f"all {self.sizes.count} places for adapters are taken",
                    "unload one, or start the server with a larger --max-loras",
                    status=400,
                )
            for loop in loops:
                loop.set_adapter(free[0], adapter)
            made = LoadedAdapter(name, path, free[0], b"lora" + secrets.token_bytes(16), int(time.time()))
            self._loaded[name] = made

    def unload(self, name: str) -> None:
        """Its place is free when the requests under way have ended; what lies in it is overwritten by the next."""
        if self._loaded.pop(name, None) is None:
            raise UserError(f"there is no adapter {name[:200]!r}", "GET /v1/models lists them", status=404)
