"""One training step of MaxText for a TPU slice, lowered and compiled without a TPU: run by the Python that MaxText is installed in.

`python tools/maxtext_step.py DIRECTORY < rehearsal.json`, with MaxText's settings in MAXTEXT_SETTINGS (a JSON list). It writes the
lines that `podway.rehearse.worker` writes, so that `podway.rehearse.running` reads what the compiler wrote in the same way. What is
lowered is made by MaxText's own functions (`train_compile`), from its own configuration.
"""

import hashlib
import importlib.metadata
import json
import os
import sys
import threading
import time
from typing import Any

import msgspec

from podway.rehearse.messages import Compiled, Lowered
from podway.rehearse.rehearsal import Rehearsal


def main() -> int:
    """The exit code is 0 also where the step does not compile: that is an answer."""
    folder = sys.argv[1]
    rehearsal = msgspec.json.decode(sys.stdin.readline(), type=Rehearsal)
    began = time.monotonic()
    lowered, devices = _lower(json.loads(os.environ["MAXTEXT_SETTINGS"]))
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    key = hashlib.sha256((lowered.as_text() + os.environ.get("LIBTPU_INIT_ARGS", "")).encode()).hexdigest()[:32]
    axes = len(rehearsal.tpu.topology)
    places = tuple((getattr(device, "slice_index", 0) or 0, *device.coords[:axes]) for device in devices)
    _send(Lowered(name="MaxText's step", key=key, places=places, lowering_seconds=time.monotonic() - began, **versions))
    if sys.stdin.readline().strip() != "go":
        return 0
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    began = time.monotonic()
    try:
        lowered.compile(compiler_options={"xla_dump_to": folder})
    except Exception as error:  # whatever the compiler throws is the answer
        _send(Compiled(failed=" ".join(str(error).split())[:400], compile_seconds=time.monotonic() - began))
        return 0
    _send(Compiled(compile_seconds=time.monotonic() - began))
    return 0


def _lower(settings: list[str]) -> tuple[Any, list[Any]]:
    """MaxText's step for the topology that its settings name, and the devices in the program's order."""
    import jax
    from flax.linen import logical_axis_rules
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train, train_compile
    from maxtext.utils import maxtext_utils, sharding

    jax.config.update("jax_default_prng_impl", "unsafe_rbg")
    config = pyconfig.initialize(["train_compile", *settings])
    mesh = train_compile.get_topology_mesh(config)
    arguments, named, shardings, _, model = train_compile.get_shaped_inputs(mesh, config)
    params, shardings = sharding.maybe_update_params_sharding_with_opt(config, shardings)
    data = sharding.get_input_data_sharding(config, mesh)
    function, inside, outside, static, donated = maxtext_utils.get_functional_train_with_signature(
        train.train_step, data, shardings, model, config, params
    )
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        jitted = jax.jit(
            function, in_shardings=inside, out_shardings=outside, static_argnums=static, donate_argnums=donated
        )
        lowered = jitted.lower(*arguments, **named)
    return lowered, list(mesh.devices.flat)


def _send(message: msgspec.Struct) -> None:
    sys.stdout.write(msgspec.json.encode(message).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
