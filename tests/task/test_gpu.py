"""dstack's gpu grammar."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.catalog.slices import all_slices, find_slice
from podway.errors import UserError
from podway.task.fields import FlagField
from podway.task.gpu import slices_for

from .reading import read, refused, steady, types


def gpu(written: str) -> list[str]:
    return types(read(f"type: task\ncommands: [x]\nresources:\n  gpu: {written}\n"))


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("v5litepod-8", ["v5litepod-8"]),
        ("V5LITEPOD-8", ["v5litepod-8"]),
        ("v5e-8", ["v5litepod-8"]),
        ("tpu:v5litepod-8", ["v5litepod-8"]),
        ("v5litepod-8:tpu", ["v5litepod-8"]),
        ("google:v6e-8:1", ["v6e-8"]),
        ("tpu-v5litepod-8", ["v5litepod-8"]),
        ("v4-8", ["v4-8"]),
        ("v6e-16", ["v6e-16"]),
        ("v5litepod-4,v5litepod-8", ["v5litepod-4", "v5litepod-8"]),
        ("v5litepod-4, v6e-8:100GB..", ["v6e-8"]),
        ("v6e-8:1..2", ["v6e-8"]),
        ("v6e-8:0..1", ["v6e-8"]),
        ("google:16GB", ["v5litepod-1"]),
        ("google:16GB..32GB", ["v5litepod-1", "v6e-1"]),
        ("{name: v6e-8}", ["v6e-8"]),
        ("{vendor: TPU, name: [v6e-8, v6e-4], count: 1}", ["v6e-8", "v6e-4"]),
        ("{vendor: google, memory: 16GB}", ["v5litepod-1"]),
        ("{vendor: tpu, total_memory: {max: 16GB}}", ["v5litepod-1"]),
        ("[v6e-8, v5litepod-8]", ["v6e-8", "v5litepod-8"]),
        ("[v6e-8, H100:8]", ["v6e-8"]),
        ("0", []),
        ("0..", []),
        ("0..0", []),
    ],
)
def test_grammar(written: str, expected: list[str]) -> None:
    assert gpu(written) == expected


def test_any_tpu_means_every_slice() -> None:
    every = list(dict.fromkeys(one.accelerator_type for one in all_slices()))
    assert gpu("tpu") == every
    fitting = gpu("google:256GB..512GB")
    assert "v6e-8" in fitting and "v6e-32" not in fitting and "v5litepod-8" not in fitting
    assert all(256 <= find_slice(name).hbm_bytes / 2**30 <= 512 for name in fitting)


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("1", "asks for GPUs by number"),
        ("16GB..24GB", "asks for GPUs by memory"),
        ("24GB..:2", "asks for GPUs by memory"),
        ("{total_memory: {max: 16GB}}", "asks for GPUs by memory"),
        ("H100", "not a TPU"),
        ("A100:80GB:2", "not a TPU"),
        ("nvidia", "nvidia makes no TPUs"),
        ("amd:v6e-8", "amd makes no TPUs"),
        ("{name: v6e-8, compute_capability: 8.0}", "NVIDIA"),
        ("{vendor: acme}", "not a vendor"),
        ("v5litepod-8:2", "a slice is one accelerator"),
        ("v6e-8:2..4", "a slice is one accelerator"),
        ("v6e-9", "no v6e-9"),
        ("v4-8..v4-32", "does not name a TPU"),
        ("v6e-8:v6e-4", "names twice"),
        ("tpu:google", "vendor twice"),
        ("v6e-8::1", "empty part"),
        ("'v6e-8,'", "empty name"),
        ("v5litepod-1:32GB..", "has 32..GB of HBM"),
        ("google:1GB", "no slice has 1GB"),
        ("google:16XB", "not a memory size"),
        ("google:64GB..16GB", "backwards"),
        ("[]", "no accelerator"),
        ("[H100, A100]", "not a TPU"),
        ("{memory: 16GB, total_memory: 16GB}", "keep one"),
        ("{nmae: v6e-8}", "unknown key"),
    ],
)
def test_refusals_point_at_the_place(written: str, says: str) -> None:
    error = refused(f"type: task\ncommands: [x]\nresources:\n  gpu: {written}\n")
    assert says in f"{error.what} | {error.hint}"
    assert error.what.startswith("f.yaml:4:")


def test_a_gpu_beside_a_tpu_is_noted() -> None:
    task = read("type: task\ncommands: [x]\nresources: {gpu: 'v6e-8,H100'}")
    assert types(task) == ["v6e-8"]
    assert task.notes == ("resources.gpu: 'H100' is not a TPU, and Podway runs TPUs only",)


TOKENS = st.sampled_from(
    [
        "tpu",
        "google",
        "nvidia",
        "v6e-8",
        "v5e-8",
        "v5litepod-4,v6e-1",
        "H100",
        "16GB",
        "16GB..",
        "..1TB",
        "1",
        "0..",
        "2..1",
        "",
        ",",
    ]
)


@steady
@given(st.lists(TOKENS, min_size=1, max_size=5).map(":".join) | st.text(max_size=30))
def test_any_text_gives_real_slices_or_a_clean_error(text: str) -> None:
    try:
        found = slices_for(FlagField("--gpu", text), [])
    except UserError as error:
        assert error.hint and error.what.startswith("--gpu: ")
    else:
        assert found is None or all(find_slice(name) for name in found)
