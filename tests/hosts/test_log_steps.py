"""The steps of a training run, read from its log."""

import string

from hypothesis import given
from hypothesis import strategies as st

from podway.hosts.logs.steps import LONGEST_LINE, StepProfile, StepReader, TrainingStep, read_line
from podway.train.metrics import StepReport

REPORT = StepReport(
    step=7,
    seconds=2.0,
    tflops=61.5,
    tokens_per_second=4096.0,
    loss=3.25,
    grad_norm=0.5,
    rate=3e-4,
    mfu=0.31,
    goodput=0.9,
)


def test_the_line_that_the_trainer_prints_is_read_back() -> None:
    found = read_line(REPORT.line().encode())
    assert found == TrainingStep(
        step=7, seconds=2.0, tflops=61.5, tokens_per_second=4096.0, loss=3.25, grad_norm=0.5, rate=3e-4, mfu=0.31,
        goodput=0.9,
    )  # fmt: skip


def test_maxtexts_line_is_read_too() -> None:
    line = b"completed step: 5, seconds: 0.312, TFLOP/s/device: 0.123, Tokens/s/device: 3284.1, total_weights: 65536, loss: 10.870"
    found = read_line(line)
    assert found == TrainingStep(step=5, seconds=0.312, tflops=0.123, tokens_per_second=3284.1, loss=10.87)


def test_slow_devices_skipped_steps_and_what_is_not_a_number() -> None:
    found = read_line(b"completed step: 1, seconds: 1.0, GFLOP/s/device: 8.000, loss: nan, grad_norm: inf, SKIPPED: it")
    assert found == TrainingStep(step=1, seconds=1.0, tflops=0.008, loss=None, grad_norm=None, skipped=True)


def test_evaluations_and_profiles() -> None:
    assert read_line(b"evaluation after step 9: loss: 2.5000 over 100 tokens") == TrainingStep(step=9, eval_loss=2.5)
    line = b"profile of steps 5 to 7: products 1.500000 s, attention 0.250000 s in /home/x/profile"
    assert read_line(line) == StepProfile(first=5, last=7, seconds={"products": 1.5, "attention": 0.25})
    assert read_line(b"profile of steps 5 to 7 in /home/x/profile") is None


@given(
    st.lists(st.sampled_from([REPORT.line(), "step of something", "", "completed step: x", "\x1b[31mred"])), st.data()
)
def test_a_log_cut_anywhere_is_the_same_log(lines: list[str], data: st.DataObject) -> None:
    text = "".join(f"{line}\n" for line in lines).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    reader, found = StepReader(), []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        found += reader.feed(text[start:end])
    assert found == [read_line(REPORT.line().encode())] * lines.count(REPORT.line())
    assert reader.waiting == 0


@given(
    st.binary(max_size=400)
    | st.text(string.printable, max_size=400).map(lambda text: b"completed step: 1, " + text.encode())
)
def test_whatever_a_job_prints_is_read_without_an_error(line: bytes) -> None:
    read_line(line)


def test_a_line_without_end_is_not_kept() -> None:
    reader = StepReader()
    for _ in range(100):
        assert reader.feed(b"x" * 1000) == []
    assert reader.waiting <= LONGEST_LINE
    assert reader.feed(b"\n" + REPORT.line().encode() + b"\n") != []
