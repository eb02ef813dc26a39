"""What the compiler's process (`worker.py`) writes to the process that started it (`running.py`): one JSON line each."""

from collections.abc import Mapping

import msgspec


class Lowered(msgspec.Struct, frozen=True, kw_only=True, tag="lowered"):
    """The program is ready to be compiled."""

    jax: str
    libtpu: str
    name: str
    key: str  # of what would be compiled
    places: tuple[tuple[int, ...], ...]  # of the program's devices, in its own order
    lowering_seconds: float


class Parts(msgspec.Struct, frozen=True, kw_only=True, tag="parts"):
    """The programs of an engine, by name."""

    names: tuple[str, ...]


class Compiled(msgspec.Struct, frozen=True, kw_only=True, tag="compiled"):
    """The compiler ended, or was stopped once the schedule was written; `failed` is its error in one line."""

    compile_seconds: float = 0.0
    failed: str = ""


class Invalid(msgspec.Struct, frozen=True, kw_only=True, tag="invalid"):
    """The request itself is wrong: a UserError."""

    what: str
    hint: str


Message = Lowered | Parts | Compiled | Invalid
# Options of the engine by name (podway.serve.build.Options), as they travel to the worker.
EngineOptions = Mapping[str, str | int | float | bool | None]
