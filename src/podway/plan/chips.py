"""What planning must know of one jax device of each generation, beyond the catalog: how much of the datasheet is reached.

`device_of(generation)` joins the catalog's facts (peak, HBM, links) with three kinds of constants:

1. Reached fractions that hold for every generation, each with its source below.
2. `matrix_efficiency`: the part of peak that large matrix products reach, calibrated for each generation on published steps.
3. What the attention kernel takes is in `kernels.py`, by block size and head size.
"""

from collections.abc import Mapping
from functools import cache

import msgspec

from podway.catalog.generations import GENERATIONS
from podway.plan.kernels import Blocks, kernel_cycles

# Measured over nominal, tpu7x: 6.42e12 of 7.38e12 (MaxText's recipes). The plain-JAX decode loop of jax-llm-examples
# reaches 0.85 on v5e. Taken for every generation.
HBM_EFFICIENCY = 0.87
# "About 95% of the peak claimed bandwidth" for gathers of more than 10 MB: scaling-book, "TPU networking".
ICI_EFFICIENCY = 0.95
HOP_SECONDS = 1e-6  # scaling-book: about 1 us a hop
# What a synchronous step over n slices loses to the slowest of them: this fraction for each doubling of n. Empirical;
# calibrated on published/calibration.csv (v5e) and taken for every generation that can join slices.
STRAGGLER_LOSS_PER_DOUBLING = 0.021
# A gathered weight whose shards are no multiple of 8 rows is copied into another tiling, 8.45 elements a cycle: libtpu
# 0.0.51 estimates 19,857,408 cycles for the copy of 32768 x 5120 gathered from 256 shards of 20 rows on v5e.
RELAYOUT_ELEMENTS_PER_CYCLE = 8.45
VMEM_BYTES = 128 * 2**20  # of a v5e core: jax, pallas/mosaic/tpu_info.py
SUBLANES, LANES = 8, 128  # rows and columns of a tile: the same file

# 2 x MXUs x width^2 (tpu_info.py: 4 of 128 a core on v4, v5e, v5p; 2 of 256 on v6e, tpu7x, which take two rows a cycle)
# gives FLOPs a cycle; peak divided by it gives the clock.
_FLOPS_PER_CYCLE_AND_CORE = {
    "v2": 32_768, "v3": 65_536, "v4": 131_072, "v5e": 131_072, "v5p": 131_072, "v6e": 524_288, "tpu7x": 524_288,
}  # fmt: skip
_MXU_WIDTH = {"v6e": 256, "tpu7x": 256}  # 128 before

# Bytes/s between a chip and its host, one way: 16 to 32 GB/s (scaling-book, "How to think about TPUs"), which are PCIe 3.0 and
# 4.0 with 16 lanes. Which generation has which is not published: 3.0 is assumed to v5p, 4.0 for v6e, 5.0 for tpu7x.
_HOST_BANDWIDTH = {"v4": 1.6e10, "v5e": 1.6e10, "v5p": 1.6e10, "v6e": 3.2e10, "tpu7x": 6.4e10}

# Calibrated: the mean over a generation's dense models of what their published steps ask for (published/calibration.csv,
# `evidence_training.py`). The compiler's own cycles are more optimistic: 0.93 on v4 and v5e, 0.92 on v5p, 0.90 on v6e, 0.83
# on tpu7x; what a running chip loses (power, the slowest of its neighbours, launching programs) is in no program.
_MATRIX_EFFICIENCY = {
    "v4": 0.771,  # 22B on one and two slices
    "v5e": 0.956,  # 32B on one slice
    "v5p": 0.851,  # 32B and 128B on one and two slices
    "v6e": 0.755,  # Llama 3.1 8B and 70B, GPT-3 175B
    "tpu7x": 0.717,  # Llama 3.1 70B
}


# Products of a block of scores: scores and their sum with the values; backward, scores, their gradient, and dq, or dk and dv.
_ATTENTION_PRODUCTS = {"forward": 2, "dq": 3, "dkv": 4, "backward": 7}


class Device(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """One jax device (a chip, or a core where a chip shows two), as a planner sees it; rates per second."""

    generation: str
    per_chip: int  # devices that share a chip and its links
    cores: int  # TensorCores that work for this device
    peak_bf16: float
    peak_int8: float
    peak_fp8: float | None
    hbm_limit: int  # bytes that a program may use
    hbm_bandwidth: float  # as reached
    link_bandwidth: float  # one ICI link of the chip, one way, as reached
    dcn_bandwidth: float | None  # this device's share of its host
    clock: float
    mxu_width: int
    matrix_efficiency: float
    # Weight gradients of a layer are made at its end, beside exchanges that run on the SparseCores: so libtpu 0.0.51 schedules
    # Podway's step on tpu7x (Llama 3.2 1B and 3B), and what they are made of stays in HBM until then.
    late_gradients: bool
    # The gradient of a matrix goes round in permutes, piece by piece, beside the product that makes it: so libtpu 0.0.51 compiles Podway's
    # step for v5e.
    ringed_gradients: bool
    rings_of_all: bool  # so it does for v6e, where all chips of a slice are one ring
    # The gradient of the output matrix is summed over devices at the end of the step: so libtpu 0.0.51 schedules Podway's step for v6e
    # and tpu7x. Elsewhere it is before the layers go backward.
    end_sum: bool
    # What a layer keeps is copied into the stack of all layers, and out of it again, where it is not written there at once: so
    # libtpu 0.0.51 compiles it for tpu7x (3.6 to 5.2 passes of HBM over it in five steps of Llama 3.2 1B).
    copies_stacks: bool
    grouped_float32: bool  # the compiler's grouped products (`ragged_dot`) give float32: on v4; bfloat16 since
    host_bandwidth: float  # bytes/s between HBM and host memory, one way
    host_bytes: float  # of host memory: this device's share

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

    def product_rate(self, compute: str) -> float:
        """FLOP/s of large products in bfloat16, int8 or fp8; the bfloat16 rate where the unit has no faster mode."""
        if compute == "bfloat16":
            return self.peak_bf16 * self.matrix_efficiency
        peak = {"int8": self.peak_int8, "fp8": self.peak_fp8}.get(compute) or self.peak_bf16
        return max(peak, self.peak_bf16) * self.matrix_efficiency

    def attention_seconds(self, loop: str, blocks: Blocks, *, fused: bool, d_head: int) -> float:
        """Time of an attention kernel (`kernels.py`): its cycles, no less than its products on the matrix unit."""
        cycles = kernel_cycles(self.generation, loop, blocks, fused=fused, d_head=d_head)
        products = 5 if fused and loop != "forward" else _ATTENTION_PRODUCTS[loop]
        flops = products * 2.0 * blocks.computed * blocks.size**2 * d_head
        return max(cycles / (self.clock * self.cores), flops / self.matrix_rate)

    def peak(self, compute: str) -> float:
        """The same by the datasheet."""
        return self.product_rate(compute) / self.matrix_efficiency


def _filled(size: float, unit: int) -> float:
    """How much of the padded size is real."""
    return size / (-(-size // unit) * unit) if size > 0 else 1.0


_own_rates: dict[str, float] = {}  # matrix efficiency by generation, in place of the published one (`own_rates.py`)


def set_rates(rates: Mapping[str, float]) -> None:
    """Plan by other rates of products from here on; none: by the published ones."""
    _own_rates.clear()
    _own_rates.update(rates)
    device_of.cache_clear()


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
        peak_fp8=None if facts.peak_fp8 is None else facts.peak_fp8 / per_chip,
        hbm_limit=int((facts.hbm_usable_bytes or facts.chip_hbm_bytes) / per_chip),
        hbm_bandwidth=facts.chip_hbm_bandwidth / per_chip * HBM_EFFICIENCY,
        link_bandwidth=facts.ici_link_bandwidth * ICI_EFFICIENCY,
        dcn_bandwidth=None if facts.dcn_bandwidth_per_host is None else facts.dcn_bandwidth_per_host / 4 / per_chip,
        clock=facts.peak_bf16 / (facts.cores_per_chip * _FLOPS_PER_CYCLE_AND_CORE[generation]),
        mxu_width=_MXU_WIDTH.get(generation, 128),
        matrix_efficiency=_own_rates.get(generation) or _MATRIX_EFFICIENCY.get(generation, _MATRIX_EFFICIENCY[older]),
        late_gradients=generation == "tpu7x",
        ringed_gradients=generation == "v5e",
        rings_of_all=generation == "v6e",
        end_sum=generation in ("v6e", "tpu7x"),
        copies_stacks=generation == "tpu7x",
        grouped_float32=generation in ("v2", "v3", "v4"),
        host_bandwidth=_HOST_BANDWIDTH.get(generation, _HOST_BANDWIDTH[older]) / per_chip,
        host_bytes=(facts.host_ram or 0) / 4 / per_chip,
    )
