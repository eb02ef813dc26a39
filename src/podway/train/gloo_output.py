"""Drop what Gloo prints: processes with CPU devices greet each other with a line for every group they form (no jax).

Gloo writes to file descriptor 1 from C++, from several threads at once, and has no setting for it. Nothing else in the
trainer's libraries does (XLA logs to descriptor 2), so Python's own output moves to a copy of the descriptor.
"""

import os
import sys


def drop_gloo_lines() -> None:
    """From now on this process's standard output shows what Python writes, and nothing else."""
    sys.stdout.flush()
    shown = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    sys.stdout = os.fdopen(shown, "w", buffering=1, encoding=sys.stdout.encoding, errors=sys.stdout.errors)
