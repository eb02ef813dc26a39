"""Answers to what people ask about meshes and figures, with numbers that the planner computes as it answers."""

from collections.abc import Callable

from podway.catalog.slices import find_slice
from podway.errors import UserError
from podway.model.families import find_model
from podway.model.flops import flops_per_token
from podway.model.layout import MeshShape
from podway.model.params import count
from podway.plan.chips import STRAGGLER_LOSS_PER_DOUBLING, device_of
from podway.plan.memory import GIB, train_memory
from podway.plan.network import dcn_reduce_seconds, place
from podway.plan.products import needed_again
from podway.plan.t5 import T5X, XXL, evaluate_t5
from podway.plan.training import REMAT, Training


def _core() -> str:
    v3, v4 = device_of("v3"), device_of("v4")
    return f"""\
core: the fourth number of a submesh (x, y, z, core)

A TPU chip has two TensorCores on v2, v3, v4, v5p and tpu7x. What jax calls a device differs:
  v2, v3, tpu7x   each core is a device ({v3.hbm_limit / GIB:.1f} GiB of HBM each on v3). A chip holds two, so the box of
                  devices has a fourth axis of size 2, `core`.
  v4, v5p         "megacore": the compiler splits each operation over both cores, and the chip is one device with all of
                  its HBM ({v4.hbm_limit / GIB:.1f} GiB on v4). The fourth axis has size 1, so core must be 1: a larger one
                  divides nothing, and t5x stops with an error.
  v5e, v6e        one core a chip: core is 1 as well.

`core` counts how many cores of each chip belong to one model-parallel tile. The two cores of a chip exchange data without
a network link (six links' worth on tpu7x), so where core can be 2 it should be the first axis to grow: on v3 a tile of
(1,1,1,2) is a chip with itself; (2,1,1,1) is half of one chip talking to half of its neighbour over a link that the other
halves use as well. On v4 the same tile is simply (1,1,1,1): both cores already work as one."""


def _tile() -> str:
    slice = find_slice("v4-512")
    lines = []
    for tile in ((4, 2, 2), (2, 4, 2), (2, 2, 4)):
        training = Training(seq=512, batch=896, microbatches=4, remat="none", optimizer="adafactor", program=T5X)
        plan = evaluate_t5(XXL, slice, training, tile)
        group = place(plan.mesh, slice).tensor
        lines.append(
            f"  {'x'.join(map(str, tile))}: {group.links:.0f} links a chip inside the tile; sums over the tile take "
            f"{sum(t.seconds for t in plan.time.traffic if t.axis == 'tensor'):.2f} s of a step of {plan.time.total:.2f} s"
        )
    return f"""\
tile: which chips work on one piece of the model

A tensor group exchanges activations after every block, and waits. How fast depends on the links its chips have among
themselves, and that on the shape of the box they fill, not only on how many they are. In {slice.topology_text} (v4-512,
every axis a ring) a tile that spans the whole x axis of 4 closes the ring: its chips have two links along x. A tile that
takes 2 of 4, or 4 of 8, is a line, and the chips at its ends have one link along that axis: they set the pace.

T5-11B, batch 896 in 4 microbatches:
{chr(10).join(lines)}

So match the first axis of the tile to an axis of the slice that it can fill. The tiles of other groups fill the rest of
the slice; gradients are summed across them, and where a tile takes 2 of an axis, two groups share each link of it.
`--tile` fixes a tile; without it the one with the most links is taken."""


def _mfu() -> str:
    shape = find_model("llama3.1-8b")
    rows = [
        f"  {name:<10} {flops_per_token(shape, 8192, name) / 1e9:6.1f} GFLOP a token" for name in ("causal", "full")
    ]
    return f"""\
MFU: model FLOPs of a step over what the chips could do in its time

Only the model's own work counts: 6 FLOPs for each parameter and token, and attention. What is computed again under remat
does not count, so full remat caps MFU near 75-84%. Conventions differ in how they count attention (llama3.1-8b, 8192):
{chr(10).join(rows)}
MaxText counted the whole square until 2023-11 and from 2024-05 to 2025-07, and half of it otherwise; the v6e recipes use
the whole, those of v5p and tpu7x the half. The 16B-128B table counts all parameters and the whole square. Podway prints
the causal count."""


def _remat() -> str:
    shape, mesh = find_model("llama3.1-8b"), MeshShape(fsdp=16)
    lines = []
    for name, saved in REMAT.items():
        training = Training(seq=8192, batch=16, remat=name)
        memory = train_memory(shape, mesh, training, device_of("v6e").hbm_limit, device=device_of("v6e"))
        again = sorted(needed_again(shape, training) & {"q", "k", "v", "o", "gate", "up", "down"})
        lines.append(
            f"  {name:<17} keeps {', '.join(saved) or 'the input of each layer only':<42} "
            f"{memory.saved / GIB:5.1f} GiB; again: {' '.join(again) or '-'}"
        )
    return f"""\
remat: what is kept for the backward pass, and what is computed again

llama3.1-8b, 8192 tokens a chip:
{chr(10).join(lines)}
The last product of a layer is never computed again: nothing in the layer's own backward pass needs it. Names can also be
given: --remat qkv+context."""


def _dcn() -> str:
    shape, device = find_model("64b"), device_of("v5e")
    seconds = dcn_reduce_seconds(4 * count(shape) / 256, 2, device)
    gigabits = 8 * (device.dcn_bandwidth or 0.0) / 1e9
    links = 4 * 8 * device.link_bandwidth / 1e9
    return f"""\
dcn: what a second slice costs

Slices are joined by the data-centre network: {gigabits:.0f} Gbit/s a chip on v5e, where its four links inside the slice have
{links:,.0f}. Only gradients cross it, once a step: for the 64B job {seconds:.2f} s with two slices, twice that with many. A
step also waits for its slowest slice: {100 * STRAGGLER_LOSS_PER_DOUBLING:.1f}% for each doubling of slices, an empirical figure.
More tokens per slice and step make the first of them smaller; packets of 8896 bytes are worth about 2% (MaxText)."""


TOPICS: dict[str, tuple[str, Callable[[], str]]] = {
    "core": ("what `core` in a submesh means, and why it must be 1 on v4", _core),
    "tile": ("why one order of a tile beats another", _tile),
    "mfu": ("what counts as a FLOP", _mfu),
    "remat": ("what is kept and what is computed again", _remat),
    "dcn": ("what more slices cost", _dcn),
}


def explain(topic: str) -> str:
    """The answer to one topic."""
    if topic not in TOPICS:
        raise UserError(f"unknown topic {topic!r}", f"topics: {', '.join(TOPICS)}")
    return TOPICS[topic][1]()
