"""Train a few steps on every mesh named on the command line, in one process with 16 CPU devices; prints JSON."""

import json
import sys
from dataclasses import replace

import jax

from tests.train.running import program, steps


def main() -> None:
    words, meshes = sys.argv[1].split(), sys.argv[2:]
    found = {}
    splash = any("splash" in word for word in words)  # the TPU kernel, which cuts sequences into blocks of 128
    for mesh in meshes:
        made = program(words, mesh, length=128 if splash else 16)
        state, told = steps(replace(made, interpret=True), 4 if splash else 16)
        weights = sum(float(abs(leaf).sum()) for leaf in jax.tree.leaves(state.trained))
        found[mesh] = [float(x) for one in told for x in (one.loss, one.grad_norm)] + [weights]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
