"""`python -m podway.train [config.yaml] [key=value ...]`: one process of a training run, alone or on every host of a slice.

1. The config is read, and what can be known without devices is checked.
2. The compiler's flags for this chip go into the environment, before jax is imported.
3. On several hosts (PODWAY_NUM_HOSTS), the processes find each other through `jax.distributed`.
4. `loop.train` does the rest.
"""

import os
import sys
from collections.abc import Sequence

from podway.errors import UserError
from podway.train.checks import check_settings
from podway.train.config import TrainConfig
from podway.train.devices import attached_generation
from podway.train.flags import set_flags
from podway.train.gloo_output import drop_gloo_lines
from podway.train.peers import Peers
from podway.train.settings import read_config


def main(arguments: Sequence[str]) -> int:
    """The exit code of a run."""
    try:
        config = read(arguments)
        check_settings(config)
        flags = set_flags(os.environ, attached_generation(os.environ), config.compile.flags, tuned=config.compile.tuned)
        return _train(config, flags)
    except UserError as error:
        print(f"Error: {error.what}\n  {error.hint}" if error.hint else f"Error: {error.what}", file=sys.stderr)
        return 1


def read(arguments: Sequence[str]) -> TrainConfig:
    """A file first, if the first word is not a setting; then settings."""
    file = arguments[0] if arguments and "=" not in arguments[0] else None
    return read_config(file, arguments[1:] if file is not None else arguments)


def _train(config: TrainConfig, flags: tuple[str, ...]) -> int:
    import jax  # after the flags: libtpu reads them when it is loaded

    if int(os.environ.get("PODWAY_NUM_HOSTS", "1")) > 1:
        if os.environ.get("JAX_PLATFORMS") == "cpu" or os.environ.get("PODWAY_SIMULATED") == "1":
            drop_gloo_lines()
        jax.distributed.initialize()

    from podway.model.compiled import keep_programs  # these import jax as well
    from podway.train.loop import train

    keep_programs(config.compile.cache)

    if flags and jax.process_index() == 0:
        print("flags:", *flags, flush=True)
    peers = _watch_peers()
    try:
        code = train(config)
    except UserError:
        if peers is not None:
            peers.close(failed=True)
        raise
    except Exception as error:
        if peers is not None and "RESOURCE_EXHAUSTED" not in str(error):  # the one status that is never another's fault
            peers.explain(within_s=30)
        raise
    if peers is not None:
        peers.close()
    return code


def _watch_peers() -> Peers | None:
    """Connections to the other processes of the run, by the address under which they found each other."""
    import jax
    from jax._src import distributed  # the key-value store has no public name

    client = distributed.global_state.client
    if jax.process_count() == 1 or client is None:
        return None
    host = (distributed.global_state.coordinator_address or "").rpartition(":")[0].strip("[]")
    return Peers(
        jax.process_index(), jax.process_count(), host, client.key_value_set,
        lambda key: str(client.blocking_key_value_get(key, 120_000)),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
