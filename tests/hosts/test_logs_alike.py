"""Which lines of different ranks say the same, in the formats that programs on TPUs log in."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.hosts.logs.alike import Alike, figures_differ, spread
from podway.hosts.logs.render import Chunk, Options, Renderer

IPS = [f"10.0.0.{rank}" for rank in range(64)]

# A line of rank 0 and the same of rank 3, as each format has it; and a line of rank 3 that says something else.
FORMATS = {
    "absl, Python": (
        "I1115 23:43:26.785419 139872349820 train.py:185] Compiling the step",
        "I1115 23:43:27.001204 140021983212 train.py:185] Compiling the step",
        "E1115 23:43:27.001204 140021983212 train.py:185] Compiling the step",
    ),
    "glog, C++": (
        "W1115 23:43:26.785419    1996 coordination_service.cc:185] Waiting for 4 tasks",
        "W1115 23:43:26.790001    2004 coordination_service.cc:185] Waiting for 4 tasks",
        "W1115 23:43:26.790001    2004 coordination_service.cc:185] Waiting for 3 tasks",
    ),
    "XLA before its clock is set": (
        "I0000 00:00:1763250206.785419    1996 cpu_client.cc:470] PjRtCpuClient created.",
        "I0000 00:00:1763250207.100000   30211 cpu_client.cc:470] PjRtCpuClient created.",
        "I0000 00:00:1763250207.100000   30211 cpu_client.cc:471] PjRtCpuClient created.",
    ),
    "TensorFlow": (
        "2026-11-15 10:12:01.123456: I tensorflow/core/util/port.cc:153] oneDNN custom operations are on.",
        "2026-11-15 10:12:02.654321: I tensorflow/core/util/port.cc:153] oneDNN custom operations are on.",
        "2026-11-15 10:12:02.654321: W tensorflow/core/util/port.cc:153] oneDNN custom operations are on.",
    ),
    "Python logging": (
        "2026-11-15 10:12:01,123 - trainer - INFO - process_index=0 loaded 12 shards",
        "2026-11-15 10:12:04,001 - trainer - INFO - process_index=3 loaded 12 shards",
        "2026-11-15 10:12:04,001 - trainer - INFO - process_index=3 loaded 11 shards",
    ),
    "Python logging with a process id": (
        "INFO:2026-11-15T10:12:01Z:pid=4211: ready on 10.0.0.0:8471",
        "INFO:2026-11-15T10:12:02Z:pid=977: ready on 10.0.0.3:8471",
        "INFO:2026-11-15T10:12:02Z:pid=977: ready on 10.0.0.2:8471",
    ),
    "loguru": (
        "2026-11-15 10:12:01.345 | INFO     | __main__:main:12 - Starting worker 0",
        "2026-11-15 10:12:01.399 | INFO     | __main__:main:12 - Starting worker 3",
        "2026-11-15 10:12:01.399 | INFO     | __main__:main:12 - Starting worker 5",
    ),
    "tqdm": (
        "train:  50%|█████     | 50/100 [00:05<00:05,  9.98it/s, loss=2.31]",
        "train:  50%|█████     | 50/100 [00:06<00:04, 10.02it/s, loss=2.31]",
        "train:  50%|█████     | 51/100 [00:06<00:04, 10.02it/s, loss=2.31]",
    ),
    "JAX": (
        "WARNING:2026-11-15 10:12:01,100:jax._src.xla_bridge:987: An NVIDIA GPU may be present at 0x7f00aa10",
        "WARNING:2026-11-15 10:12:01,101:jax._src.xla_bridge:987: An NVIDIA GPU may be present at 0x7fbb1230",
        "WARNING:2026-11-15 10:12:01,101:jax._src.xla_bridge:988: An NVIDIA GPU may be present at 0x7fbb1230",
    ),
    "Gloo": (
        "[Gloo] Rank 0 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3",
        "[Gloo] Rank 3 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3",
        "[Gloo] Rank 3 is connected to 2 peer ranks. Expected number of connected peer ranks is : 3",
    ),
    "MaxText": (
        "completed step: 5, seconds: 0.312, TFLOP/s/device: 0.123, Tokens/s/device: 3284.123, total_weights: 65536, loss: 10.870",
        "completed step: 5, seconds: 0.311, TFLOP/s/device: 0.124, Tokens/s/device: 3290.001, total_weights: 65536, loss: 10.870",
        "completed step: 6, seconds: 0.311, TFLOP/s/device: 0.124, Tokens/s/device: 3290.001, total_weights: 65536, loss: 10.870",
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str) -> None:
    first, same, other = (text.encode() for text in FORMATS[name])
    keys = Alike(IPS).keys([0, 3, 3], [first, same, other])
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("loss: 10.87", "loss: nan"),
        ("step 5", "step 6"),
        ("host 7 is late", "host 9 is late"),
        ("cannot reach 10.0.0.7", "cannot reach 10.0.0.9"),
        ("loaded jax 0.4.38", "loaded jax 0.4.37"),
        ("checkpoint-100 saved", "checkpoint-200 saved"),
        ("shard 3 of 8", "shard 4 of 8"),
        ("rank 30 failed", "rank 31 failed"),
        ("exit code 1", "exit code 137"),
    ],
)
def test_what_differs_in_more_than_figures_is_two_lines(one: str, other: str) -> None:
    """Said by ranks whose own index it is not."""
    keys = Alike(IPS).keys([1, 2], [one.encode(), other.encode()])
    assert keys[0] != keys[1]


@given(
    st.lists(st.tuples(st.integers(0, 63), st.binary(max_size=60).filter(lambda text: b"\n" not in text)), max_size=30)
)
def test_any_bytes_have_a_key_and_the_same_one_alone(lines: list[tuple[int, bytes]]) -> None:
    ranks, texts = [rank for rank, _ in lines], [text for _, text in lines]
    one_by_one = Alike(IPS)
    assert Alike(IPS).keys(ranks, texts) == [one_by_one.keys([rank], [text])[0] for rank, text in lines]


@pytest.mark.parametrize("text", ["Config param o_lora_rank: 0", "rank 0 leads", "using process 2 as the coordinator"])
@given(order=st.permutations(range(4)))
def test_lines_that_are_equal_are_alike(text: str, order: list[int]) -> None:
    """Also to the rank whose own index they hold, in whatever order the ranks say them."""
    assert len(set(Alike(IPS).keys(order, [text.encode()] * 4))) == 1


@given(st.text("abc 0123456789.:/-%s", max_size=40), st.text("abc 0123456789.:/-%s", max_size=40))
def test_lines_that_are_alike_differ_in_digits_alone(one: str, other: str) -> None:
    keys = Alike(IPS).keys([40, 41], [one.encode(), other.encode()])
    if keys[0] == keys[1]:
        words = [re.sub(r"[\d.:,%\s=/<>|+@~(\[-]+", "", text) for text in (one, other)]
        assert words[0] == words[1]


def test_the_spread_of_figures() -> None:
    lines = [text.encode() for text in FORMATS["MaxText"][:2]]
    assert figures_differ(lines)
    assert spread(lines) == ["0.311–0.312", "0.123–0.124", "3284.123–3290.001"]
    assert not figures_differ([text.encode() for text in FORMATS["absl, Python"][:2]])


def shown(texts: list[str], options: Options, hosts: int) -> list[str]:
    """What a reader sees where these are the lines of each rank."""
    renderer = Renderer(options, IPS[:hosts])
    for rank in range(hosts):
        data = "".join(
            text.replace("RANK", str(rank)).replace("FIGURE", f"{0.3 + rank / 1000:.3f}") + "\n" for text in texts
        ).encode()
        ends = [index + 1 for index, byte in enumerate(data) if byte == 10]
        times = [(end, 1_000_000_000 + number * 1000 + rank) for number, end in enumerate(ends)]
        renderer.push(rank, "run", Chunk(data=data, times=times, next=len(data), ended=True, pid=100 + rank), 0.0)
        renderer.end(rank)
    lines: list[str] = []
    while some := renderer.finish():
        lines += some
    return lines


TEXTS = ["10:00:0RANK ready", "step 1 took FIGURE s", "process RANK done"]


def test_lines_shown_once_say_whose_figures_they_show() -> None:
    assert shown(TEXTS, Options(), 4) == [
        "(all 4 hosts) 10:00:00 ready",
        "(all 4 hosts, figures of rank 0) step 1 took 0.300 s",
        "(all 4 hosts) process 0 done",
    ]
    assert shown(TEXTS, Options(spread=True), 4)[1].endswith("step 1 took 0.300 s [0.300–0.303]")
    assert len(shown(TEXTS, Options(raw=True), 4)) == 12


def test_what_one_rank_alone_says_is_shown() -> None:
    renderer_lines = shown([*TEXTS, "step RANK7 lost"], Options(), 4)
    assert sum("lost" in line for line in renderer_lines) == 4


def test_the_log_of_64_hosts_is_as_long_as_that_of_one() -> None:
    own = (
        ("process_index=3", "process_index=RANK"),
        ("worker 3", "worker RANK"),
        ("Rank 3", "Rank RANK"),
        ("10.0.0.3:", "10.0.0.RANK:"),
    )
    texts = [same for _, same, _ in FORMATS.values()]
    for told, placed in own:
        texts = [text.replace(told, placed) for text in texts]
    assert len(shown(texts * 20, Options(), 64)) <= 1.2 * len(texts) * 20
    assert len(shown(texts * 20, Options(raw=True), 64)) == 64 * len(texts) * 20
