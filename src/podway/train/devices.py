"""What is known of the device that a step runs on, by the name that jax gives it: its bf16 peak and memory (no jax)."""

from podway.catalog.generations import GENERATIONS

# device_kind of jax -> generation; jax shows some generations under two names.
_TPU_KINDS = {
    "TPU v2": "v2",
    "TPU v3": "v3",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}
# Dense bf16 FLOP/s (without sparsity) and bytes of memory: NVIDIA's data sheets of the SXM parts.
_GPUS = {"H200": (989e12, 141e9), "H100": (989e12, 80e9), "A100": (312e12, 40e9), "B200": (2250e12, 180e9)}


def peak_flops(kind: str) -> float | None:
    """FLOP/s of one jax device, or None where nobody has published a figure (CPU)."""
    if kind in _TPU_KINDS:
        facts = GENERATIONS[_TPU_KINDS[kind]]
        return facts.peak_bf16 / facts.devices_per_chip
    return next((peak for name, (peak, _) in _GPUS.items() if name in kind), None)


def device_memory(kind: str) -> float | None:
    """Bytes of memory of one jax device, or None where the name does not tell."""
    if kind in _TPU_KINDS:
        facts = GENERATIONS[_TPU_KINDS[kind]]
        return facts.chip_hbm_bytes / facts.devices_per_chip
    return next((memory for name, (_, memory) in _GPUS.items() if name in kind), None)
