"""Lines, averages and last words."""

from pathlib import Path
from typing import NamedTuple

import pytest

from podway.catalog.generations import GENERATIONS
from podway.model.families import find_model
from podway.model.flops import flops_per_token
from podway.train.devices import attached_generation, count_slices, device_memory, peak_flops
from podway.train.flags import FLAGS, flags_for, set_flags
from podway.train.goodput import Goodput
from podway.train.metrics import Meter, clock

SHAPE = find_model("llama3.2-1b")


def meter(**changes: object) -> Meter:
    settings = {"batch": 8, "length": 4096, "devices": 4, "peak": 1e15, "warmup": 2, "convention": "causal"} | changes
    return Meter(SHAPE, **settings)  # type: ignore[arg-type]


def tell(one: Meter, step: int, seconds: float, loss: float = 2.0, good: bool = True) -> object:
    return one.report(step, seconds, loss=loss, grad_norm=0.5, rate=1e-4, good=good)


def test_the_line_of_a_step() -> None:
    report = meter().report(7, 2.0, loss=3.25, grad_norm=0.5, rate=3e-4, good=True)
    flops = flops_per_token(SHAPE, 4096) * 8 * 4096
    assert report.tokens_per_second == 8 * 4096 / 2 / 4
    assert report.mfu == pytest.approx(flops / 2 / 4 / 1e15)
    assert report.line().startswith(
        f"completed step: 7, seconds: 2.000, TFLOP/s/device: {flops / 8 / 1e12:.3f}, "
        "Tokens/s/device: 4096.000, loss: 3.250, MFU: "
    )


def test_no_peak_no_mfu() -> None:
    report = meter(peak=None).report(0, 1.0, loss=1, grad_norm=1, rate=1, good=False)
    assert report.mfu is None and "MFU" not in report.line() and "SKIPPED" in report.line()


def test_warm_up_is_left_out_of_averages() -> None:
    one = meter()
    for step, seconds in enumerate((60.0, 0.1, 2.0, 2.0)):
        tell(one, step, seconds, loss=step)
    rows = dict(line.split(" = ") for line in one.block(epoch=1.25).splitlines()[1:])
    said = {key.strip(): value.strip() for key, value in rows.items()}
    assert said["train_steps_per_second"] == "0.500"
    assert said["train_samples_per_second"] == "4.000"
    assert said["train_samples"] == "32" and said["epoch"] == "1.25" and said["train_loss"] == "1.5000"
    assert said["total_flos"] == f"{int(flops_per_token(SHAPE, 4096) * 8 * 4096 * 4) >> 30}GF"


def test_the_block_is_aligned() -> None:
    one = meter()
    tell(one, 0, 1.0)
    lines = one.block(0.0).splitlines()
    assert lines[0] == "***** train metrics *****"
    assert len({line.index("=") for line in lines[1:]}) == 1 and len({len(line) for line in lines[1:]}) == 1


def test_the_clock() -> None:
    assert clock(672.77) == "0:11:12.77"
    assert clock(59.999) == "0:01:00.00"
    assert clock(3600 * 25 + 1.5) == "25:00:01.50"


def test_peaks_are_those_of_a_device() -> None:
    assert peak_flops("TPU v5 lite") == GENERATIONS["v5e"].peak_bf16
    assert peak_flops("TPU v3") == GENERATIONS["v3"].peak_bf16 / 2
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("cpu") is None and device_memory("cpu") is None
    assert device_memory("TPU v5 lite") == 16 * 2**30 and device_memory("TPU7x") == 96 * 2**30


def test_flags_of_a_chip_and_who_wins() -> None:
    assert set(FLAGS) <= set(GENERATIONS)
    environment = {"LIBTPU_INIT_ARGS": "--xla_enable_async_all_gather=false"}
    chosen = set_flags(environment, "v5e", ["--mine=1", "--xla_tpu_overlap_compute_collective_tc=false"])
    assert "--xla_enable_async_all_gather=false" in chosen and "--xla_enable_async_all_gather=true" not in chosen
    assert "--xla_tpu_overlap_compute_collective_tc=false" in chosen and "--mine=1" in chosen
    assert environment["LIBTPU_INIT_ARGS"].split() == list(chosen)
    assert flags_for("v5e", tuned=False) == ()


def test_which_tpu_a_host_has_without_a_name_in_the_environment(tmp_path: Path) -> None:
    for number, (vendor, device) in enumerate([("0x8086", "0x006f"), ("0x1ae0", "0x0001"), ("0x1ae0", "0x006f")]):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "vendor").write_text(f"{vendor}\n")
        (tmp_path / str(number) / "device").write_text(f"{device}\n")
    (tmp_path / "gone").mkdir()
    assert attached_generation({}, tmp_path) == "v6e"
    assert attached_generation({"PODWAY_ACCELERATOR": "v5p-8"}, tmp_path) == "v5p", "what a launch says comes first"
    assert attached_generation({"TPU_ACCELERATOR_TYPE": "v99-8"}, tmp_path) == "v6e"
    assert attached_generation({"PODWAY_ACCELERATOR": "cpu"}, tmp_path) is None
    assert attached_generation({"PODWAY_SIMULATED": "1"}, tmp_path) is None
    assert attached_generation({"JAX_PLATFORMS": "cpu"}, tmp_path) is None
    assert attached_generation({}, tmp_path / "no-pci") is None


def test_simulated_slices_are_counted_by_the_launch() -> None:
    class Chip(NamedTuple):
        platform: str
        slice_index: int | None = None

    chips = [Chip("tpu", index // 2) for index in range(4)]
    assert count_slices(chips, {"PODWAY_NUM_SLICES": "4"}) == 2, "real chips know their slice"
    simulated, said = [Chip("cpu")] * 16, {"PODWAY_SIMULATED": "1"}
    assert count_slices(simulated, said | {"PODWAY_NUM_SLICES": "2"}) == 2
    assert count_slices(simulated, {"PODWAY_NUM_SLICES": "2"}) == 1, "machines without TPUs are no slices"
    for number in ("", "0", "1", "3", "two"):
        assert count_slices(simulated, said | {"PODWAY_NUM_SLICES": number}) == 1


def test_no_chip_no_flags() -> None:
    environment: dict[str, str] = {}
    assert set_flags(environment, None, ["--mine=1"]) == () and not environment


def test_rates_include_saves_and_evaluations() -> None:
    one = meter()
    for step in range(4):
        tell(one, step, 2.0)
    one.add_pause(4.0)
    rows = {
        key.strip(): value.strip() for key, _, value in (line.partition(" = ") for line in one.block(0).splitlines())
    }
    assert rows["train_steps_per_second"] == "0.250"  # two steps after the warm-up, and the pause
    assert rows["train_launches"] == "1"


def test_goodput_counts_from_the_first_launch_and_leaves_out_what_was_lost() -> None:
    clock_ = [1000.0]
    first = Goodput((), now=lambda: clock_[0])
    for seconds in (60.0, 2.0, 2.0):  # the first compiles
        first.add_step(seconds, good=True)
    first.add_step(2.0, good=False)  # skipped
    assert first.productive_seconds == 6.0
    clock_[0] = 1300.0  # killed, and launched again from a checkpoint that held all three steps
    again = Goodput((1000.0, 1200.0), productive=first.productive_seconds, now=lambda: clock_[0])
    for seconds in (30.0, 7.0, 7.0):
        again.add_step(seconds, good=True)
    assert again.productive_seconds == 27.0 and again.share == pytest.approx(27 / 300)
    assert str(again) == "goodput: 9.0% (27 of 300 s, 2 launches)"


def test_small_models_are_shown_in_units_that_fit() -> None:
    report = Meter(
        find_model("tiny-llama3"), batch=1, length=64, devices=1, peak=None, warmup=0, convention="causal"
    ).report(0, 1.0, loss=1, grad_norm=1, rate=1, good=True)
    assert "GFLOP/s/device: 0.0" in report.line() and "TFLOP" not in report.line()
