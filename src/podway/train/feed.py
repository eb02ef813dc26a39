"""From this host's rows to one batch over all devices.

Which rows of the global batch a host must bring follows from the mesh: hosts whose devices differ only along tensor,
context or expert need the same rows. `Feed` groups hosts by the rows that their devices hold; the data pipeline is
opened as reader `process` of `processes` groups, and brings each group its own block. Where a torus interleaves the rows
of hosts, rows change places within the batch: the sum over a batch does not see it.
"""

import jax
import numpy as np
from numpy.typing import NDArray

from podway.model.mesh import named_sharding
from podway.train.step import Batch, Program

Rows = dict[str, NDArray[np.generic]]


class Feed:
    """Places batches of one size on the devices of a program."""

    def __init__(self, program: Program, size: int, length: int) -> None:
        self.dims = (size, length)
        self.packed = not program.config.data.synthetic  # a row of made-up tokens is one document: no mask to look up
        self.where = named_sharding(program.mesh, ("batch", "length"), self.dims, program.rules)
        held: dict[int, set[int]] = {}
        for device, block in self.where.devices_indices_map(self.dims).items():
            assert block is not None
            rows = range(*block[0].indices(size))
            held.setdefault(device.process_index, set()).update(rows)  # type: ignore[attr-defined]
        groups = sorted({tuple(sorted(rows)) for rows in held.values()})
        apart = sum(map(len, groups)) == size and len({len(rows) for rows in groups}) == 1
        self.rows = tuple(sorted(held[jax.process_index()])) if apart else tuple(range(size))
        self.process = groups.index(self.rows) if apart else 0
        self.processes = len(groups) if apart else 1
        self._at = {row: i for i, row in enumerate(self.rows)}

    def place(self, rows: Rows) -> Batch:
        """One batch; `rows` are those of this host's group."""
        return {name: self._one(array) for name, array in model_inputs(rows, packed=self.packed).items()}

    def _one(self, array: NDArray[np.generic]) -> jax.Array:
        def piece(block: tuple[slice, ...] | None) -> NDArray[np.generic]:
            assert block is not None
            first, last, _ = block[0].indices(self.dims[0])
            mine = [self._at[row] for row in range(first, last)]
            return np.ascontiguousarray(array[mine][:, block[1]])

        return jax.make_array_from_callback(self.dims, self.where, piece)


def model_inputs(rows: Rows, *, packed: bool) -> Rows:
    """What the step takes: rows of tokens one longer than the sequence become inputs and targets."""
    if "tokens" in rows:
        tokens = rows["tokens"]
        rows = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    if "loss_mask" not in rows:
        rows = rows | {"loss_mask": np.ones(rows["inputs"].shape, np.float32)}
    names = ("inputs", "targets", "loss_mask", *(("segment_ids", "positions") if packed else ()))
    kinds = {"loss_mask": np.float32}
    return {name: rows[name].astype(kinds.get(name, np.int32)) for name in names if name in rows}
