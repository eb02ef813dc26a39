"""`python -m podway.rehearse.worker DIRECTORY < rehearsal.json`: lower one program, and compile it if told to.

A process of its own for each program: libtpu reads its flags once, an abort of the compiler ends this process alone, and a
fast rehearsal ends it as soon as memory and schedule are written. It writes lines of JSON (`messages.py`):

1. `Lowered`, with the key of what would be compiled; `Parts` for an engine without a named part, and it ends;
2. it then reads one line: `go` compiles, anything else (the answer is known already) ends it;
3. `Compiled`. A request that is wrong in itself is answered by `Invalid`.

What the compiler writes on the way (its text, its buffers) goes to DIRECTORY.
"""

import hashlib
import importlib.metadata
import json
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from podway.decoding import from_json
from podway.errors import UserError
from podway.rehearse.messages import Compiled, Invalid, Lowered, Message, Parts
from podway.rehearse.rehearsal import Rehearsal

if TYPE_CHECKING:  # jax takes seconds to load, and `main` reads its input first
    from jax.stages import Lowered as LoweredProgram


def main() -> int:
    """The exit code is 0 also where the program does not compile: that is an answer."""
    folder = sys.argv[1]
    rehearsal = from_json(sys.stdin.readline(), Rehearsal)
    try:
        return _rehearse(rehearsal, folder)
    except UserError as error:
        _send(Invalid(what=error.what, hint=error.hint))
        return 0


def _rehearse(rehearsal: Rehearsal, folder: str) -> int:
    from podway.rehearse.lowering import engine_parts, prepare  # here: jax and libtpu take seconds to load

    if rehearsal.what == "serve" and rehearsal.part is None:
        _send(Parts(names=tuple(engine_parts(rehearsal))))
        return 0
    began = time.monotonic()
    try:
        prepared = prepare(rehearsal)
    except UserError:
        raise
    except Exception as error:  # jax ends its own traceback with a line that says nothing
        _send(Compiled(failed=f"lowering ended with {type(error).__name__}: {_one_line(str(error))}"))
        return 0
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    key = _key(prepared.lowered, rehearsal, versions)
    seconds = time.monotonic() - began
    _send(Lowered(name=prepared.name, key=key, places=prepared.places, lowering_seconds=seconds, **versions))
    if sys.stdin.readline().strip() != "go":
        return 0
    threading.Thread(target=_end_with_parent, daemon=True).start()
    began = time.monotonic()
    try:
        prepared.lowered.compile(compiler_options={"xla_dump_to": folder})
    except Exception as error:  # whatever the compiler throws is what the person asked to know
        _send(Compiled(failed=_one_line(str(error)), compile_seconds=time.monotonic() - began))
        return 0
    _send(Compiled(compile_seconds=time.monotonic() - began))
    return 0


def _end_with_parent() -> None:
    """Standard input closes when the parent has ended: nobody waits for the answer."""
    sys.stdin.read()
    os._exit(1)


def _key(lowered: "LoweredProgram", rehearsal: Rehearsal, versions: dict[str, str]) -> str:
    """Of the program, the chips, the flags and the versions: what an answer depends on."""
    tpu = rehearsal.tpu
    digest = hashlib.sha256(lowered.as_text().encode())  # it does not say which chips it is for
    digest.update(f"{tpu.aot_name} {tpu.wrap} x{rehearsal.slices}".encode())
    digest.update(os.environ.get("LIBTPU_INIT_ARGS", "").encode())
    digest.update(json.dumps(versions, sort_keys=True).encode())
    return digest.hexdigest()[:32]


def _one_line(text: str) -> str:
    return " ".join(text.split())[:400]


def _send(message: Message) -> None:
    sys.stdout.write(msgspec.json.encode(message).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
