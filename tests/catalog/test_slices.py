"""The slices: every row is sound, every name finds its row, no text whatever gets past as a traceback."""

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.catalog.generations import GENERATIONS, GIB
from podway.catalog.names import ALIASES, looks_like_tpu
from podway.catalog.slices import Slice, all_slices, find_slice, is_tpu_name, slices_of
from podway.errors import UserError

ROWS = [pytest.param(row, id=f"{row.accelerator_type}-{row.gke_machine_type}") for row in all_slices()]


def test_the_catalog_is_whole() -> None:
    counts = {name: len(slices_of(name)) for name in GENERATIONS}
    assert counts == {"v2": 5, "v3": 8, "v4": 52, "v5e": 9, "v5p": 94, "v6e": 9, "tpu7x": 99}
    assert len(all_slices()) == 276
    keys = {(row.accelerator_type, row.gke_machine_type) for row in all_slices()}
    assert len(keys) == 276


@pytest.mark.parametrize("row", ROWS)
def test_row_is_consistent(row: Slice) -> None:
    facts = row.generation_facts
    assert facts.name == row.generation
    assert row.chips == math.prod(row.topology) == row.hosts * row.chips_per_host
    assert row.cores == row.chips * facts.cores_per_chip
    assert row.devices == row.chips * facts.devices_per_chip
    named = row.cores if facts.names_count == "cores" else row.chips
    assert row.accelerator_type.rpartition("-")[2] == str(named)
    assert len(row.topology) == len(row.wrap) == facts.ici_axes == len(facts.pod_topology)
    assert row.chips <= math.prod(facts.pod_topology)
    assert row.aot_name == f"{row.generation}:{row.topology_text}"
    assert row.single_host == (row.hosts == 1)
    assert row.hbm_bytes == row.chips * facts.chip_hbm_bytes
    assert row.peak_bf16 == row.chips * facts.peak_bf16
    assert row.host is not None and row.host.chips == row.chips_per_host


@pytest.mark.parametrize("row", ROWS)
def test_row_is_found_by_its_names(row: Slice) -> None:
    size = row.accelerator_type.rpartition("-")[2]
    by_topology = f"{row.generation}-{row.topology_text}"
    for name in (row.accelerator_type, f"tpu-{row.generation}-{size}", by_topology, by_topology.upper()):
        assert is_tpu_name(name)
        assert find_slice(name, machine_type=row.gke_machine_type) == row
        assert find_slice(name, topology=row.topology_text).chips == row.chips
    assert find_slice(row.generation, topology=row.topology_text).accelerator_type == row.accelerator_type


@pytest.mark.parametrize(
    ("name", "accelerator_type", "topology", "hosts"),
    [
        ("tpu-v6e-8", "v6e-8", "2x4", 1),
        ("v5e-8", "v5litepod-8", "2x4", 1),
        ("V5LITEPOD-8", "v5litepod-8", "2x4", 1),
        ("tpu-v5litepod-256", "v5litepod-256", "16x16", 64),
        ("v5lite-4", "v5litepod-4", "2x2", 1),
        ("v4-512", "v4-512", "4x8x8", 64),
        ("v5p-128", "v5p-128", "4x4x4", 16),
        ("v5p-2x2x1", "v5p-8", "2x2x1", 1),
        ("tpu7x-8", "tpu7x-8", "2x2x1", 1),
        ("tpu-7x-8", "tpu7x-8", "2x2x1", 1),
        ("v7x-8", "tpu7x-8", "2x2x1", 1),
        ("Ironwood-8", "tpu7x-8", "2x2x1", 1),
        (" trillium-8 ", "v6e-8", "2x4", 1),
        ("tpuv6e-16", "v6e-16", "4x4", 4),
        ("tpu-v6e-8:1", "v6e-8", "2x4", 1),
        ("tpu-v6e-slice:8", "v6e-8", "2x4", 1),
        ("tpu-v5p-slice:4", "v5p-8", "2x2x1", 1),
        ("tpu-v5-lite-device:4", "v5litepod-4", "2x2", 1),
        ("tpu-v5-lite-podslice:8", "v5litepod-8", "2x4", 1),
        ("tpu-v4-podslice:4", "v4-8", "2x2x1", 1),
        ("tpu-v3-device:4", "v3-8", "2x2", 1),
        ("tpu7x:4", "tpu7x-8", "2x2x1", 1),
    ],
)
def test_names_people_use(name: str, accelerator_type: str, topology: str, hosts: int) -> None:
    row = find_slice(name)
    assert (row.accelerator_type, row.topology_text, row.hosts) == (accelerator_type, topology, hosts)
    assert is_tpu_name(name)


def test_the_number_after_a_gke_label_counts_the_chips_of_one_host() -> None:
    row = find_slice("tpu-v5-lite-podslice:4", topology="4x4")
    assert (row.accelerator_type, row.hosts, row.chips_per_host) == ("v5litepod-16", 4, 4)
    with pytest.raises(UserError, match=r"v5litepod-8 \(2x4\) have 8 chips each, not 4"):
        find_slice("tpu-v5-lite-podslice:4", topology="2x4")


@pytest.mark.parametrize(
    ("name", "like"),
    [("v6ee-8", True), ("trilium-8", True), ("tpu9", True), ("A100:8", False), ("V100", False), ("T4", False)],
)
def test_a_misspelt_tpu_is_not_taken_for_a_gpu(name: str, like: bool) -> None:
    assert looks_like_tpu(name) is like


def test_a_size_with_two_host_layouts_is_one_host_unless_a_machine_is_named() -> None:
    assert find_slice("v6e-8").hosts == 1
    two = find_slice("v6e-8", machine_type="ct6e-standard-4t")
    assert (two.hosts, two.chips_per_host, two.chips) == (2, 4, 8)


@pytest.mark.parametrize("name", ["v4-4x4x16", "v5p-4x4x16", "tpu7x-4x4x16"])
def test_a_3d_size_has_other_shapes(name: str) -> None:
    row = find_slice(name)
    default = find_slice(row.accelerator_type)
    assert (row.topology, default.topology) == ((4, 4, 16), (4, 8, 8))
    assert (row.chips, row.hosts, row.cores) == (default.chips, default.hosts, default.cores)
    assert row.wrap == (True, True, True)
    assert row.aot_name == f"{row.generation}:4x4x16"
    assert find_slice(row.accelerator_type, topology="4x4x16") == row


@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("v6e-256", (True, True)),
        ("v6e-128", (False, True)),
        ("v6e-64", (False, False)),
        ("v5e-256", (True, True)),
        ("v3-2048", (True, True)),
        ("v3-1024", (False, True)),
        ("v3-512", (False, False)),  # 16x16, but a v3 pod is 32x32
        ("v2-512", (True, True)),
        ("v4-8", (False, False, False)),
        ("v4-64", (False, False, False)),  # 2x4x4: not a whole cube
        ("v4-128", (True, True, True)),
        ("tpu7x-2", (False, False, False)),
    ],
)
def test_wrap(name: str, wrap: tuple[bool, ...]) -> None:
    assert find_slice(name).wrap == wrap


@pytest.mark.parametrize(
    ("name", "what", "hint"),
    [
        ("v6e-9", "There is no v6e-9.", "nearest are v6e-8 (8 chips, 2x4) and v6e-16 (16 chips, 4x4)"),
        ("v6e-512", "There is no v6e-512.", "largest is v6e-256"),
        ("v4-4", "counts TensorCores", "smallest is v4-8 (4 chips"),
        ("v5e-9", "no v5litepod-9", "v5litepod-8 (8 chips, 2x4) and v5litepod-16"),
        ("v6e-0", "no v6e-0", "smallest is v6e-1 (1 chip, 1x1)"),
        ("v6e-1x8", "topology 1x8", "nearest are v6e-8 (8 chips, 2x4)"),
        ("v6e-8x4", "topology 8x4", "another order: 4x8"),
        ("v4-16x4x4", "topology 16x4x4", "another order: 4x4x16"),
        ("v6e-4x4x4", "2 axes", "v6e-64"),
        ("v4-4x4", "3 axes", "v4-32 (16 chips, 2x2x4)"),
        ("v6e", "size is missing", "v6e-1, v6e-4, v6e-8"),
        ("v6-8", "'v6-8' does not name a TPU that exists", "Did you mean v6e?"),
        ("v5-8", "does not name a TPU", "v5e"),
        ("trilium-8", "does not name a TPU", "Did you mean v6e?"),
        ("tpu-v9-8", "does not name a TPU", "Generations: v2, v3, v4, v5e, v5p, v6e, tpu7x"),
        ("tpu", "does not name a TPU", "named like v6e-8"),
        ("A100", "'A100' is not a TPU, and Podway runs TPUs only", "podway tpus"),
        ("H100:8", "'H100:8' is not a TPU", "podway tpus"),
        ("V100-8", "is not a TPU", "podway tpus"),
        ("L4", "is not a TPU", "podway tpus"),
        ("v6e-8:4", "asks for 4 slices", "num_nodes"),
        ("tpu-v5-lite-podslice:16", "No v5e host has 16 chips", "Write 1, 4, 8; a slice of several hosts"),
        ("tpu-v5-lite-podslice:16", "counts those of one host", "such as v5litepod-16"),
        ("tpu-v6e-slice:" + "9" * 9, "No v6e host has", "v6e-256"),
        ("v6e-" + "9" * 5000, "does not name a TPU", "v6e"),  # more digits than int() takes
        ("v6e-8:" + "9" * 5000, "does not name a TPU", "v6e"),
        ("v6e-4x" + "9" * 5000, "does not name a TPU", "v6e"),
        ("", "No TPU is named", "v6e-8"),
        ("\x1b[2J\n" + "x" * 5000, "is not a TPU", "v6e-8"),
    ],
)
def test_what_does_not_exist_is_answered_with_what_does(name: str, what: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        find_slice(name)
    assert what in caught.value.what
    assert hint in caught.value.hint
    assert "\n" not in caught.value.what + caught.value.hint
    assert "\x1b" not in caught.value.what
    assert len(caught.value.what) < 200


@pytest.mark.parametrize(
    ("name", "topology", "what"),
    [
        ("v6e-16", "4x8", "v6e-16 has 16 chips; topology 4x8 has 32"),
        ("v6e-4x4", "4x8", "disagree"),
        ("v6e-16", "square", "not of the form AxB"),
        ("v6e-16", "", "not of the form AxB"),
        ("v6e-16", "2x8", "no v6e slice of topology 2x8"),
    ],
)
def test_topology_must_fit_the_name(name: str, topology: str, what: str) -> None:
    with pytest.raises(UserError, match=what):
        find_slice(name, topology=topology)


def test_machine_type_must_fit() -> None:
    with pytest.raises(UserError) as caught:
        find_slice("v6e-8", machine_type="ct5p-hightpu-4t")
    assert "ct6e-standard-8t or ct6e-standard-4t" in caught.value.hint


@pytest.mark.parametrize("text", ["A100", "H100:8", "V100-8", "cpu", "", "L4", "v100", "-8", "x-4x4"])
def test_what_is_no_tpu_name(text: str) -> None:
    assert not is_tpu_name(text)


@pytest.mark.parametrize("text", ["v6e", "v6e-9", "tpu-v9-8", "TPU-V6E-8", "v4-7x7x7"])
def test_what_is_a_tpu_name_real_or_not(text: str) -> None:
    assert is_tpu_name(text)


_near_names = st.builds(
    "{}{}{}{}{}".format,
    st.sampled_from(["", "tpu-", "tpu", " ", "TPU-", "gpu-"]),
    st.sampled_from([*ALIASES, "v5", "v9", "a100", ""]),
    st.sampled_from(["-", "", "_", ":", "--"]),
    st.one_of(
        st.integers(min_value=-1, max_value=10**12).map(str),
        st.lists(st.integers(min_value=0, max_value=10**6).map(str), max_size=8).map("x".join),
    ),
    st.sampled_from(["", ":1", ":0", ":", "x", " "]),
)


@given(
    name=st.text() | _near_names, topology=st.none() | st.text() | st.sampled_from(["4x4", "4x4x16", "0x0", "2x2x1"])
)
def test_any_text_is_a_slice_or_a_user_error(name: str, topology: str | None) -> None:
    is_tpu_name(name)
    try:
        row = find_slice(name, topology)
    except UserError as error:
        assert error.what and error.hint
        assert "\n" not in error.what + error.hint
        return
    assert is_tpu_name(name)
    assert row.chips == math.prod(row.topology)
    assert row.hosts * row.chips_per_host == row.chips


@given(st.sampled_from(["v4", "v5p", "tpu7x"]), st.tuples(*[st.integers(min_value=1, max_value=12)] * 3))
def test_every_box_of_whole_cubes_in_order_exists(generation: str, sides: tuple[int, int, int]) -> None:
    shape = tuple(4 * side for side in sorted(sides))
    sizes = {row.chips for row in slices_of(generation)}
    name = f"{generation}-{'x'.join(map(str, shape))}"
    if math.prod(shape) in sizes:
        row = find_slice(name)
        assert row.topology == shape
        assert find_slice(row.accelerator_type, row.topology_text) == row
    else:
        with pytest.raises(UserError):
            find_slice(name)


@pytest.mark.parametrize("name", GENERATIONS)
def test_generation_is_plausible(name: str) -> None:
    facts = GENERATIONS[name]
    assert facts.devices_per_chip in (1, facts.cores_per_chip)
    assert facts.hbm_usable_bytes is not None
    assert 0.9 * facts.chip_hbm_bytes < facts.hbm_usable_bytes < facts.chip_hbm_bytes
    assert facts.peak_int8 >= facts.peak_bf16
    assert facts.host_vcpus is not None and facts.host_ram is not None and facts.host_ram > 100 * GIB
    assert (facts.dcn_bandwidth_per_host is None) == (name in ("v2", "v3"))


def test_dcn_grows_with_the_chips_of_a_host() -> None:
    four, eight = find_slice("v6e-4"), find_slice("v6e-8")
    assert four.dcn_bandwidth == GENERATIONS["v6e"].dcn_bandwidth_per_host == 5e10
    assert eight.dcn_bandwidth == 2 * 5e10
    assert find_slice("v3-8").dcn_bandwidth is None


def test_importing_the_catalog_reads_no_file() -> None:
    code = (
        "import podway.catalog.prices as p, podway.catalog.slices as s;"
        "print(s.all_slices.cache_info().currsize, p.all_prices.cache_info().currsize)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["0", "0"]
