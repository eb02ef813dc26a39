"""What is known of the device that a step runs on (no jax): its bf16 peak and memory by the name that jax gives it, of how many slices
the devices of a run are, and which TPU this host has by its PCI devices, before anything of jax is loaded."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from podway.catalog.generations import GENERATIONS
from podway.catalog.slices import find_slice
from podway.errors import UserError

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


# PCI device id of Google's -> generation: jax 0.10.2, `_src/hardware_utils.py`. v2 and v3 share one.
_PCI_VENDOR = "0x1ae0"
_PCI_DEVICES = {"0x0027": "v3", "0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "tpu7x"}


def attached_generation(environment: Mapping[str, str], pci: Path = Path("/sys/bus/pci/devices")) -> str | None:
    """The TPU that this host has: by the name that a launch gives, else by its PCI devices; None where there is none."""
    name = environment.get("PODWAY_ACCELERATOR") or environment.get("TPU_ACCELERATOR_TYPE")
    if name == "cpu" or environment.get("PODWAY_SIMULATED") == "1" or environment.get("JAX_PLATFORMS") == "cpu":
        return None
    try:
        if name:
            return find_slice(name).generation
    except UserError:
        pass  # a name that the catalog does not know: the devices may tell
    for device in sorted(pci.glob("*")):
        ids = [_read_id(device / file) for file in ("vendor", "device")]
        if ids[0] == _PCI_VENDOR and ids[1] in _PCI_DEVICES:
            return _PCI_DEVICES[ids[1]]
    return None


def _read_id(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""  # a device that goes away, or a file that this user may not read


class Device(Protocol):
    """What is asked of a jax device; `slice_index` too, where it has one."""

    @property
    def platform(self) -> str:
        """tpu, gpu or cpu."""


def count_slices(devices: Sequence[Device], environment: Mapping[str, str]) -> int:
    """The slices that these devices are of. Those of simulated slices are CPU devices, which do not tell: there the launch does."""
    told = len({getattr(device, "slice_index", 0) or 0 for device in devices})
    launched = environment.get("PODWAY_NUM_SLICES", "") if environment.get("PODWAY_SIMULATED") == "1" else ""
    if any(device.platform != "cpu" for device in devices) or not launched.isdecimal() or int(launched) < 2:
        return told
    return int(launched) if len(devices) % int(launched) == 0 else told


def generation_of(kind: str) -> str | None:
    """The TPU generation of a jax device; None where it is no TPU of the catalog."""
    return _TPU_KINDS.get(kind)


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
