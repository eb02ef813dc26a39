"""What planning must know of one jax device of each generation, beyond the catalog: how much of the datasheet is reached.

`device_of(generation)` joins the catalog's facts (peak, HBM, links) with three kinds of constants:

1. Reached fractions that hold for every generation, each with its source below.
2. `matrix_efficiency`: the part of peak that large matrix products reach. For v5e and v4 it is calibrated, on the rows of
   `published/calibration.csv`; for the others it is what the TPU compiler itself estimates (libtpu 0.0.51,
   `estimated_cycles` of bf16 products of 4 to 12 LLM shapes, forward and both backward forms, weighted by FLOPs, with
   the flags that Google's recipes set for the generation).
3. `flash`: cycles that the splash attention kernel of jax 0.10.2 takes for a block of 512 x 512 scores on one core, as
   the bundles that libtpu 0.0.51 schedules for it: (forward, backward), by head dimension. They hold what FLOPs do not
   say: softmax on the vector unit, which binds below 128 channels (and on v6e and later always), and a backward pass of
   two kernels that makes the scores twice.
"""

from functools import cache
from types import MappingProxyType

import msgspec

from podway.catalog.generations import GENERATIONS

# Measured over nominal, tpu7x: 6.42e12 of 7.38e12 (MaxText's recipes). The plain-JAX decode loop of jax-llm-examples
# reaches 0.85 on v5e. Taken for every generation.
HBM_EFFICIENCY = 0.87
# "About 95% of the peak claimed bandwidth" for gathers of more than 10 MB: scaling-book, "TPU networking".
ICI_EFFICIENCY = 0.95
HOP_SECONDS = 1e-6  # scaling-book: about 1 us a hop
# What a synchronous step over n slices loses to the slowest of them: this fraction for each doubling of n. Empirical;
# calibrated on published/calibration.csv (v5e) and taken for every generation that can join slices.
STRAGGLER_LOSS_PER_DOUBLING = 0.020
# A gathered weight whose shards are no multiple of 8 rows is copied into another tiling, 8.45 elements a cycle: libtpu
# 0.0.51 estimates 19,857,408 cycles for the copy of 32768 x 5120 gathered from 256 shards of 20 rows on v5e.
RELAYOUT_ELEMENTS_PER_CYCLE = 8.45
SUBLANES, LANES = 8, 128  # rows and columns of a tile: jax, pallas/mosaic/tpu_info.py

# 2 x MXUs x width^2 (tpu_info.py: 4 of 128 a core on v4, v5e, v5p; 2 of 256 on v6e, tpu7x, which take two rows a cycle)
# gives FLOPs a cycle; peak divided by it gives the clock.
_FLOPS_PER_CYCLE_AND_CORE = {
    "v2": 32_768, "v3": 65_536, "v4": 131_072, "v5e": 131_072, "v5p": 131_072, "v6e": 524_288, "tpu7x": 524_288,
}  # fmt: skip
_MXU_WIDTH = {"v6e": 256, "tpu7x": 256}  # 128 before

_MATRIX_EFFICIENCY = {
    "v5e": 0.963,  # calibrated: the 32B job on one slice; the compiler estimates 0.93
    "v4": 0.844,  # calibrated: T5-11B, tiles of 4x2x2, batch 5376; the compiler estimates 0.93
    "v5p": 0.92,  # compiler
    "v6e": 0.90,  # compiler, with xla_tpu_scoped_vmem_limit_kib=98304 as the recipes set it
    "tpu7x": 0.83,  # compiler
}

_FLASH: dict[str, dict[int, tuple[int, int]]] = {
    "v4": {64: (3012, 5722), 128: (2994, 5637), 256: (4503, 9382)},
    "v5e": {64: (1984, 4202), 128: (2134, 4136), 256: (3283, 7950)},
    "v5p": {64: (2296, 4547), 128: (2376, 4653), 256: (3560, 8202)},
    "v6e": {64: (1375, 2851), 128: (1527, 2907), 256: (1663, 3215)},
    "tpu7x": {64: (1419, 2916), 128: (1408, 2838), 256: (2027, 3621)},
}
FLASH_BLOCK = 512


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One jax device (a chip, or a core where a chip shows two), as a planner sees it; rates per second."""

    generation: str
    per_chip: int  # devices that share a chip and its links
    cores: int  # TensorCores that work for this device
    peak_bf16: float
    peak_int8: float
    hbm_limit: int  # bytes that a program may use
    hbm_bandwidth: float  # as reached
    link_bandwidth: float  # one ICI link of the chip, one way, as reached
    dcn_bandwidth: float | None  # this device's share of its host
    clock: float
    mxu_width: int
    matrix_efficiency: float
    flash: MappingProxyType[int, tuple[int, int]]

    @property
    def matrix_rate(self) -> float:
        """bf16 FLOP/s of large products."""
        return self.peak_bf16 * self.matrix_efficiency

    def tile_efficiency(self, rows: float, inner: float, columns: float) -> float:
        """The part of the matrix unit that a product of these dimensions fills.

        One side of the result lies along the unit's columns, the other streams through it in tiles of 8; the compiler
        may choose which.
        """
        along, through = _filled(columns, self.mxu_width), _filled(rows, SUBLANES)
        turned = _filled(rows, self.mxu_width) * _filled(columns, SUBLANES)
        return _filled(inner, self.mxu_width) * max(along * through, turned)

    def flash_seconds(self, scores: float, d_head: int, *, forward: float, backward: float) -> float:
        """Time of the attention kernel for this many scores, so many times forward and backward."""
        known = min((d for d in self.flash if d >= d_head), default=max(self.flash))
        ahead, back = self.flash[known]
        cycles = (forward * ahead + backward * back) * max(1.0, d_head / known)
        return scores / FLASH_BLOCK**2 * cycles / (self.clock * self.cores)


def _filled(size: float, unit: int) -> float:
    """How much of the padded size is real."""
    return size / (-(-size // unit) * unit) if size > 0 else 1.0


@cache
def device_of(generation: str) -> Device:
    """The device of a generation of the catalog."""
    facts = GENERATIONS[generation]
    per_chip = facts.devices_per_chip
    cores = facts.cores_per_chip // per_chip
    older = "v4"  # v2 and v3 have no figures of their own: they take those of v4, their nearest relative
    return Device(
        generation=generation,
        per_chip=per_chip,
        cores=cores,
        peak_bf16=facts.peak_bf16 / per_chip,
        peak_int8=facts.peak_int8 / per_chip,
        hbm_limit=int((facts.hbm_usable_bytes or facts.chip_hbm_bytes) / per_chip),
        hbm_bandwidth=facts.chip_hbm_bandwidth / per_chip * HBM_EFFICIENCY,
        link_bandwidth=facts.ici_link_bandwidth * ICI_EFFICIENCY,
        dcn_bandwidth=None if facts.dcn_bandwidth_per_host is None else facts.dcn_bandwidth_per_host / 4 / per_chip,
        clock=facts.peak_bf16 / (facts.cores_per_chip * _FLOPS_PER_CYCLE_AND_CORE[generation]),
        mxu_width=_MXU_WIDTH.get(generation, 128),
        matrix_efficiency=_MATRIX_EFFICIENCY.get(generation, _MATRIX_EFFICIENCY[older]),
        flash=MappingProxyType(_FLASH.get(generation, _FLASH[older])),
    )
