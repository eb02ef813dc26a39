"""What one chip of each TPU generation is: memory, speed, links, host, runtime.

Every figure is per chip unless its name says otherwise, and carries its source. The sources, shortened below:

- docs/vN: Google's page of that generation (docs.cloud.google.com/tpu/docs/vN); docs/tpu7x also tabulates v5p and v6e.
- book: jax-ml scaling-book, chapter "How to think about TPUs", and its table of chips.
- jax: jax 0.10.2, `jax/_src/pallas/mosaic/tpu_info.py`, per TensorCore, times the cores of a chip.
- compiler: "exceeds available HBM (…)" of libtpu 0.0.51 when a program of this generation is too large, times the jax
  devices of a chip; printed with two decimals, rounded down here.
- machines: Google's machine-type tables (GKE and Compute Engine), as TPU VMs get them.
"""

from typing import Literal

import msgspec

MIB, GIB = 2**20, 2**30


class MachineType(msgspec.Struct, frozen=True, kw_only=True):
    """The virtual machine that holds `chips` chips."""

    chips: int
    vcpus: int
    ram_bytes: int


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of one TPU generation."""

    name: str
    title: str
    cores_per_chip: int
    # jax.devices() per chip: megacore joins the two cores of v4 and v5p into one device; v2, v3 and tpu7x show both.
    devices_per_chip: int
    # What the number in `v5p-128` counts.
    names_count: Literal["cores", "chips"]
    chip_hbm_bytes: int
    # What a program may use of it; the rest is the runtime's. Divide by devices_per_chip for the limit of one device.
    hbm_usable_bytes: int | None
    chip_hbm_bandwidth: float  # bytes/s, nominal
    vmem_bytes: int | None  # all cores of the chip together
    peak_bf16: float  # FLOP/s
    peak_int8: float  # the bf16 rate where the matrix unit has no faster int8 mode
    peak_fp8: float | None  # None where fp8 is not a documented mode
    ici_link_bandwidth: float  # bytes/s, one link, one way
    ici_axes: int
    pod_topology: tuple[int, ...]
    # Bytes/s to the data-centre network of a 4-chip host. None: the generation does not do multislice.
    dcn_bandwidth_per_host: float | None
    hosts: tuple[MachineType, ...]
    default_runtime: str

    def host(self, chips: int) -> MachineType | None:
        """The machine that holds this many chips, where its size is known."""
        return next((host for host in self.hosts if host.chips == chips), None)

    @property
    def host_vcpus(self) -> int | None:
        """vCPUs of a 4-chip host, the one that multi-host slices are made of."""
        host = self.host(4)
        return host.vcpus if host else None

    @property
    def host_ram(self) -> int | None:
        """Bytes of memory of a 4-chip host."""
        host = self.host(4)
        return host.ram_bytes if host else None


_V2 = Generation(
    name="v2",
    title="TPU v2",
    cores_per_chip=2,
    devices_per_chip=2,
    names_count="cores",
    chip_hbm_bytes=16 * GIB,  # Jouppi et al., CACM 63(7) 2020 (the paper docs/v2 refers to)
    hbm_usable_bytes=int(2 * 7.48 * GIB),  # compiler: 7.48G a core
    chip_hbm_bandwidth=7.0e11,  # CACM 2020; jax says 7.16e11
    vmem_bytes=2 * 16 * MIB,  # jax
    peak_bf16=4.6e13,  # CACM 2020; jax
    peak_int8=4.6e13,  # no int8 matrix mode (jax)
    peak_fp8=None,
    ici_link_bandwidth=6.2e10,  # CACM 2020: 496 Gbit/s a link
    ici_axes=2,
    pod_topology=(16, 16),  # CACM 2020: 256 chips
    dcn_bandwidth_per_host=None,  # multislice starts at v4 (Google, "Multislice overview")
    hosts=(MachineType(chips=4, vcpus=96, ram_bytes=334 * GIB),),  # gpuhunt's hardware table, v2-8
    default_runtime="tpu-ubuntu2204-base",  # docs, "TPU software versions": v4 and older
)

_V3 = Generation(
    name="v3",
    title="TPU v3",
    cores_per_chip=2,
    devices_per_chip=2,
    names_count="cores",
    chip_hbm_bytes=32 * GIB,  # docs/v3
    hbm_usable_bytes=int(2 * 15.48 * GIB),  # compiler: 15.48G a core
    chip_hbm_bandwidth=9.0e11,  # docs/v3
    vmem_bytes=2 * 16 * MIB,  # jax
    peak_bf16=1.23e14,  # docs/v3; the book and jax say 1.4e14
    peak_int8=1.23e14,  # no int8 matrix mode (jax)
    peak_fp8=None,
    # CACM 2020: 656 Gbit/s a link. docs/v3 agrees: all-reduce 340 TB/s over 1024 chips of 4 links. The book says 1e11.
    ici_link_bandwidth=8.2e10,
    ici_axes=2,
    pod_topology=(32, 32),  # docs/v3: 1024 chips; book
    dcn_bandwidth_per_host=None,  # multislice starts at v4
    # gpuhunt's hardware table, v3-8; on GKE the hosts of larger slices (ct3p-hightpu-4t) have 48 vCPUs
    hosts=(MachineType(chips=4, vcpus=96, ram_bytes=334 * GIB),),
    default_runtime="tpu-ubuntu2204-base",  # docs, "TPU software versions": v4 and older
)

_V4 = Generation(
    name="v4",
    title="TPU v4",
    cores_per_chip=2,
    devices_per_chip=1,
    names_count="cores",
    chip_hbm_bytes=32 * GIB,  # docs/v4
    hbm_usable_bytes=int(30.75 * GIB),  # compiler, megacore
    chip_hbm_bandwidth=1.2e12,  # docs/v4
    vmem_bytes=2 * 16 * MIB,  # jax
    peak_bf16=2.75e14,  # docs/v4
    peak_int8=2.75e14,  # docs/v4: "bf16 or int8"
    peak_fp8=None,
    ici_link_bandwidth=4.5e10,  # book; docs/v4: all-reduce 1.1 PB/s over 4096 chips of 6 links
    ici_axes=3,
    pod_topology=(16, 16, 16),  # docs/v4: 4096 chips
    dcn_bandwidth_per_host=2.5e10,  # book, for any host; Google publishes none for v4
    hosts=(MachineType(chips=4, vcpus=240, ram_bytes=400 * GIB),),  # machines, v4 TPU VM
    default_runtime="tpu-ubuntu2204-base",  # docs, "TPU software versions": v4 and older
)

_V5E = Generation(
    name="v5e",
    title="TPU v5e",
    cores_per_chip=1,
    devices_per_chip=1,
    names_count="chips",
    chip_hbm_bytes=16 * GIB,  # docs/v5e
    hbm_usable_bytes=int(15.75 * GIB),  # compiler
    chip_hbm_bandwidth=8.19e11,  # docs/v5e
    vmem_bytes=128 * MIB,  # jax; book
    peak_bf16=1.97e14,  # docs/v5e
    peak_int8=3.93e14,  # docs/v5e; the book says 3.94e14
    peak_fp8=None,
    ici_link_bandwidth=4.5e10,  # book; docs/v5e: 400 GB/s a chip, 4 ports, both ways, i.e. 50 nominal
    ici_axes=2,
    pod_topology=(16, 16),  # docs/v5e: 256 chips
    dcn_bandwidth_per_host=1.25e10,  # docs/v5e: 6.4 Tbit/s a pod of 256 chips = 25 Gbit/s a chip
    hosts=(  # machines: ct5lp-hightpu-{1,4,8}t
        MachineType(chips=1, vcpus=24, ram_bytes=48 * GIB),
        MachineType(chips=4, vcpus=112, ram_bytes=192 * GIB),
        MachineType(chips=8, vcpus=224, ram_bytes=384 * GIB),
    ),
    default_runtime="v2-alpha-tpuv5-lite",  # docs, "TPU software versions"
)

_V5P = Generation(
    name="v5p",
    title="TPU v5p",
    cores_per_chip=2,
    devices_per_chip=1,
    names_count="cores",
    chip_hbm_bytes=96 * GIB,  # book, and the compiler grants 95.73; docs/v5p prints 95
    hbm_usable_bytes=int(95.73 * GIB),  # compiler
    chip_hbm_bandwidth=2.765e12,  # docs/v5p
    vmem_bytes=2 * 64 * MIB,  # jax
    peak_bf16=4.59e14,  # docs/v5p
    peak_int8=9.18e14,  # book; jax
    peak_fp8=4.59e14,  # docs/tpu7x
    ici_link_bandwidth=9.0e10,  # book; docs/tpu7x: 1200 GB/s a chip, 6 links, both ways, i.e. 100 nominal
    ici_axes=3,
    pod_topology=(16, 20, 28),  # book; docs/v5p: 8960 chips (a job may have 6144)
    dcn_bandwidth_per_host=2.5e10,  # docs/tpu7x: 50 Gbit/s a chip
    hosts=(MachineType(chips=4, vcpus=208, ram_bytes=448 * GIB),),  # docs/tpu7x
    default_runtime="v2-alpha-tpuv5",  # docs, "TPU software versions"
)

_V6E = Generation(
    name="v6e",
    title="TPU v6e (Trillium)",
    cores_per_chip=1,
    devices_per_chip=1,
    names_count="chips",
    chip_hbm_bytes=32 * GIB,  # docs/v6e
    hbm_usable_bytes=int(31.24 * GIB),  # compiler
    chip_hbm_bandwidth=1.638e12,  # docs/tpu7x; docs/v6e prints 1600
    vmem_bytes=128 * MIB,  # jax
    peak_bf16=9.18e14,  # docs/v6e
    peak_int8=1.836e15,  # docs/v6e
    peak_fp8=9.18e14,  # docs/tpu7x
    ici_link_bandwidth=9.0e10,  # book; docs/v6e: 800 GB/s a chip, 4 ports, both ways, i.e. 100 nominal
    ici_axes=2,
    pod_topology=(16, 16),  # docs/v6e: 256 chips
    dcn_bandwidth_per_host=5.0e10,  # docs/v6e: 25.6 Tbit/s a pod of 256 chips = 100 Gbit/s a chip
    hosts=(  # machines: ct6e-standard-{1,4}t; v6e-8 as a TPU VM (Compute Engine lists ct6e-standard-8t with 360 vCPUs)
        MachineType(chips=1, vcpus=44, ram_bytes=176 * GIB),
        MachineType(chips=4, vcpus=180, ram_bytes=720 * GIB),
        MachineType(chips=8, vcpus=180, ram_bytes=1440 * GIB),
    ),
    default_runtime="v2-alpha-tpuv6e",  # docs, "TPU software versions"
)

_TPU7X = Generation(
    name="tpu7x",
    title="TPU7x (Ironwood)",
    cores_per_chip=2,
    devices_per_chip=2,
    names_count="cores",
    chip_hbm_bytes=192 * GIB,  # docs/tpu7x
    hbm_usable_bytes=int(2 * 94.74 * GIB),  # compiler: 94.74G a core
    chip_hbm_bandwidth=7.38e12,  # docs/tpu7x, nominal; 6.42e12 measured in the MaxText recipes
    vmem_bytes=2 * 64 * MIB,  # jax
    peak_bf16=2.307e15,  # docs/tpu7x
    peak_int8=2.307e15,  # no int8 matrix mode (jax)
    peak_fp8=4.614e15,  # docs/tpu7x
    ici_link_bandwidth=9.0e10,  # MaxText's intensity of 12800 for one axis; docs/tpu7x: 1200 GB/s a chip, 100 nominal
    ici_axes=3,
    pod_topology=(16, 24, 24),  # docs/tpu7x: 9216 chips
    dcn_bandwidth_per_host=5.0e10,  # docs/tpu7x: 100 Gbit/s a chip
    hosts=(  # machines: tpu7x-standard-{1,4}t
        MachineType(chips=1, vcpus=56, ram_bytes=240 * GIB),
        MachineType(chips=4, vcpus=224, ram_bytes=960 * GIB),
    ),
    # Not in Google's table of TPU software (docs/tpu7x points to GKE); used with tpu7x-8 by AI-Hypercomputer's
    # accelerator-microbenchmarks README and by the CI of vLLM's tpu-inference.
    default_runtime="v2-alpha-tpu7-ubuntu2404",
)

GENERATIONS: dict[str, Generation] = {g.name: g for g in (_V2, _V3, _V4, _V5E, _V5P, _V6E, _TPU7X)}
