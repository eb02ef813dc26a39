"""Whether all hosts see the same output folder: checkpoints and models are written by all of them together, and would never be whole."""

import time
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from podway.errors import UserError


def check_shared(folder: str) -> None:
    """Host 0 leaves a mark, the others look for it; every host raises when one of them does not find it."""
    if jax.process_count() == 1 or "://" in folder:
        return
    number = int(
        multihost_utils.broadcast_one_to_all(np.int32(time.time_ns() % 2**31 if jax.process_index() == 0 else 0))
    )
    place = Path(folder).expanduser()
    mark = place / f".seen-by-all-{number}"
    if jax.process_index() == 0:
        place.mkdir(parents=True, exist_ok=True)
        mark.touch()
    multihost_utils.sync_global_devices("output-marked")
    found = multihost_utils.process_allgather(np.array([mark.exists()]))
    multihost_utils.sync_global_devices("output-looked-for")
    if jax.process_index() == 0:
        mark.unlink(missing_ok=True)
    blind = [str(host) for host, seen in enumerate(np.ravel(found)) if not seen]
    if blind:
        raise UserError(
            f"output={folder} is another folder on host {', '.join(blind[:4])} than on host 0; "
            "checkpoints and exported models need one for all",
            "put output on storage that all hosts share (gs://BUCKET/RUN), or set checkpoint.save=false checkpoint.export=false",
        )
